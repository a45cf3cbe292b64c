"""The requests to an attached server and the reading of its answers, without a server."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from parley.types import AttachedSettings, EngineRequest, PoolingOptions, SamplingOptions
from parley.worker.attached.server_facts import (
    AttachedModelCard,
    AttachRefused,
    attached_bounds,
    choose_card,
    error_text,
    list_adapters,
)
from parley.worker.attached.server_metrics import CacheTotals, read_server_metrics
from parley.worker.attached.server_totals import ServerTotals
from parley.worker.attached.token_answers import (
    ChoiceChunk,
    TokenAnswer,
    read_choice_output,
    write_choice,
    write_pooling,
)
from parley.worker.vllm.outputs.output_reader import LOWEST_LOGPROB, read_token_scores
from parley.worker.vllm.requests.continuation import Continuation

SETTINGS = AttachedSettings(model="/models/m", url="http://engine:8000")


def request(**members: Any) -> EngineRequest:
    return EngineRequest(**({"id": "r", "token_ids": [5, 6, 7], "max_tokens": 4} | members))


def body(index: int = 0, **members: Any) -> dict[str, Any]:
    return write_choice(request(**members), index, Continuation(), model="m", max_logprobs=20)


def read_choice(choice: dict[str, Any], **members: Any) -> Any:
    answer = msgspec.json.decode(json.dumps({"choices": [choice]}), type=TokenAnswer)
    return read_choice_output("c", request(**members), answer)


def entry(token_id: int, rank: int, **more: Any) -> dict[str, Any]:
    return {"token_id": token_id, "logprob": -rank / 4, "rank": rank} | more


def test_each_choice_becomes_one_request_to_the_server():
    written = body(2, n=3, seed=40, cache_salt="s", priority=-1, sampling=SamplingOptions(temperature=0.5))
    assert (written["token_ids"], written["model"], written["stream"]) == ([5, 6, 7], "m", True)
    assert (written["cache_salt"], written["priority"]) == ("s", -1)
    params = written["sampling_params"]
    assert (params["seed"], params["temperature"], params["max_tokens"]) == (42, 0.5, 4)
    assert params["detokenize"] is False and params["ignore_eos"] is True and "n" not in params


def test_a_grammar_holds_from_the_first_token():
    written = body(grammar='{"grammars": [{"lark_grammar": "start: /a+/"}]}')
    assert written["reasoning_ended"] is True and written["sampling_params"]["ignore_eos"] is False
    assert "start: /a+/" in written["sampling_params"]["structured_outputs"]["grammar"]


def test_scores_of_the_prompt_come_with_a_whole_answer():
    assert body(prompt_logprobs=2)["stream"] is False
    assert body(1, prompt_logprobs=2, n=2)["stream"] is True
    positions = [
        None,
        {"6": {"logprob": -1.0, "rank": 1}},
        {"7": {"logprob": -3.0, "rank": 9}, "8": {"logprob": -0.5, "rank": 1}},
    ]
    whole = {"choices": [{"token_ids": [9], "finish_reason": "length"}], "prompt_logprobs": positions}
    output = read_choice_output(
        "c", request(prompt_logprobs=1), msgspec.json.decode(json.dumps(whole), type=TokenAnswer)
    )
    first, second = read_token_scores(output.new_prompt_logprobs_tensors, 1)
    assert (first.logprob, first.rank, first.top_ids) == (-1.0, 1, [6])
    assert (second.logprob, second.rank, second.top_ids) == (-3.0, 9, [8])


@pytest.mark.parametrize(("wanted", "asked"), [(0, 0), (3, 4), (19, 20), (20, 20)])
def test_asks_for_one_more_alternative_than_wanted(wanted: int, asked: int):
    """The server's list begins with the drawn token, which takes a place even if it is none of the most likely."""
    assert body(logprobs=wanted)["sampling_params"]["logprobs"] == asked


def test_alternatives_are_the_most_likely_tokens_wherever_the_drawn_one_stands():
    unlikely = entry(70, 50, top_logprobs=[entry(70, 50), entry(71, 1), entry(72, 2)])
    second = entry(72, 2, top_logprobs=[entry(72, 2), entry(71, 1), entry(73, 3)])
    output = read_choice({"token_ids": [70, 72], "logprobs": {"content": [unlikely, second]}}, logprobs=2)
    scores = read_token_scores(output.new_logprobs, 2)
    assert [(score.logprob, score.rank, score.top_ids) for score in scores] == [
        (-12.5, 50, [71, 72]), (-0.5, 2, [71, 72]),
    ]  # fmt: skip


def test_named_tokens_keep_their_order():
    params = body(logprobs=0, logprob_ids=[9, 8])["sampling_params"]
    assert (params["logprob_token_ids"], params["logprobs"]) == ([9, 8, 9], 3)
    token = entry(7, 1, top_logprobs=[entry(7, 1), entry(9, 4), {"token_id": 8, "logprob": None}])
    output = read_choice({"token_ids": [7], "logprobs": {"content": [token]}}, logprobs=0, logprob_ids=[9, 8])
    (score,) = read_token_scores(output.new_logprobs, 2, are_named=True)
    assert (score.top_ids, score.top_logprobs) == ([9, 8], [-1.0, LOWEST_LOGPROB])


