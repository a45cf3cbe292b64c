"""Finishing a beam search early returns exactly the results of a search that was limited to that length."""

from __future__ import annotations

import msgspec
import pytest
from support.invariant_ledger import VOCAB, LoopHarness, run_alone

from parley.types import BeamOptions, EngineRequest

PROMPT = [(7 * i + 3) % VOCAB for i in range(40)]
WORK = EngineRequest("w", PROMPT, 40, n=3, stop_ids=[5, 6], logprobs=1, prompt_logprobs=0, token_costs=True)


@pytest.mark.parametrize("penalty", [1.0, 0.0, -1.0])
def test_early_finish_equals_beam_search_of_that_length(penalty):
    request = msgspec.structs.replace(WORK, beam=BeamOptions(4, penalty))
    lengths = set()
    for steps in range(4, 20):
        bench = LoopHarness(budgets=(16,))
        bench.loop.add_request(request)
        for _ in range(steps):
            bench.step()
        if ("w", 0) in bench.outputs:
            break  # the search ended by itself
        length = bench.beam_length("w")
        lengths.add(length)
        if steps % 2:
            bench.loop.scheduler.preempt_last()  # a preempted beam keeps its tokens without pages
        bench.loop.finish_beam_search("w", "length")
        bench.drain()
        for index in range(request.n):
            actual = bench.merged_output("w", index)
            expected = run_alone(msgspec.structs.replace(request, max_tokens=length), index)
            actual.cached_tokens = 0
            assert actual == expected
            assert len(bench.outputs["w", index][0].token_costs) == len(actual.token_ids)
    assert len(lengths) > 3


def test_early_finish_before_first_token_returns_no_tokens():
    request = msgspec.structs.replace(WORK, beam=BeamOptions(4))
    for steps in range(3):  # queued; one chunk of the prompt computed; another chunk
        bench = LoopHarness(budgets=(16,))
        bench.loop.add_request(request)
        for _ in range(steps):
            bench.step()
        bench.loop.finish_beam_search("w", "cancel")
        bench.drain()
        for index in range(request.n):
            actual = bench.merged_output("w", index)
            assert (actual.token_ids, actual.finish_reason, actual.prompt_scores) == ([], "cancel", None)


def test_early_finish_ends_beam_search_waiting_for_grammar():
    waiting = []
    bench = LoopHarness(prepare_request=lambda request, done: waiting.append(done))
    bench.loop.add_request(msgspec.structs.replace(WORK, beam=BeamOptions(4)))
    bench.loop.cancel_request("w", 1)
    bench.loop.finish_beam_search("w", "length")
    bench.drain()
    assert set(bench.outputs) == {("w", 0), ("w", 2)} and bench.merged_output("w", 2).finish_reason == "length"
    waiting.pop()()
    assert bench.loop.is_idle


def test_early_finish_leaves_other_requests_running():
    bench = LoopHarness(slots=8)
    plain = msgspec.structs.replace(WORK, id="plain", prompt_logprobs=-1, token_costs=False)
    bench.loop.add_request(plain)
    bench.loop.add_request(msgspec.structs.replace(WORK, beam=BeamOptions(3)))
    for _ in range(6):
        bench.step()
    length = bench.beam_length("w")
    for request_id in ("plain", "nobody", "w", "w"):
        bench.loop.finish_beam_search(request_id, "length")
    bench.loop.cancel_request("w", 0)  # a choice that is cancelled before its final output gets none
    bench.drain()
    assert ("w", 0) not in bench.outputs
    expected = run_alone(msgspec.structs.replace(WORK, beam=BeamOptions(3), max_tokens=length), 1)
    assert bench.merged_output("w", 1).token_ids == expected.token_ids
    for index in range(3):
        actual = bench.merged_output("plain", index)
        actual.cached_tokens = 0
        assert actual == run_alone(plain, index)
