// Cline, without a terminal: it reads a file with its tool, and answers.
import assert from "node:assert/strict";
import { join } from "node:path";

const { ANSWER, NOTE, runAgent, toolCall, withNote, withScriptedServer } = await import(
  join(process.env.CLIENTS_SOURCE, "scripted_agent.mjs")
);

await withNote(async (folder, file) => {
  const script = [[NOTE, ANSWER], ["", toolCall("read_files", { files: [{ path: file }] })]];
  await withScriptedServer(script, async (port) => {
    const endpoint = ["-p", "openai-compatible", "-k", "none", "-m", "scripted", "-b", `http://127.0.0.1:${port}/v1`];
    const environment = { CLINE_SESSION_BACKEND_MODE: "local" }; // or a daemon outlives it
    await runAgent("cline", ["auth", ...endpoint], folder, environment);
    const words = ["-P", "openai-compatible", "-m", "scripted", "--json", "Read note.txt"];
    const output = await runAgent("cline", words, folder, environment);
    const result = output.split("\n").filter((line) => line.startsWith("{")).map(JSON.parse).at(-1);
    assert.deepEqual([result.type, result.text], ["run_result", ANSWER], output);
  });
});
console.log("good");
