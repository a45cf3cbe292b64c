// Nanocoder, without a terminal: it reads a file with its tool, and answers.
import assert from "node:assert/strict";
import { writeFileSync } from "node:fs";
import { join } from "node:path";

const { ANSWER, NOTE, runAgent, toolCall, withNote, withScriptedServer } = await import(
  join(process.env.CLIENTS_SOURCE, "scripted_agent.mjs")
);

await withNote(async (folder, file) => {
  const script = [[NOTE, ANSWER], ["", toolCall("read_file", { path: file })]];
  await withScriptedServer(script, async (port) => {
    const local = { name: "local", baseUrl: `http://127.0.0.1:${port}/v1`, models: ["scripted"] };
    writeFileSync(join(folder, "agents.config.json"), JSON.stringify({ nanocoder: { providers: [local] } }));
    const words = ["--provider", "local", "--model", "scripted", "--mode", "yolo", "--trust-directory", "--plain"];
    const output = await runAgent("nanocoder", [...words, "run", "Read note.txt"], folder);
    assert.ok(output.includes(ANSWER), output);
  });
});
console.log("good");
