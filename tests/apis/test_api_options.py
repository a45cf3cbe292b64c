"""The operator's options for OpenAI's and vLLM's APIs, over the wire: the flags that vLLM has under these names."""

import pytest
from support.http_client import HELLO_CHAT

from parley.dialects.request_context import ApiOptions

BOTH_APIS = pytest.mark.parametrize("prefix", ["", "/vllm"])
HELLO_TEXT = {"model": "tiny", "prompt": "Hello there", "max_tokens": 4}
PATHS = {"/v1/chat/completions": HELLO_CHAT, "/v1/completions": HELLO_TEXT}
METRIC_NAMES = ["time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"]


def ask_logprobs(path, count):
    """Return the members that ask for ``count`` alternatives per token."""
    return {"logprobs": True, "top_logprobs": count} if "chat" in path else {"logprobs": count}


def listed_names(path, choice):
    """Return the tokens of a choice, and the alternatives of its first, as its log-probabilities name them."""
    if "chat" not in path:
        return choice["logprobs"]["tokens"], list(choice["logprobs"]["top_logprobs"][0])
    content = choice["logprobs"]["content"]
    return [logprob["token"] for logprob in content], [
        top_logprob["token"] for top_logprob in content[0]["top_logprobs"]
    ]


@BOTH_APIS
@pytest.mark.parametrize("path", PATHS)
async def test_max_logprobs_replaces_the_limit_of_the_api(serve, prefix, path):
    server = await serve(api_options=ApiOptions(max_logprobs=30))
    answer = await server.post(prefix + path, PATHS[path] | ask_logprobs(path, 30))
    assert answer.status == 200 and len(listed_names(path, answer.json["choices"][0])[1]) == 30
    for count in (31, -1):
        refused = await server.post(prefix + path, PATHS[path] | ask_logprobs(path, count))
        assert refused.status == 400 and "30" in refused.error["message"], count
        assert refused.error["param"] in ("logprobs", "top_logprobs")
    assert (await server.post(prefix + path, PATHS[path] | {"prompt_logprobs": 31})).status == 400


@BOTH_APIS
@pytest.mark.parametrize("path", PATHS)
async def test_max_logprobs_of_minus_one_grants_the_whole_vocabulary(serve, prefix, path):
    server = await serve(api_options=ApiOptions(max_logprobs=-1))
    by_id = {"return_tokens_as_token_ids": True}  # several tokens have the same text
    for count, listed in ((-1, 640), (640, 640), (100, 100)):
        answer = await server.post(prefix + path, PATHS[path] | ask_logprobs(path, count) | by_id)
        assert answer.status == 200 and len(listed_names(path, answer.json["choices"][0])[1]) == listed, count
    for count in (641, 2**31 - 1, -2):
        refused = await server.post(prefix + path, PATHS[path] | ask_logprobs(path, count))
        assert refused.status == 400, count
    many = await server.post(prefix + path, PATHS[path] | ask_logprobs(path, 600) | {"max_tokens": 4000})
    assert many.status == 400 and "at most" in many.error["message"]
    await server.wait_until_idle()


@BOTH_APIS
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("limit", "granted"), [(639, False), (640, True), (5000, True)])
async def test_max_logprobs_of_the_whole_vocabulary_grants_minus_one(serve, prefix, path, limit, granted):
    server = await serve(api_options=ApiOptions(max_logprobs=limit))
    for members in (ask_logprobs(path, -1), {"prompt_logprobs": -1}):
        answer = await server.post(prefix + path, PATHS[path] | members)
        assert answer.status == (200 if granted else 400), members
    if granted:
        by_id = ask_logprobs(path, -1) | {"return_tokens_as_token_ids": True}
        answer = await server.post(prefix + path, PATHS[path] | by_id)
        assert len(listed_names(path, answer.json["choices"][0])[1]) == 640


@pytest.mark.parametrize(("limit", "status"), [(639, 400), (640, 200)])
async def test_token_ids_may_have_scores_of_the_whole_vocabulary(serve, limit, status):
    server = await serve(api_options=ApiOptions(max_logprobs=limit))
    for member in ("logprobs", "prompt_logprobs"):
        body = {"model": "tiny", "token_ids": [5, 6], "sampling_params": {"max_tokens": 1, member: -1}}
        assert (await server.post("/vllm/inference/v1/generate", body)).status == status, member


