// Codex runs one tool that the model asks for, and shows the answer: over HTTP, and over a WebSocket. It has a server of
// its own, whose model follows a script, because its prompts are longer than the built-in model's context.
import assert from "node:assert";
import { execFileSync, spawn } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const source = process.env.CLIENTS_SOURCE;
const server = spawn(process.env.SERVER_PYTHON, [join(source, "responses", "scripted_server.py")], {
  env: { ...process.env, PYTHONPATH: [join(source, ".."), join(source, "..", "..")].join(":") },
  stdio: ["ignore", "pipe", "inherit"],
});
const home = mkdtempSync(join(tmpdir(), "codex-"));
try {
  const port = await new Promise((resolve, reject) => {
    server.stdout.once("data", (line) => resolve(Number(line)));
    server.once("exit", (status) => reject(new Error(`the server ended with ${status}`)));
  });
  for (const websockets of [false, true]) {
    writeFileSync(
      join(home, "config.toml"),
      `model = "scripted"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "http://127.0.0.1:${port}/v1"
env_key = "LOCAL_KEY"
wire_api = "responses"
supports_websockets = ${websockets}
`,
    );
    const said = execFileSync(
      join(import.meta.dirname, "node_modules", ".bin", "codex"),
      ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Run the command."],
      { cwd: home, env: { ...process.env, CODEX_HOME: home, LOCAL_KEY: "none" }, stdio: ["ignore", "pipe", "pipe"], timeout: 120_000 },
    );
    assert.ok(said.toString().includes("The tool said hello-42."), said.toString());
  }
} finally {
  server.kill();
  rmSync(home, { recursive: true, force: true });
}
console.log("good");
