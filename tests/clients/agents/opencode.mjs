// opencode, without a terminal: it reads a file with its tool, and answers.
import assert from "node:assert/strict";
import { writeFileSync } from "node:fs";
import { join } from "node:path";

const { ANSWER, NOTE, runAgent, toolCall, withNote, withScriptedServer } = await import(
  join(process.env.CLIENTS_SOURCE, "scripted_agent.mjs")
);

await withNote(async (folder, file) => {
  const script = [[NOTE, ANSWER], ["title generator", "A note"], ["", toolCall("read", { filePath: file })]];
  await withScriptedServer(script, async (port) => {
    const local = {
      npm: "@ai-sdk/openai-compatible",
      options: { baseURL: `http://127.0.0.1:${port}/v1`, apiKey: "none" },
      models: { scripted: { limit: { context: 65536, output: 256 } } },
    };
    const settings = { model: "local/scripted", autoupdate: false, share: "disabled", provider: { local } };
    writeFileSync(join(folder, "opencode.json"), JSON.stringify(settings));
    const output = await runAgent("opencode", ["run", "Read note.txt"], folder, { OPENCODE_DISABLE_MODELS_FETCH: "1" });
    assert.ok(output.includes(ANSWER), output);
  });
});
console.log("good");
