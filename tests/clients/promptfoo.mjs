// promptfoo asks one question over seven of its providers, and checks the answers. Arguments: HOST:PORT MODEL.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const [address, model] = process.argv.slice(2);
const openai = { apiBaseUrl: `http://${address}/v1`, apiKey: "none", temperature: 0 };
const root = { apiBaseUrl: `http://${address}`, apiKey: "none", temperature: 0 };
const providers = {
  "openai:chat": { ...openai, max_tokens: 50 },
  "openai:responses": { ...openai, max_output_tokens: 50 },
  "openai:completion": { ...openai, max_tokens: 50 },
  "ollama:chat": { num_predict: 50, temperature: 0 },
  "ollama:completion": { num_predict: 50, temperature: 0 },
  "anthropic:messages": { ...root, max_tokens: 50 },
  "huggingface:text-generation": { apiEndpoint: `http://${address}`, apiKey: "none", max_new_tokens: 20, temperature: 0.01 },
};
const similar = { type: "similar", value: "The capital of France is Paris.", threshold: 0.5 };
const settings = {
  prompts: ["What is the capital of France?"],
  providers: Object.entries(providers).map(([kind, config]) => ({ id: `${kind}:${model}`, config })),
  tests: [
    {
      assert: [
        { type: "contains", value: "Paris" },
        { ...similar, provider: { id: `openai:embeddings:${model}`, config: openai } },
      ],
    },
  ],
};
const folder = mkdtempSync(join(tmpdir(), "promptfoo-"));
try {
  writeFileSync(join(folder, "promptfooconfig.json"), JSON.stringify(settings));
  const words = ["eval", "-c", "promptfooconfig.json", "--no-cache", "--no-progress-bar", "-o", "out.json"];
  const environment = { PATH: process.env.PATH, HOME: folder, OLLAMA_BASE_URL: `http://${address}` };
  execFileSync(join(import.meta.dirname, "node_modules", ".bin", "promptfoo"), words, {
    cwd: folder,
    env: { ...environment, PROMPTFOO_DISABLE_TELEMETRY: "1", PROMPTFOO_DISABLE_UPDATE: "1" },
    stdio: ["ignore", "ignore", "inherit"],
  });
  const { results } = JSON.parse(readFileSync(join(folder, "out.json"))).results;
  assert.equal(results.length, Object.keys(providers).length);
  for (const { success, provider, response } of results) assert.ok(success, `${provider.id}: ${response?.output}`);
} finally {
  rmSync(folder, { recursive: true, force: true });
}
console.log("good");
