"""A server whose model calls Codex's tool once, then says what it returned. Prints its port, runs until killed."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

import msgspec
import uvloop
from support.tiny_models import write_tokenizer
from tokenizers import Tokenizer

from parley.boot.parts import ServerParts
from parley.disagg.kv.peer import KVPeer
from parley.engine.fake import FAKE_MODEL, FakeEngine
from parley.serving.options import ServerOptions
from parley.serving.served_model import ServedModel
from parley.types import EngineRequest, Settings
from parley.web import port as http_port

COMMAND, OUTPUT = "echo hello-$((40+2))", "hello-42"
CALL = f"<tool_call>\n{json.dumps({'name': 'exec_command', 'arguments': {'cmd': COMMAND}})}\n</tool_call>"


async def serve(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def answer(request: EngineRequest, choice: int) -> list[int]:
        prompt = tokenizer.decode(request.token_ids)
        return tokenizer.encode(f"The tool said {OUTPUT}." if OUTPUT in prompt else CALL).ids

    info = msgspec.structs.replace(FAKE_MODEL, vocab_size=640, max_model_len=400_000, kv_blocks=50_000)
    options = ServerOptions(port=0, access_log=False)
    engine = FakeEngine(answer, info=info)
    model = ServedModel(("scripted",), Settings(model=str(folder), tool_parser="hermes"), engine, options)
    parts = ServerParts(options, [model], KVPeer(secret=b"s"))
    listener = http_port.open_listener(options.host, 0)
    await model.load_engine()
    print(listener.getsockname()[1], flush=True)
    await http_port.HttpServer(http_port.uvicorn_config(options, parts.build_app())).serve(sockets=[listener])


with tempfile.TemporaryDirectory() as name:
    write_tokenizer(Path(name))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(Path(name)))
