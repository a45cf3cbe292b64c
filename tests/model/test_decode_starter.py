"""Decode steps that are started before the results of the step before are known: the same tokens, with a real model."""

from __future__ import annotations

import pytest
from support import tiny_models
from support.run_model import load_test_runner, serve_requests

from parley.model.decode_starter import DecodeStarter
from parley.model.sampling.verify import BROKEN_LOGITS
from parley.types import EngineRequest, SamplingOptions

# Some draw on the device alone; others need the host (cuts, penalties, logprobs), which ends the steps ahead.
SAMPLINGS = [
    (SamplingOptions(temperature=0.0), -1),
    (SamplingOptions(temperature=0.9), -1),
    (SamplingOptions(temperature=1.3, min_p=0.1), -1),
    (SamplingOptions(temperature=0.8, top_p=0.9, top_k=20), -1),
    (SamplingOptions(temperature=0.0, repetition_penalty=1.2), -1),
    (SamplingOptions(temperature=0.7), 2),
]


def make_requests(numbers: list[int], limit: int) -> list[EngineRequest]:
    return [
        EngineRequest(
            f"{place}",
            [3 + (5 * place + i * i) % (tiny_models.VOCAB - 3) for i in range(1 + 9 * place)],
            limit + 3 * place,
            SAMPLINGS[number][0],
            seed=place,
            logprobs=SAMPLINGS[number][1],
            n=1 + place % 2,
        )
        for place, number in enumerate(numbers)
    ]


def count_started(starter: DecodeStarter, patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of rows of each step that is started ahead of results."""
    started, start_step = [], starter.start_step

    def start(step, previous):
        if previous is not None:
            started.append(len(step.rows))
        return start_step(step, previous)

    patch.setattr(starter, "start_step", start)
    return started


@pytest.mark.parametrize("numbers", [[0, 1, 2, 1], [3, 4, 5, 0, 1]], ids=["on the device", "mixed"])
@pytest.mark.parametrize("blocks", [120, 14], ids=["", "preempted"])
def test_steps_ahead_change_no_token(numbers, blocks, monkeypatch):
    requests = make_requests(numbers, 20)
    runner, _ = load_test_runner(tiny_models.model_folder("qwen2"))
    expected = serve_requests(runner, requests, blocks=blocks)[0]
    runner.starter = DecodeStarter(runner)
    started = count_started(runner.starter, monkeypatch)
    actual = serve_requests(runner, requests, blocks=blocks)[0]
    assert actual == expected
    assert started, "no step was started ahead"


def test_row_with_broken_logits_ends_alone_in_a_started_step(monkeypatch):
    runner, _ = load_test_runner(tiny_models.model_folder("qwen2"))
    starter = DecodeStarter(runner)
    results, compute_logits = [], runner.network.compute_logits

    def break_first_row(hidden):
        logits = compute_logits(hidden)
        logits[0] = float("nan")
        return logits

    start_step = starter.start_step

    def start(step, previous):
        if len(step.rows) == 2 and not results:
            monkeypatch.setattr(runner.network, "compute_logits", break_first_row)
            started = start_step(step, previous)
            monkeypatch.setattr(runner.network, "compute_logits", compute_logits)
            results.extend(started.wait())
            return started
        return start_step(step, previous)

    monkeypatch.setattr(starter, "start_step", start)
    runner.starter = starter
    requests = [*make_requests([1], 20), EngineRequest("other", [4, 5, 6], 20, SamplingOptions(), seed=1)]
    with pytest.raises(AssertionError, match=BROKEN_LOGITS):
        serve_requests(runner, requests)
    assert [result.error for result in results] == [BROKEN_LOGITS, None]
    assert 0 <= results[1].tokens[0] < runner.vocab_size
