"""The media processes of one model: started when they are first needed, and ended with a job that takes too long.

A process can be ended while it decodes, and returns its memory. Each tenant has its share of them
(``tenant_executor.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from importlib.util import find_spec

import msgspec

from parley import wire
from parley.child_process import python_command
from parley.engine.media_messages import (
    FromMediaProcess,
    MediaProcessed,
    MediaProcessFailed,
    MediaProcessReady,
    MediaRefused,
    ProcessMedia,
)
from parley.errors import NotReady, Unsupported
from parley.serving.media.memory_files import MemoryFile
from parley.tenant_executor import TenantExecutor

log = logging.getLogger("parley.server")

PROCESS_COMMAND = python_command("-m", "parley.worker.media_process")
START_SECONDS = 120.0  # that a process has to start: it imports Transformers
SILENCE_SECONDS = 180.0  # a process that does not answer for this long is killed, even if it computed little
KILL_DELAY = 5.0  # seconds that a job whose client has left may go on: as long as a new process takes to start
END_SECONDS = 5.0  # that a process has to end once its socket is closed
KEPT_VARIABLES = frozenset({"PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"})
PACKAGES = {"PIL": "Pillow", "av": "PyAV", "torchvision": "torchvision"}  # by the name that is imported

TOO_SLOW = MediaRefused("could not be decoded in time, or within the memory set aside for that", "too_slow")
CRASHED = MediaRefused("made its decoder crash", "undecodable")

_decoder: msgspec.msgpack.Decoder[FromMediaProcess] = msgspec.msgpack.Decoder(FromMediaProcess)


def process_environment() -> dict[str, str]:
    """Return the environment of a media process: of this process's, only what Python needs. It may hold keys."""
    kept = {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES or name.startswith("PYTHON")}
    return kept | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def missing_packages() -> list[str]:
    """Return the names of the packages that reading media needs and that are not installed."""
    return [name for module, name in PACKAGES.items() if find_spec(module) is None]


