"""aider answers a question about a repository, without a terminal. Arguments: HOST:PORT MODEL."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

address, model = sys.argv[1:]
words = ["--model", f"openai/{model}", "--edit-format", "ask", "--map-tokens", "0", "--no-git", "--no-pretty"]
words += [
    "--no-check-update",
    "--no-show-model-warnings",
    "--no-show-release-notes",
    "--no-detect-urls",
    "--yes-always",
]
with tempfile.TemporaryDirectory() as folder:
    environment = {**os.environ, "HOME": folder, "OPENAI_API_BASE": f"http://{address}/v1", "OPENAI_API_KEY": "none"}
    command = [str(Path(sys.executable).parent / "aider"), *words, "--message", "What is the capital of France?"]
    output = subprocess.check_output(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, text=True)
assert "The capital of France is Paris." in output, output
print("good")
