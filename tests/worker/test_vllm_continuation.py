"""The host of vLLM continues answers that another instance began, and fetches that instance's KV pages."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec
import pytest
from support.recorded_vllm import Harness

from parley.disagg.wire.handover import take_transfers
from parley.model.sampling.extra_options import ExtraOptions
from parley.types import BeamOptions, EngineOutput, EngineRequest, ReasoningLimit, SamplingOptions
from parley.worker.vllm.page_moves import PageMove, read_transfer, rejected_params, write_transfer
from parley.worker.vllm.requests.continuation import Continuation, plan_continuations
from parley.worker.vllm.requests.extra_options import read_extra_options
from parley.worker.vllm.requests.sampling_fields import translate_choice

GREEDY = SamplingOptions(temperature=0.0)
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}
LEASE_SECONDS = 1e6  # no run of the tests takes as long
TRANSFER = write_transfer(PARAMS, LEASE_SECONDS)
FETCHING = Continuation(page_move=PARAMS)
COUNTING: list[dict[str, Any]] = [
    {"sampling": SamplingOptions(temperature=0.0, presence_penalty=1.0)},
    {"sampling": SamplingOptions(temperature=0.0, frequency_penalty=1.0)},
    {"sampling": SamplingOptions(temperature=0.0, banned=[[7]])},
    {"sampling": GREEDY, "grammar": '{"grammars": [{"lark_grammar": "start: /a/"}]}'},
    {"sampling": GREEDY, "reasoning_limit": ReasoningLimit("<t>", "</t>", True, 1, [9])},
]


def request(**members: Any) -> EngineRequest:
    return EngineRequest(**({"id": "r", "token_ids": [5, 6], "max_tokens": 9, "sampling": GREEDY} | members))


def test_greedy_choice_continues_after_its_prior_tokens_as_prompt():
    resumed_request = request(prior_tokens=[[7], [8, 9]], n=2, min_tokens=3)
    (continuation,) = plan_continuations(resumed_request, 1)
    fields = translate_choice(resumed_request, 1, continuation)
    assert fields.token_ids == [5, 6, 8, 9] and continuation.redrawn_tokens(resumed_request, 1) == []
    assert fields.sampling["max_tokens"] == 7 and fields.sampling["min_tokens"] == 1 and fields.page_move is None


@pytest.mark.parametrize("members", [*COUNTING, {"sampling": SamplingOptions(temperature=1.0)}])
def test_options_that_count_or_draw_make_vllm_draw_again(members):
    resumed_request = request(prior_tokens=[[7, 8]], **members)
    continuation, *others = plan_continuations(resumed_request, 0, can_force=True)
    fields = translate_choice(resumed_request, 0, continuation)
    assert fields.token_ids == [5, 6] and fields.sampling["max_tokens"] == 9
    options = read_extra_options(fields.sampling["extra_args"])
    assert options is not None and options.forced == [7, 8]
    is_counted = members in COUNTING
    assert others == ([] if is_counted else [Continuation(2)])
    unforced, *_ = plan_continuations(resumed_request, 0)
    assert unforced == Continuation() and unforced.redrawn_tokens(resumed_request, 0) == [7, 8]


def test_penalties_with_a_window_do_not_tell_prompt_from_output():
    penalized = SamplingOptions(temperature=0.0, presence_penalty=1.0, penalty_window=5)
    assert plan_continuations(request(prior_tokens=[[7, 8]], sampling=penalized), 0) == [Continuation(2)]


def test_fetched_pages_exclude_the_token_that_their_instance_drew():
    resumed_request = request(prior_tokens=[[7, 8]], transfer=TRANSFER)
    continuation, other = plan_continuations(resumed_request, 0)
    fields = translate_choice(resumed_request, 0, continuation)
    assert (
        fields.token_ids == [5, 6, 7]
        and fields.page_move == PARAMS
        and continuation.redrawn_tokens(resumed_request, 0) == [8]
    )
    assert other == Continuation(2)
    sampled = request(prior_tokens=[[7]], transfer=TRANSFER, sampling=SamplingOptions(temperature=1.0))
    ways = plan_continuations(sampled, 0, can_force=True)
    assert ways == [FETCHING, Continuation(is_forced=True), Continuation(1)]
    later = msgspec.structs.replace(sampled, prior_tokens=[[7, 8]])
    assert plan_continuations(later, 0, can_force=True)[0] == Continuation(is_forced=True)  # draws from the start
    assert plan_continuations(msgspec.structs.replace(sampled, prior_tokens=[]), 0) == [FETCHING]


def test_pages_whose_lease_may_have_ended_are_not_fetched(caplog):
    caplog.set_level(logging.WARNING)
    assert read_transfer(TRANSFER) == PARAMS and not caplog.records
    assert read_transfer(write_transfer(PARAMS, 5.0)) is None
    assert "are not used" in caplog.text


def test_pages_are_not_fetched_after_the_clock_was_set_back(monkeypatch, caplog):
    """Their lease may have ended, although it has an hour left by the new time."""
    caplog.set_level(logging.WARNING)
    now, transfer = time.time(), write_transfer(PARAMS, 30.0)
    for change, found in ((-3600.0, None), (-5.0, PARAMS), (5.0, PARAMS), (3600.0, None)):
        monkeypatch.setattr("parley.worker.vllm.page_moves.time.time", lambda seconds=change: now + seconds)
        assert read_transfer(transfer) == found
    reasons = ["seems to begin 3600.0 s from now; compare the clocks", "ends in -3570.0 s, by this machine's clock"]
    assert all(reason in record.message for reason, record in zip(reasons, caplog.records, strict=True))


@pytest.mark.parametrize(
    "transfer", [b"\xff", b"\x92\x80\xa1a", b"\x92\x81\xa1\xff\x01\x01", b"\x92\x81\xa1a" + b"\x91" * 100_000]
)
def test_transfer_that_cannot_be_read_is_not_used(transfer, caplog):
    caplog.set_level(logging.WARNING)
    assert read_transfer(transfer) is None and rejected_params(transfer) is None
    assert caplog.text.count("KV pages of another instance are not used") == 1
    harness = Harness()
    harness.add("a", transfer=transfer)
    assert harness.client.ways == [Continuation()] and harness.client.rejected_moves == []


def test_pages_are_kept_for_another_instance_unless_tokens_are_drawn_again():
    leased = request(lease=True, n=2)
    assert translate_choice(leased, 0, Continuation()).page_move["do_remote_decode"] is True
    assert translate_choice(leased, 1, Continuation()).page_move is None
    redrawn = request(lease=True, prior_tokens=[[7]])
    assert translate_choice(redrawn, 0, Continuation()).page_move is None
    assert translate_choice(redrawn, 0, Continuation(1)).page_move is not None


def test_output_of_a_lease_says_where_the_pages_are():
    harness = Harness()
    harness.add("a", lease=True, max_tokens=1)
    harness.add("b", max_tokens=1)
    first, second = harness.step("a", "b", finish=1)
    assert read_transfer(first.transfer) == {"remote_request_id": "0"} and second.transfer == b""


def test_known_tokens_that_are_drawn_again_are_no_news():
    harness = Harness()
    harness.add("a", prior_tokens=[[7, 8]], sampling=SamplingOptions(temperature=1.0), logprobs=0)
    assert harness.step("a") == []
    assert harness.step("a", token=8) == []
    (output,) = harness.step("a", token=3)
    assert output.token_ids == [3] and harness.sent[-1].stats.generated_tokens == 1
    (output,) = harness.step("a", token=4, finish=1)
    assert output.token_ids == [4] and output.finish_reason == "length" and harness.loop.is_idle


def test_host_tries_the_next_way_if_vllm_draws_other_tokens_than_the_prior_ones():
    harness = Harness(can_force=True)
    harness.add("a", prior_tokens=[[8]], transfer=TRANSFER, sampling=SamplingOptions(temperature=1.0))
    for continuation in (FETCHING, Continuation(is_forced=True)):
        assert harness.client.ways[-1] == continuation and harness.step("a") == []
    assert harness.client.cancelled == ["0", "1"] and harness.client.ways[-1] == Continuation(1)
    (output,) = harness.step("a")
    assert output.token_ids == [7] and output.finish_reason is None


@pytest.mark.parametrize("finish", [None, 1])
def test_choice_that_cannot_be_continued_ends_with_an_error(finish):
    harness = Harness()
    harness.add("a", prior_tokens=[[8]], sampling=SamplingOptions(temperature=0.0, presence_penalty=1.0))
    (output,) = harness.step("a", finish=finish)
    assert output.finish_reason == "error" and "another token" in output.error and output.token_ids == []
    assert harness.loop.is_idle and not harness.client.computing


def test_answer_that_ends_before_the_known_tokens_is_another_answer():
    harness = Harness()
    harness.add("a", prior_tokens=[[7, 8]], sampling=SamplingOptions(temperature=0.0, presence_penalty=1.0))
    (output,) = harness.step("a", finish=0)
    assert output.finish_reason == "error"


@pytest.mark.parametrize("end", ["token", "cancel", "reject"])
def test_first_choice_fetches_pages_at_once_and_others_wait_for_it(end):
    harness = Harness(1)
    harness.add("running")
    harness.add("a", n=3, prior_tokens=[[7], [7], [7]], transfer=TRANSFER)
    assert harness.client.names == [("running", 0), ("a", 0)]
    harness.loop.report_statistics()
    assert harness.sent[-1].stats.waiting == 2
    if end == "token":
        harness.step("a")
    elif end == "cancel":
        harness.loop.cancel_request("a", 0)
    else:
        harness.loop.reject_choice("1", "Too long.")
        del harness.client.computing["1"]
    harness.step("running", finish=1)
    if end == "token":
        harness.step("a", finish=1)
    assert ("a", 1) in harness.client.names
    harness.loop.cancel_request("a")
    stats = harness.sent[-1].stats
    assert harness.loop.is_idle and (stats.running, stats.waiting) == (0, 0)


def test_cancel_takes_choices_that_wait_for_pages():
    harness = Harness()
    harness.add("a", n=3, transfer=TRANSFER)
    harness.loop.cancel_request("a", 2)
    harness.loop.cancel_request("a")
    stats = harness.sent[-1].stats
    assert harness.loop.is_idle and (stats.running, stats.waiting) == (0, 0)


def test_first_round_of_a_beam_search_fetches_pages():
    harness = Harness()
    harness.add("s", beam=BeamOptions(2), n=2, transfer=TRANSFER)
    assert harness.client.ways == [FETCHING]


@pytest.mark.parametrize(
    ("members", "is_rejected"),
    [
        ({"n": 2}, False),
        ({"adapter": "gone"}, True),
        ({"lease_seconds": 5.0}, True),  # some are needed to fetch them
        ({"lease_seconds": -5.0}, False),  # they are free by now
        ({"prior_tokens": [[7, 8]], "sampling": SamplingOptions(temperature=1.0)}, True),
        (
            {"prior_tokens": [[8]], "sampling": SamplingOptions(temperature=1.0)},
            False,
        ),  # fetched, then another way is tried
    ],
)
def test_pages_that_no_choice_fetches_are_given_back_once(members, is_rejected):
    harness = Harness(3, can_force=True)
    lease_seconds = members.get("lease_seconds", LEASE_SECONDS)
    request_members = {name: value for name, value in members.items() if name != "lease_seconds"}
    harness.add("a", transfer=write_transfer(PARAMS, lease_seconds), **request_members)
    harness.step("a")
    harness.step("a", finish=1)
    assert harness.client.rejected_moves == [PARAMS] * is_rejected


def test_rejected_choice_frees_transferred_pages_unless_started():
    harness = Harness()
    for name in ("a", "b"):
        harness.add(name, transfer=TRANSFER)
    harness.step("b")
    for choice_id in ("0", "1"):
        harness.loop.reject_choice(choice_id, "Too long.")
    assert harness.client.rejected_moves == [PARAMS]


def test_pages_of_a_search_that_is_cancelled_in_the_queue_are_given_back():
    harness = Harness(1)
    harness.add("running")
    harness.add("s", beam=BeamOptions(2), n=2, transfer=TRANSFER)
    harness.loop.cancel_request("s")
    assert harness.client.rejected_moves == [PARAMS] and harness.client.names == [("running", 0)]


def test_transfers_go_to_one_instance_only():
    outputs = [[(0, EngineOutput("", 0, [7], transfer=b"x")), (1, EngineOutput("", 0, [8]))]]
    assert take_transfers(outputs) == {0: b"x"} and take_transfers(outputs) == {}


def test_transfer_is_understood_by_the_version_that_wrote_it():
    move = msgspec.msgpack.decode(TRANSFER, type=PageMove)
    assert move.params == PARAMS and ExtraOptions().forced == []
