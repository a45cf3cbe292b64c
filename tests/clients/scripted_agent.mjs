// Runs an agent on a task of one tool call. Its server's model follows a script, because agents' prompts are long, and
// the built-in model cannot know their tools.
import { execFile, spawn } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { promisify } from "node:util";

const source = process.env.CLIENTS_SOURCE;
export const NOTE = "The harbour opens at seven.";
export const ANSWER = "The file was read, and it ends here.";

/** Returns the text with which the scripted model calls a tool. */
export function toolCall(name, parameters) {
  return `<tool_call>\n${JSON.stringify({ name, arguments: parameters })}\n</tool_call>`;
}

/** Starts a server that answers by the script, calls `use(port)`, and ends the server. */
export async function withScriptedServer(script, use) {
  const server = spawn(process.env.SERVER_PYTHON, [join(source, "scripted_server.py"), JSON.stringify(script)], {
    env: { ...process.env, PYTHONPATH: [join(source, ".."), join(source, "..", "..")].join(":") },
    stdio: ["ignore", "pipe", "inherit"],
  });
  try {
    const port = await new Promise((resolve, reject) => {
      server.stdout.once("data", (line) => resolve(Number(line)));
      server.once("exit", (status) => reject(new Error(`the server ended with ${status}`)));
    });
    return await use(port);
  } finally {
    server.kill();
  }
}

/** Calls `use(folder, file)` with a new folder, which is removed afterwards, and a file in it that says NOTE. */
export async function withNote(use) {
  const folder = mkdtempSync(join(tmpdir(), "agent-"));
  const file = join(folder, "note.txt");
  writeFileSync(file, `${NOTE}\n`);
  try {
    return await use(folder, file);
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}

/** Runs a program of the environment's packages in a folder that is also its home; returns what it printed. */
export async function runAgent(program, words, folder, environment = {}) {
  const running = promisify(execFile)(join(dirname(process.argv[1]), "node_modules", ".bin", program), words, {
    cwd: folder,
    env: { PATH: process.env.PATH, HOME: folder, XDG_CONFIG_HOME: folder, XDG_DATA_HOME: folder, ...environment },
    timeout: 150_000,
    maxBuffer: 64 << 20,
  });
  running.child.stdin.end();
  const { stdout, stderr } = await running;
  return stdout + stderr;
}