async def test_vllm_refuses_logprobs_above_the_limit_with_its_own_sentence(serve):
    server = await serve(api_options=ApiOptions(max_logprobs=5))
    sentence = "Requested sample logprobs of 6, which is greater than max allowed: 5 (parameter=logprobs, value=6)"
    whole = await server.post("/vllm/v1/completions", HELLO_TEXT | {"logprobs": 6})
    assert (whole.status, whole.error["message"]) == (400, sentence)
    (event,) = (await server.post("/vllm/v1/completions", HELLO_TEXT | {"logprobs": 6, "stream": True})).events
    assert event["error"]["message"] == sentence


@BOTH_APIS
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("members", [{}, {"stream_options": {"include_usage": False}}])
async def test_forced_usage_is_in_every_chunk(serve, prefix, path, members):
    server = await serve(api_options=ApiOptions(force_include_usage=True))
    events = (await server.post(prefix + path, PATHS[path] | {"stream": True} | members)).events
    assert events[-1]["choices"] == [] and all(event["usage"] is not None for event in events)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] > 0
    unasked = (await (await serve()).post(prefix + path, PATHS[path] | {"stream": True} | members)).events
    assert not any(event.get("usage") for event in unasked)
    misplaced = await server.post(prefix + path, PATHS[path] | {"stream_options": {"include_usage": True}})
    assert misplaced.status == 400


@BOTH_APIS
@pytest.mark.parametrize("path", PATHS)
async def test_tokens_are_named_by_id_unless_the_request_says_otherwise(serve, prefix, path):
    server = await serve(api_options=ApiOptions(return_tokens_as_token_ids=True))
    body = PATHS[path] | ask_logprobs(path, 2)
    for members, by_id in ({}, True), ({"return_tokens_as_token_ids": False}, False):
        tokens, alternatives = listed_names(path, (await server.post(prefix + path, body | members)).json["choices"][0])
        assert [name.startswith("token_id:") for name in tokens + alternatives] == [by_id] * len(tokens + alternatives)


@BOTH_APIS
@pytest.mark.parametrize("path", PATHS)
async def test_metrics_of_a_request_are_in_its_answer(serve, prefix, path):
    server = await serve(tick=0.002, api_options=ApiOptions(per_request_metrics=True))
    metrics = (await server.post(prefix + path, PATHS[path])).json["metrics"]
    assert metrics.pop("speculative_decoding") is None
    assert list(metrics) == METRIC_NAMES and all(value >= 0 for value in metrics.values())
    assert metrics["generation_time_ms"] >= metrics["mean_itl_ms"] > 0
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = (await server.post(prefix + path, PATHS[path] | options)).events
    assert list(last["metrics"])[:5] == METRIC_NAMES and not any("metrics" in chunk for chunk in chunks)
    without_usage = (await server.post(prefix + path, PATHS[path] | {"stream": True})).events
    assert not any("metrics" in chunk for chunk in without_usage)
    several = (await server.post(prefix + path, PATHS[path] | {"n": 2, "temperature": 1})).json
    assert several.get("metrics") is None
    two_prompts = (await server.post(prefix + "/v1/completions", HELLO_TEXT | {"prompt": ["a", "b"]})).json
    assert two_prompts.get("metrics") is None
    single = (await server.post(prefix + path, PATHS[path] | {"max_tokens": 1})).json["metrics"]
    assert single["mean_itl_ms"] is None and single["generation_time_ms"] == 0


@BOTH_APIS
async def test_metrics_are_given_only_on_request_of_the_operator(serve, prefix):
    server = await serve()
    answer = (await server.post(prefix + "/v1/chat/completions", HELLO_CHAT)).json
    assert ("metrics" in answer, answer.get("metrics")) == (prefix == "/vllm", None)


async def test_databricks_does_not_follow_the_options(serve):
    options = ApiOptions(
        max_logprobs=1, force_include_usage=True, return_tokens_as_token_ids=True, per_request_metrics=True
    )
    bodies = HELLO_CHAT | {"logprobs": True, "top_logprobs": 2}, HELLO_CHAT | {"stream": True}
    answers = []
    for server in (await serve(), await serve(api_options=options)):
        whole, stream = [await server.post("/databricks/serving-endpoints/tiny/invocations", body) for body in bodies]
        answers.append((whole.status, sorted(whole.json), whole.json["choices"], [sorted(e) for e in stream.events]))
    assert answers[0] == answers[1] and answers[0][0] == 200
