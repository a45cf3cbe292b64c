"""Runs real clients against a real server, each in an environment of its own.

``python tests/clients/run.py [--cluster] [NAME ...]`` creates missing environments (below ``.clients``, with the exact
versions in ``ENVIRONMENTS``), starts a server, or with ``--cluster`` a coordinator, a P and a D, runs the scripts in
this folder, and exits with 1 if one of them failed. An environment that cannot be created counts as a failure: a client
that did not run was not tested.

The scripts in ``media`` send images, video and sound to a second server. Its models are small ones that
``media/write_cases.py`` writes, with the answers of Transformers, which the scripts find through ``MEDIA_CASES``. Those
in ``encoder`` and ``classifier`` have a server each, too, whose main model is one. Those in ``browser`` and
``browser_media`` open the web page in Chromium. Those in ``agents`` and some others have servers whose model follows a
script (``scripted_server.py``). The other scripts talk to the built-in model.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from socket import socket
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FOLDER = Path(os.environ.get("PARLEY_CLIENTS", ROOT / ".clients"))
MEDIA_CASES = FOLDER / "media" / "cases.json"

NODE_22 = "node@22.23.3"  # the runtime of packages that need a newer one than the system may have
OPEN_WEBUI_NEEDS = (  # for its routers; all that it requires is PyTorch with CUDA and 200 packages more
    "aiocache==0.12.3", "aiofiles==25.1.0", "aiohttp==3.14.5", "aiosqlite==0.22.1", "alembic==1.18.4",
    "argon2-cffi==25.1.0", "authlib==1.7.2", "bcrypt==5.0.0", "beautifulsoup4==4.14.3", "fastapi==0.136.3",
    "httpx==0.28.1", "langchain-core==1.4.8", "loguru==0.7.3", "markdown==3.10.2", "mcp==2.3.0",
    "opensearch-py==3.2.0", "orjson==3.11.9", "pillow==13.0.0", "pycrdt==0.14.8", "pydantic==2.13.4",
    "pyjwt[crypto]==2.13.0", "python-mimeparse==2.0.0", "python-multipart==0.0.32", "python-socketio==5.16.2",
    "pytz==2026.6", "redis==8.0.1", "requests==2.34.2", "sqlalchemy[asyncio]==2.0.50", "typer==0.29.2",
    "uvicorn==0.54.0", "validators==0.36.0",
)  # fmt: skip
# Packages that cannot be installed together have separate environments; those called "node" are npm's.
ENVIRONMENTS = {
    "text": ("openai==3.57.0", "text-generation==0.7.0", "tritonclient[http,grpc]==2.73.0"),
    "hub": ("huggingface_hub==2.4.0", "numpy==2.4.6"),
    "embeddings": ("langchain-huggingface==1.2.3", "huggingface_hub==1.33.0", "numpy==2.4.6"),
    "langchain": ("langchain-openai==1.7.4", "langchain-huggingface==1.2.3"),
    "litellm": ("litellm==1.110.2",),
    "mistral": ("mistralai==3.7.0",),
    "instructor": ("instructor==1.17.0",),
    "guidance": ("guidance==0.3.1", "openai==3.57.0"),
    "lm-eval": ("lm-eval[api]==0.4.13", "transformers==5.24.0"),
    "mem0": ("mem0ai==2.2.1",),
    "dspy": ("dspy==3.4.1",),
    "haystack": ("haystack-ai==3.4.1",),
    "autogen": ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"),
    "semantic-kernel": ("semantic-kernel==1.45.0",),
    "strands": ("strands-agents[anthropic,litellm,ollama,openai]==1.62.0",),
    "agno": ("agno==3.1.10", "openai==3.57.0", "anthropic==2.14.0", "ollama==0.6.3"),
    "outlines": ("outlines[ollama,openai,tgi]==1.3.3", "huggingface_hub==2.4.0"),
    "claude-agent-sdk": ("claude-agent-sdk==0.2.189",),
    "cohere": ("cohere==7.3.1", "numpy==2.4.6"),
    "langchain-cohere": ("langchain-cohere==0.6.0",),
    "smolagents": ("smolagents[openai]==1.26.0",),
    "langgraph": ("langgraph==1.2.24", "langchain==1.5.2", "langchain-openai==1.7.4", "langchain-ollama==1.1.0"),
    "crewai": ("crewai==1.15.30",),
    "aider": ("aider-chat==0.86.2",),
    "inspect": ("inspect-ai==0.3.285", "openai==3.57.0"),
    "browser-use": ("browser-use==0.13.14",),
    "llamaindex-ollama": ("llama-index-llms-ollama==0.11.0", "llama-index-embeddings-ollama==0.10.0"),
    "llamaindex": ("llama-index-llms-openai-like==0.8.1",),
    "databricks": (
        "databricks-sdk==0.162.0",
        "mlflow-skinny==3.17.2",
        "databricks-openai==0.18.0",
        "databricks-langchain==0.22.0",
    ),
    "anthropic": ("anthropic==2.14.0",),
    "anthropic-older": ("anthropic==0.121.0",),  # it speaks the first version of the API
    "langchain-anthropic": ("langchain-anthropic==1.7.10",),
    "node-anthropic": (
        NODE_22,
        "@anthropic-ai/sdk@1.14.0",
        "@anthropic-ai/claude-code@2.1.332",
        "ai@7.0.173",
        "@ai-sdk/anthropic@4.0.105",
    ),
    "ollama": ("ollama==0.6.3", "langchain-ollama==1.1.0"),
    "node-ollama": (NODE_22, "ollama@0.6.4", "ai@7.0.173", "ollama-ai-provider-v2@4.0.1"),
    "node-agents": ("opencode-ai@1.18.33", "cline@3.0.65", "@continuedev/cli@1.5.47"),
    "node-agents-22": (
        NODE_22,
        "@qwen-code/qwen-code@0.24.4",
        "@github/copilot@1.0.102",
        "@mariozechner/pi-coding-agent@0.73.1",
        "@nanocollective/nanocoder@1.30.0",
    ),
    "node-promptfoo": ("promptfoo@0.123.1",),
    "open-webui": (*OPEN_WEBUI_NEEDS, "open-webui==0.12.4"),
    "agents": ("openai-agents==0.24.0",),
    "pydantic-ai": ("pydantic-ai-slim[anthropic,openai]==2.68.0",),
    "litellm-responses": ("litellm==1.110.2", "mcp==2.3.0"),
    "node-responses": (NODE_22, "openai@7.59.0", "ai@7.0.173", "@ai-sdk/openai@4.0.118", "@openai/codex@0.171.0"),
    "node-openai-agents": (NODE_22, "@openai/agents@0.20.0", "openai@7.59.0", "zod@4.6.7"),
    "node-langchain": (
        NODE_22,
        "@langchain/openai@1.6.0",
        "@langchain/anthropic@1.5.11",
        "@langchain/ollama@1.3.0",
        "@langchain/core@1.4.0",
        "zod@4.6.7",
    ),
    "node-mastra": (NODE_22, "@mastra/core@1.71.0", "zod@4.6.7"),
    "openapi": ("openapi-python-client==0.29.1", "ruff==0.17.6"),
    "node-browser": ("playwright-core@1.65.1", "axe-core@4.14.1"),  # they need Chromium: CHROMIUM, or /usr/bin/chromium
    "node": (
        NODE_22,
        "openai@7.59.0",
        "ai@7.0.173",
        "@ai-sdk/openai-compatible@3.0.92",
        "@huggingface/inference@4.13.30",
    ),
    "node-older": ("openai@6.49.0", "ai@5.0.277", "@ai-sdk/openai-compatible@1.0.61"),  # the last for Node.js 20
}
RESOLVED_BY_UV = ("databricks", "crewai", "browser-use")  # resolved by uv, because pip would take minutes
ALONE = ("open-webui==0.12.4",)  # installed without what it requires
SCRIPTS = {
    "openai_sdk.py": "text",
    "openai_async.py": "text",
    "text_generation_client.py": "text",
    "triton_http.py": "text",
    "triton_grpc.py": "text",
    "hub_client.py": "hub",
    "langchain_client.py": "langchain",
    "litellm_client.py": "litellm",
    "mistral_client.py": "mistral",
    "instructor_client.py": "instructor",
    "pydantic_ai_client.py": "pydantic-ai",
    "llama_index_client.py": "llamaindex",
    "haystack_client.py": "haystack",
    "dspy_client.py": "dspy",
    "autogen_client.py": "autogen",
    "semantic_kernel_client.py": "semantic-kernel",
    "smolagents_client.py": "smolagents",
    "strands_client.py": "strands",
    "agno_client.py": "agno",
    "outlines_client.py": "outlines",
    "langgraph_client.py": "langgraph",
    "crewai_client.py": "crewai",
    "aider_client.py": "aider",
    "inspect_client.py": "inspect",
    "browser_use_client.py": "browser-use",
    "promptfoo.mjs": "node-promptfoo",
    "guidance_client.py": "guidance",
    "mem0_client.py": "mem0",
    "lm_eval_client.py": "lm-eval",
    "databricks_sdk_client.py": "databricks",
    "mlflow_client.py": "databricks",
    "databricks_openai_client.py": "databricks",
    "databricks_langchain_client.py": "databricks",
    "anthropic/anthropic_sdk.py": "anthropic",
    "anthropic/anthropic_async.py": "anthropic",
    "anthropic/anthropic_older_sdk.py": "anthropic-older",
    "anthropic/toolset_client.py": "anthropic",
    "anthropic/context_client.py": "anthropic",
    "anthropic/langchain_client.py": "langchain-anthropic",
    "anthropic/anthropic_sdk.mjs": "node-anthropic",
    "anthropic/ai_sdk.mjs": "node-anthropic",
    "anthropic/claude_code.mjs": "node-anthropic",
    "vllm/openai_sdk.py": "text",
    "vllm/anthropic_sdk.py": "anthropic",
    "cohere/cohere_sdk.py": "cohere",
    "cohere/langchain_client.py": "langchain-cohere",
    "ollama/ollama_client.py": "ollama",
    "ollama/ollama_async.py": "ollama",
    "ollama/langchain_client.py": "ollama",
    "ollama/litellm_client.py": "litellm",
    "open_webui_client.py": "open-webui",
    "ollama/ollama_client.mjs": "node-ollama",
    "ollama/llama_index_client.py": "llamaindex-ollama",
    "ollama/ai_sdk.mjs": "node-ollama",
    "responses/openai_sdk.py": "agents",
    "responses/realtime_sdk.py": "agents",
    "responses/agents_client.py": "agents",
    "responses/agents_tools_client.py": "agents",
    "responses/langchain_client.py": "langchain",
    "responses/litellm_client.py": "litellm-responses",
    "responses/openai_sdk.mjs": "node-responses",
    "responses/ai_sdk.mjs": "node-responses",
    "responses/codex.mjs": "node-responses",
    "responses/codex_tool.mjs": "node-responses",
    "responses/openai_agents.mjs": "node-openai-agents",
    "agents/agent_sdk_client.py": "claude-agent-sdk",
    "agents/qwen_code.mjs": "node-agents-22",
    "agents/copilot.mjs": "node-agents-22",
    "agents/pi.mjs": "node-agents-22",
    "agents/nanocoder.mjs": "node-agents-22",
    "agents/opencode.mjs": "node-agents",
    "agents/cline.mjs": "node-agents",
    "agents/continue_cli.mjs": "node-agents",
    "openapi_client.py": "openapi",
    "openai_sdk.mjs": "node",
    "ai_sdk.mjs": "node",
    "langchain.mjs": "node-langchain",
    "mastra.mjs": "node-mastra",
    "huggingface_inference.mjs": "node",
    "encoder/hub_client.py": "hub",
    "encoder/langchain_client.py": "embeddings",
    "encoder/cohere_client.py": "cohere",
    "classifier/hub_client.py": "hub",
    "media/openai_sdk.py": "text",
    "media/text_generation_client.py": "text",
    "media/triton_http.py": "text",
    "media/triton_grpc.py": "text",
    "media/hub_client.py": "hub",
    "media/langchain_client.py": "langchain",
    "media/litellm_client.py": "litellm",
    "media/llama_index_client.py": "llamaindex",
    "media/databricks_clients.py": "databricks",
    "media/ollama_client.py": "ollama",
    "media/openai_sdk.mjs": "node-older",
    "media/ai_sdk.mjs": "node-older",
    "media/huggingface_inference.mjs": "node",
    "browser/pages.mjs": "node-browser",
    "browser_media/images.mjs": "node-browser",
    "browser/screenshots.mjs": "node-browser",
}
UNTESTED = ("browser/screenshots.mjs",)  # writes images for docs/, so it runs by its name alone
MINUTES = 3  # time limit of a script


class Place(NamedTuple):
    """Where clients find a server: its addresses, and the names of its models."""

    http: str
    grpc: str
    models: tuple[str, ...]


class ModelSet(NamedTuple):
    """The models of a server: their names, and the options that serve them."""

    names: tuple[str, ...]
    options: tuple[str, ...]


def prepare_environment(name: str) -> Path:
    """Returns the folder of an environment, rebuilt if its packages changed. Raises CalledProcessError, OSError."""
    folder, packages = FOLDER / name, ENVIRONMENTS[name]
    stamp = folder / "packages.txt"
    requirements = "\n".join(packages)
    if stamp.exists() and stamp.read_text() == requirements:
        return folder
    print(f"{name}: installing {', '.join(packages)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if name.startswith("node"):
        (folder / "package.json").write_text('{"private": true, "type": "module"}\n')
        run(["npm", "install", "--no-audit", "--no-fund", "--silent", *packages], folder)
    else:
        run([sys.executable, "-m", "venv", str(folder)], ROOT)
        python = str(folder / "bin" / "python")
        if name in RESOLVED_BY_UV:
            run([python, "-m", "pip", "install", "--quiet", "uv"], folder)
            run([python, "-m", "uv", "pip", "install", "--quiet", "--python", python, *packages], folder)
        else:
            required = [package for package in packages if package not in ALONE]
            run([python, "-m", "pip", "install", "--quiet", *required], folder)
            if alone := [package for package in packages if package in ALONE]:
                run([python, "-m", "pip", "install", "--quiet", "--no-deps", *alone], folder)
    stamp.write_text(requirements)
    return folder


def run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, timeout=900, stdin=subprocess.DEVNULL)


def client_command(script: str, folder: Path) -> list[str]:
    if script.endswith(".mjs"):  # Node resolves packages from the folder of the module
        copy = folder / Path(script).name
        shutil.copyfile(HERE / script, copy)
        return ["node", str(copy)]
    return [str(folder / "bin" / "python"), str(HERE / script)]


def run_client(script: str, place: Place) -> str:
    """Runs one client; returns an error description, empty if it succeeded."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PARLEY_"))},
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HAYSTACK_TELEMETRY_ENABLED": "False",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "AI_SDK_LOG_WARNINGS": "false",
        "MEDIA_CASES": str(MEDIA_CASES),
        "SERVER_PYTHON": sys.executable,  # for clients with a server of their own
        "CLIENTS_SOURCE": str(HERE),
    }
    folder = FOLDER / SCRIPTS[script]
    environment["PATH"] = os.pathsep.join((str(folder / "node_modules" / "node" / "bin"), os.environ["PATH"]))
    address = place.grpc if script.endswith("_grpc.py") else place.http
    try:
        done = subprocess.run(
            [*client_command(script, prepare_environment(SCRIPTS[script])), address, *place.models],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60 * MINUTES,
        )
    except subprocess.TimeoutExpired as error:
        return f"it took longer than {error.timeout:g} seconds"
    except (subprocess.CalledProcessError, OSError) as error:
        return f"its environment could not be made: {error}"
    if done.returncode == 0 and done.stdout.endswith("good\n"):
        return ""
    return done.stdout[-4000:] or f"it ended with {done.returncode}"


