"""Processes of this server that do jobs of several tenants, each over a socket: compiling grammars, decoding media.

A process can be ended while it works, keeps the interpreter of this one free for streams, and returns its memory. It is
started with its first job. Each tenant has its share of the processes (``tenant_executor.py``): the jobs of one wait
for their own.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import msgspec

from parley import control_groups, wire
from parley.errors import NotReady
from parley.tenant_executor import TenantExecutor

log = logging.getLogger("parley.server")

START_SECONDS = 120.0  # seconds in which a process must start: some import Transformers

MessageT = TypeVar("MessageT")
ResultT = TypeVar("ResultT")


class UnreadJob(NotReady):
    """A process ended before it read the last message, so its job is not the cause."""


class WorkerProcess(Generic[MessageT]):
    """A process that may be started again after its end. Belongs to one thread at a time; only ``kill`` may be called
    from others.

    * ``command``: starts the process; the file descriptor of its end of the socket is added as the last argument.
    * ``decoder``: reads the messages that it sends.
    * ``silence_seconds``: how long it may take to answer.
    * ``end_seconds``: how long it may take to end once its socket is closed.
    * ``environment``: its environment variables; None: those of this process.
    """

    def __init__(
        self,
        command: list[str],
        decoder: msgspec.msgpack.Decoder[MessageT],
        *,
        silence_seconds: float,
        end_seconds: float,
        environment: Mapping[str, str] | None = None,
    ):
        self._command, self._decoder, self._environment = command, decoder, environment
        self._silence_seconds, self._end_seconds = silence_seconds, end_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket
        self.memory_kills: int | None = None  # kills in the control group before the process was started

    @property
    def process_id(self) -> int | None:
        """The process id; None if no process was started, or it has been ended."""
        return self._process.pid if self._process is not None else None

    @property
    def is_running(self) -> bool:
        """Whether the process runs. It may be killed from outside at any time."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> MessageT | None:
        """Start the process and return its first message, None if it does not start."""
        self.end()
        self._socket, process_end = socket.socketpair()
        self._socket.settimeout(START_SECONDS)
        self.memory_kills = control_groups.count_memory_kills()
        with process_end:
            try:
                self._process = subprocess.Popen(
                    [*self._command, str(process_end.fileno())],
                    pass_fds=[process_end.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=self._environment,
                )
            except OSError as error:
                log.error("%s cannot be started: %s.", self._command[0], error.strerror)
                self._socket.close()
                return None
        message = self.receive_message()
        self._socket.settimeout(self._silence_seconds)
        return message

    def send_message(self, message: msgspec.Struct) -> None:
        """Send a message. Raises UnreadJob if the process has ended."""
        try:
            self._socket.sendall(wire.encode_frame(message))
        except ConnectionError:
            raise self._end_unread() from None
        except OSError as error:
            log.debug("worker process: %s", error)

    def receive_message(self) -> MessageT | None:
        """Return the next message of the process, None if it has ended or is silent for too long.

        Raises UnreadJob if it ended without reading the last message; the kernel tells that from an end of file.
        """
        try:
            message: MessageT | None = wire.receive_frame(self._socket, self._decoder)
        except ConnectionError:
            raise self._end_unread() from None
        except (OSError, wire.BrokenFrame, msgspec.DecodeError) as error:
            log.debug("worker process: %s", error)
            return None
        return message

    def _end_unread(self) -> UnreadJob:
        self.end()
        return UnreadJob("A process of this server was ended from outside.", retry_after=5)

    def kill(self) -> None:
        """Kill the process. Its job fails."""
        if (process := self._process) is not None:
            process.kill()

    def end(self) -> int:
        """End the process, by force if it still runs, and return its exit code; 0 if there is none."""
        process, self._process = self._process, None
        if process is None:
            return 0
        self._socket.close()
        try:
            return process.wait(self._end_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


WorkerT = TypeVar("WorkerT", bound=WorkerProcess[Any])


class WorkerPool(Generic[WorkerT]):
    """At most ``count`` worker processes, which ``make_worker`` makes."""

    def __init__(self, count: int, name: str, make_worker: Callable[[], WorkerT]):
        self._executor = TenantExecutor(count, name)
        self._make_worker = make_worker
        self._idle_workers: list[WorkerT] = []
        self._closed = False

    @property
    def idle_process_ids(self) -> list[int]:
        """The process ids of workers that have nothing to do."""
        return [worker.process_id for worker in self._idle_workers if worker.process_id is not None]

    def submit(self, tenant: str, job: Callable[[WorkerT], ResultT]) -> Future[ResultT]:
        """Queue a job of a tenant, a function that gets an idle worker. Cancelling the future takes it out of the
        queue, unless it has begun."""
        return self._executor.submit(tenant, lambda: self._run_job(job))

    def close(self) -> None:
        """Cancel the jobs that wait and end the workers: idle ones now, the others after their job."""
        self._closed = True
        self._executor.shutdown()
        self._end_idle_workers()

    def _run_job(self, job: Callable[[WorkerT], ResultT]) -> ResultT:
        """Run a job in a thread of the executor, which has no more threads than there may be workers.

        A process that was killed while it was idle may look alive, so a job that it did not read is run once more.
        """
        try:
            worker = self._idle_workers.pop()
        except IndexError:
            worker = self._make_worker()
        try:
            try:
                return job(worker)
            except UnreadJob:
                return job(worker)
        finally:
            self._idle_workers.append(worker)
            if self._closed:
                self._end_idle_workers()

    def _end_idle_workers(self) -> None:
        with contextlib.suppress(IndexError):  # none is left; several threads may take them
            while True:
                self._idle_workers.pop().end()
