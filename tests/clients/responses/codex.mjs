// Codex runs one tool that the model asks for, and shows the answer: over HTTP, and over a WebSocket; then it reviews
// changes. It has a server of its own, whose model follows a script, because its prompts are longer than the built-in
// model's context.
import assert from "node:assert";
import { execFileSync } from "node:child_process";
import { writeFileSync } from "node:fs";
import { join } from "node:path";

const { runAgent, toolCall, withNote, withScriptedServer } = await import(
  join(process.env.CLIENTS_SOURCE, "scripted_agent.mjs")
);

const finding = {
  title: "[P1] Open the harbour later",
  body: "Seven is too early.",
  confidence_score: 0.9,
  priority: 1,
  code_location: { absolute_file_path: "note.txt", line_range: { start: 1, end: 1 } },
};
const review = {
  findings: [finding],
  overall_correctness: "patch is incorrect",
  overall_explanation: "The time is wrong.",
  overall_confidence_score: 0.8,
};
const script = [
  ["hello-42", "The tool said hello-42."],
  ["Review the current code changes", JSON.stringify(review)],
  ["", toolCall("exec_command", { cmd: "echo hello-$((40+2))" })],
];

await withScriptedServer(script, (port) =>
  withNote(async (folder) => {
    const execute = (websockets, ...words) => {
      writeFileSync(
        join(folder, "config.toml"),
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
      const flags = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"];
      return runAgent("codex", [...flags, ...words], folder, { CODEX_HOME: folder, LOCAL_KEY: "none" });
    };
    execFileSync("git", ["init", "--quiet"], { cwd: folder });
    for (const websockets of [false, true]) {
      const answer = await execute(websockets, "Run the command.");
      assert.ok(answer.includes("The tool said hello-42."), answer);
      const reviewed = await execute(websockets, "review", "--uncommitted");
      assert.ok(reviewed.includes("Open the harbour later"), reviewed);
    }
  }),
);
console.log("good");