def demo_model() -> ModelSet:
    return ModelSet(("parley-demo",), ("--kv-memory", "256MiB"))


def write_models(script: str, target: Path) -> None:
    """Runs a script that writes models."""
    path = os.pathsep.join((str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])))
    command = [sys.executable, str(HERE / script), str(target)]
    log = (FOLDER / f"{Path(script).stem}.log").open("wb")
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=log, check=True, timeout=300)


def written_encoders(*names: str) -> ModelSet:
    """Writes small encoders and classifiers, and returns those of these names; the first is the main model."""
    home = FOLDER / "encoders"
    write_models("encoder/write_models.py", home)
    return ModelSet(names, tuple(word for name in names for word in ("--model", f"{name}={home / name}")))


def media_models() -> ModelSet:
    """Writes the models that read media, and the answers of Transformers; returns the models."""
    write_models("media/write_cases.py", MEDIA_CASES)
    folders = json.loads(MEDIA_CASES.read_text())["models"]
    options = [word for name, folder in folders.items() for word in ("--model", f"{name}={folder},kv-memory=64MiB")]
    return ModelSet(tuple(folders), (*options, "--dtype", "fp32", "--media-eager"))


MODELS: dict[str, Callable[[], ModelSet]] = {  # by the folder of the scripts; "": all other scripts
    "": demo_model,
    "media": media_models,
    "encoder": lambda: written_encoders("encoder", "reranker"),
    "classifier": lambda: written_encoders("classifier"),
    "browser": demo_model,
    "browser_media": media_models,
}
# Whose models never run on a P and a D.
SINGLE_FOLDERS = ("encoder", "classifier", "browser_media")


