"""Features that an engine lacks: every API refuses them in its own shape, and nothing reaches the engine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.http_client import MODEL_INFO, Answer

from parley.engine.fake import echo_prompt
from parley.errors import Unsupported
from parley.serving.engine_features import FEATURE_FIELDS, check_engine_features
from parley.types import (
    ALL_ENGINE_FEATURES,
    BeamOptions,
    Chat,
    EngineFeature,
    EngineRequest,
    Grammar,
    Message,
    ModelInfo,
    OutputOptions,
    Request,
    Sampling,
    StopConditions,
    Text,
)

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
STRICT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}

# for each feature, requests that use it and no other one, with the field that each uses it by
FEATURE_USES: dict[EngineFeature, list[tuple[dict[str, Any], str]]] = {
    "top_k": [({"sampling": Sampling(top_k=2)}, "top_k")],
    "min_p": [({"sampling": Sampling(min_p=0.1)}, "min_p")],
    "typical_p": [({"sampling": Sampling(typical_p=0.5)}, "typical_p")],
    "repetition_penalty": [({"sampling": Sampling(repetition_penalty=1.1)}, "repetition_penalty")],
    "presence_penalty": [({"sampling": Sampling(presence_penalty=0.1)}, "presence_penalty")],
    "frequency_penalty": [({"sampling": Sampling(frequency_penalty=0.1)}, "frequency_penalty")],
    "logit_bias": [({"sampling": Sampling(logit_bias={1: 1.0})}, "logit_bias")],
    "allowed_tokens": [({"sampling": Sampling(allowed=[1])}, "allowed_token_ids")],
    "banned_tokens": [({"sampling": Sampling(banned=[[1]])}, "bad_words"), ({"banned_words": ["a"]}, "bad_words")],
    "no_repeat_ngram": [({"sampling": Sampling(no_repeat_ngram=2)}, "no_repeat_ngram_size")],
    "watermark": [({"sampling": Sampling(watermark=True)}, "watermark")],
    "min_tokens": [({"stop_conditions": StopConditions(min_tokens=1)}, "min_tokens")],
    "beam_search": [({"beam": BeamOptions(2, field="beam_width")}, "beam_width")],
    "logprobs": [({"output_options": OutputOptions(logprobs=0)}, "logprobs"), ({"best_of": 2}, "best_of")],
    "named_logprobs": [({"output_options": OutputOptions(logprob_ids=[1])}, "logprob_token_ids")],
    "prompt_logprobs": [({"output_options": OutputOptions(prompt_logprobs=1)}, "prompt_logprobs")],
    "grammar": [
        ({"grammar": Grammar("regex", "a", field="guided_regex")}, "guided_regex"),
        ({"prompts": [Chat([Message("user", "a")], tools=[TOOL], tool_choice="required")]}, "tool_choice"),
        ({"prompts": [Chat([Message("user", "a")], tools=[STRICT_TOOL])]}, "tools"),
    ],
    "thinking_budget": [({"thinking_budget": 5}, "thinking_budget")],
    "adapters": [({"adapter": "a"}, "adapter")],
    "cache_salt": [({"cache_salt": "a"}, "cache_salt")],
}
PLAIN_PROMPTS = [Text("a"), Chat([Message("user", "a")], tools=[TOOL]), Chat([Message("user", "a")])]


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

    served = await serve(note_request, info=engine_without("typical_p", "min_p", "grammar", "beam_search", "top_k"))
    answer = await served.post("/v1/chat/completions", CHAT | {"typical_p": 0.5, "stream": stream})
    assert (answer.status, answer.error["param"]) == (400, "typical_p")
    assert answer.error["message"] == "'typical_p' is not available with the engine other 1.2."
    required = CHAT | {"tools": [TOOL], "tool_choice": "required", "stream": stream}
    answer = await served.post("/v1/chat/completions", required)
    assert (answer.status, answer.error["param"]) == (400, "tool_choice")
    answer = await served.post("/vllm/v1/completions", {"model": "tiny", "prompt": "a", "min_p": 0.5, "stream": stream})
    assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "BadRequestError", "min_p")
    path = "/generate_stream" if stream else "/generate"
    answer = await served.post("/tgi" + path, {"inputs": "a", "parameters": {"typical_p": 0.5, "do_sample": True}})
    assert answer.status == (200 if stream else 422)  # streams of the original report the error as an event
    assert error_object(answer) == {
        "error": "Input validation error: 'typical_p' is not available with the engine other 1.2.",
        "error_type": "validation",
    }
    path = "/v2/models/tiny/generate" + "_stream" * stream
    answer = await served.post("/triton" + path, {"text_input": "a", "beam_width": 2, "parameters": {}})
    assert answer.status == 400 and error_object(answer) == {
        "error": "'beam_width' is not available with the engine other 1.2."
    }
    answer = await served.post("/mindie" + path, {"text_input": "a", "parameters": {"top_k": 2, "do_sample": True}})
    assert (
        answer.status == 422 and "'top_k' is not available with the engine other 1.2." in error_object(answer)["error"]
    )
    assert not seen and served.engine.stats.steps == 0 and served.model.used_slots == 0
    assert (await served.post("/v1/chat/completions", CHAT | {"presence_penalty": 0.5})).status == 200
    assert seen
    await served.idle()
