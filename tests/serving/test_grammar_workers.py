"""Grammars are compiled in processes: with the same results, by turns of the API keys, and ended if they never end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest
from support.hostile_grammars import HOSTILE
from support.http_client import HELLO_CHAT

from parley.child_process import python_command
from parley.demo import model_folder
from parley.errors import InvalidValue, NotReady
from parley.serving.workers.grammar_workers import GrammarWorker, GrammarWorkerPool
from parley.tenant_executor import TenantExecutor
from parley.text.grammar.answer_question import AnswerCompiled, AnswerRefused, encode_question
from parley.text.grammar.limits import CRASHED, TOO_SLOW
from parley.text.text_pipeline import TextPipeline
from parley.types import (
    ChatPrompt,
    Grammar,
    Message,
    StructuralRepeat,
    StructuralSequence,
    StructuralTag,
    StructuralToken,
    TextPrompt,
)

CHAT = "/v1/chat/completions"
# A worker that obeys questions with certain words in them.
OBEDIENT_WORKER = """
import os, sys, time
from parley.worker import grammar_process
answer_question = grammar_process.GrammarProcess._answer_question
def obey(self, message):
    while "spin" in message.question:
        pass
    if "abort" in message.question:
        os.abort()
    if "sleep" in message.question:
        time.sleep(3600)
    if "raise" in message.question:
        raise SystemExit(3)
    return answer_question(self, message)