def start_server(models: ModelSet) -> tuple[list[subprocess.Popen[bytes]], Place]:
    """Starts a server and waits until it is ready; returns it, and where it is."""
    port, grpc = free_ports(2)
    server = start_process("server", "serve", "--port", f"{port}", "--grpc-port", f"{grpc}", *models.options)
    return wait_ready([server], port), Place(f"127.0.0.1:{port}", f"127.0.0.1:{grpc}", models.names)


def start_cluster(models: ModelSet) -> tuple[list[subprocess.Popen[bytes]], Place]:
    """The same for a coordinator with one P and one D, which share every request."""
    front, rpc, *others = free_ports(11)
    lines = ["host = '127.0.0.1'", "separate = 'always'", f"predict_port = {front}", f"grpc_port = {rpc}"]
    lines += [f"{name}_port = {port}" for name, port in zip(("management", "metrics", "status"), others, strict=False)]
    servers = []
    for role, (port, peer, grpc) in (("prefill", others[3:6]), ("decode", others[6:9])):
        flags = ["--port", f"{port}", "--peer-port", f"{peer}", "--grpc-port", f"{grpc}", *models.options]
        servers.append(start_process(role, "serve", "--role", role, *flags))
        lines += ["[[instances]]", f"url = 'http://127.0.0.1:{port}'", f"grpc = '127.0.0.1:{grpc}'", f"role = '{role}'"]
    file = FOLDER / "coordinator.toml"
    file.write_text("\n".join(lines))
    servers.append(start_process("coordinator", "coordinator", "--config", str(file)))
    return wait_ready(servers, front), Place(f"127.0.0.1:{front}", f"127.0.0.1:{rpc}", models.names)


