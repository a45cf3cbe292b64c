"""The host of vLLM, with a stand-in for vLLM: the calls that it makes and when, and how it rewrites vLLM's log."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
from support.recorded_vllm import Harness, raw_output

from parley.types import BeamOptions, EngineOutput
from parley.worker.vllm.host import explain_adapter_failure, explain_failure
from parley.worker.vllm.tree_log import TreeLog


def test_vllm_gets_no_more_choices_than_it_computes_at_once():
    harness = Harness(2)
    harness.add("a", n=3)
    assert harness.client.names == [("a", 0), ("a", 1)]
    assert [output.index for output in harness.step("a", finish=1)] == [0, 1]
    assert harness.client.names == [("a", 2)]
    harness.step("a", finish=1)
    assert harness.loop.is_idle


def test_tenants_take_turns():
    harness = Harness(1)
    for name in ("a1", "a2", "a3"):
        harness.add(name, tenant="a")
    harness.add("b1", tenant="b")
    order = []
    for _ in range(4):
        order.append(harness.client.names[0][0])
        harness.step(order[-1], finish=1)
    assert order == ["a1", "b1", "a2", "a3"]


def test_better_priority_goes_first():
    harness = Harness(1)
    for name, priority in (("running", 0), ("low", 1), ("high", -1)):
        harness.add(name, priority=priority)
    harness.step("running", finish=1)
    assert harness.client.names == [("high", 0)]


def test_cancel_takes_choices_from_vllm_and_from_the_queue():
    harness = Harness(1)
    harness.add("a", n=2)
    harness.add("b")
    harness.loop.cancel_request("a", 1)
    assert harness.client.cancelled == []
    harness.loop.cancel_request("a")
    assert harness.client.cancelled == ["0"] and harness.client.names == [("b", 0)]
    assert not harness.step("a") and harness.sent[-1].stats.running == 1
    harness.loop.cancel_request("b")
    harness.loop.cancel_request("unknown")
    stats = harness.sent[-1].stats
    assert harness.loop.is_idle and (stats.running, stats.waiting, stats.used_pages) == (0, 0, 0)


def test_statistics_count_each_token_once():
    harness = Harness(2)
    harness.add("a", n=2)
    harness.step("a")
    stats = harness.sent[-1].stats
    assert (stats.prompt_tokens, stats.generated_tokens, stats.running, stats.used_pages) == (2, 2, 2, 5)
    assert (stats.step_rows, stats.step_tokens, stats.prefix_queries, stats.prefix_hits) == (2, 6, 2, 1)
    harness.add("resumed", resumed=True)
    harness.step("a", finish=1)
    assert harness.sent[-1].stats.prompt_tokens == 2


def test_costs_count_the_time_between_steps_as_computing():
    harness = Harness(1)
    harness.add("first", token_costs=True)
    harness.step("first")
    (output,) = harness.step("first")
    (cost,) = output.token_costs
    assert (cost.batch_rows, cost.compute_seconds, cost.wait_seconds) == (1, 1.0, 0.0)


# Log-probabilities of the next token after the last one, for tokens 7, 8 and 9. Token 9 ends an answer.
NEXT = {6: {7: -0.5, 8: -1.0, 9: -3.0}, 7: {7: -2.0, 8: -2.0, 9: -2.5}, 8: {8: -0.1, 7: -3.0, 9: -4.0}}


def beam_step(harness: Harness) -> list[EngineOutput]:
    """Answer the rounds of all beams from NEXT."""
    outputs = []
    for choice_id, (round_, _) in list(harness.client.computing.items()):
        assert round_.max_tokens == 1 and not round_.stop_ids and round_.logprobs == 5
        ranked = sorted(NEXT[round_.token_ids[-1]].items(), key=lambda candidate: -candidate[1])
        raw = raw_output(choice_id, 1, SimpleNamespace(num_cached_tokens=1, num_computed_tokens=1))
        ids, values = ([ranked[0][column], *(candidate[column] for candidate in ranked)] for column in (0, 1))
        raw.new_logprobs = np.array([ids]), np.array([values]), np.array([1])
        outputs.append(raw)
        del harness.client.computing[choice_id]
    harness.time += 1
    step = SimpleNamespace(engine_index=0, outputs=outputs, scheduler_stats=None, timestamp=harness.time)
    harness.loop.handle_step(step)
    return harness.sent[-1].outputs


def search(harness: Harness, **members: Any) -> None:
    harness.add("s", beam=BeamOptions(2), n=2, stop_ids=[9], **({"max_tokens": 3} | members))


def rounds(harness: Harness) -> list[list[int]]:
    return sorted(round_.token_ids for round_, _ in harness.client.computing.values())


def test_beams_of_a_search_go_on_together():
    harness = Harness(4)
    search(harness, logprobs=1)
    assert rounds(harness) == [[5, 6]]
    beam_step(harness)
    assert rounds(harness) == [[5, 6, 7], [5, 6, 8]]
    beam_step(harness)
    assert rounds(harness) == [[5, 6, 7, 7], [5, 6, 8, 8]]
    first, second = beam_step(harness)
    assert first.token_ids == [8, 8, 8] and first.finish_reason == "length" and first.cached_tokens == 1
    assert first.scores[0].logprob == -1.0 and first.scores[0].rank == 2 and first.scores[0].top_ids == [7]
    assert second.index == 1 and harness.loop.is_idle and harness.sent[-1].stats.generated_tokens == 6


def test_stop_token_ends_a_beam_after_min_tokens():
    harness = Harness(4)
    search(harness, max_tokens=2, min_tokens=2)
    beam_step(harness)
    assert all(9 not in output.token_ids for output in beam_step(harness))


def test_search_can_be_finished_cancelled_and_rejected():
    for end in ("finish", "cancel", "reject"):
        harness = Harness(1)
        search(harness)
        beam_step(harness)
        if end == "finish":
            harness.loop.finish_beam_search("s", "length")
            assert [output.token_ids for output in harness.sent[-1].outputs] == [[7], [8]]
        elif end == "cancel":
            harness.loop.cancel_request("s")
            assert harness.sent[-1].outputs == []
        else:
            harness.loop.reject_choice(next(iter(harness.client.computing)), "Too long.")
            assert [output.error for output in harness.sent[-1].outputs] == ["Too long."] * 2
        assert harness.loop.is_idle and (harness.sent[-1].stats.running, harness.sent[-1].stats.waiting) == (0, 0)


def test_unknown_adapters_and_rejected_choices_end_with_an_error():
    harness = Harness(2)
    harness.add("a", adapter="gone", n=2)
    assert [output.error for output in harness.sent[-1].outputs] == ["There is no adapter of this name."] * 2
    harness.add("b", adapter="known")
    assert harness.loop.uses_adapter("known")
    harness.loop.reject_choice("0", "Too long.")
    assert [output.error for output in harness.sent[-1].outputs] == ["Too long."]
    assert harness.loop.is_idle and not harness.loop.uses_adapter("known")


def test_log_becomes_progress_and_then_warnings(caplog):
    caplog.set_level(logging.INFO)
    stages: list[tuple[str, float]] = []
    tree_log = TreeLog(lambda *stage: stages.append(stage), lambda: None)
    tree_log.read_line("(EngineCore pid=9) INFO 11-22 23:00:01 [core.py:100] Loading weights")
    tree_log.read_line("INFO 11-22 23:00:02 [core.py:101] Warming up")
    tree_log.read_line("(EngineCore pid=9) ERROR 11-22 23:00:03 [core.py:9] ValueError: No room for the KV cache.")
    tree_log.read_line("Loading: 100%|####| 1/1")
    assert [stage for stage, _ in stages] == ["Loading weights", "Warming up"] and stages[0][1] < stages[1][1] < 1
    assert tree_log.cause == "No room for the KV cache." and not caplog.records
    tree_log.end_loading()
    tree_log.read_line("INFO 11-22 23:00:04 [core.py:100] A request came")
    tree_log.read_line("WARNING 11-22 23:00:04 [core.py:100] Something is slow")
    assert [record.getMessage() for record in caplog.records] == ["vLLM: Something is slow"]
    assert not tree_log.tells_worker_death
    tree_log.read_line("ERROR 11-22 23:00:05 [ray_executor_v2.py:523] RayWorkerProc rank=[0] died unexpectedly, bye.")
    assert tree_log.tells_worker_death


def test_failed_adapter_is_explained_without_folders():
    error = RuntimeError(
        "Call failed: Worker failed with error 'No adapter found for /a/b', please check the trace above"
    )
    assert explain_adapter_failure(error, "/a/b") == "No adapter found for its folder."


def test_failed_start_is_explained_by_its_cause():
    error = RuntimeError("Engine core initialization failed. See root cause above.")
    explanation = explain_failure(error, "To serve one request, 3 GiB KV cache is needed.")
    assert explanation.startswith("vLLM did not start: To serve one request, 3 GiB KV cache is needed. A smaller --max")
    assert explain_failure(ValueError("Unknown\n quantization"), "") == "vLLM did not start: Unknown quantization."
    wrapped = (
        "1 validation error for ModelConfig\n Value error, Unknown method: x. [type=value_error, input_value=Args(1)]"
    )
    assert explain_failure(ValueError(wrapped), "") == "vLLM did not start: Unknown method: x."
