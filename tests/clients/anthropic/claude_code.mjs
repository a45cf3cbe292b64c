// Claude Code in print mode: it reads one file with its tool, and ends.
//
// The built-in model cannot know Claude Code's tools. So a relay before the server has the first answer call Read with
// the path of the file, and the next one end the turn: the model's own text would exceed the limit of tokens. All else is
// passed on as it is. The conversation is short: the model's context is small.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const [address, model] = process.argv.slice(2);
const folder = mkdtempSync(join(tmpdir(), "claude-"));
const file = join(folder, "note.txt");
writeFileSync(file, "The harbour opens at seven.\n");
const bodies = [];

function forceRead(body) {
  const read = body.tools?.find((tool) => tool.name === "Read");
  if (!read) return body;
  if (JSON.stringify(body.messages).includes("tool_result")) {
    const format = { type: "json_schema", schema: { const: "The file is read." } };
    return { ...body, thinking: { type: "disabled" }, output_config: { ...body.output_config, format } };
  }
  const properties = { file_path: { const: file } };
  read.input_schema = { type: "object", properties, required: ["file_path"], additionalProperties: false };
  read.strict = true;
  return { ...body, tool_choice: { type: "tool", name: "Read" } };
}

const relay = createServer(async (request, response) => {
  let data = "";
  for await (const piece of request) data += piece;
  const { host, connection, "content-length": length, ...headers } = request.headers;
  const isMessage = request.url.startsWith("/v1/messages") && request.method === "POST";
  if (isMessage) bodies.push(JSON.parse(data));
  const body = isMessage ? JSON.stringify(forceRead(JSON.parse(data))) : data || undefined;
  const answer = await fetch(`http://${address}${request.url}`, { method: request.method, headers, body });
  response.writeHead(answer.status, { "content-type": answer.headers.get("content-type") ?? "" });
  for await (const piece of answer.body ?? []) response.write(piece);
  response.end();
});
await new Promise((resolve) => relay.listen(0, "127.0.0.1", resolve));

const claude = join(dirname(fileURLToPath(import.meta.url)), "node_modules", ".bin", "claude");
const words = ["-p", "Read note.txt", "--model", model, "--tools", "Read", "--allowedTools", "Read"];
words.push("--system-prompt", "You are a helper.", "--output-format", "json", "--max-turns", "3");
const child = spawn(claude, words, {
  cwd: folder,
  stdio: ["ignore", "pipe", "inherit"],
  env: {
    PATH: process.env.PATH,
    HOME: folder,
    ANTHROPIC_BASE_URL: `http://127.0.0.1:${relay.address().port}`,
    ANTHROPIC_AUTH_TOKEN: "none",
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    CLAUDE_CODE_MAX_OUTPUT_TOKENS: "200",
    DISABLE_AUTOUPDATER: "1",
  },
});
let output = "";
for await (const piece of child.stdout) output += piece;
const status = child.exitCode ?? (await new Promise((resolve) => child.on("exit", resolve)));
relay.close();
rmSync(folder, { recursive: true, force: true });

assert.equal(status, 0, output);
assert.equal(JSON.parse(output).is_error, false, output);
assert.ok(bodies.length > 1, "one turn calls the tool, and others answer");
const results = bodies[1].messages.flatMap((turn) => (Array.isArray(turn.content) ? turn.content : []));
const result = results.find((block) => block.type === "tool_result");
assert.match(JSON.stringify(result.content), /The harbour opens at seven\./);
console.log("good");
process.exit(0);