grammar_process.KILL_SECONDS = 0
grammar_process.GrammarProcess._answer_question = obey
grammar_process.serve_grammar_socket(int(sys.argv[1]))
"""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
LETTERS = Grammar("regex", "[a-z]{1,5}")
GRAMMARS = [
    Grammar("json", {"type": "object", "properties": {"struct": {"const": "Chat"}, "object": {"type": "null"}}}),
    Grammar("json", {"enum": [10**9, -1, 1.5]}, whitespace=""),
    Grammar("json", True),
    Grammar("regex", "é+", field="guided_regex"),
    Grammar("choice", ["yes", "no"]),
    Grammar("lark", 'start: "x" /[0-9]+/'),
    Grammar("ebnf", 'root ::= "y" [0-9]+'),
    Grammar("tags", StructuralSequence([StructuralToken("a"), StructuralRepeat(StructuralToken(70), 1, 2)])),
    Grammar("tags", StructuralSequence([StructuralTag("<a>", {"type": "integer"}, ["</a>", "!"]), LETTERS])),
]
WRONG = [
    Grammar("json", {"enum": [10**30, {"struct": "Chat"}]}),
    Grammar("regex", "(a", field="guided_regex"),
    Grammar("json", {"type": "string", "pattern": "\ud800"}),
    Grammar("tags", StructuralToken("no such token")),
]


@pytest.fixture(scope="module")
def pipeline() -> TextPipeline:
    return TextPipeline.from_folder(model_folder())


@pytest.fixture
def start_workers() -> Iterator[Callable[..., GrammarWorkerPool]]:
    """Make groups of workers, whose processes end with the test."""
    groups: list[GrammarWorkerPool] = []

    def start(*arguments: Any) -> GrammarWorkerPool:
        groups.append(GrammarWorkerPool(*arguments))
        return groups[-1]

    yield start
    for group in groups:
        group.close()


def ask(worker: GrammarWorker, pipeline: TextPipeline, grammar: Grammar) -> AnswerCompiled | AnswerRefused:
    question = encode_question(TextPrompt("x"), grammar)
    return worker.ask_worker(pipeline.compiler_setup, question, pipeline.tokenizer.find_token)


# -- results


async def test_workers_compile_what_this_process_compiles(pipeline, start_workers):
    workers = start_workers(1)
    prompts = [
        TextPrompt("x"),
        ChatPrompt([Message("user", "x")], [TOOL]),
        ChatPrompt([Message("user", "x")], tool_choice="none"),
    ]
    for grammar in GRAMMARS:
        for prompt in prompts:
            expected = pipeline.compile_answer_grammar(prompt, grammar)
            for _ in range(2):  # compiled, then remembered
                assert await workers.compile_answer_grammar(pipeline, prompt, grammar, "") == expected
    required = ChatPrompt([Message("user", "x")], [TOOL], tool_choice="required")
    expected = pipeline.compile_answer_grammar(required, None)
    assert expected and await workers.compile_answer_grammar(pipeline, required, None, "") == expected
    for grammar in WRONG:
        with pytest.raises(InvalidValue) as here:
            pipeline.compile_answer_grammar(TextPrompt("x"), grammar)
        for _ in range(2):
            with pytest.raises(InvalidValue) as there:
                await workers.compile_answer_grammar(pipeline, TextPrompt("x"), grammar, "")
            assert (there.value.message, there.value.field) == (here.value.message, here.value.field)


async def test_hostile_grammars_end_no_worker(pipeline, start_workers):
    workers, worker_ids = start_workers(1), list[int]()
    for grammar in HOSTILE[::6]:
        try:
            await workers.compile_answer_grammar(pipeline, TextPrompt("x"), grammar, "")
        except InvalidValue as error:
            assert len(error.message) < 400 and error.field == grammar.field
        first, *_ = worker_ids = [*worker_ids, *workers.idle_process_ids]
    assert len(worker_ids) > 10 and set(worker_ids) == {first}


async def test_refuses_a_question_that_is_too_large_before_it_waits(pipeline, start_workers):
    workers = start_workers(1, ["/no/such/program"])
    huge = {"type": "object", "description": "x" * (4 << 20)}
    deep: dict[str, Any] = {}
    for _ in range(20_000):
        deep = {"items": deep}
    for schema, reason in ((huge, "4194304 are allowed"), (deep, "nested too deeply")):
        with pytest.raises(InvalidValue, match=reason):
            await workers.compile_answer_grammar(pipeline, TextPrompt("x"), Grammar("json", schema), "")


# -- workers that end


@pytest.mark.parametrize(
    ("order", "reason"), [("spin", TOO_SLOW), ("abort", CRASHED), ("raise", CRASHED), ("sleep", TOO_SLOW)]
)
def test_grammar_that_ends_its_worker_is_refused_and_the_next_one_compiled(pipeline, order, reason):
    command = python_command("-c", OBEDIENT_WORKER)
    worker = GrammarWorker(command, silence_seconds=1.5 if order == "sleep" else 60.0)
    assert isinstance(ask(worker, pipeline, Grammar("choice", ["a"])), AnswerCompiled)
    refusal = AnswerRefused(reason, is_lasting=order != "sleep")
    assert ask(worker, pipeline, Grammar("choice", [order])) == refusal
    assert worker.process_id is None
    assert isinstance(ask(worker, pipeline, Grammar("choice", ["b"])), AnswerCompiled)
    worker.end()


async def test_grammar_whose_worker_was_killed_from_outside_can_be_requested_again(pipeline, tmp_path, start_workers):
    """The system kills processes when memory is short; a grammar must not be refused for ever because of that."""
    grammar, began = Grammar("choice", ["sleep once"]), tmp_path / "began"
    worker_code = OBEDIENT_WORKER.replace('"sleep" in', f'not os.path.exists({str(began)!r}) and "sleep" in').replace(
        "time.sleep(3600)", f"open({str(began)!r}, 'w').close(); os.kill(os.getpid(), 9)"
    )
    workers = start_workers(1, python_command("-c", worker_code))
    with pytest.raises(InvalidValue, match=TOO_SLOW):
        await workers.compile_answer_grammar(pipeline, TextPrompt("x"), grammar, "")
    assert began.exists()
    assert await workers.compile_answer_grammar(pipeline, TextPrompt("x"), grammar, "")


async def test_worker_survives_the_signals_that_reach_its_process_group(pipeline, start_workers):
    workers = start_workers(1)
    await workers.compile_answer_grammar(pipeline, TextPrompt("x"), Grammar("regex", "before signals"), "")
    (process_id,) = workers.idle_process_ids
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(process_id, number)
    assert await workers.compile_answer_grammar(pipeline, TextPrompt("x"), Grammar("regex", "after signals"), "")
    assert workers.idle_process_ids == [process_id]


async def test_worker_that_cannot_start_is_no_fault_of_the_grammar(pipeline, start_workers):
    for command in (["/no/such/program"], [sys.executable, "-c", "pass"]):
        workers = start_workers(1, command)
        for _ in range(2):
            with pytest.raises(NotReady):
                await workers.compile_answer_grammar(pipeline, TextPrompt("x"), Grammar("choice", ["a"]), "")


# -- turns


class Gate:
    """Work that waits to be let through, one call at a time; ``order`` has the names of the calls that began."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._began, self._let_through = threading.Semaphore(0), threading.Semaphore(0)

    def work(self, name: str) -> Callable[[], None]:
        def wait() -> None:
            self.order.append(name)
            self._began.release()
            assert self._let_through.acquire(timeout=60)

        return wait

    def wait_begun(self) -> None:
        assert self._began.acquire(timeout=60)

    def let_through(self) -> None:
        self._let_through.release()


