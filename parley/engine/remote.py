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
import sys
import time
from collections.abc import Sequence

import msgspec

from parley import wire
from parley.engine.messages import (
    Fatal,
    FromEngine,
    Progress,
    Ready,
    Shutdown,
    ToEngine,
)
from parley.engine.protocol import Engine, EngineFailed
from parley.types import Settings

log = logging.getLogger("parley.engine")

HEALTHY_S = 60.0  # an engine that ran at least this long after a restart is restarted again
CLOSE_S = 2.0  # seconds that a closing engine has to end by itself, by default


OWN_HOST = (sys.executable, "-m", "parley.worker.process")  # the command that runs parley's own engine


class RemoteEngine(Engine):
    """Runs the engine as a child process. It is restarted unless it ends within HEALTHY_S of a restart.

    ``command``: starts the process; the file descriptor of its end of the socket is added as the last argument.
    ``name``: the model's name in the log. ``close_seconds``: time that the process has to end by itself.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        command: Sequence[str] = OWN_HOST,
        name: str = "model",
        close_seconds: float = CLOSE_S,
    ):
        super().__init__()
        self.settings = settings
        self.name = name
        self._command = command
        self._close_seconds = close_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the engine; None if no process runs."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the process and its supervisor. Raises EngineFailed if it cannot be started."""
        self._begin()
        reader = await self._spawn()
        self._task = asyncio.create_task(self._supervise(reader))
        self._task.add_done_callback(self._orphaned)

    async def close(self) -> None:
        """End the supervisor and the process; open streams end with an error."""
        if self.state == "closed":
            return
        self.state = "closed"
        self._closed("The server is shutting down.")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._end()

    def _send(self, message: ToEngine) -> None:
        if self._writer is not None:
            self._writer.write(wire.frame(message))

    async def _spawn(self) -> asyncio.StreamReader:
        """Start the process and send the settings. Raises EngineFailed."""
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            ours.close()
            raise EngineFailed(f"The engine process could not be started: {error.strerror}.") from error
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(wire.frame(self.settings))
        return reader

    async def _supervise(self, reader: asyncio.StreamReader) -> None:
        """Receive from the process, and restart it until it has failed for good."""
        restarted_at = -HEALTHY_S
        while True:
            fatal = await self._listen(reader)
            code = await self._end()
            served = self.info is not None and self.state == "ready"
            reason = fatal or f"The engine process {_how(code)}."
            if not served or time.monotonic() - restarted_at < HEALTHY_S:
                if self.info is not None:
                    log.error("%s: %s It is not restarted again; restart the server.", self.name, reason)
                self._give_up(reason)
                return
            restarted_at = time.monotonic()
            self.state = "restarting"
            self.progress = Progress("restarting", 0.0)
            self._fail_all(reason)
            log.error(
                "%s: %s It is being restarted with the same settings; requests that were running got an error.",
                self.name,
                reason,
            )
            try:
                reader = await self._spawn()
            except EngineFailed as error:
                self._give_up(str(error))
                return

    def _orphaned(self, task: asyncio.Task[None]) -> None:
        """Fail the engine if the supervisor ended by an exception: a defect, but no stream may wait for ever."""
        if not task.cancelled() and task.exception() is not None:
            log.error("the engine's supervisor failed", exc_info=task.exception())
            self._give_up("The connection to the engine failed.")

    async def _listen(self, reader: asyncio.StreamReader) -> str | None:
        """Handle messages until the stream ends. Return the reason if the engine sent one before."""
        decoder = msgspec.msgpack.Decoder(FromEngine)
        fatal = None
        try:
            while (message := await wire.read(reader, decoder)) is not None:
                match message:
                    case Ready(info):
                        if self.state == "restarting":
                            log.warning("%s: The engine is ready again.", self.name)
                        self._serve(info)
                    case Fatal(reason):
                        fatal = reason
                    case _:
                        self._receive(message)
        except (OSError, wire.BrokenFrame, msgspec.DecodeError) as error:
            log.debug("engine stream: %s", error)
        return fatal

    async def _end(self) -> int | None:
        """End the process, by force if necessary. Return its exit code."""
        if self._writer is not None:
            if not self._writer.is_closing():
                self._writer.write(wire.frame(Shutdown()))
            self._writer.close()  # end of file makes the process exit, also during a step
            self._writer = None
        process = self._process
        if process is None:
            return None
        try:
            code = await asyncio.to_thread(process.wait, self._close_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            code = await asyncio.to_thread(process.wait)
        self._process = None  # only now: if this task is cancelled while waiting, the next call waits again
        return code


def _how(code: int | None) -> str:
    """Describe how a process ended."""
    if code is None or code == 0:
        return "ended unexpectedly"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = ", perhaps for lack of memory" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    return f"ended with exit code {code}"
