"""Grammar workers: processes that compile the grammars of clients' answers.

A process can be ended while it compiles, keeps the interpreter of this one free for streams, and returns its memory.
Its kernel ends it after KILL_SECONDS of processor time, so a grammar that no other limit stops ends its worker and is
refused. Each tenant has its share of the workers (``tenant_executor.py``): the grammars of one wait for their own. The
workers are shared by all models, and started when they are first needed.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import signal
import socket
import subprocess
from collections.abc import Callable
from functools import partial

import msgspec

from parley import wire
from parley.child_process import python_command
from parley.errors import Invalid, NotReady
from parley.tenant_executor import TenantExecutor
from parley.text import TextPipeline
from parley.text.grammar.answer_compiler import may_be_any_text
from parley.text.grammar.answer_question import (
    AnswerCompiled,
    AnswerRefused,
    CompileAnswer,
    FindToken,
    FromWorker,
    TokenFound,
    WorkerReady,
    encode_question,
)
from parley.text.grammar.limits import CRASHED, TOO_SLOW
from parley.types import Grammar, Prompt

log = logging.getLogger("parley.server")

WORKER_COMMAND = python_command("-m", "parley.worker.grammar_process")
WORKER_COUNT = 2
START_SECONDS = 60.0  # seconds that a worker has to start
SILENCE_SECONDS = 60.0  # a worker that does not answer for this many seconds is killed, even if it computed little

_decoder = msgspec.msgpack.Decoder(FromWorker)


class GrammarWorker:
    """A worker process, started when it is first asked and again after its end. Belongs to one thread at a time.

    ``command``: starts the process; the file descriptor of its end of a socket is added as the last argument.
    """

    def __init__(self, command: list[str] = WORKER_COMMAND, silence_seconds: float = SILENCE_SECONDS):
        self._command, self._silence_seconds = command, silence_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket

    @property
    def process_id(self) -> int | None:
        """The process id of the worker; None if no process runs."""
        return self._process.pid if self._process is not None else None

    def _start_process(self) -> None:
        """Start the process, unless it runs. Raises NotReady."""
        if self._process is not None:
            return
        self._socket, worker_end = socket.socketpair()
        self._socket.settimeout(START_SECONDS)
        try:
            self._process = subprocess.Popen(
                [*self._command, str(worker_end.fileno())], pass_fds=[worker_end.fileno()], stdin=subprocess.DEVNULL
            )
            worker_end.close()
            if isinstance(self._receive_message(), WorkerReady):
                self._socket.settimeout(self._silence_seconds)
                return
        except OSError as error:
            log.error("A process that compiles grammars cannot be started: %s.", error.strerror)
        finally:
            worker_end.close()
        self.end_process()
        raise NotReady("The grammar of the answer cannot be compiled now.", retry_after=5)

    def ask_worker(
        self, setup: bytes, question: str, find_token: Callable[[int | str], int | None]
    ) -> AnswerCompiled | AnswerRefused:
        """Return the compiled grammar that answers a question, or its refusal. Raises NotReady.

        ``setup``: of the model; ``find_token``: returns the id of a token of its vocabulary.
        """
        self._start_process()
        self._send_message(CompileAnswer(setup, question))
        while (message := self._receive_message()) is not None:
            if isinstance(message, AnswerCompiled | AnswerRefused):
                return message
            if isinstance(message, FindToken):
                self._send_message(TokenFound(find_token(message.token)))
        exit_code = self.end_process()
        reason = TOO_SLOW if exit_code in (-signal.SIGXCPU, -signal.SIGKILL) else CRASHED
        log.warning("A grammar was refused because it ended the process that compiled it: %s.", reason)
        return AnswerRefused(reason, is_lasting=exit_code != -signal.SIGKILL)

    def end_process(self) -> int:
        """End the process, by force if it still runs, and return its exit code."""
        process, self._process = self._process, None
        self._socket.close()
        if process is None:
            return 0
        try:
            return process.wait(0.5)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _send_message(self, message: CompileAnswer | TokenFound) -> None:
        """Send a message. A worker that has ended is noticed by the next receive."""
        try:
            self._socket.sendall(wire.encode_frame(message))
        except OSError as error:
            log.debug("grammar worker: %s", error)

    def _receive_message(self) -> FromWorker | None:
        """Return the worker's next message, None if it has ended or is silent for too long."""
        try:
            message: FromWorker | None = wire.receive_frame(self._socket, _decoder)
        except (OSError, wire.BrokenFrame, msgspec.DecodeError) as error:
            log.debug("grammar worker: %s", error)
            return None
        return message


class GrammarWorkers:
    """The grammar workers of this process."""

    def __init__(self, count: int = WORKER_COUNT, command: list[str] = WORKER_COMMAND):
        self._executor = TenantExecutor(count, "grammar")
        self._command = command
        self._idle_workers: list[GrammarWorker] = []
        self._closed = False

    @property
    def idle_process_ids(self) -> list[int]:
        """The process ids of workers that have nothing to do."""
        return [worker.process_id for worker in self._idle_workers if worker.process_id is not None]

    def close(self) -> None:
        """Cancel the questions that wait and end the workers: idle ones now, the others once they have answered."""
        self._closed = True
        self._executor.shutdown()
        self._end_idle_workers()

    async def compile_answer_grammar(
        self, pipeline: TextPipeline, prompt: Prompt, grammar: Grammar | None, tenant: str
    ) -> str:
        """Return the grammar that the answer to a prompt must follow, as the engine reads it; "" if it may be any text.

        Raises Invalid, NotReady.
        """
        if may_be_any_text(prompt, grammar):
            return ""
        field = grammar.field if grammar is not None else "tools"
        question = encode_question(prompt, grammar)
        result = pipeline.answer_grammars.find_result(question)
        if result is None:
            ask_worker = partial(
                self._ask_idle_worker, pipeline.compiler_setup, question, pipeline.tokenizer.find_token
            )
            result = await asyncio.wrap_future(self._executor.submit(tenant, ask_worker))
            if isinstance(result, AnswerCompiled) or result.is_lasting:
                pipeline.answer_grammars.add_result(question, result)
        if isinstance(result, AnswerCompiled):
            return result.grammar
        raise refusal_error(result, field)

    def _ask_idle_worker(
        self, setup: bytes, question: str, find_token: Callable[[int | str], int | None]
    ) -> AnswerCompiled | AnswerRefused:
        """Have an idle worker answer a question. Called in a thread of the executor, which has no more threads than
        there may be workers. Raises NotReady."""
        try:
            worker = self._idle_workers.pop()
        except IndexError:
            worker = GrammarWorker(self._command)
        try:
            return worker.ask_worker(setup, question, find_token)
        finally:
            self._idle_workers.append(worker)
            if self._closed:
                self._end_idle_workers()

    def _end_idle_workers(self) -> None:
        with contextlib.suppress(IndexError):  # none is left; several threads may take them
            while True:
                self._idle_workers.pop().end_process()


def refusal_error(refused: AnswerRefused, field: str) -> Invalid:
    """Return the error of a refusal. ``field``: the request's member that is refused unless the refusal names one."""
    if refused.field is None:
        return Invalid(f"{field} cannot be followed: {refused.reason}.", field=field)
    return Invalid(refused.reason, field=refused.field)


GRAMMAR_WORKERS = GrammarWorkers()
atexit.register(GRAMMAR_WORKERS.close)
