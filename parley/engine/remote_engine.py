"""An engine in a process of its own, connected by a socket. Starts the process, detects its end, and restarts it.

A step of the model occupies a core and the interpreter's lock just when tokens should be written to clients; a separate
process avoids that. The process is dead when the socket reaches end of file: every open stream gets its error in the
same iteration of the event loop. A process that hangs is killed (``watchdog``), and is then dead as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence

import msgspec

from parley import wire
from parley.engine.engine_process import ENGINE_COMMAND, EngineProcess, start_engine_process
from parley.engine.messages import (
    EngineFatal,
    EngineReady,
    FromEngine,
    LoadProgress,
    Shutdown,
    ToEngine,
)
from parley.engine.page_transfer import MessagePageTransfer
from parley.engine.process_exit import describe_exit
from parley.engine.protocol import EngineFailed
from parley.engine.watchdog import TICK_SECONDS, Watchdog, read_processor_seconds
from parley.types import EngineSettings, ModelInfo

log = logging.getLogger("parley.engine")

HEALTHY_SECONDS = 60.0  # an engine that served at least this long is restarted without a delay
RESTART_DELAYS = 1.0, 30.0  # seconds before a restart if it ended sooner: the first delay, doubled each time, at most
CLOSE_SECONDS = 2.0  # seconds that a closing engine has to end by itself, by default
# The API process has read the tokenizer and the template before, so an engine with another model would get nonsense.
REPLACED_MODEL = "The model's files are those of another model now; restart the server to serve it."


class EngineHung(Exception):
    """The engine process shows no sign of life. The message is one sentence."""


class RemoteEngine(MessagePageTransfer):
    """Runs the engine as a child process. Once it has loaded its model it is restarted whenever it ends or hangs.

    * ``command``: starts the process; the file descriptor of its end of the socket is added as the last argument.
    * ``name``: the model's name in the log.
    * ``close_seconds``: seconds that the process has to end by itself.
    * ``owns_group``: the process leads a process group of its own, whose other members end with it.
    * ``early_process``: a process that has been started already, and becomes the first one.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        name: str = "model",
        close_seconds: float = CLOSE_SECONDS,
        owns_group: bool = False,
        early_process: EngineProcess | None = None,
    ):
        super().__init__()
        self.settings = settings
        self.name = name
        self._command = command
        self._close_seconds = close_seconds
        self._owns_group = owns_group
        self._early_process = early_process
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._message_count = 0  # messages from all processes so far
        self._memory_kills: int | None = None  # before the process was started
        self._ready_at = 0.0  # when the process became ready, by time.monotonic
        self._ends_in_a_row = 0  # processes that ended; counted anew after one that served for HEALTHY_SECONDS

    @property
    def process_id(self) -> int | None:
        """The process id of the engine; None if no process runs."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the process and its supervisor. Raises EngineFailed if it cannot be started."""
        self._begin_loading()
        reader = await self._spawn_process()
        self._supervisor = asyncio.create_task(self._supervise_process(reader))
        self._supervisor.add_done_callback(self._on_supervisor_done)

    async def close(self) -> None:
        """End the supervisor and the process; open streams end with an error."""
        if self.state == "closed":
            return
        self.state = "closed"
        self._release_waiters("The server is shutting down.")
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        await self._end_process()

    def _send_to_engine(self, message: ToEngine) -> None:
        if self._writer is not None:
            self._writer.write(wire.encode_frame(message))

    async def _spawn_process(self) -> asyncio.StreamReader:
        """Start the process and send the settings. Raises EngineFailed."""
        started, self._early_process = self._early_process, None
        try:
            started = started or start_engine_process(self._command, owns_group=self._owns_group)
        except OSError as error:
            raise EngineFailed(f"The engine process could not be started: {error.strerror}.") from error
        self._process, self._memory_kills = started.process, started.memory_kills
        reader, self._writer = await asyncio.open_connection(sock=started.own_end)
        self._writer.write(wire.encode_frame(self.settings))
        return reader

    async def _supervise_process(self, reader: asyncio.StreamReader) -> None:
        """Receive from the process, and restart it whenever it ends, unless it could not load its model at first."""
        while True:
            watching = asyncio.create_task(self._watch_process(reader))
            try:
                reason = await self._read_messages(reader)
            finally:
                watching.cancel()
            if reason:  # do not wait for the end of the process
                self._handle_end(reason)
            exit_code = await self._end_process()
            if not reason:
                self._handle_end(f"The engine process {describe_exit(exit_code, self._memory_kills)}.")
            if self.state == "failed":
                return
            reader = await self._restart_process()

    def _handle_end(self, reason: str) -> None:
        """Fail all streams because the process has ended or is about to be ended."""
        if self.info is None:
            self._fail_for_good(reason)
            return
        was_healthy = self.state == "ready" and time.monotonic() - self._ready_at >= HEALTHY_SECONDS
        self._ends_in_a_row = 1 if was_healthy else self._ends_in_a_row + 1
        self.restarts += 1
        self.state = "restarting"
        self.progress = LoadProgress("restarting", 0.0)
        self._fail_all_streams(reason)
        log.error("%s: %s Requests that were running got an error.", self.name, reason)

    async def _restart_process(self) -> asyncio.StreamReader:
        """Start the process again, after a delay if it ended early before. Tries until it succeeds."""
        while True:
            first, longest = RESTART_DELAYS
            delay = min(longest, first * 2.0 ** min(self._ends_in_a_row - 2, 16)) if self._ends_in_a_row > 1 else 0.0
            log.warning("%s: The engine is restarted with the same settings in %g s.", self.name, delay)
            await asyncio.sleep(delay)
            try:
                return await self._spawn_process()
            except EngineFailed as error:
                self._ends_in_a_row += 1
                log.error("%s: %s", self.name, error)

    async def _watch_process(self, reader: asyncio.StreamReader) -> None:
        """Kill the process if it hangs, and let ``reader`` raise EngineHung. The first start may take any time."""
        process, watchdog = self._process, Watchdog(self.settings.engine_timeout)
        if process is None or not self.settings.engine_timeout:
            return
        with contextlib.suppress(OSError):  # it has just ended
            while True:
                await asyncio.sleep(TICK_SECONDS)
                processor_seconds = read_processor_seconds(process.pid)
                hang = watchdog.explain_hang(self._message_count, processor_seconds, is_serving=self.state == "ready")
                if hang and self.info is not None:
                    process.kill()  # a stopped process would not take any other signal
                    reader.set_exception(EngineHung(f"The engine process hung: it {hang}, and was killed."))
                    return

    def _on_supervisor_done(self, task: asyncio.Task[None]) -> None:
        """Fail the engine if the supervisor ended by an exception: a defect, but no stream may wait for ever."""
        if not task.cancelled() and task.exception() is not None:
            log.error("the engine's supervisor failed", exc_info=task.exception())
            self._fail_for_good("The connection to the engine failed.")

    async def _read_messages(self, reader: asyncio.StreamReader) -> str | None:
        """Handle messages until the stream ends. Return the reason if it is known by then."""
        decoder = msgspec.msgpack.Decoder(FromEngine)
        fatal = None
        try:
            while (message := await wire.read_frame(reader, decoder)) is not None:
                self._message_count += 1
                match message:
                    case EngineReady(info) if self.info is not None and _model_identity(info) != _model_identity(
                        self.info
                    ):
                        return REPLACED_MODEL
                    case EngineReady(info):
                        self._ready_at = time.monotonic()
                        if self.state == "restarting":
                            log.warning("%s: The engine is ready again.", self.name)
                        self._become_ready(info)
                    case EngineFatal(reason):
                        fatal = reason
                    case _:
                        self._handle_message(message)
        except (OSError, wire.BrokenFrame, msgspec.DecodeError) as error:
            log.debug("engine stream: %s", error)
        except EngineHung as hung:
            return str(hung)
        return fatal

    async def _end_process(self) -> int | None:
        """End the process, by force if necessary. Return its exit code."""
        if self._writer is not None:
            if not self._writer.is_closing():
                self._writer.write(wire.encode_frame(Shutdown()))
            self._writer.close()  # end of file makes the process exit, also during a step
            self._writer = None
        process = self._process
        if process is None:
            return None
        try:
            exit_code = await asyncio.to_thread(process.wait, self._close_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            exit_code = await asyncio.to_thread(process.wait)
        if self._owns_group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self._process = None  # only now: if this task is cancelled while waiting, the next call waits again
        return exit_code


def _model_identity(info: ModelInfo) -> tuple[object, ...]:
    """Return values that differ between models: if they change, the files are those of another one."""
    return info.architecture, info.vocab_size, info.parameters, info.dimensions, info.labels
