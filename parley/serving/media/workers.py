"""The media processes of one model, which are ended with a job that takes too long (``workers/worker_pool.py``)."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from importlib.util import find_spec

import msgspec

from parley.child_process import python_command
from parley.engine.media_messages import (
    FromMediaProcess,
    MediaJobRequest,
    MediaJobResult,
    MediaProcessFailed,
    MediaProcessReady,
    MediaRefused,
)
from parley.engine.process_exit import describe_exit
from parley.errors import NotReady, Unsupported
from parley.log_lines import FORMAT_VARIABLE, LEVEL_VARIABLE
from parley.serving.media.memory_files import MemoryFile
from parley.serving.workers.worker_pool import WorkerPool, WorkerProcess

log = logging.getLogger("parley.server")

PROCESS_COMMAND = python_command("-m", "parley.worker.media_process")
SILENCE_SECONDS = 180.0  # a process that does not answer for this long is killed, even if it computed little
KILL_DELAY = 5.0  # seconds that a job may still run after its client left: as long as a new process takes to start
END_SECONDS = 5.0  # seconds in which a process must end once its socket is closed
KEPT_VARIABLES = frozenset(
    {"PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", FORMAT_VARIABLE, LEVEL_VARIABLE}
)
PACKAGES = {"PIL": "Pillow", "av": "PyAV", "torchvision": "torchvision"}  # by the imported names

TOO_SLOW = MediaRefused("could not be decoded in time, or within the memory set aside for that", "too_slow")
CRASHED = MediaRefused("made its decoder crash", "undecodable")

_decoder: msgspec.msgpack.Decoder[FromMediaProcess] = msgspec.msgpack.Decoder(FromMediaProcess)


def process_environment() -> dict[str, str]:
    """Return the environment of a media process: only Python's variables, because others may hold keys."""
    kept_variables = {
        name: value for name, value in os.environ.items() if name in KEPT_VARIABLES or name.startswith("PYTHON")
    }
    return kept_variables | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def missing_packages() -> list[str]:
    """Return the names of the packages that reading media needs and that are not installed."""
    return [name for module, name in PACKAGES.items() if find_spec(module) is None]


class MediaWorker(WorkerProcess[FromMediaProcess]):
    """A process that does one job after the other with the processor of the model in ``folder``."""

    def __init__(self, folder: str, command: list[str]):
        super().__init__(
            [*command, folder],
            _decoder,
            silence_seconds=SILENCE_SECONDS,
            end_seconds=END_SECONDS,
            environment=process_environment(),
        )
        self._killed = False  # because its job was abandoned

    def ensure_running(self) -> None:
        """Start the process, unless it runs, and wait until it is ready. Raises NotReady, Unsupported."""
        if self.is_running:
            return
        self._killed = False
        message = self.start()
        if isinstance(message, MediaProcessReady):
            return
        self.end()
        if isinstance(message, MediaProcessFailed):
            raise Unsupported("This model's media cannot be read: its processor cannot be loaded.")
        raise NotReady("Media cannot be read now: the process that decodes them does not start.", retry_after=5)

    def process_media(self, job: MediaJobRequest) -> MediaJobResult | MediaRefused:
        """Give a job to the running process, and return its answer."""
        self.send_message(job)
        message = self.receive_message()
        if isinstance(message, MediaJobResult | MediaRefused):
            return message
        exit_code = self.end()
        if not self._killed:
            log.warning("A media process %s during a job.", describe_exit(exit_code, self.memory_kills))
        return TOO_SLOW if exit_code in (-signal.SIGXCPU, -signal.SIGKILL) else CRASHED

    def kill(self) -> None:
        """Kill the process because its job was abandoned."""
        self._killed = True
        super().kill()


class MediaWorkerPool:
    """The media processes of the model in ``folder``: ``count`` at most. ``command``: starts a process, which may be
    another Python's with libraries of its own; None: one with parley's libraries."""

    def __init__(self, folder: str, count: int = 1, command: list[str] | None = None):
        self._needs_packages = command is None
        self._pool = WorkerPool(count, "media", lambda: MediaWorker(folder, command or PROCESS_COMMAND))

    @property
    def idle_process_ids(self) -> list[int]:
        """The process ids of workers that have nothing to do."""
        return self._pool.idle_process_ids

    def close(self) -> None:
        """Cancel the jobs that wait and end the processes: idle ones now, the others once they have answered."""
        self._pool.close()

    async def start(self) -> None:
        """Start a process before the first job. Raises NotReady, Unsupported."""
        self._check_packages()
        await asyncio.wrap_future(self._pool.submit("", MediaWorker.ensure_running))

    async def process_media(
        self, source: MemoryFile, target: MemoryFile, job: MediaJobRequest, tenant: str
    ) -> MediaJobResult | MediaRefused:
        """Run a job with two files in a process. Raises NotReady, Unsupported.

        Cancelling this ends the job soon: it is not begun, or gets KILL_DELAY to finish.
        """
        self._check_packages()
        # The files stay open until the process is done with them, even if this is cancelled: it opens them by their
        # numbers, which other files could get.
        call = _JobCall(job, (source, target))
        future = self._pool.submit(tenant, call.run)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            call.give_up()
            asyncio.get_running_loop().call_later(KILL_DELAY, call.kill_worker)
            raise

    def _check_packages(self) -> None:
        """Raise Unsupported if packages that parley's own media process needs are missing."""
        if self._needs_packages and (missing := missing_packages()):
            raise Unsupported(
                f"This server cannot read media: {', '.join(missing)} is not installed "
                "(pip install 'parley-llm[media]')."
            )


class _JobCall:
    """A job and its files. It can be given up before it begins; later the process that does it can be killed."""

    def __init__(self, job: MediaJobRequest, files: tuple[MemoryFile, MemoryFile]):
        self._job, self._files = job, files
        self._lock = threading.Lock()
        self._worker: MediaWorker | None = None
        self._given_up = False

    def run(self, worker: MediaWorker) -> MediaJobResult | MediaRefused:
        """Run the job on a worker. Raises NotReady, Unsupported."""
        worker.ensure_running()
        with self._lock:
            if self._given_up:
                return TOO_SLOW  # no request waits for it
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