@pytest.mark.parametrize(
    ("word", "number"), [("stop", 0), ("length", 1), ("abort", 2), ("error", 3), ("repetition", 4), ("new word", 3)]
)
def test_reads_every_finish_reason(word: str, number: int):
    assert read_choice({"token_ids": [9], "finish_reason": word}).finish_reason == number


def test_bounds_follow_from_the_servers_limit_of_log_probabilities():
    bounds = attached_bounds(20, 640, 2)
    assert (bounds["logprobs"], bounds["beam_width"], bounds["named_logprobs"]) == ((0, 20), (1, 8), (0, 19))
    assert "logprobs" not in attached_bounds(640, 640, 2)


def test_chooses_the_model_by_name_unless_there_is_only_one():
    first, second = AttachedModelCard("a", "/x", None, 99), AttachedModelCard("b", "/y", None, 99)
    assert choose_card([first, second], SETTINGS, "b") is second
    assert choose_card([first, AttachedModelCard("alias", "/x", None, 99)], SETTINGS, "b") is first
    with pytest.raises(AttachRefused, match="serves a, b, but not c: choose one with --model NAME=MODEL"):
        choose_card([first, second], SETTINGS, "c")


def test_adapters_belong_to_a_model_under_all_its_names():
    first, alias, other = (AttachedModelCard("a", "/x"), AttachedModelCard("alias", "/x"), AttachedModelCard("b", "/y"))
    adapters = [
        AttachedModelCard("one", "/1", "a"),
        AttachedModelCard("two", "/2", "alias"),
        AttachedModelCard("three", None, "b"),
    ]
    cards = [
        first,
        alias,
        other,
        *adapters,
        AttachedModelCard("four", "/4", "one"),
        AttachedModelCard("five", "/x", "gone"),
    ]
    for card in (first, alias):
        assert list_adapters(cards, card) == {"one": "/1", "two": "/2"}
    assert list_adapters(cards, other) == {"three": ""}


def test_reads_the_metrics_of_all_engines():
    page = b"""# HELP vllm:kv_cache_usage_perc x
vllm:kv_cache_usage_perc{engine="0",model_name="a}b\\""} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="a"} 1.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:num_requests_waiting{engine="1"} 3.0
vllm:num_requests_waiting_by_reason{reason="capacity"} 77
vllm:prefix_cache_queries_total{engine="0"} 100.0
vllm:prefix_cache_hits_total 40.0
vllm:num_preemptions_total NaN
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="10"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="10"} 1.0
"""
    metrics = read_server_metrics(page)
    assert (metrics.num_waiting_reqs, metrics.kv_cache_usage, metrics.preemptions) == (5, 0.75, 0)
    assert metrics.prefix_cache_stats == CacheTotals(100, 40)
    assert (metrics.kv_pages, metrics.block_size) == (20, 16)
    assert read_server_metrics(b"").kv_pages == 0


def test_counters_grow_by_the_counts_of_the_server():
    totals = ServerTotals(20)
    for queries in (100, 130, 10, 15):  # it was started again after the second
        totals.record_server(
            read_server_metrics(b"vllm:prefix_cache_queries_total %d\nvllm:kv_cache_usage_perc 0.5" % queries)
        )
    stats = totals.collect_stats(computing=0, waiting=0)
    assert (stats.prefix_queries, stats.used_pages) == (35, 10)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b'{"error": {"message": "no\\n way"}}', "no way"),
        (b'{"message": "older form"}', "older form"),
        (b"<html>", "status 500"),
        (b'{"error": null}', "status 500"),
    ],
)
def test_finds_the_message_of_an_error(answer: bytes, text: str):
    assert error_text(500, answer) == text


def test_pages_are_kept_and_fetched_by_the_servers():
    kept = body(lease=True)
    assert kept["kv_transfer_params"]["do_remote_decode"] is True and not kept["stream"]
    answer = TokenAnswer([ChoiceChunk([7], "length")], kv_transfer_params={"remote_port": 5})
    output = read_choice_output("c", request(), answer)
    assert output is not None and output.kv_transfer_params == {"remote_port": 5}
    way = Continuation(page_move={"do_remote_prefill": True})
    fetched = write_choice(request(), 0, way, model="m", max_logprobs=20)
    assert fetched["kv_transfer_params"] == {"do_remote_prefill": True} and fetched["stream"]
    assert "kv_transfer_params" not in body()


def test_adapters_take_the_place_of_the_model():
    assert body(adapter="one")["model"] == "one" and body()["model"] == "m"
    vector = request(adapter="one", pooling=PoolingOptions(normalize=False))
    assert write_pooling(vector, model="m")["model"] == "one"
    assert write_pooling(vector, model="m")["use_activation"] is False