def free_ports(count: int) -> list[int]:
    probes = [socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def start_process(name: str, *words: str) -> subprocess.Popen[bytes]:
    log = (FOLDER / f"{name}.log").open("wb")
    return subprocess.Popen([sys.executable, "-m", "parley", *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def wait_ready(servers: list[subprocess.Popen[bytes]], port: int) -> list[subprocess.Popen[bytes]]:
    """Waits until the port accepts requests; returns the servers."""
    end = time.monotonic() + 240
    while all(server.poll() is None for server in servers) and time.monotonic() < end:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5)
            return servers
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    for server in servers:
        server.kill()
    sys.exit(f"The server did not start; see the logs in {FOLDER}.")


def model_folder(script: str) -> str:
    """Returns the key of a script's models in ``MODELS``."""
    folder = script.partition("/")[0]
    return folder if folder in MODELS else ""


def run_clients(names: Sequence[str], place: Place) -> list[str]:
    """Runs clients one after the other; returns the names of those that failed."""
    failed = []
    for name in names:
        start = time.monotonic()
        wrong = run_client(name, place)
        print(f"{name:32} {'FAILED' if wrong else 'good'}  {time.monotonic() - start:5.1f} s", flush=True)
        if wrong:
            failed.append(name)
            print(wrong, flush=True)
    return failed


def main() -> int:
    words = sys.argv[1:]
    names = [word for word in words if word != "--cluster"] or [name for name in SCRIPTS if name not in UNTESTED]
    if unknown := [name for name in names if name not in SCRIPTS]:
        sys.exit(f"There is no {unknown[0]}; there are {', '.join(SCRIPTS)}.")
    FOLDER.mkdir(parents=True, exist_ok=True)
    start_servers = start_cluster if "--cluster" in words else start_server
    failed = []
    for folder, find_models in MODELS.items():
        group = [name for name in names if model_folder(name) == folder]
        if not group:
            continue
        servers, place = (start_server if folder in SINGLE_FOLDERS else start_servers)(find_models())
        try:
            failed += run_clients(group, place)
        finally:
            for server in servers:
                server.terminate()
            for server in servers:
                server.wait(60)
    print(f"{len(names) - len(failed)} of {len(names)} clients work.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
