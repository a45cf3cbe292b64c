// Qwen Code, without a terminal: it reads a file with its tool, and answers.
import assert from "node:assert/strict";
import { join } from "node:path";

const { ANSWER, NOTE, runAgent, toolCall, withNote, withScriptedServer } = await import(
  join(process.env.CLIENTS_SOURCE, "scripted_agent.mjs")
);

await withNote(async (folder, file) => {
  const script = [[NOTE, ANSWER], ["", toolCall("read_file", { file_path: file })]];
  await withScriptedServer(script, async (port) => {
    const endpoint = ["--openai-base-url", `http://127.0.0.1:${port}/v1`, "--openai-api-key", "none"];
    const words = ["--auth-type", "openai", ...endpoint, "--model", "scripted", "--yolo", "-p", "Read note.txt"];
    const output = await runAgent("qwen", words, folder);
    assert.ok(output.includes(ANSWER), output);
  });
});
console.log("good");
