// GitHub's Copilot CLI, without a terminal: it reads a file with its tool, and answers; in each API that it speaks.
import assert from "node:assert/strict";
import { join } from "node:path";

const { ANSWER, NOTE, runAgent, toolCall, withNote, withScriptedServer } = await import(
  join(process.env.CLIENTS_SOURCE, "scripted_agent.mjs")
);

await withNote(async (folder, file) => {
  const script = [[NOTE, ANSWER], ["", toolCall("view", { path: file })]];
  await withScriptedServer(script, async (port) => {
    const providers = [
      { COPILOT_PROVIDER_BASE_URL: `http://127.0.0.1:${port}/v1`, COPILOT_PROVIDER_WIRE_API: "completions" },
      { COPILOT_PROVIDER_BASE_URL: `http://127.0.0.1:${port}/v1`, COPILOT_PROVIDER_WIRE_API: "responses" },
      {
        COPILOT_PROVIDER_BASE_URL: `http://127.0.0.1:${port}/v1`,
        COPILOT_PROVIDER_WIRE_API: "responses",
        COPILOT_PROVIDER_TRANSPORT: "websockets",
      },
      { COPILOT_PROVIDER_BASE_URL: `http://127.0.0.1:${port}`, COPILOT_PROVIDER_TYPE: "anthropic" },
      { COPILOT_PROVIDER_BASE_URL: `http://127.0.0.1:${port}`, COPILOT_PROVIDER_TYPE: "azure" },
    ];
    for (const provider of providers) {
      const words = ["-p", "Read note.txt", "--allow-all-tools", "--no-color"];
      const output = await runAgent("copilot", words, folder, {
        COPILOT_OFFLINE: "true",
        COPILOT_MODEL: "scripted",
        COPILOT_PROVIDER_API_KEY: "none",
        ...provider,
      });
      assert.ok(output.includes(ANSWER), output);
    }
  });
});
console.log("good");