class MediaWorker:
    """A media process, started with its first job and again after its end. Belongs to one thread at a time; only
    ``kill`` may be called from others."""

    def __init__(self, folder: str, command: list[str]):
        self._folder, self._command = folder, command
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket
        self._killed = False  # because nobody wants the result of its job

    @property
    def process_id(self) -> int | None:
        """The process id; None if no process runs."""
        return self._process.pid if self._process is not None else None

    def start_process(self) -> None:
        """Start the process, unless it runs, and wait until it is ready. Raises NotReady, Unsupported."""
        if self._process is not None and self._process.poll() is None:
            return
        self.end_process()
        self._killed = False
        self._socket, process_end = socket.socketpair()
        self._socket.settimeout(START_SECONDS)
        with process_end:
            try:
                self._process = subprocess.Popen(
                    [*self._command, str(process_end.fileno()), self._folder],
                    pass_fds=[process_end.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=process_environment(),
                )
            except OSError as error:
                log.error("A media process cannot be started: %s.", error.strerror)
        message = self._receive_message() if self._process is not None else None
        if isinstance(message, MediaProcessReady):
            self._socket.settimeout(SILENCE_SECONDS)
            return
        self.end_process()
        if isinstance(message, MediaProcessFailed):
            raise Unsupported("This model's media cannot be read: its processor cannot be loaded.")
        raise NotReady("Media cannot be read now: the process that decodes them does not start.", retry_after=5)

    def process_media(self, job: ProcessMedia) -> MediaProcessed | MediaRefused:
        """Have the process, which runs, do a job."""
        with contextlib.suppress(OSError):  # its end is noticed below
            self._socket.sendall(wire.encode_frame(job))
        message = self._receive_message()
        if isinstance(message, MediaProcessed | MediaRefused):
            return message
        exit_code = self.end_process()
        if not self._killed:
            log.warning("A media process ended during a job, with exit code %d.", exit_code)
        return TOO_SLOW if exit_code in (-signal.SIGXCPU, -signal.SIGKILL) else CRASHED

    def kill(self) -> None:
        """Kill the process. Its job fails."""
        self._killed = True
        if (process := self._process) is not None:
            process.kill()

    def end_process(self) -> int:
        """End the process, by force if it still runs, and return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        self._socket.close()
        try:
            return process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _receive_message(self) -> FromMediaProcess | None:
        """Return the process's next message, None if it has ended or is silent for too long."""
        try:
            message: FromMediaProcess | None = wire.receive_frame(self._socket, _decoder)
        except (OSError, wire.BrokenFrame, msgspec.DecodeError) as error:
            log.debug("media process: %s", error)
            return None
        return message


class MediaWorkers:
    """The media processes of the model in ``folder``: ``count`` at most."""

    def __init__(self, folder: str, count: int = 1, command: list[str] = PROCESS_COMMAND):
        self._folder, self._command = folder, command
        self._executor = TenantExecutor(count, "media")
        self._idle_workers: list[MediaWorker] = []
        self._closed = False

    @property
    def idle_process_ids(self) -> list[int]:
        """The process ids of workers that have nothing to do."""
        return [worker.process_id for worker in self._idle_workers if worker.process_id is not None]

    def close(self) -> None:
        """Cancel the jobs that wait and end the processes: idle ones now, the others once they have answered."""
        self._closed = True
        self._executor.shutdown()
        self._end_idle_workers()

    async def start(self) -> None:
        """Start a process before the first job. Raises NotReady, Unsupported."""
        check_packages()
        await asyncio.wrap_future(self._executor.submit("", self._start_worker))

    async def process_media(
        self, source: MemoryFile, target: MemoryFile, job: ProcessMedia, tenant: str
    ) -> MediaProcessed | MediaRefused:
        """Have a process do a job with two files. Raises NotReady, Unsupported.

        Cancelling this ends the job soon: it is not begun, or gets KILL_DELAY to finish.
        """
        check_packages()
        # The files stay open until the process is done with them, even if this is cancelled: it opens them by their
        # numbers, which other files could get.
        call = _JobCall(job, (source, target))
        future = self._executor.submit(tenant, lambda: self._run_call(call))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            call.give_up()
            asyncio.get_running_loop().call_later(KILL_DELAY, call.kill_worker)
            raise

    def _start_worker(self) -> None:
        with self._take_worker() as worker:
            worker.start_process()

    def _run_call(self, call: _JobCall) -> MediaProcessed | MediaRefused:
        """Have an idle worker do a job. Called in a thread of the executor, which has no more threads than there may be
        workers. Raises NotReady, Unsupported."""
        with self._take_worker() as worker:
            worker.start_process()
            return call.run(worker)

    @contextlib.contextmanager
    def _take_worker(self) -> Iterator[MediaWorker]:
        try:
            worker = self._idle_workers.pop()
        except IndexError:
            worker = MediaWorker(self._folder, self._command)
        try:
            yield worker
        finally:
            self._idle_workers.append(worker)
            if self._closed:
                self._end_idle_workers()

    def _end_idle_workers(self) -> None:
        with contextlib.suppress(IndexError):  # none is left; several threads may take them
            while True:
                self._idle_workers.pop().end_process()


class _JobCall:
    """A job and its files. It can be given up before it begins; later the process that does it can be killed."""

    def __init__(self, job: ProcessMedia, files: tuple[MemoryFile, MemoryFile]):
        self._job, self._files = job, files
        self._lock = threading.Lock()
        self._worker: MediaWorker | None = None
        self._given_up = False

    def run(self, worker: MediaWorker) -> MediaProcessed | MediaRefused:
        with self._lock:
            if self._given_up:
                return TOO_SLOW  # nobody waits for it
            self._worker = worker
        try:
            return worker.process_media(self._job)
        finally:
            with self._lock:
                self._worker = None

    def give_up(self) -> None:
        """Do not begin the job."""
        with self._lock:
            self._given_up = True

    def kill_worker(self) -> None:
        """Kill the process that does the job, if one does."""
        with self._lock:
            if self._worker is not None:
                self._worker.kill()


def check_packages() -> None:
    """Raise Unsupported if packages that reading media needs are missing."""
    if missing := missing_packages():
        raise Unsupported(
            f"This server cannot read media: {', '.join(missing)} is not installed (pip install 'parley[media]')."
        )
