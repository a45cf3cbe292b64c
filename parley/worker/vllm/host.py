"""The host process of vLLM, which ``start.py`` runs with the Python that vLLM is installed for. Its argument is FD.

It speaks the same messages as parley's own engine process, over the stream socket with file descriptor FD: the first
frame is VLLMSettings; then ToEngine frames arrive and FromEngine frames are sent. End of file means that the API
process is gone. The host leads a process group, and ends it as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from parley import wire
from parley.engine.messages import (
    AdapterResult,
    CancelRequest,
    EngineFatal,
    EngineReady,
    FinishBeamSearch,
    FromEngine,
    Heartbeat,
    LoadAdapter,
    LoadProgress,
    ReservePages,
    ResetDone,
    ResetPrefixCache,
    Shutdown,
    SubmitRequest,
    ToEngine,
    UnloadAdapter,
)
from parley.heartbeat import BEAT_SECONDS
from parley.types import VLLMSettings
from parley.worker.vllm.core_watch import CoreWatch
from parley.worker.vllm.host_loop import UNKNOWN_ADAPTER, HostLoop, compare_adapter
from parley.worker.vllm.tree_log import TreeLog

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from parley.worker.vllm.vllm_client import VLLMClient

log = logging.getLogger("parley.engine")

SHUTDOWN_SECONDS = 8.0  # seconds for vLLM's own shutdown; then its processes are killed
MEMORY_WORDS = ("memory", "KV cache", "allocate")
MEMORY_HINT = (
    " A smaller --max-model-len or --max-batch needs less memory, and --kv-memory sets the size of the KV cache."
)
CPU_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"  # GiB; vLLM's build for CPUs prefers it to the argument
# Read by vLLM when it is imported.
VLLM_VARIABLES = {
    # A forked process would keep the socket open, and the API process would not notice the end of this one.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
}


def run_host(descriptor: int) -> None:
    """Load the model and serve until the socket ends."""
    # A service manager's SIGTERM reaches every process, but the API process decides when to end. Not SIG_IGN, which
    # vLLM's processes would inherit: their end begins with this signal.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    settings = wire.receive_frame(sock, msgspec.msgpack.Decoder(VLLMSettings))
    if settings is None:
        return
    loading = LoadingReporter(sock)
    tree_log = TreeLog(loading.report_stage, loading.beat)
    tree_log.take_over_output()
    loading.report_stage("importing vLLM", 0.0)
    os.environ |= VLLM_VARIABLES | ({"VLLM_BATCH_INVARIANT": "1"} if settings.exact else {})
    if settings.kv_memory is not None:
        os.environ.pop(CPU_CACHE_VARIABLE, None)
    try:
        llm = load_vllm(settings)
    except Exception as error:
        loading.send(EngineFatal(explain_failure(error, tree_log.cause)))
        end_group()
    tree_log.end_loading()
    try:
        import uvloop

        uvloop.run(VLLMHost(llm, settings, tree_log).serve(sock))
    except Exception:
        log.exception("the host of vLLM failed")
    end_group()


class LoadingReporter:
    """Sends the messages of a host while it loads, from two threads."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, message: FromEngine) -> None:
        """Send a message; end all processes if the API process is gone."""
        try:
            with self._lock:
                self._sock.sendall(wire.encode_frame(message))
        except OSError:
            end_group()

    def report_stage(self, stage: str, fraction: float) -> None:
        """Report the progress."""
        self.send(LoadProgress(stage, fraction))

    def beat(self) -> None:
        """Show that this process lives, and end it if the API process is gone or wants it to end."""
        with contextlib.suppress(BlockingIOError):
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            end_group()  # until the model is loaded, nothing arrives but Shutdown or the end of file
        self.send(Heartbeat())


def load_vllm(settings: VLLMSettings) -> AsyncLLM:
    """Start vLLM; importing it alone takes seconds. Raises any exception of vLLM."""
    from parley.worker.vllm.vllm_client import start_vllm

    return start_vllm(settings)


def explain_failure(error: Exception, cause: str) -> str:
    """Return in one sentence why vLLM did not start. ``cause``: the last error in the log of its processes."""
    if type(error).__name__ == "StartRefused":
        return str(error)
    reason = " ".join((cause if "See root cause above" in str(error) and cause else str(error)).split())
    reason = reason.partition("Value error, ")[2] or reason  # pydantic's words around vLLM's
    reason = re.sub(r" \[type=\w+, input_value=.*", "", reason).rstrip(".") or type(error).__name__
    needs_memory = any(word in reason for word in MEMORY_WORDS)
    return f"vLLM did not start: {reason}.{MEMORY_HINT if needs_memory else ''}"


