"""An engine in a process of its own, connected by a socket. Starts the process, detects its death, and restarts it.

A step of the model occupies a core and the interpreter's lock just when tokens should be written to clients; a separate
process avoids that. The process is dead when the socket reaches end of file: every open stream gets its error in the
same turn of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import time
from collections.abc import Sequence

import msgspec

from parley import wire
from parley.child_process import python_command
from parley.engine.messages import (
    EngineFatal,
    EngineReady,
    FromEngine,
    LoadProgress,
    Shutdown,
    ToEngine,
)
from parley.engine.page_transfer import MessagePageTransfer
from parley.engine.protocol import EngineFailed
from parley.types import EngineSettings

log = logging.getLogger("parley.engine")

HEALTHY_SECONDS = 60.0  # an engine that ran at least this long after a restart is restarted again
CLOSE_SECONDS = 2.0  # seconds that a closing engine has to end by itself, by default


ENGINE_COMMAND = python_command("-m", "parley.worker.process")  # the command that runs parley's own engine


class RemoteEngine(MessagePageTransfer):
    """Runs the engine as a child process. It is restarted unless it ends within HEALTHY_SECONDS of a restart.

    ``command``: starts the process; the file descriptor of its end of the socket is added as the last argument.
    ``name``: the model's name in the log. ``close_seconds``: time that the process has to end by itself.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        name: str = "model",
        close_seconds: float = CLOSE_SECONDS,
    ):
        super().__init__()
        self.settings = settings
        self.name = name
        self._command = command
        self._close_seconds = close_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None

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
        own_end, engine_end = socket.socketpair()
        try:
            self._process = subprocess.Popen(  # noqa: ASYNC220 (forking takes milliseconds)
                [*self._command, str(engine_end.fileno())],
                pass_fds=[engine_end.fileno()],
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            own_end.close()
            raise EngineFailed(f"The engine process could not be started: {error.strerror}.") from error
        finally:
            engine_end.close()
        reader, self._writer = await asyncio.open_connection(sock=own_end)
        self._writer.write(wire.encode_frame(self.settings))
        return reader

    async def _supervise_process(self, reader: asyncio.StreamReader) -> None:
        """Receive from the process, and restart it until it has failed for good."""
        restarted_at = -HEALTHY_SECONDS
        while True:
            fatal = await self._read_messages(reader)
            exit_code = await self._end_process()
            was_ready = self.info is not None and self.state == "ready"
            reason = fatal or f"The engine process {_describe_exit(exit_code)}."
            if not was_ready or time.monotonic() - restarted_at < HEALTHY_SECONDS:
                if self.info is not None:
                    log.error("%s: %s It is not restarted again; restart the server.", self.name, reason)
                self._fail_for_good(reason)
                return
            restarted_at = time.monotonic()
            self.state = "restarting"
            self.progress = LoadProgress("restarting", 0.0)
            self._fail_all_streams(reason)
            log.error(
                "%s: %s It is being restarted with the same settings; requests that were running got an error.",
                self.name,
                reason,
            )
            try:
                reader = await self._spawn_process()
            except EngineFailed as error:
                self._fail_for_good(str(error))
                return

    def _on_supervisor_done(self, task: asyncio.Task[None]) -> None:
        """Fail the engine if the supervisor ended by an exception: a defect, but no stream may wait for ever."""
        if not task.cancelled() and task.exception() is not None:
            log.error("the engine's supervisor failed", exc_info=task.exception())
            self._fail_for_good("The connection to the engine failed.")

    async def _read_messages(self, reader: asyncio.StreamReader) -> str | None:
        """Handle messages until the stream ends. Return the reason if the engine sent one before."""
        decoder = msgspec.msgpack.Decoder(FromEngine)
        fatal = None
        try:
            while (message := await wire.read_frame(reader, decoder)) is not None:
                match message:
                    case EngineReady(info):
                        if self.state == "restarting":
                            log.warning("%s: The engine is ready again.", self.name)
                        self._become_ready(info)
                    case EngineFatal(reason):
                        fatal = reason
                    case _:
                        self._handle_message(message)
        except (OSError, wire.BrokenFrame, msgspec.DecodeError) as error:
            log.debug("engine stream: %s", error)
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
        self._process = None  # only now: if this task is cancelled while waiting, the next call waits again
        return exit_code


def _describe_exit(exit_code: int | None) -> str:
    """Describe how a process ended."""
    if exit_code is None or exit_code == 0:
        return "ended unexpectedly"
    if exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = f"signal {-exit_code}"
        hint = ", perhaps for lack of memory" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    return f"ended with exit code {exit_code}"
