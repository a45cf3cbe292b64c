"""A media process: decodes media and runs the model's processor (``python -m parley.worker.media_process FOLDER FD``).

It does one job after another for a stream socket, inherited as file descriptor FD, with the processor of the model in
FOLDER. Data and results do not pass through the socket, but are files in the parent's memory. The data comes from
clients, and decoders have had bugs that let a file run code or use all memory. So the environment of this process has
no keys, and memory, file sizes and the processor time of each job are limited. The kernel kills the process if a job
exceeds a limit; the parent then refuses the item and starts another process. End of file means that the parent is gone.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from parley import wire
from parley.child_process import die_with_parent, ignore_group_signals, limit_resource
from parley.engine.media_messages import (
    FromMediaProcess,
    MediaJobRequest,
    MediaProcessFailed,
    MediaProcessReady,
    MediaRefused,
)
from parley.log_lines import set_up_child_logging

if TYPE_CHECKING:
    from parley.model.media_input.jobs import MediaJobs

log = logging.getLogger("parley.engine")

JOB_SECONDS = 60  # most seconds of processor time of a job
JOB_MEMORY = 4 << 30  # most bytes of address space of a job, in addition to that of the libraries
MAX_RESULT_BYTES = 1 << 30  # most bytes of a result
NICENESS = 10  # above the server's: the engine's steps come first

_decoder = msgspec.msgpack.Decoder(MediaJobRequest)


class MediaJobLoop:
    """Does the jobs that arrive over a socket."""

    def __init__(self, sock: socket.socket, jobs: MediaJobs[Any]):
        self._socket = sock
        self._jobs = jobs

    def serve_jobs(self) -> None:
        """Do jobs until the end of file."""
        limit_resource(resource.RLIMIT_AS, address_space() + JOB_MEMORY)
        limit_resource(resource.RLIMIT_FSIZE, MAX_RESULT_BYTES)
        send_message(self._socket, MediaProcessReady())
        while (job := wire.receive_frame(self._socket, _decoder)) is not None:
            limit_resource(resource.RLIMIT_CPU, int(time.process_time()) + 1 + JOB_SECONDS)
            send_message(self._socket, self._do_job(job))

    def _do_job(self, job: MediaJobRequest) -> FromMediaProcess:
        try:
            return self._jobs.process_media(job)
        except Exception:
            log.exception("a job of a media process failed")
            return MediaRefused("cannot be processed", "refused_by_model")


def send_message(sock: socket.socket, message: FromMediaProcess) -> None:
    """Send a message to the parent."""
    sock.sendall(wire.encode_frame(message))


def address_space() -> int:
    """Return the size of this process's address space in bytes."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    return pages * resource.getpagesize()


def give_way_to_engine() -> None:
    """Lower the priority of every thread of this process, because Linux sets it per thread.

    It is called after the imports: with a low priority, their seven seconds would take over a minute while an engine
    uses every core.
    """
    niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, 19)  # more than the server's, which may not be 0
    for thread in Path("/proc/self/task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)


def load_jobs(folder: Path) -> MediaJobs[Any]:
    """Return the jobs for the model in ``folder``. Raises the exceptions of loading its processor."""
    from parley.model.media_input import processor  # here, so that a missing package is reported to the parent

    return processor.load_jobs(folder)


def serve_media_socket(folder: Path, fd: int, load: Callable[[Path], MediaJobs[Any]] = load_jobs) -> None:
    """Serve over an inherited socket until it is closed. ``fd``: its file descriptor. ``load``: loads the processor."""
    ignore_group_signals()
    die_with_parent(signal.SIGKILL)
    set_up_child_logging()
    limit_resource(resource.RLIMIT_CORE, 0)
    sock = socket.socket(fileno=fd)
    try:
        try:
            process = MediaJobLoop(sock, load(folder))
        except Exception as error:  # Transformers raises errors of many kinds
            log.error("The processor of the model's media cannot be loaded: %s", error)
            send_message(sock, MediaProcessFailed())
            return
        give_way_to_engine()
        process.serve_jobs()
    except (OSError, wire.BrokenFrame):
        sys.exit(0)  # the parent is gone


if __name__ == "__main__":
    serve_media_socket(Path(sys.argv[1]), int(sys.argv[2]))
