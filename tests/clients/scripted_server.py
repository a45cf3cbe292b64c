"""A server whose model follows a script, for agents whose prompts are long. Prints its port, runs until killed.

Argument: a JSON list of ``[TEXT, ANSWER]``. A request gets the first answer whose text its prompt contains.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import msgspec
import uvloop
from support.tiny_models import write_tokenizer
from tokenizers import Tokenizer

from parley.boot.server_parts import ServerParts
from parley.disagg.kv.peer import KVPeer
from parley.engine.scripted_engine import SCRIPTED_MODEL, ScriptedEngine
from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.types import EngineRequest, ParleySettings
from parley.web import port as http_port


async def serve(folder: Path, script: list[tuple[str, str]]) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def answer(request: EngineRequest, choice: int) -> list[int]:
        prompt = tokenizer.decode(request.token_ids)
        return tokenizer.encode(next(reply for text, reply in script if text in prompt)).ids

    info = msgspec.structs.replace(SCRIPTED_MODEL, vocab_size=640, max_model_len=400_000, kv_pages=50_000)
    options = ServerOptions(port=0, access_log=False)
    engine = ScriptedEngine(answer, info=info)
    model = ServedModel(("scripted",), ParleySettings(model=str(folder), tool_parser="hermes"), engine, options)
    parts = ServerParts(options, [model], KVPeer(secret=b"s"))
    listener = http_port.open_listener(options.host, 0)
    await model.load_engine()
    print(listener.getsockname()[1], flush=True)
    await http_port.HttpServer(http_port.uvicorn_config(options, parts.build_app())).serve(sockets=[listener])


with tempfile.TemporaryDirectory() as name:
    write_tokenizer(Path(name))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(Path(name), json.loads(sys.argv[1])))
