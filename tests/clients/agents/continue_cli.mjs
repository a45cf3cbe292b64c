// Continue's CLI, without a terminal: it reads a file with its tool, and answers.
import assert from "node:assert/strict";
import { writeFileSync } from "node:fs";
import { join } from "node:path";

const { ANSWER, NOTE, runAgent, toolCall, withNote, withScriptedServer } = await import(
  join(process.env.CLIENTS_SOURCE, "scripted_agent.mjs")
);

await withNote(async (folder, file) => {
  const script = [[NOTE, ANSWER], ["", toolCall("Read", { filepath: file })]];
  await withScriptedServer(script, async (port) => {
    const model = { name: "scripted", provider: "openai", model: "scripted", apiBase: `http://127.0.0.1:${port}/v1` };
    const models = [{ ...model, apiKey: "none", roles: ["chat"] }];
    const config = join(folder, "config.yaml"); // JSON is YAML
    writeFileSync(config, JSON.stringify({ name: "local", version: "1.0.0", schema: "v1", models }));
    const environment = { CONTINUE_TELEMETRY_ENABLED: "0" };
    const output = await runAgent("cn", ["--config", config, "--auto", "-p", "Read note.txt"], folder, environment);
    assert.ok(output.includes(ANSWER), output);
  });
});
console.log("good");
