"""An API is added by its package and one line in the table of surfaces; and no other file knows an API by name."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import made_up_dialect

from parley.cli.apis import BENCHED_APIS as ALL_BENCHED
from parley.cli.apis import bench_apis
from parley.cli.bench import BENCH_APIS
from parley.cli.client import ServerAddress
from parley.cli.load.generator import LoadGenerator
from parley.coordinator.proxy.paths import PathTable
from parley.dialects import mounts
from parley.dialects.bench import LoadShape
from parley.dialects.mounts import INNER_MOUNTS, ApiMount, universal_mounts
from parley.disagg.wire.prompt_hash import PromptReader
from parley.serving.web_pages import metrics_page

LINE = ApiMount("", made_up_dialect.DIALECT)


@pytest.fixture
def registered_dialect(monkeypatch: pytest.MonkeyPatch) -> tuple[ApiMount, ...]:
    """The table with one more line."""
    table = (*mounts.API_MOUNTS, LINE)
    for module in (mounts, metrics_page):
        monkeypatch.setattr(module, "API_MOUNTS", table)
    return table


async def test_new_api_is_served_and_counted(serve, registered_dialect):
    server = await serve(surfaces=universal_mounts())
    answer = await server.post("/repeat", {"question": "Hello", "length": 4})
    assert answer.status == 200 and b'{"over": {"read": 5, "written": 4}}' in answer.body
    answer = await server.post("/repeat", {"question": 5})
    assert answer.status == 400 and set(answer.json) == {"wrong"}
    assert b"parrot_words 4" in (await server.get("/metrics")).body


def test_bench_option_lists_every_api_that_declares_a_bench():
    assert set(BENCH_APIS) == set(ALL_BENCHED)


async def test_new_api_can_be_benchmarked(serve, registered_dialect):
    server = await serve(surfaces=universal_mounts())
    api = bench_apis(registered_dialect)["parrot"]
    load = LoadGenerator(ServerAddress("http", "127.0.0.1", server.port, ""), None, LoadShape("tiny", 3, 10.0), api)
    samples, _ = await load.run_load(["Hello", "Hello again"], 2)
    assert [(sample.error, sample.tokens) for sample in samples] == [("", 3)] * 2


def test_new_api_is_routed_by_prefix(registered_dialect):
    path, _ = PathTable(universal_mounts()).match_path("POST", "/repeat")
    assert (path.kind, path.dialect) == ("generate", made_up_dialect.DIALECT)
    reader = PromptReader(surface.dialect for surface in (*registered_dialect, *INNER_MOUNTS))
    one, two = (reader.hash_body(json.dumps({"question": "x" * 300 + end}).encode()) for end in ("a", "b"))
    assert one.token_count == two.token_count == 303 // 4.02
    assert one.marks and one.marks == two.marks
    other = reader.hash_body(json.dumps({"question": "y" * 300}).encode())
    assert other.marks[0].prefix_hash != one.marks[0].prefix_hash


# -- names

PACKAGE = Path(__file__).parents[2] / "parley"
APIS = sorted(file.parent.name for file in (PACKAGE / "dialects").glob("*/__init__.py"))
NAME = re.compile(rf"(?<![a-z])({'|'.join(APIS)})(?![a-z])", re.IGNORECASE)
TABLE = "dialects/mounts.py"
OTHER_MEANINGS = "worker/vllm/", "worker/attached/", "native/"  # the engine vLLM and the language Triton are no APIs
KNOWING = {  # files that know an API by its name, and why
    "cli/client.py": "the commands are clients of OpenAI's API",
    "cli/bench.py": "the API that is asked unless another is named",
    "cli/load/generator.py": "the same",
    "llm.py": "scripts write requests in OpenAI's form",
    "cli/serve_config/mindie_config.py": "reads MindIE's configuration file",
    "cli/serve.py": "options",
    "cli/serve_config/server_options.py": "options",
    "cli/routes.py": "options",
    "coordinator/config.py": "options",
    **{
        f"settings/serve_options/{subject}_options.py": "options"
        for subject in ("access", "answer", "cluster", "engine", "media", "port")
    },
    "settings/engine_settings.py": "options",
    "serving/server_options.py": "options",
    "boot/listening_places.py": "options",
    "boot/server_parts.py": "options",
    "serving/grpc/grpc_port.py": "the port for gRPC, which is Triton's protocol",
    "serving/grpc/grpc_call.py": "the same",
    "web/websocket/handshake.py": "browsers can give the key of a WebSocket as OpenAI's clients do",
    "web/grpc_limits.py": "limits of such ports, reported by their statuses",
    "coordinator/proxy/grpc/grpc_port.py": "the same, of a coordinator",
    "coordinator/proxy/grpc/grpc_call.py": "the same",
    "engine/vllm_engine.py": "vLLM as an engine, which is no API",
    "boot/engine_factories.py": "the same",
    "boot/start_banner.py": "the same",
    "cli/doctor.py": "the same",
    "cli/serve_config/engine_options.py": "the same",
    "cluster/plan.py": "the same",
    "model/load/plan.py": "the language Triton, which is no API",
    "cli/doctor_engines.py": "the same",
    "serving/endpoints/inference_tables.py": "a column of these tables has this name",
    "text/parsing/call_families.py": "a family of models has this name",
    "text/parsing/reasoning_families.py": "the same",
    "text/media_family.py": "the same",
    "gguf/architectures.py": "the same",
    "gguf/recent_architectures.py": "the same",
    "gguf/pre_tokenizers.py": "the same",
    "model/load/logit_scale.py": "the same",
    "model/networks/mixtures.py": "the same",
    "model/networks/families/layer_norm_decoders.py": "the same",
    "model/networks/families/table.py": "the same",
}
IMPORTING = {
    "cli/serve_config/mindie_config.py",
    "llm.py",
    "serving/grpc/grpc_port.py",
    "serving/grpc/grpc_call.py",
    "web/grpc_limits.py",
    "coordinator/proxy/grpc/grpc_port.py",
    "coordinator/proxy/grpc/grpc_call.py",
}


def outside_modules() -> Iterator[tuple[str, ast.Module]]:
    """Every file of the package but those of APIs, the table, and folders where names mean something else."""
    own_folders = (*OTHER_MEANINGS, *(f"dialects/{api}/" for api in APIS))
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE).as_posix()
        if path != TABLE and not path.startswith(own_folders):
            yield path, ast.parse(file.read_text("utf-8"))


def names(tree: ast.Module) -> Iterator[str]:
    """All names and texts in code; docstrings and comments may speak of anything."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            yield node.value if isinstance(node.value, str) else node.value.decode("latin-1")
        for attribute in ("id", "attr", "name", "arg", "module"):
            if isinstance(name := getattr(node, attribute, None), str):
                yield name


def test_no_other_file_knows_an_api_by_name():
    naming_files = {path for path, tree in outside_modules() if any(map(NAME.search, names(tree)))}
    assert naming_files == set(KNOWING)


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_other_file_imports_an_api():
    package = re.compile(rf"parley\.dialects\.({'|'.join(APIS)})\b")
    assert {path for path, tree in outside_modules() if any(map(package.match, imports(tree)))} == IMPORTING
