"""The loop and its scheduler: shared pages, preemption, cancels, errors and counts."""

from __future__ import annotations

import pytest
from support.invariant_ledger import COMMON_TOKENS, VOCAB, LedgerViolation, LoopHarness, assert_same_output, run_alone
from support.placed_items import make_item

from parley.core.beam_search.beam import beam_capacity
from parley.types import BeamOptions, EngineOutput, EngineRequest, PoolingOptions


def make_prompt(number: int, shared: int, own: int) -> list[int]:
    return COMMON_TOKENS[:shared] + [(number * 13 + 1 + i) % VOCAB for i in range(own)]


@pytest.mark.parametrize("budget", [16, 48, 64, 100, 1000])
def test_simultaneous_requests_compute_shared_prefix_once(budget: int) -> None:
    bench = LoopHarness(slots=8, budgets=(budget,))
    for number in range(8):
        bench.loop.add_request(EngineRequest(f"w{number}", make_prompt(number, 64, 5), max_tokens=1))
    bench.drain()
    assert bench.runner.computed_tokens == 64 + 8 * 5
    assert [bench.merged_output(f"w{number}").cached_tokens for number in range(8)] == [0] + [64] * 7
    assert (bench.stats.prefix_queries, bench.stats.prefix_hits) == (8 * 69, 7 * 64)


def test_choices_share_prompt_pages() -> None:
    bench = LoopHarness(slots=8, budgets=(1000,))
    bench.loop.add_request(EngineRequest("w", make_prompt(0, 64, 5), max_tokens=20, n=8))
    bench.drain()
    assert bench.runner.computed_tokens == 69 + 7 * 5 + 8 * 19
    assert len({tuple(bench.merged_output("w", index).token_ids) for index in range(8)}) == 8


def test_fully_cached_prompt_still_computes_its_last_page() -> None:
    bench = LoopHarness()
    for request_id, expected in (("first", 0), ("second", 48), ("third", 48)):
        bench.loop.add_request(EngineRequest(request_id, make_prompt(0, 64, 0), max_tokens=3))
        bench.drain()
        assert bench.merged_output(request_id).cached_tokens == expected


def test_next_chat_turn_hits_cached_pages_of_last_answer() -> None:
    bench = LoopHarness()
    bench.loop.add_request(EngineRequest("turn 1", make_prompt(0, 20, 0), max_tokens=30))
    bench.drain()
    history = make_prompt(0, 20, 0) + bench.merged_output("turn 1").token_ids
    bench.loop.add_request(EngineRequest("turn 2", [*history, 1, 2, 3], max_tokens=3))
    bench.drain()
    assert bench.merged_output("turn 2").cached_tokens == 48  # 50 tokens, but the last of them was never computed


def test_different_salts_share_no_pages() -> None:
    bench = LoopHarness()
    for salt in ("a", "b", "", "a"):
        bench.loop.add_request(EngineRequest("w" + salt, make_prompt(0, 64, 5), max_tokens=1, cache_salt=salt))
        bench.drain()
    assert bench.stats.prefix_hits == 64


def test_disabled_prefix_cache_is_never_queried() -> None:
    bench = LoopHarness(prefix_cache=False)
    for request_id in ("first", "second"):
        bench.loop.add_request(EngineRequest(request_id, make_prompt(0, 64, 5), max_tokens=2))
        bench.drain()
    assert bench.stats.prefix_queries == bench.stats.prefix_hits == bench.merged_output("second").cached_tokens == 0


def test_prompt_logprobs_recompute_cached_prompt() -> None:
    """Cached pages do not spare a prompt with log-probabilities its computation, and are not replaced by its pages."""
    bench = LoopHarness(budgets=(32,))
    bench.loop.add_request(EngineRequest("first", make_prompt(0, 64, 5), max_tokens=1))
    bench.drain()
    scoring = EngineRequest("scoring", make_prompt(0, 64, 5), max_tokens=0, prompt_logprobs=0, n=2)
    bench.loop.add_request(scoring)
    bench.drain()
    first, second = bench.merged_output("scoring", 0), bench.merged_output("scoring", 1)
    assert first.cached_tokens == 0 and second.cached_tokens == 64
    assert first.prompt_scores is not None and len(first.prompt_scores) == 69 and second.prompt_scores is None
    assert_same_output(first, run_alone(scoring))
    bench.loop.add_request(EngineRequest("last", make_prompt(0, 64, 5), max_tokens=1))
    bench.drain()
    assert bench.merged_output("last").cached_tokens == 64


