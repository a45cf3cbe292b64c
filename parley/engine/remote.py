"""An engine in a process of its own, at the other end of a socket. Starts it, notices its death, restarts it once.

A step of the model holds a core and the interpreter's lock exactly when tokens should be written to clients; a process
apart keeps the two out of each other's way. Death is end-of-file on the socket: every open stream gets its error in
the same turn of the event loop.
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

HEALTHY_S = 60.0  # an engine that served this long may be restarted again
CLOSE_S = 2.0  # seconds that a closing engine usually has to end by itself


OWN_HOST = (sys.executable, "-m", "parley.worker.process")  # the command that runs parley's own engine


class RemoteEngine(Engine):
    """Runs an engine's host as a child process. One restart for each time the engine was up for HEALTHY_S.

    ``command``: starts the host, which gets the file descriptor of its end of the socket as a last argument. ``name``:
    the model's name in the log. ``close_seconds``: how long the host may take to end by itself.
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
        """Process id of the engine while there is one."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        self._begin()
        reader = await self._spawn()
        self._task = asyncio.create_task(self._supervise(reader))
        self._task.add_done_callback(self._orphaned)

    async def close(self) -> None:
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
        """Start the process and say what to load."""
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
        """Follow one process after another until one ends for good."""
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
        """The supervisor is done. An exception in it is a defect, and must not leave streams waiting for ever."""
        if not task.cancelled() and task.exception() is not None:
            log.error("the engine's supervisor failed", exc_info=task.exception())
            self._give_up("The connection to the engine failed.")

    async def _listen(self, reader: asyncio.StreamReader) -> str | None:
        """Take messages until the stream ends. Returns the reason if the engine gave one before it ended."""
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
        """Make sure that the process is gone; its exit code."""
        if self._writer is not None:
            if not self._writer.is_closing():
                self._writer.write(wire.frame(Shutdown()))
            self._writer.close()  # end-of-file ends the process, whatever it is doing
            self._writer = None
        process = self._process
        if process is None:
            return None
        try:
            code = await asyncio.to_thread(process.wait, self._close_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            code = await asyncio.to_thread(process.wait)
        self._process = None  # not before: who is cancelled while waiting leaves it to the next
        return code


def _how(code: int | None) -> str:
    """How a process ended, in words."""
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