def ticks() -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += 1.0


def test_tenants_take_turns_at_one_thread():
    clock = ticks()
    executor, gate = TenantExecutor(1, "test", clock.__next__), Gate()
    futures = [executor.submit("a", gate.work("a"))]
    gate.wait_begun()
    futures += [executor.submit(tenant, gate.work(tenant)) for tenant in "aaabb"]
    for _ in range(5):
        gate.let_through()
        gate.wait_begun()
    gate.let_through()
    for future in futures:
        future.result(60)
    assert "".join(gate.order) == "ababaa"
    executor.shutdown()


def test_one_tenant_cannot_occupy_all_threads_of_an_executor():
    executor, gate = TenantExecutor(2, "test"), Gate()
    flood = [executor.submit("a", gate.work("a")) for _ in range(5)]
    gate.wait_begun()
    other = executor.submit("b", gate.work("b"))
    gate.wait_begun()  # although four of a's wait
    assert gate.order == ["a", "b"]
    for _ in range(6):
        gate.let_through()
    for future in (*flood, other):
        future.result(60)
    executor.shutdown()


def test_work_without_a_tenant_uses_all_threads():
    executor, gate = TenantExecutor(2, "test"), Gate()
    futures = [executor.submit("", gate.work("x")) for _ in range(3)]
    gate.wait_begun()
    gate.wait_begun()
    assert len(gate.order) == 2
    for _ in futures:
        gate.let_through()
    for future in futures:
        future.result(60)
    executor.shutdown()


def test_cancelled_work_does_not_run_and_errors_are_results():
    executor, gate = TenantExecutor(1, "test"), Gate()
    first, second = executor.submit("a", gate.work("first")), executor.submit("a", gate.work("second"))
    failing = executor.submit("a", lambda: 1 // 0)
    gate.wait_begun()
    assert second.cancel()
    gate.let_through()
    first.result(60)
    with pytest.raises(ZeroDivisionError):
        failing.result(60)
    last = executor.submit("a", gate.work("last"))
    gate.wait_begun()
    never = executor.submit("b", gate.work("never"))
    executor.shutdown()
    with pytest.raises(CancelledError):
        never.result(60)
    gate.let_through()
    last.result(60)
    assert gate.order == ["first", "last"]


def slow_grammar(number: int) -> dict[str, Any]:
    """Return a request whose grammar takes a good part of a second to compile."""
    rules = "\n".join(f'a{rule} ::= "{number} {rule}" [a-z]* a{(rule + 1) % 300}?' for rule in range(300))
    grammar = "root ::= " + " | ".join(f"a{rule}" for rule in range(300)) + "\n" + rules
    return HELLO_CHAT | {"structured_outputs": {"grammar": grammar}}


async def test_slow_grammars_of_one_key_do_not_delay_other_keys(serve, monkeypatch, start_workers):
    monkeypatch.setattr("parley.serving.engine_requests.GRAMMAR_WORKERS", start_workers())
    server = await serve(api_keys=("a", "b"))
    flood = [
        asyncio.create_task(server.post(CHAT, slow_grammar(number), authorization="Bearer a")) for number in range(16)
    ]
    await server.until(lambda: server.model.used_slots == 16)
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    answer = await server.post(CHAT, HELLO_CHAT | {"response_format": schema}, authorization="Bearer b")
    assert answer.status == 200
    assert sum(request.done() for request in flood) < 8
    for request in flood:
        request.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    await server.wait_until_idle()


async def test_an_impossible_format_is_refused_although_a_summary_ignores_it(serve, monkeypatch, start_workers):
    monkeypatch.setattr("parley.serving.engine_requests.GRAMMAR_WORKERS", start_workers())
    server = await serve()
    broken = {"type": "json_schema", "name": "s", "schema": {"type": "string", "pattern": "("}}
    talk = [{"role": "user", "content": "Hi"}]
    for items in (talk, [*talk, {"type": "compaction_trigger"}]):
        body = {"model": "tiny", "max_output_tokens": 4, "input": items, "text": {"format": broken}}
        assert (await server.post("/v1/responses", body)).status == 400