def test_one_token_prompt_has_no_prompt_score() -> None:
    bench = LoopHarness()
    bench.loop.add_request(EngineRequest("w", [4], max_tokens=0, prompt_logprobs=3))
    bench.drain()
    assert bench.merged_output("w") == EngineOutput("w", 0, finish_reason="length", prompt_scores=[None])


def test_decodes_run_in_every_step_of_long_prefill() -> None:
    bench = LoopHarness(budgets=(16,))
    bench.loop.add_request(EngineRequest("short", [1, 2, 3], max_tokens=40))
    bench.step()
    bench.loop.add_request(EngineRequest("long", make_prompt(0, 200, 100), max_tokens=1))
    bench.drain()
    together = [rows for rows in bench.runner.steps if any(request_id == "long" for request_id, *_ in rows)]
    assert len(together) == 19
    assert all(any(request_id == "short" for request_id, *_ in rows) for rows in together)


def test_max_tokens_reserves_no_pages() -> None:
    bench = LoopHarness(blocks=16, slots=8)
    for number in range(8):
        bench.loop.add_request(EngineRequest(f"w{number}", [number, 1, 2], max_tokens=200))
    bench.step()
    assert bench.stats.running == 8 and bench.stats.used_pages == 8
    bench.drain()
    assert bench.stats.preemptions > 0
    assert sum(parts[-1].preemptions for parts in bench.outputs.values()) == bench.stats.preemptions
    for number in range(8):
        assert_same_output(
            bench.merged_output(f"w{number}"), run_alone(EngineRequest(f"w{number}", [number, 1, 2], max_tokens=200))
        )


def test_admission_leaves_pages_for_running_sequences() -> None:
    bench = LoopHarness(blocks=4, slots=2)
    bench.loop.add_request(EngineRequest("first", make_prompt(0, 0, 20), max_tokens=30))
    bench.loop.add_request(EngineRequest("second", make_prompt(1, 0, 20), max_tokens=30))
    bench.step()
    assert (bench.stats.running, bench.stats.waiting) == (1, 1)
    bench.drain()
    assert bench.stats.preemptions == 0 and len(bench.merged_output("second").token_ids) == 30


def test_preempted_sequence_resumes_from_prefix_cache() -> None:
    """Two sequences grow until one is preempted; its pages that were not overwritten are not computed again."""
    bench = LoopHarness(blocks=10, slots=2)
    for number in range(2):
        bench.loop.add_request(EngineRequest(f"w{number}", make_prompt(number, 0, 40), max_tokens=60))
    bench.drain()
    assert bench.stats.preemptions > 0
    everything = 2 * (40 + 59)
    assert bench.runner.computed_tokens < everything + bench.stats.preemptions * 40
    for number in range(2):
        assert_same_output(
            bench.merged_output(f"w{number}"),
            run_alone(EngineRequest(f"w{number}", make_prompt(number, 0, 40), max_tokens=60)),
        )


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption_at_any_step_does_not_change_outputs(prefix_cache: bool) -> None:
    """Preempts one sequence or all, in the middle of the prompt (scored or not) or of the output."""
    requests = [
        EngineRequest("scored", make_prompt(0, 48, 20), max_tokens=12, prompt_logprobs=0, logprobs=0),
        EngineRequest("plain", make_prompt(1, 48, 9), max_tokens=12, n=2),
    ]
    expected = [run_alone(request, index) for request in requests for index in range(request.n)]
    for moment in range(40):
        for count in (1, 3):
            bench = LoopHarness(budgets=(16,), prefix_cache=prefix_cache)
            for request in requests:
                bench.loop.add_request(request)
            for _ in range(moment):
                bench.step()
            for _ in range(min(count, len(bench.loop.scheduler.running))):
                bench.loop.scheduler.preempt_last()
            bench.drain()
            for result in expected:
                assert_same_output(bench.merged_output(result.id, result.index), result)


