"""Features that an engine lacks, and values outside of its bounds: every API refuses them in its own shape.

Nothing of such a request reaches the engine.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.http_client import MODEL_INFO, Answer

from parley.engine.scripted_engine import echo_prompt
from parley.errors import InvalidValue, Unsupported
from parley.serving.engine_features import (
    BOUNDED_VALUES,
    FEATURE_FIELDS,
    check_engine_bounds,
    check_engine_features,
)
from parley.types import (
    ALL_ENGINE_FEATURES,
    BeamOptions,
    ChatPrompt,
    EngineBound,
    EngineFeature,
    EngineRequest,
    Grammar,
    Message,
    ModelInfo,
    OutputOptions,
    PoolingOptions,
    Request,
    SamplingOptions,
    StopConditions,
    TextPrompt,
)

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
STRICT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}

# for each feature, requests that use it and no other one, with the field that each uses it by
FEATURE_USES: dict[EngineFeature, list[tuple[dict[str, Any], str]]] = {
    "top_k": [({"sampling": SamplingOptions(top_k=2)}, "top_k")],
    "min_p": [({"sampling": SamplingOptions(min_p=0.1)}, "min_p")],
    "typical_p": [({"sampling": SamplingOptions(typical_p=0.5)}, "typical_p")],
    "repetition_penalty": [({"sampling": SamplingOptions(repetition_penalty=1.1)}, "repetition_penalty")],
    "presence_penalty": [({"sampling": SamplingOptions(presence_penalty=0.1)}, "presence_penalty")],
    "frequency_penalty": [({"sampling": SamplingOptions(frequency_penalty=0.1)}, "frequency_penalty")],
    "penalty_window": [({"sampling": SamplingOptions(penalty_window=3)}, "repeat_last_n")],
    "logit_bias": [({"sampling": SamplingOptions(logit_bias={1: 1.0})}, "logit_bias")],
    "allowed_tokens": [({"sampling": SamplingOptions(allowed=[1])}, "allowed_token_ids")],
    "banned_tokens": [
        ({"sampling": SamplingOptions(banned=[[1]])}, "bad_words"),
        ({"banned_words": ["a"]}, "bad_words"),
    ],
    "no_repeat_ngram": [({"sampling": SamplingOptions(no_repeat_ngram=2)}, "no_repeat_ngram_size")],
    "watermark": [({"sampling": SamplingOptions(watermark=True)}, "watermark")],
    "min_tokens": [({"stop_conditions": StopConditions(min_tokens=1)}, "min_tokens")],
    "beam_search": [({"beam": BeamOptions(2, field="beam_width")}, "beam_width")],
    "beam_edits": [
        ({"beam": BeamOptions(2), "sampling": SamplingOptions(logit_bias={1: 1.0})}, "logit_bias"),
        ({"beam": BeamOptions(2), "grammar": Grammar("regex", "a", field="guided_regex")}, "guided_regex"),
    ],
    "logprobs": [({"output_options": OutputOptions(logprobs=0)}, "logprobs"), ({"best_of": 2}, "best_of")],
    "named_logprobs": [({"output_options": OutputOptions(logprob_ids=[1])}, "logprob_token_ids")],
    "prompt_logprobs": [({"output_options": OutputOptions(prompt_logprobs=1)}, "prompt_logprobs")],
    "grammar": [
        ({"grammar": Grammar("regex", "a", field="guided_regex")}, "guided_regex"),
        ({"prompts": [ChatPrompt([Message("user", "a")], tools=[TOOL], tool_choice="required")]}, "tool_choice"),
        ({"prompts": [ChatPrompt([Message("user", "a")], tools=[STRICT_TOOL])]}, "tools"),
    ],
    "limited_grammar": [
        (
            {"sampling": SamplingOptions(allowed=[1]), "grammar": Grammar("regex", "a", field="guided_regex")},
            "allowed_token_ids",
        ),
    ],
    "thinking_budget": [({"thinking_budget": 5}, "thinking_budget")],
    "adapters": [({"adapter": "a"}, "adapter")],
    "cache_salt": [({"cache_salt": "a"}, "cache_salt")],
}
USED_WITH: dict[EngineFeature, set[EngineFeature]] = {
    "beam_edits": {"beam_search", "logit_bias", "grammar"},
    "limited_grammar": {"allowed_tokens", "grammar"},
}
PLAIN_PROMPTS = [TextPrompt("a"), ChatPrompt([Message("user", "a")], tools=[TOOL]), ChatPrompt([Message("user", "a")])]


def engine_without(*features: EngineFeature) -> ModelInfo:
    return msgspec.structs.replace(MODEL_INFO, engine="other 1.2", features=ALL_ENGINE_FEATURES - set(features))


def make_request(changes: dict[str, Any]) -> Request:
    return Request(**{"id": "a", "model": "m", "prompts": PLAIN_PROMPTS, **changes})


def error_object(answer: Answer) -> dict[str, Any]:
    """Return the error in an answer, or in the only event of a stream."""
    return msgspec.json.decode(answer.body.removeprefix(b"data:"))


def test_table_covers_every_feature_that_a_request_can_use():
    assert FEATURE_FIELDS.keys() == FEATURE_USES.keys() == ALL_ENGINE_FEATURES - {"page_transfer"}


@given(st.sampled_from(sorted(FEATURE_USES)), st.sets(st.sampled_from(sorted(ALL_ENGINE_FEATURES))), st.data())
def test_request_is_refused_exactly_if_the_engine_lacks_a_feature(used, lacking, data):
    changes, field = data.draw(st.sampled_from(FEATURE_USES[used]))
    lacking = lacking - USED_WITH.get(used, set())
    for plain in ({}, {"beam": BeamOptions(1)}):
        check_engine_features(make_request(plain), engine_without(*ALL_ENGINE_FEATURES))
    check_engine_features(make_request(changes), MODEL_INFO)
    check_engine_features(make_request(changes), engine_without(*lacking - {used}))
    with pytest.raises(Unsupported, match=f"'{field}' is not available with the engine other 1.2") as caught:
        check_engine_features(make_request(changes), engine_without(*lacking | {used}))
    assert caught.value.field == field and caught.value.status == 400


def test_model_info_passes_the_wire_with_its_features():
    info = engine_without("grammar")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=ModelInfo) == info
    assert "grammar" not in info.features and MODEL_INFO.features == ALL_ENGINE_FEATURES


@pytest.mark.parametrize("stream", [False, True])
async def test_apis_refuse_what_the_engine_lacks_before_it_is_queued(serve, stream):
    seen: list[EngineRequest] = []

    def note_request(request: EngineRequest, index: int) -> list[int]:
        seen.append(request)
        return echo_prompt(request, index)

    server = await serve(note_request, info=engine_without("typical_p", "min_p", "grammar", "beam_search", "top_k"))
    answer = await server.post("/v1/chat/completions", CHAT | {"typical_p": 0.5, "stream": stream})
    assert (answer.status, answer.error["param"]) == (400, "typical_p")
    assert answer.error["message"] == "'typical_p' is not available with the engine other 1.2."
    required = CHAT | {"tools": [TOOL], "tool_choice": "required", "stream": stream}
    answer = await server.post("/v1/chat/completions", required)
    assert (answer.status, answer.error["param"]) == (400, "tool_choice")
    answer = await server.post("/vllm/v1/completions", {"model": "tiny", "prompt": "a", "min_p": 0.5, "stream": stream})
    assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "BadRequestError", "min_p")
    path = "/generate_stream" if stream else "/generate"
    answer = await server.post("/tgi" + path, {"inputs": "a", "parameters": {"typical_p": 0.5, "do_sample": True}})
    assert answer.status == (200 if stream else 422)  # streams of the original report the error as an event
    assert error_object(answer) == {
        "error": "Input validation error: 'typical_p' is not available with the engine other 1.2.",
        "error_type": "validation",
    }
    path = "/v2/models/tiny/generate" + "_stream" * stream
    answer = await server.post("/triton" + path, {"text_input": "a", "beam_width": 2, "parameters": {}})
    assert answer.status == 400 and error_object(answer) == {
        "error": "'beam_width' is not available with the engine other 1.2."
    }
    answer = await server.post("/mindie" + path, {"text_input": "a", "parameters": {"top_k": 2, "do_sample": True}})
    assert (
        answer.status == 422 and "'top_k' is not available with the engine other 1.2." in error_object(answer)["error"]
    )
    assert not seen and server.engine.stats.steps == 0 and server.model.used_slots == 0
    assert (await server.post("/v1/chat/completions", CHAT | {"presence_penalty": 0.5})).status == 200
    assert seen
    await server.wait_until_idle()


# for each bound, a range and requests just outside of it, each with the end of the sentence that refuses it
IDS = list(range(9))
BOUND_USES: dict[EngineBound, tuple[tuple[float, float], list[tuple[dict[str, Any], str]]]] = {
    "temperature": ((0.01, 2), [
        ({"sampling": SamplingOptions(temperature=2.5)}, "'temperature' must be at least 0.01 and at most 2 {}2.5."),
        ({"sampling": SamplingOptions(temperature=0.0)}, "'temperature' must be at least 0.01 and at most 2 {}0."),
    ]),
    "top_k": ((-math.inf, 1), [({"sampling": SamplingOptions(top_k=2)}, "'top_k' must be at most 1 {}2.")]),
    "repetition_penalty": ((0.5, math.inf), [
        ({"sampling": SamplingOptions(repetition_penalty=0.25)}, "'repetition_penalty' must be at least 0.5 {}0.25."),
    ]),
    "presence_penalty": ((0, 2), [
        (
            {"sampling": SamplingOptions(presence_penalty=-1.0)},
            "'presence_penalty' must be at least 0 and at most 2 {}-1.",
        ),
    ]),
    "frequency_penalty": ((-1, 1), [
        (
            {"sampling": SamplingOptions(frequency_penalty=2.0)},
            "'frequency_penalty' must be at least -1 and at most 1 {}2.",
        ),
    ]),
    "logit_bias": ((-math.inf, 8), [
        (
            {"sampling": SamplingOptions(logit_bias=dict.fromkeys(IDS, 1.0))},
            "'logit_bias' must have at most 8 tokens {}9.",
        ),
    ]),
    "allowed_tokens": ((-math.inf, 8), [
        ({"sampling": SamplingOptions(allowed=IDS)}, "'allowed_token_ids' must have at most 8 tokens {}9."),
    ]),
    "banned_tokens": ((-math.inf, 1), [
        ({"sampling": SamplingOptions(banned=[[1], [2]])}, "'bad_words' must have at most 1 sequences {}2."),
        ({"banned_words": ["a", "b", "c"]}, "'bad_words' must have at most 1 sequences {}3."),
    ]),
    "stop_ids": ((-math.inf, 8), [
        ({"stop_conditions": StopConditions(ids=IDS)}, "'stop_ids' must have at most 8 tokens {}9."),
    ]),
    "max_tokens": ((1, 100000), [
        ({"stop_conditions": StopConditions(max_tokens=0)}, "'max_tokens' must be at least 1 and at most 100000 {}0."),
    ]),
    "n": ((1, 2), [({"n": 3}, "'n' must be at least 1 and at most 2 {}3."),
                   ({"best_of": 3}, "'best_of' must be at least 1 and at most 2 {}3.")]),
    "beam_width": ((1, 4), [
        ({"beam": BeamOptions(5, field="beam_width")}, "'beam_width' must be at least 1 and at most 4 {}5."),
    ]),
    "logprobs": ((0, 5), [
        ({"output_options": OutputOptions(logprobs=-1)}, "'top_logprobs' must be at least 0 and at most 5 {}-1."),
        ({"output_options": OutputOptions(logprobs=6)}, "'top_logprobs' must be at least 0 and at most 5 {}6."),
    ]),
    "named_logprobs": ((-math.inf, 8), [
        ({"output_options": OutputOptions(logprob_ids=IDS)}, "'logprob_token_ids' must have at most 8 tokens {}9."),
    ]),
    "prompt_logprobs": ((-math.inf, 1), [
        ({"output_options": OutputOptions(prompt_logprobs=2)}, "'prompt_logprobs' must be at most 1 {}2."),
    ]),
}  # fmt: skip


def engine_within(**bounds: tuple[float, float]) -> ModelInfo:
    return msgspec.structs.replace(MODEL_INFO, engine="other 1.2", bounds=bounds)


ALL_BOUNDS: dict[str, tuple[float, float]] = {bound: limits for bound, (limits, _) in BOUND_USES.items()}


def test_table_covers_every_bound():
    assert BOUNDED_VALUES.keys() == BOUND_USES.keys() == set(get_args(EngineBound))


@pytest.mark.parametrize("bound", BOUND_USES)
def test_value_is_refused_exactly_if_it_is_outside_of_its_bound(bound):
    limits, uses = BOUND_USES[bound]
    for changes, sentence in uses:
        request = make_request(changes)
        check_engine_bounds(request, engine_within(**{name: ALL_BOUNDS[name] for name in ALL_BOUNDS if name != bound}))
        value = BOUNDED_VALUES[bound](request)
        assert value is not None
        check_engine_features(request, engine_within(**{bound: (value.value, value.value)}))
        with pytest.raises(InvalidValue) as caught:
            check_engine_features(request, engine_within(**{bound: limits}))
        assert caught.value.message == sentence.format("with the engine other 1.2, but got ")
        assert (caught.value.field, caught.value.status) == (value.field, 400)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(engine_within(**{bound: limits})), type=ModelInfo).bounds


def test_bounds_leave_plain_requests_and_embeddings_alone():
    check_engine_features(make_request({}), engine_within(**ALL_BOUNDS))
    embedding = make_request({"pooling": PoolingOptions(), "stop_conditions": StopConditions(max_tokens=0)})
    check_engine_features(embedding, engine_within(**ALL_BOUNDS))


NARROW_BOUNDS: dict[EngineBound, tuple[float, float]] = {
    "max_tokens": (1, 6), "n": (-math.inf, 2), "logprobs": (-1, 3), "logit_bias": (-math.inf, 1),
    "stop_ids": (-math.inf, 1),
}  # fmt: skip
TOKENS = "be at least 1 and at most 6 {}7."
CHOICES = "be at most 2 {}3."
ALTERNATIVES = "be at least -1 and at most 3 {}4."
LISTED_TOKENS = "have at most 1 tokens {}2."
NAMED_CHAT = CHAT | {"model": "tiny"}
COMPLETION = {"model": "tiny", "prompt": "a", "max_tokens": 2}
TRITON_PATH = "/v2/models/tiny/generate"
SCORED = {"max_new_tokens": 2, "details": True, "top_n_tokens": 4}

# path, body, status, the field as the API calls it, and the rest of the sentence
REFUSALS: list[tuple[str, dict[str, Any], int, str, str]] = [
    ("/v1/chat/completions", CHAT | {"max_tokens": 7}, 400, "max_tokens", TOKENS),
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 4}, 400, "top_logprobs", ALTERNATIVES),
    ("/v1/chat/completions", CHAT | {"logit_bias": {"1": 1, "2": 1}}, 400, "logit_bias", LISTED_TOKENS),
    ("/v1/chat/completions", CHAT | {"n": 3}, 400, "n", CHOICES),
    ("/v1/completions", COMPLETION | {"logprobs": 4}, 400, "logprobs", ALTERNATIVES),
    ("/v1/completions", COMPLETION | {"n": 1, "best_of": 3}, 400, "best_of", CHOICES),
    ("/vllm/v1/chat/completions", NAMED_CHAT | {"stop_token_ids": [1, 2]}, 400, "stop_token_ids", LISTED_TOKENS),
    ("/vllm/v1/completions", COMPLETION | {"logprobs": 4}, 400, "logprobs", ALTERNATIVES),
    ("/tgi/generate", {"inputs": "a", "parameters": {"max_new_tokens": 7}}, 422, "max_new_tokens", TOKENS),
    ("/tgi/generate", {"inputs": "a", "parameters": SCORED}, 422, "top_n_tokens", ALTERNATIVES),
    ("/tgi/v1/chat/completions", NAMED_CHAT | {"max_tokens": 7}, 422, "max_tokens", TOKENS),
    ("/triton" + TRITON_PATH, {"text_input": "a", "max_tokens": 7}, 400, "max_tokens", TOKENS),
    ("/triton" + TRITON_PATH, {"text_input": "a", "n": 3, "max_tokens": 2}, 400, "n", CHOICES),
    ("/mindie" + TRITON_PATH, {"text_input": "a", "parameters": {"max_new_tokens": 7}}, 422, "max_new_tokens", TOKENS),
    ("/mindie/v1/chat/completions", NAMED_CHAT | {"max_tokens": 7}, 422, "max_tokens", TOKENS),
    ("/mindie/v1/completions", COMPLETION | {"logprobs": 4}, 422, "logprobs", ALTERNATIVES),
    ("/databricks/serving-endpoints/tiny/invocations", CHAT | {"max_tokens": 7}, 400, "max_tokens", TOKENS),
]  # fmt: skip


@pytest.fixture
async def narrow_server(serve):
    """A server whose engine has narrow bounds, and the requests that reach it."""
    requests: list[EngineRequest] = []

    def note_request(request: EngineRequest, index: int) -> list[int]:
        requests.append(request)
        return echo_prompt(request, index)

    return await serve(note_request, info=engine_within(**NARROW_BOUNDS)), requests


async def test_every_api_refuses_values_outside_of_the_engines_bounds(narrow_server):
    server, requests = narrow_server
    for path, body, status, field, limits in REFUSALS:
        answer = await server.post(path, body)
        sentence = f"'{field}' must {limits.format('with the engine other 1.2, but got ')}"
        assert (answer.status, sentence in answer.body.decode()) == (status, True), (path, answer)
    assert not requests and server.engine.stats.steps == 0 and server.model.used_slots == 0


async def test_bounds_are_errors_in_the_shape_of_the_api(narrow_server):
    server, _ = narrow_server
    answer = await server.post("/v1/completions", COMPLETION | {"logprobs": 4, "stream": True})
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "logprobs", "invalid_value")
    answer = await server.post("/tgi/generate_stream", {"inputs": "a", "parameters": {"max_new_tokens": 7}})
    sentence = "'max_new_tokens' must be at least 1 and at most 6 with the engine other 1.2, but got 7."
    assert error_object(answer) == {"error": f"Input validation error: {sentence}", "error_type": "validation"}


async def test_output_without_a_limit_ends_at_the_engines_bound(narrow_server):
    server, requests = narrow_server
    answer = await server.post("/v1/chat/completions", CHAT | {"n": 2, "logprobs": True, "top_logprobs": 3})
    assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 12
    assert {request.max_tokens for request in requests} == {6}
    await server.wait_until_idle()


def test_vectors_of_tokens_have_a_width_of_their_own():
    """Linear layers after the pooling make the vectors of texts wider or narrower, and leave those of tokens."""
    for width, token_width in ((96, 64), (32, 64)):
        info = msgspec.structs.replace(MODEL_INFO, dimensions=width, token_vectors=True, token_dimensions=token_width)
        for task, limit in (("embed", width), ("token_embed", token_width)):
            for wanted in (limit, limit + 1):
                pooling = PoolingOptions(dimensions=wanted, task=task)
                request = Request(id="r", model="m", prompts=[TextPrompt("a")], pooling=pooling)
                if wanted == limit:
                    check_engine_features(request, info)
                    continue
                with pytest.raises(InvalidValue, match=f"have {limit}, but {wanted}"):
                    check_engine_features(request, info)
