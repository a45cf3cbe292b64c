"""Clients that openapi-python-client generates from documents of the server. Takes HOST:PORT MODEL."""

import importlib
import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

address, model = sys.argv[1:]
TURNS = [{"role": "user", "content": "Hello"}]
CALLS = {  # by the API's prefix: the module of an operation, a body, and a member of the answer
    "openai": ("open_ai.post_v1_responses", {"model": model, "input": "Hello", "temperature": 0}, "output"),
    "anthropic": (
        "anthropic.post_v1_messages_count_tokens", {"model": model, "messages": TURNS}, "input_tokens",
    ),
    "ollama": ("ollama.post_api_chat", {"model": model, "messages": TURNS, "stream": False}, "message"),
    "tgi": ("tgi.post_generate", {"inputs": "Hello"}, "generated_text"),
    "triton": ("triton.get_v2", None, "extensions"),
}  # fmt: skip
TOOLS = Path(sys.executable).parent


def generate_client(prefix: str, folder: Path) -> str:
    """Return the name of the package with the client of an API, in a folder."""
    source = folder / f"{prefix}.json"
    with urllib.request.urlopen(f"http://{address}/{prefix}/openapi.json") as answer:
        source.write_bytes(answer.read())
    package = f"generated_{prefix}"
    generated = subprocess.run(
        [TOOLS / "openapi-python-client", "generate", "--path", source, "--meta", "none",
         "--output-path", folder / package],
        env={"PATH": f"{TOOLS}:/usr/bin:/bin", "HOME": str(folder)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert generated.returncode == 0 and "arning" not in generated.stdout, generated.stdout + generated.stderr
    return package


with tempfile.TemporaryDirectory() as name:
    sys.path.insert(0, name)
    for prefix, (operation, body, member) in CALLS.items():
        package = generate_client(prefix, Path(name))
        client = importlib.import_module(package).Client(
            base_url=f"http://{address}/{prefix}", headers={"anthropic-version": "2023-06-01"}, timeout=60
        )
        models = vars(importlib.import_module(f"{package}.models"))
        classes = {name: value for name, value in models.items() if isinstance(value, type)}
        call = importlib.import_module(f"{package}.api.{operation}")
        arguments = {}
        if body is not None:
            kind = operation.rpartition("post_")[2].replace("_", "")
            (body_class,) = (model_class for name, model_class in classes.items() if name.lower() == kind)
            arguments["body"] = body_class.from_dict(body)
        if "anthropic_version" in call.sync_detailed.__annotations__:
            (versions,) = (
                model_class for name, model_class in classes.items() if name.lower() == f"post{kind}anthropicversion"
            )
            arguments["anthropic_version"] = next(iter(versions))
        reply = call.sync_detailed(client=client, **arguments)
        assert reply.status_code == 200 and json.loads(reply.content)[member], reply.content
print("good")