def test_cache_reset_forgets_pages_and_keeps_running_requests() -> None:
    bench = LoopHarness(budgets=(500,))
    first, again = (
        EngineRequest(request_id, make_prompt(0, 48, 20), max_tokens=12) for request_id in ("first", "again")
    )
    for moment, running in ((0, False), (3, True)):
        bench.loop.add_request(first)
        for _ in range(moment):
            bench.step()
        if moment:
            assert not bench.loop.reset_prefix_cache()  # its pages are in use
        assert bench.loop.reset_prefix_cache(running=running)
        bench.drain()
        assert_same_output(bench.merged_output("first"), run_alone(first))
        assert bench.loop.reset_prefix_cache()
        bench.loop.add_request(again)
        bench.drain()
        assert bench.merged_output("again").cached_tokens == 0
        bench.outputs.clear()


def test_page_pool_size_limits_context_length() -> None:
    bench = LoopHarness(blocks=3)
    bench.loop.add_request(EngineRequest("w", make_prompt(0, 0, 40), max_tokens=1000))
    bench.loop.add_request(EngineRequest("full", make_prompt(0, 0, 48), max_tokens=1000))
    bench.drain()
    assert bench.merged_output("w").finish_reason == bench.merged_output("full").finish_reason == "length"
    assert len(bench.merged_output("w").token_ids) == 8 and bench.merged_output("full").token_ids == []


@pytest.mark.parametrize(
    ("token_ids", "sentence"),
    [
        ([], "no tokens"),
        ([1] * 49, "49 tokens, but only 48 fit"),
        ([1, VOCAB], "vocabulary (0 to 49)"),
        ([-1], "vocabulary"),
        ([2**70], "vocabulary"),
        ([1.5], "vocabulary"),
    ],
)
def test_invalid_prompt_fails_every_choice_with_reason(token_ids: list[int], sentence: str) -> None:
    bench = LoopHarness(blocks=3)
    bench.loop.add_request(EngineRequest("wrong", token_ids, max_tokens=5, n=2))
    bench.loop.add_request(EngineRequest("right", [1, 2], max_tokens=5))
    bench.drain()
    for index in range(2):
        result = bench.merged_output("wrong", index)
        assert result.finish_reason == "error" and result.error is not None and sentence in result.error
    assert len(bench.merged_output("right").token_ids) == 5


def test_rejected_request_can_be_cancelled_before_its_error() -> None:
    bench = LoopHarness()
    bench.loop.add_request(EngineRequest("w", [], max_tokens=5, n=2))
    bench.loop.cancel_request("w", 1)
    bench.drain()
    assert list(bench.outputs) == [("w", 0)]


def test_cancel_frees_pages_at_once_and_reports_it() -> None:
    bench = LoopHarness()
    bench.loop.add_request(EngineRequest("w", make_prompt(0, 0, 40), max_tokens=50, n=2))
    bench.step()
    bench.step()
    assert bench.stats.used_pages > 0
    bench.loop.cancel_request("unknown")
    bench.loop.cancel_request("w", 7)
    bench.loop.cancel_request("w")
    bench.loop.cancel_request("w")
    assert bench.loop.pool.used_count == 0 and not bench.loop.is_idle
    before = {choice: len(outputs) for choice, outputs in bench.outputs.items()}
    bench.drain()
    assert bench.stats.used_pages == 0
    assert before == {choice: len(outputs) for choice, outputs in bench.outputs.items()}


def test_request_id_can_be_reused_after_cancel() -> None:
    bench = LoopHarness()
    bench.loop.add_request(EngineRequest("w", [1, 2, 3], max_tokens=5))
    bench.step()
    bench.loop.cancel_request("w")
    bench.loop.add_request(EngineRequest("w", [1, 2, 3], max_tokens=1))
    bench.drain()
    assert bench.outputs["w", 0][-1].finish_reason == "length"


@pytest.mark.parametrize("failure", ["before", "midway"])
def test_pages_of_failed_step_are_not_reused(failure: str) -> None:
    bench = LoopHarness(budgets=(32,))
    bench.loop.add_request(EngineRequest("first", make_prompt(0, 64, 5), max_tokens=3))
    bench.step()
    bench.runner.fail_next = failure
    bench.step()
    result = bench.merged_output("first")
    assert result.finish_reason == "error" and result.error == "The engine failed while computing this request."
    bench.loop.add_request(EngineRequest("second", make_prompt(0, 64, 5), max_tokens=3))
    bench.drain()
    assert bench.merged_output("second").cached_tokens == 32  # the step before did not fail
    assert_same_output(
        bench.merged_output("second"), run_alone(EngineRequest("second", make_prompt(0, 64, 5), max_tokens=3))
    )


