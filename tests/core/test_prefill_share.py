"""The prefill share: prompts get their share of the time during decodes, no more, no less on demand, and never starve.

Seconds are simulated, per step or by the ledger's formula.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.invariant_ledger import LoopHarness, run_alone

from parley.core.prefill_share import MAX_CHARGED_SECONDS, PrefillShare
from parley.types import EngineRequest

PARTS = st.sampled_from([0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99])


def run_step(quota: PrefillShare, answers: int, requested_tokens: int, seconds: float) -> float:
    """Run one step with the wanted prompt tokens if it is open to prompts; return the seconds they took."""
    quota.begin_step(answers)
    prompt_tokens = requested_tokens if quota.allows_prefill else 0
    quota.charge_prefill(prompt_tokens)
    tokens = answers + prompt_tokens
    if not tokens:
        return 0.0
    quota.observe_step(seconds, tokens)
    return seconds * prompt_tokens / tokens


@given(
    PARTS,
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([0, 1, 16, 500]), st.floats(0.001, 0.3)), max_size=200),
)
@settings(deadline=None, max_examples=150)
def test_prefill_never_exceeds_its_share_in_any_interval(part: float, steps: list[tuple[int, int, float]]) -> None:
    quota, spans = PrefillShare(part), [(0.0, 0.0)]
    for answers, prompt_tokens, seconds in steps:
        prompts = run_step(quota, answers, prompt_tokens, seconds)
        if answers:
            spans.append((spans[-1][0] + prompts, spans[-1][1] + seconds))
    for start in range(0, len(spans), 10):
        for prompts, both in spans[start:]:
            prompt_seconds, time = prompts - spans[start][0], both - spans[start][1]
            assert prompt_seconds <= part * time + 2 * 0.3 + 1e-9


@given(PARTS, st.lists(st.tuples(st.integers(1, 40), st.floats(0.001, 0.3)), min_size=1, max_size=300))
@settings(deadline=None, max_examples=150)
def test_prefill_gets_its_full_share_under_demand(part: float, steps: list[tuple[int, float]]) -> None:
    quota, had, time = PrefillShare(part), 0.0, 0.0
    for answers, seconds in steps:
        had += run_step(quota, answers, 100_000, seconds)
        time += seconds
        assert abs(had - part * time) <= 0.3 + 1e-9


@given(PARTS, st.floats(0.001, 1000), st.floats(0.05, 0.3))
@settings(deadline=None, max_examples=60)
def test_prefill_debt_is_capped_and_paid(part: float, slow: float, seconds: float) -> None:
    """The debt of a slow step is capped: a pause of the whole machine does not block prompts for long."""
    quota, waited = PrefillShare(part), 0.0
    run_step(quota, 1, 10_000, slow)
    while not run_step(quota, 1, 1, seconds):
        waited += seconds
    assert waited <= min(slow, MAX_CHARGED_SECONDS) / part + seconds


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 500), st.floats(0.001, 0.3)), max_size=60))
def test_prefill_share_of_one_and_zero(steps: list[tuple[int, int, float]]) -> None:
    everything, nothing = PrefillShare(1.0), PrefillShare(0.0)
    for answers, prompt_tokens, seconds in steps:
        assert run_step(everything, answers, prompt_tokens, seconds) > 0 or not prompt_tokens
        assert run_step(nothing, answers, prompt_tokens, seconds) == 0
        assert run_step(nothing, 0, prompt_tokens, seconds) > 0 or not prompt_tokens


def test_changed_prefill_share_applies_at_once() -> None:
    quota = PrefillShare(0.01)
    run_step(quota, 1, 500, 0.3)
    assert run_step(quota, 1, 500, 0.1) == 0
    quota.set_share(0.5)
    assert run_step(quota, 1, 500, 0.1) > 0
    quota.set_share(0.0)
    assert run_step(quota, 1, 500, 0.1) == 0


def make_request(number: int, prompt: int, answer: int, **more: object) -> EngineRequest:
    return EngineRequest(f"w{number}", [(number * 11 + k) % 50 for k in range(prompt)], max_tokens=answer, **more)  # type: ignore[arg-type]


@given(
    st.sampled_from([0.25, 0.5, 0.75, 0.9]),
    st.lists(st.tuples(st.integers(20, 200), st.integers(0, 20)), min_size=6, max_size=10),
    st.sampled_from([48, 128, 512]),
    st.integers(1, 3),
)
@settings(deadline=None, max_examples=15)
def test_loop_keeps_prefill_share(part: float, prompts: list[tuple[int, int]], budget: int, streams: int) -> None:
    """Decodes run as long as prompts wait: each side keeps its share to within some steps."""
    bench = LoopHarness(blocks=500, slots=16, budgets=(budget,), prefix_cache=False, prefill_share=part)
    for number in range(streams):
        bench.loop.add_request(make_request(number, 3, 2000))
    bench.step()
    bench.step()
    requests = [make_request(100 + number, *prompt) for number, prompt in enumerate(prompts)]
    for request in requests:
        bench.loop.add_request(request)
    share = bench.prefill_share
    share.prompt_seconds = share.mixed_seconds = 0.0
    while any((request.id, 0) not in bench.outputs for request in requests):
        bench.step()
        assert share.prompt_seconds <= part * share.mixed_seconds + share.longest_step + 1e-9
        if (
            len(requests) - sum((request.id, 0) in bench.outputs for request in requests) > 3
        ):  # enough prompts left to fill steps
            assert share.prompt_seconds >= part * share.mixed_seconds - 2 * share.longest_step
    for number in range(streams):
        bench.loop.cancel_request(f"w{number}")
    bench.drain()
    for request in requests:
        assert bench.merged_output(request.id).token_ids == run_alone(request).token_ids


def test_zero_share_delays_prefill_until_decodes_end() -> None:
    bench = LoopHarness(slots=4, budgets=(500,), prefill_share=0.0)
    bench.loop.add_request(make_request(0, 40, 30))
    bench.step()
    bench.loop.add_request(make_request(1, 100, 2))
    bench.drain()
    rows = [{request_id for request_id, *_ in step} for step in bench.runner.steps]
    assert rows == [{"w0"}] * 30 + [{"w1"}] * 2


@pytest.mark.parametrize("part", [0.0, 0.01])
def test_handed_over_answer_is_exempt_from_prefill_share(part: float) -> None:
    bench = LoopHarness(slots=4, budgets=(500,), prefill_share=part)
    bench.loop.add_request(make_request(0, 40, 60))
    for _ in range(3):
        bench.step()
    expected_tokens = run_alone(make_request(1, 100, 5)).token_ids
    bench.loop.add_request(make_request(1, 100, 5, prior_tokens=[expected_tokens[:2]]))
    bench.step()
    assert bench.outputs["w1", 0][0].token_ids == expected_tokens[2:3]
    bench.drain()


def test_encoding_is_charged_to_prefill_only_while_requests_decode() -> None:
    quota = PrefillShare(0.25)
    run_step(quota, 0, 16, 0.1)
    quota.charge_encoding(100.0)
    for encoding_seconds, decode_steps in ((0.3, 9), (0.1, 3)):
        run_step(quota, 4, 0, 0.1)
        quota.charge_encoding(encoding_seconds)
        closed_steps = 0
        while True:
            run_step(quota, 4, 0, 0.1)
            if quota.allows_prefill:
                break
            closed_steps += 1
        assert closed_steps == pytest.approx(decode_steps, abs=1)


def test_decode_only_and_prefill_only_steps_make_no_debt() -> None:
    bench = LoopHarness(slots=4, budgets=(500,), prefill_share=0.01)
    for number in range(3):  # no decodes yet
        bench.loop.add_request(make_request(number, 200, 1))
    bench.step()
    assert bench.prefill_share.closed_steps == 0
    bench.loop.add_request(make_request(3, 20, 50))
    bench.loop.add_request(make_request(4, 20, 1))
    bench.drain()
    assert bench.prefill_share.closed_steps == 0