def explain_adapter_failure(error: Exception, folder: str) -> str:
    """Return vLLM's reason why an adapter could not be loaded, without the layers of its processes around it."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if inner := re.search(r"with error '(.*)', please check", reason):
        reason = inner[1]
    return f"{(reason.replace(folder, 'its folder') if folder else reason).rstrip('.')}."


def end_group() -> None:
    """Kill all processes that vLLM started, and this one."""
    os.killpg(0, signal.SIGKILL)


class VLLMHost:
    """Applies the messages of the API process to vLLM, and sends its outputs."""

    def __init__(self, llm: AsyncLLM, settings: VLLMSettings, tree_log: TreeLog):
        self._llm = llm
        self._settings = settings
        self._client: VLLMClient
        self._loop: HostLoop
        self._writer: asyncio.StreamWriter
        self._tasks: set[asyncio.Task[None]] = set()
        self._core_watch = CoreWatch(settings.engine_timeout, self._expects_steps, lambda: tree_log.tells_worker_death)

    async def serve(self, sock: socket.socket) -> None:
        """Serve until the API process ends the connection, or vLLM ends."""
        from vllm import __version__

        from parley.worker.vllm.generate_client import GenerateClient
        from parley.worker.vllm.vllm_client import VLLMClient, has_engine_core

        reader, self._writer = await asyncio.open_connection(sock=sock)
        client_class = VLLMClient if has_engine_core(self._llm) else GenerateClient
        if client_class is GenerateClient:
            log.warning(
                "The inner interface of vLLM %s is not known; the public one takes more processor time.", __version__
            )
        self._client = await client_class.connect(
            self._llm, lambda choice_id, reason: self._loop.reject_choice(choice_id, reason)
        )
        self._loop = HostLoop(self._client, self._send_message)
        await self._load_adapters()
        self._send_message(EngineReady(self._client.describe_model(self._settings, __version__)))
        coroutines = (self._read_messages(reader), self._read_steps(), self._send_beats(), self._watch_core())
        tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(OSError):
            await self._writer.drain()
        threading.Timer(SHUTDOWN_SECONDS, end_group).start()
        await asyncio.to_thread(self._client.shut_down)

    async def _load_adapters(self) -> None:
        """Load the adapters of the settings, because the API process asks for them at the first start only."""
        for name, folder in self._settings.adapters.items():
            try:
                await self._client.load_adapter(name, folder)
            except Exception as error:  # vLLM does not document what it raises
                log.warning("The adapter %s is not loaded: %s", name, explain_adapter_failure(error, folder))

    def _send_message(self, message: FromEngine) -> None:
        if not self._writer.is_closing():
            self._writer.write(wire.encode_frame(message))

    async def _send_beats(self) -> None:
        while True:
            self._send_message(Heartbeat())
            await asyncio.sleep(BEAT_SECONDS)

    async def _read_steps(self) -> None:
        """Pass on vLLM's steps until its engine ends."""
        try:
            while True:
                step = await self._client.next_step()
                self._core_watch.note_step()
                self._loop.handle_step(step)
        except Exception as error:
            is_dead = type(error).__name__ == "EngineDeadError"
            if not is_dead:
                log.exception("vLLM's steps cannot be read")
            reason = "its processes died" if is_dead else f"its steps cannot be read ({type(error).__name__})"
            self._send_message(EngineFatal(f"vLLM ended: {reason}."))

    async def _watch_core(self) -> None:
        """Wait until vLLM hangs. Report it, and end all processes: they would not end by themselves."""
        self._send_message(EngineFatal(await self._core_watch.wait_for_hang()))
        with contextlib.suppress(OSError):
            await self._writer.drain()
        end_group()

    def _expects_steps(self) -> bool:
        return self._loop.computing_count > self._client.preparing_count

    async def _read_messages(self, reader: asyncio.StreamReader) -> None:
        """Apply messages until Shutdown or the end of file."""
        decoder = msgspec.msgpack.Decoder(ToEngine)
        with contextlib.suppress(OSError, wire.BrokenFrame):
            while (message := await wire.read_frame(reader, decoder)) is not None:
                if isinstance(message, Shutdown):
                    return
                self._apply_message(message)

    def _apply_message(self, message: ToEngine) -> None:
        match message:
            case SubmitRequest(request):
                self._loop.add_request(request)
            case CancelRequest(request_id, index):
                self._loop.cancel_request(request_id, index)
            case LoadAdapter(number, name, folder):
                self._answer_change(number, partial(self._client.load_adapter, name, folder), folder)
            case UnloadAdapter(number, name) if not self._client.knows_adapter(name):
                self._send_message(AdapterResult(number, UNKNOWN_ADAPTER))
            case UnloadAdapter(number, name):
                in_use = self._loop.uses_adapter(name)
                self._answer_change(number, partial(self._client.unload_adapter, name, in_use=in_use))
            case ResetPrefixCache():
                self._start_task(self._reset_prefix_cache(message))
            case FinishBeamSearch(request_id, reason):
                self._loop.finish_beam_search(request_id, reason)
            case ReservePages(number, _, prefix):
                self._send_message(compare_adapter(number, prefix, self._client.digest_adapter))

    def _answer_change(self, number: int, change: Callable[[], Awaitable[None]], folder: str = "") -> None:
        """Change an adapter, and send the result. Errors name no ``folder``: clients read them."""

        async def change_and_answer() -> None:
            try:
                await change()
                error = ""
            except Exception as failure:
                error = explain_adapter_failure(failure, folder)
            self._send_message(AdapterResult(number, error))

        self._start_task(change_and_answer())

    async def _reset_prefix_cache(self, message: ResetPrefixCache) -> None:
        is_done = False
        if message.running or self._loop.is_idle:
            is_done = await self._client.reset_prefix_cache(running=message.running)
        self._send_message(ResetDone(message.id, is_done))

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


if __name__ == "__main__":
    run_host(int(sys.argv[1]))
