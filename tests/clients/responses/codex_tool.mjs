// Codex runs one command that the model calls its tool for, through the server or coordinator under test.
//
// The built-in model cannot know Codex's tools. So a relay before the server has the first answer call exec_command with
// a command of the test, and the next one end the turn; everything else is passed on as it is. Codex's own instructions
// and most of its tools are switched off, because the model's context is small. codex.mjs has all of them.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";

const [address, model] = process.argv.slice(2);
const bodies = [];

function forceCall(body) {
  if (body.input.some((item) => item.type === "function_call_output"))
    return { ...body, tool_choice: "none", guided_choice: ["The command has run."] };
  const tool = body.tools.find((each) => each.name === "exec_command");
  const properties = { cmd: { const: "echo hello-$((40+2))" } };
  tool.parameters = { type: "object", properties, required: ["cmd"], additionalProperties: false };
  tool.strict = true;
  return { ...body, tool_choice: { type: "function", name: "exec_command" } };
}

const relay = createServer(async (request, response) => {
  let data = "";
  for await (const piece of request) data += piece;
  const { host, connection, "content-length": length, ...headers } = request.headers;
  const isResponse = request.url === "/v1/responses" && request.method === "POST";
  if (isResponse) bodies.push(JSON.parse(data));
  const body = isResponse ? JSON.stringify(forceCall(JSON.parse(data))) : data || undefined;
  const answer = await fetch(`http://${address}${request.url}`, { method: request.method, headers, body });
  response.writeHead(answer.status, { "content-type": answer.headers.get("content-type") ?? "" });
  for await (const piece of answer.body ?? []) response.write(piece);
  response.end();
});
await new Promise((resolve) => relay.listen(0, "127.0.0.1", resolve));

const home = mkdtempSync(join(tmpdir(), "codex-"));
writeFileSync(join(home, "instructions.md"), "You are a helper.");
writeFileSync(
  join(home, "config.toml"),
  `model = "${model}"
model_provider = "local"
model_instructions_file = "${join(home, "instructions.md")}"
web_search = "disabled"
include_permissions_instructions = false
include_apps_instructions = false
include_environment_context = false
[features]
multi_agent = false
goals = false
[model_providers.local]
name = "local"
base_url = "http://127.0.0.1:${relay.address().port}/v1"
env_key = "LOCAL_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
`,
);
const words = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Run the command."];
const codex = spawn(join(import.meta.dirname, "node_modules", ".bin", "codex"), words, {
  cwd: home,
  env: { ...process.env, CODEX_HOME: home, LOCAL_KEY: "none" },
  stdio: ["ignore", "pipe", "pipe"],
});
let output = "";
for (const pipe of [codex.stdout, codex.stderr]) pipe.on("data", (piece) => (output += piece));
const status = await new Promise((resolve) => codex.on("close", resolve));
relay.close();
rmSync(home, { recursive: true, force: true });

assert.equal(status, 0, output);
assert.equal(bodies.length, 2, `one turn calls the tool, and one answers\n${output}`);
const result = bodies[1].input.find((item) => item.type === "function_call_output");
assert.match(JSON.stringify(result.output), /hello-42/, output);
assert.match(output, /The command has run\./);
console.log("good");
process.exit(0);
