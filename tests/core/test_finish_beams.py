"""Finishing a beam search early returns exactly the results of a search that was limited to that length."""

from __future__ import annotations

import msgspec
import pytest
from support.invariant_ledger import VOCAB, Bench, alone

from parley.types import Beam, Work

PROMPT = [(7 * i + 3) % VOCAB for i in range(40)]
WORK = Work("w", PROMPT, 40, n=3, stop_ids=[5, 6], logprobs=1, prompt_logprobs=0, costs=True)


@pytest.mark.parametrize("penalty", [1.0, 0.0, -1.0])
def test_early_finish_equals_beam_search_of_that_length(penalty):
    work = msgspec.structs.replace(WORK, beam=Beam(4, penalty))
    lengths = set()
    for steps in range(4, 20):
        bench = Bench(budgets=(16,))
        bench.loop.add(work)
        for _ in range(steps):
            bench.step()
        if "w" not in bench.loop._searches:
            break  # the search ended by itself
        length = bench.loop._searches["w"].beams[0].sequence.generated
        lengths.add(length)
        if steps % 2:
            bench.loop.scheduler.preempt()  # a preempted beam keeps its tokens without pages
        bench.loop.conclude("w", "length")
        bench.drain()
        for index in range(work.n):
            got = bench.result("w", index)
            same = alone(msgspec.structs.replace(work, max_tokens=length), index)
            got.cached_tokens = 0
            assert got == same
            assert len(bench.outputs["w", index][0].costs) == len(got.token_ids)
    assert len(lengths) > 3


def test_early_finish_before_first_token_returns_no_tokens():
    work = msgspec.structs.replace(WORK, beam=Beam(4))
    for steps in range(3):  # queued; one chunk of the prompt computed; another chunk
        bench = Bench(budgets=(16,))
        bench.loop.add(work)
        for _ in range(steps):
            bench.step()
        bench.loop.conclude("w", "cancel")
        bench.drain()
        for index in range(work.n):
            got = bench.result("w", index)
            assert (got.token_ids, got.finish, got.prompt_scores) == ([], "cancel", None)


def test_early_finish_ends_beam_search_waiting_for_grammar():
    bench = Bench()
    waiting = []
    bench.loop.intake._prepare = lambda work, done: waiting.append(done)
    bench.loop.add(msgspec.structs.replace(WORK, beam=Beam(4)))
    bench.loop.cancel("w", 1)
    bench.loop.conclude("w", "length")
    bench.drain()
    assert set(bench.outputs) == {("w", 0), ("w", 2)} and bench.result("w", 2).finish == "length"
    waiting.pop()()
    assert bench.loop.idle


def test_early_finish_leaves_other_requests_running():
    bench = Bench(slots=8)
    plain = msgspec.structs.replace(WORK, id="plain", prompt_logprobs=-1, costs=False)
    bench.loop.add(plain)
    bench.loop.add(msgspec.structs.replace(WORK, beam=Beam(3)))
    for _ in range(6):
        bench.step()
    length = bench.loop._searches["w"].beams[0].sequence.generated
    for id in ("plain", "nobody", "w", "w"):
        bench.loop.conclude(id, "length")
    bench.loop.cancel("w", 0)  # a choice that is cancelled before its final output gets none
    bench.drain()
    assert ("w", 0) not in bench.outputs
    expected = alone(msgspec.structs.replace(WORK, beam=Beam(3), max_tokens=length), 1)
    assert bench.result("w", 1).token_ids == expected.token_ids
    for index in range(3):
        got = bench.result("plain", index)
        got.cached_tokens = 0
        assert got == alone(plain, index)