def test_failed_row_ends_only_its_choice_and_is_not_cached() -> None:
    bench = LoopHarness()
    bench.runner.failing_rows.add(("bad", 2))
    bench.loop.add_request(EngineRequest("good", make_prompt(1, 0, 40), max_tokens=30))
    bench.loop.add_request(EngineRequest("bad", make_prompt(0, 0, 40), max_tokens=30))
    bench.drain()
    bad = bench.merged_output("bad")
    assert (bad.finish_reason, bad.error, len(bad.token_ids)) == ("error", "This row is not a number.", 2)
    assert len(bench.merged_output("good").token_ids) == 30
    bench.loop.add_request(EngineRequest("again", make_prompt(0, 0, 40), max_tokens=1))
    bench.drain()
    assert bench.merged_output("again").cached_tokens == 0


def test_failed_admission_ends_only_its_choice() -> None:
    bench = LoopHarness()
    bench.runner.failing_admissions.add("bad")
    for request_id in ("good", "bad", "other"):
        bench.loop.add_request(EngineRequest(request_id, [1, 2, 3], max_tokens=4))
    bench.drain()
    assert bench.merged_output("bad").finish_reason == "error"
    assert len(bench.merged_output("good").token_ids) == len(bench.merged_output("other").token_ids) == 4


def test_runner_with_missing_results_fails_step() -> None:
    bench = LoopHarness()
    run = bench.runner.run_step
    bench.runner.run_step = lambda step: run(step)[1:]  # type: ignore[method-assign]
    bench.loop.add_request(EngineRequest("w", [1, 2, 3], max_tokens=4))
    bench.drain()
    assert bench.merged_output("w").finish_reason == "error"


def test_ledger_detects_unwritten_page() -> None:
    """Checks the check itself: without ``abandon_step`` a failed step must poison the next request and be noticed."""
    bench = LoopHarness(budgets=(32,))
    bench.loop.scheduler.abandon_step = lambda step: None  # type: ignore[method-assign]
    bench.loop.add_request(EngineRequest("first", make_prompt(0, 64, 5), max_tokens=3))
    bench.runner.fail_next = "before"
    bench.step()
    bench.loop.add_request(EngineRequest("second", make_prompt(0, 64, 5), max_tokens=3))
    with pytest.raises(LedgerViolation):
        bench.drain()


def test_embedding_finishes_while_generation_continues() -> None:
    """An embedding is computed in chunks, from cached pages, and survives a preemption."""
    bench = LoopHarness(blocks=12, slots=4, budgets=(16,))
    bench.loop.add_request(EngineRequest("text", make_prompt(0, 32, 5), max_tokens=30))
    for request_id in ("first", "again"):
        bench.loop.add_request(EngineRequest(request_id, make_prompt(1, 64, 5), max_tokens=9, pooling=PoolingOptions()))
    for _ in range(3):
        bench.step()
    bench.loop.scheduler.preempt_last()
    bench.drain()
    first, again = bench.merged_output("first"), bench.merged_output("again")
    assert (
        first.vector
        == again.vector
        == run_alone(EngineRequest("w", make_prompt(1, 64, 5), max_tokens=0, pooling=PoolingOptions())).vector
    )
    assert first.finish_reason == "stop" and not first.token_ids and again.cached_tokens == 64
    assert len(bench.merged_output("text").token_ids) == 30


@pytest.mark.parametrize(("generates", "dimensions", "good"), [(True, 0, "text"), (False, 2, "vector")])
def test_loop_rejects_tasks_the_model_cannot_do(generates: bool, dimensions: int, good: str) -> None:
    bench = LoopHarness()
    bench.runner.generates, bench.runner.dimensions = generates, dimensions
    bench.loop.add_request(EngineRequest("text", [1, 2], max_tokens=0))
    bench.loop.add_request(
        EngineRequest("vector", [1, 2], max_tokens=0, pooling=PoolingOptions(dimensions=dimensions or None))
    )
    bench.loop.add_request(EngineRequest("wide", [1, 2], max_tokens=0, pooling=PoolingOptions(dimensions=3)))
    bench.drain()
    ends = {request_id: bench.merged_output(request_id).finish_reason for request_id in ("text", "vector", "wide")}
    assert [request_id for request_id, end in ends.items() if end != "error"] == [good]


