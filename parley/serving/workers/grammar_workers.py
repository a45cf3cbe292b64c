"""Grammar workers: processes that compile the grammars of clients' answers (``worker_pool.py``).

The kernel ends a process after KILL_SECONDS of processor time, so a grammar that no other limit stops ends its worker
and is refused. The workers are shared by all models.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import signal
from collections.abc import Callable

import msgspec

from parley.child_process import python_command
from parley.errors import InvalidValue, NotReady
from parley.serving.workers.worker_pool import WorkerPool, WorkerProcess
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
from parley.text.text_pipeline import TextPipeline
from parley.types import Grammar, Prompt

log = logging.getLogger("parley.server")

WORKER_COMMAND = python_command("-m", "parley.worker.grammar_process")
WORKER_COUNT = 2
SILENCE_SECONDS = 60.0  # a worker that does not answer for this many seconds is killed, even if it computed little
END_SECONDS = 0.5

_decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


class GrammarWorker(WorkerProcess[FromWorker]):
    """A process that compiles one grammar after the other."""

    def __init__(self, command: list[str] = WORKER_COMMAND, silence_seconds: float = SILENCE_SECONDS):
        super().__init__(command, _decoder, silence_seconds=silence_seconds, end_seconds=END_SECONDS)

    def ask_worker(
        self, setup: bytes, question: str, find_token: Callable[[int | str], int | None]
    ) -> AnswerCompiled | AnswerRefused:
        """Return the compiled grammar that answers a question, or its refusal. Raises NotReady.

        ``setup``: of the model; ``find_token``: returns the id of a token of its vocabulary.
        """
        self._ensure_running()
        self.send_message(CompileAnswer(setup, question))
        while (message := self.receive_message()) is not None:
            if isinstance(message, AnswerCompiled | AnswerRefused):
                return message
            if isinstance(message, FindToken):
                self.send_message(TokenFound(find_token(message.token)))
        exit_code = self.end()
        reason = TOO_SLOW if exit_code in (-signal.SIGXCPU, -signal.SIGKILL) else CRASHED
        log.warning("A grammar was refused because it ended the process that compiled it: %s.", reason)
        return AnswerRefused(reason, is_lasting=exit_code != -signal.SIGKILL)

    def _ensure_running(self) -> None:
        if not self.is_running and not isinstance(self.start(), WorkerReady):
            self.end()
            raise NotReady("The grammar of the answer cannot be compiled now.", retry_after=5)


class GrammarWorkerPool:
    """The grammar workers of this process."""

    def __init__(self, count: int = WORKER_COUNT, command: list[str] = WORKER_COMMAND):
        self._pool = WorkerPool(count, "grammar", lambda: GrammarWorker(command))

    @property
    def idle_process_ids(self) -> list[int]:
        """The process ids of workers that have nothing to do."""
        return self._pool.idle_process_ids

    def close(self) -> None:
        """Cancel the questions that wait and end the workers: idle ones now, the others once they have answered."""
        self._pool.close()

    async def compile_answer_grammar(
        self, pipeline: TextPipeline, prompt: Prompt, grammar: Grammar | None, tenant: str
    ) -> str:
        """Return the grammar that the answer to a prompt must follow, as the engine reads it; "" if it may be any text.

        Raises InvalidValue, NotReady.
        """
        if may_be_any_text(prompt, grammar):
            return ""
        question = encode_question(prompt, grammar)
        result = pipeline.answer_grammars.find_result(question)
        if result is None:
            result = await self._ask_worker(pipeline, question, tenant)
            if isinstance(result, AnswerCompiled) or result.is_lasting:
                pipeline.answer_grammars.add_result(question, result)
        if isinstance(result, AnswerCompiled):
            return result.grammar
        raise refusal_error(result, grammar.field if grammar is not None else "tools")

    async def _ask_worker(self, pipeline: TextPipeline, question: str, tenant: str) -> AnswerCompiled | AnswerRefused:
        setup, find_token = pipeline.compiler_setup, pipeline.tokenizer.find_token
        job = self._pool.submit(tenant, lambda worker: worker.ask_worker(setup, question, find_token))
        return await asyncio.wrap_future(job)


def refusal_error(refused: AnswerRefused, field: str) -> InvalidValue:
    """Return the error of a refusal. ``field``: the request's member that is refused unless the refusal names one."""
    if refused.field is None:
        return InvalidValue(f"{field} cannot be enforced: {refused.reason}.", field=field)
    return InvalidValue(refused.reason, field=refused.field)


GRAMMAR_WORKERS = GrammarWorkerPool()
atexit.register(GRAMMAR_WORKERS.close)
