// pi, without a terminal: it reads a file with its tool, and answers; in each API that it speaks, with thinking.
import assert from "node:assert/strict";
import { writeFileSync } from "node:fs";
import { join } from "node:path";

const { ANSWER, NOTE, runAgent, toolCall, withNote, withScriptedServer } = await import(
  join(process.env.CLIENTS_SOURCE, "scripted_agent.mjs")
);
const APIS = { "openai-completions": "/v1", "openai-responses": "/v1", "anthropic-messages": "" };

await withNote(async (folder, file) => {
  const script = [[NOTE, ANSWER], ["", toolCall("read", { path: file })]];
  await withScriptedServer(script, async (port) => {
    const provider = ([api, path]) => [
      api,
      { api, baseUrl: `http://127.0.0.1:${port}${path}`, apiKey: "none", models: [{ id: "scripted", reasoning: true }] },
    ];
    const providers = Object.fromEntries(Object.entries(APIS).map(provider));
    writeFileSync(join(folder, "models.json"), JSON.stringify({ providers }));
    for (const api of Object.keys(APIS)) {
      const words = ["--offline", "--provider", api, "--model", "scripted", "--thinking", "low", "-p", "Read note.txt"];
      const output = await runAgent("pi", words, folder, { PI_CODING_AGENT_DIR: folder });
      assert.ok(output.includes(ANSWER), output);
    }
  });
});
console.log("good");