def test_loop_counts_tokens_and_steps() -> None:
    bench = LoopHarness()
    bench.loop.add_request(EngineRequest("w", [1, 2, 3], max_tokens=4, n=2))
    bench.drain()
    assert (bench.stats.prompt_tokens, bench.stats.generated_tokens, bench.stats.steps) == (3, 8, 4)
    assert bench.stats.total_pages == 64


def test_queue_time_is_reported_once_with_first_output():
    bench = LoopHarness(slots=1)
    for number in range(2):
        bench.loop.add_request(EngineRequest(f"w{number}", COMMON_TOKENS[:5], 4))
    bench.drain()
    first, second = ([part.queue_seconds for part in bench.outputs[f"w{number}", 0]] for number in range(2))
    assert 0 < first[0] < second[0]
    assert first[1:] == second[1:] == [0.0] * 3


def test_chunks_of_a_prompt_are_reported_with_its_first_output() -> None:
    bench = LoopHarness(budgets=(32,))
    for name, length in (("long", 100), ("short", 20)):
        bench.loop.add_request(EngineRequest(name, COMMON_TOKENS[:length], 3))
        bench.drain()
    (first, *others), short = bench.outputs["long", 0], bench.outputs["short", 0]
    assert first.prefill_chunks is not None
    assert [chunk.tokens for chunk in first.prefill_chunks] == [32, 32, 32, 4]
    starts = [chunk.start_seconds for chunk in first.prefill_chunks]
    assert starts == sorted(starts) and starts[0] >= 0
    assert not any(output.prefill_chunks for output in [*others, *short])


def test_unprepared_request_does_not_block_others() -> None:
    ready = {}
    bench = LoopHarness(
        prepare_request=lambda request, done: done() if request.id == "b" else ready.update({request.id: done})
    )
    a = EngineRequest("a", COMMON_TOKENS[:40], 5, n=3)
    for request in (
        a,
        EngineRequest("b", COMMON_TOKENS[:40], 5),
        EngineRequest("c", COMMON_TOKENS[:40], 5),
        EngineRequest("d", COMMON_TOKENS[:9], 5, beam=BeamOptions(2)),
    ):
        bench.loop.add_request(request)
    while bench.step():
        assert bench.stats.waiting == 3
    assert bench.merged_output("b").finish_reason == "length" and set(bench.outputs) == {("b", 0)}
    bench.loop.cancel_request("a", 1)
    bench.loop.cancel_request("c")
    for done in ready.values():
        done()
    assert not bench.loop.is_idle
    bench.drain()
    assert set(bench.outputs) == {("a", 0), ("a", 2), ("b", 0), ("d", 0)}
    assert bench.merged_output("a", 2).token_ids == run_alone(a, 2).token_ids


def test_waiting_beam_takes_pages_from_a_younger_request() -> None:
    """A request that lacks a page gives up its own to a preempted beam, for which another beam of its search waits."""
    image = make_item("image", 0, 1)
    search = EngineRequest("search", make_prompt(3, 0, 19), max_tokens=20, beam=BeamOptions(2), media=[image])
    younger = EngineRequest("younger", COMMON_TOKENS[:48], max_tokens=45)
    bench = LoopHarness(blocks=8, slots=2, budgets=(16,), long_rope_after=37, step_ms=0, media_cache=0)
    for request in (
        EngineRequest("first", [0], max_tokens=0),
        EngineRequest("second", [11], max_tokens=0, n=3),
        EngineRequest("third", [22], max_tokens=0, n=3),
        search,
        EngineRequest("fourth", [*COMMON_TOKENS[:15], *make_prompt(4, 0, 33)], max_tokens=0),
        younger,
    ):
        bench.loop.add_request(request)
    bench.drain()
    assert bench.outputs["younger", 0][-1].preemptions > 0
    assert_same_output(bench.merged_output("younger"), run_alone(younger, long_rope_after=37))
    assert_same_output(bench.merged_output("search"), run_alone(search, 0, beam_capacity(8, 2), 37))
