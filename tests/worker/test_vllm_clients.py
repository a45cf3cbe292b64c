"""The host's clients of vLLM, with a stand-in for vLLM: the adapters that they have it load, and unused KV pages."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.http_client import MODEL_INFO
from support.stand_in_vllm import StandInVLLM, stand_in_modules

from parley import wire
from parley.core.shared_pages.reservations import ADAPTER_DIFFERS
from parley.engine.messages import (
    AdapterResult,
    EngineReady,
    FromEngine,
    Heartbeat,
    LoadAdapter,
    ReservePages,
    ReserveResponse,
    Shutdown,
    ToEngine,
    UnloadAdapter,
)
from parley.types import EngineRequest, KVPrefix, SamplingOptions, VLLMSettings
from parley.worker.vllm import host
from parley.worker.vllm.host_loop import UNKNOWN_ADAPTER
from parley.worker.vllm.requests.continuation import Continuation


@pytest.fixture(autouse=True)
def importable_vllm() -> Iterator[None]:
    with stand_in_modules():
        yield


class HostConnection:
    """The API process's end of the connection to a host."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self.writer = reader, writer
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    async def receive(self) -> Any:
        """Return the next message that is no heartbeat."""
        while isinstance(message := await wire.read_frame(self._reader, self._decoder), Heartbeat):
            pass
        return message

    async def ask(self, question: ToEngine) -> Any:
        """Return the answer to a question."""
        self.writer.write(wire.encode_frame(question))
        return await self.receive()


@asynccontextmanager
async def running_host(
    llm: StandInVLLM, monkeypatch: pytest.MonkeyPatch, **adapters: str
) -> AsyncIterator[HostConnection]:
    """Run a host in this process. ``adapters``: those that the API process had when it started the host."""
    from parley.worker.vllm.vllm_client import VLLMClient

    monkeypatch.setattr(VLLMClient, "describe_model", lambda *_: MODEL_INFO)
    monkeypatch.setattr(host, "end_group", lambda: None)
    monkeypatch.setattr(host, "SHUTDOWN_SECONDS", 0)
    own, other = socket.socketpair()
    settings = VLLMSettings(model="m", adapters=dict(adapters))
    tree_log: Any = SimpleNamespace(tells_worker_death=False)
    running = host.VLLMHost(llm, settings, tree_log)  # type: ignore[arg-type]
    serving = asyncio.create_task(running.serve(other))
    connection = HostConnection(*await asyncio.open_connection(sock=own))
    try:
        assert isinstance(await connection.receive(), EngineReady)
        yield connection
    finally:
        connection.writer.write(wire.encode_frame(Shutdown()))
        await serving
        for writer in (connection.writer, running._writer):  # the host's is open until its process ends
            writer.close()
            await writer.wait_closed()


def write_content(folder: Path, content: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_text(content)
    return str(folder)


async def test_adapter_is_loaded_unless_exactly_it_is_loaded(monkeypatch, tmp_path):
    folder, llm = write_content(tmp_path / "one", "first"), StandInVLLM()

    async def load(loads: int, from_folder: str = folder) -> None:
        assert await connection.ask(LoadAdapter(1, "one", from_folder)) == AdapterResult(1)
        assert len(llm.adapters) == loads

    async with running_host(llm, monkeypatch, one=folder) as connection:
        await load(1)
        write_content(tmp_path / "one", "second")
        await load(2)
        await load(2)
        await load(3, write_content(tmp_path / "two", "second"))
        assert await connection.ask(UnloadAdapter(1, "one")) == AdapterResult(1)
        await load(4)
        assert "its folder" in (await connection.ask(LoadAdapter(1, "gone", str(tmp_path / "gone")))).error
    # vLLM's prefix cache compares names and folders only.
    assert len({(adapter.lora_name, adapter.lora_path) for adapter in llm.adapters}) == 3
    assert len({adapter.lora_int_id for adapter in llm.adapters}) == 4


async def test_adapter_of_a_restarted_engine_can_be_unloaded_and_loaded(monkeypatch, tmp_path):
    """The API process does not ask a restarted engine for the adapters that it gave to it in the settings."""
    folder, llm = write_content(tmp_path / "one", "first"), StandInVLLM()
    async with running_host(llm, monkeypatch, one=folder) as connection:
        assert await connection.ask(UnloadAdapter(1, "one")) == AdapterResult(1)
        assert await connection.ask(LoadAdapter(2, "one", folder)) == AdapterResult(2)
        assert (await connection.ask(ReservePages(3, "k", KVPrefix([], adapter="one")))).error == ""
        assert len(llm.adapters) == 2


async def test_pages_depend_on_an_adapter_as_it_was_loaded(monkeypatch, tmp_path):
    """The files are read once: neither do requests read them again, nor does a later change of them count."""
    folder, llm = write_content(tmp_path / "one", "first"), StandInVLLM()

    async def reserve(name: str, digest: str = "") -> ReserveResponse:
        return await connection.ask(ReservePages(1, "k", KVPrefix([], "", name, digest)))

    async with running_host(llm, monkeypatch) as connection:
        assert await connection.ask(LoadAdapter(1, "one", folder)) == AdapterResult(1)
        first = (await reserve("one")).digest
        write_content(tmp_path / "one", "second")
        assert first and (await reserve("one", first)) == ReserveResponse(1, digest=first)
        await connection.ask(LoadAdapter(1, "one", folder))
        second = await reserve("one", first)
        assert second.error == ADAPTER_DIFFERS and second.digest not in ("", first)
        await connection.ask(UnloadAdapter(1, "one"))
        assert (await reserve("one")).error == UNKNOWN_ADAPTER
        assert await reserve("") == ReserveResponse(1)


@pytest.mark.parametrize("is_public", [False, True])
async def test_choice_cancelled_before_submission_frees_transferred_pages(is_public):
    from parley.worker.vllm.generate_client import GenerateClient
    from parley.worker.vllm.vllm_client import VLLMClient

    llm = StandInVLLM()
    client: VLLMClient = await (GenerateClient if is_public else VLLMClient).connect(llm, fail_on_rejection)  # type: ignore[arg-type]
    request = EngineRequest("r", [5, 6], max_tokens=2, sampling=SamplingOptions(temperature=0.0))
    for choice_id in ("cancelled", "begun"):
        client.add_choice(choice_id, request, 0, Continuation(page_move={"remote_request_id": choice_id}))
    client.cancel_choices(["cancelled"])
    await let_tasks_run()
    assert llm.rejected_moves == [{"remote_request_id": "cancelled"}] and len(llm.submitted) == 1
    client.cancel_choices(["begun"])
    await let_tasks_run()
    assert len(llm.rejected_moves) == 1  # vLLM frees the pages of the choices that it has


async def test_pages_of_a_cancelled_choice_are_given_back_also_if_vllm_would_refuse_it():
    from parley.worker.vllm.vllm_client import VLLMClient

    llm = StandInVLLM()
    llm.input_processor.process_inputs = lambda *arguments, **members: {}["x"]
    client = await VLLMClient.connect(llm, fail_on_rejection)  # type: ignore[arg-type]
    client.add_choice("c", EngineRequest("r", [5, 6], max_tokens=2), 0, Continuation(page_move={"remote_port": 5}))
    client.cancel_choices(["c"])
    await let_tasks_run()
    assert llm.rejected_moves == [{"remote_port": 5}]


def fail_on_rejection(choice_id: str, reason: str) -> None:
    pytest.fail(reason)


async def let_tasks_run() -> None:
    for _ in range(10):
        await asyncio.sleep(0)
