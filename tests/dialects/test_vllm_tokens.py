"""vLLM's route from tokens to tokens, and rendered prompts: reading of bodies, refusals, exact bytes of answers.

The expected bytes were written by the classes of vLLM 0.32.0 itself (``GenerateRequest``, ``GenerateTokensResponse``
and so on), but for the count of cached tokens, which that server has only with ``--enable-prompt-tokens-details``.
"""

import json
from dataclasses import replace
from typing import Any

import pytest

from parley.dialects.render_reply import RenderedPrompt
from parley.dialects.request_context import ApiOptions, RequestContext
from parley.dialects.vllm.error_answers import vllm_error_answer
from parley.dialects.vllm.token_routes import derender_readers as derender
from parley.dialects.vllm.token_routes import render, token_generation
from parley.errors import BadRequest, EngineError, Unsupported
from parley.types import (
    ChoiceDelta,
    ChoiceDone,
    EngineOutput,
    Grammar,
    PromptAccepted,
    PromptScored,
    RepetitionPattern,
    TokenInfo,
    TokenScore,
    TokensPrompt,
    ToolCallDelta,
    Usage,
)

JSON = {b"content-type": b"application/json"}
CONTEXT = RequestContext("0123456789abcdef0123456789abcdef", 1700000000, "fp_1", context_length=256, headers=JSON)
ID = "generate-tokens-mine"
USAGE = Usage(prompt_tokens=2, completion_tokens=2, cached_tokens=0)
NULLS = b'"routed_experts":null,"sampling_mask":null,"weight_versions":null'


def read_tokens(params: dict[str, Any] | None = None, context: RequestContext = CONTEXT, **members: Any):
    body = {"token_ids": [5, 6], "sampling_params": params or {}, "request_id": "mine", "model": "tiny"} | members
    return token_generation.read_token_request(json.dumps(body).encode(), context)


def refusal(params: dict[str, Any] | None = None, **members: Any) -> dict[str, Any]:
    with pytest.raises(BadRequest) as caught:
        read_tokens(params, **members)
    answer = vllm_error_answer(caught.value)
    assert answer.status == 400
    return json.loads(answer.body)["error"]


def token(token_id: int, logprob: float = -0.5, rank: int = 1, top: list[TokenInfo] | None = None) -> TokenInfo:
    return TokenInfo(token_id, chr(96 + token_id), bytes([96 + token_id]), logprob, rank, top or [])


# -- bodies


def test_vllm_tokens_need_only_ids_and_sampling_params():
    request = read_tokens().request
    assert request.prompts == [TokensPrompt([5, 6], None)]
    stop = request.stop_conditions
    assert (request.n, request.stream, stop.max_tokens, request.sampling.temperature) == (1, False, None, 1.0)
    assert request.output_options.unparsed and request.output_options.tokens_at_once and stop.reserved_tokens == 1
    advice = {"max_new_tokens": 64, "temperature": 0.5}  # of it only the limit applies, as in the original
    request = read_tokens(context=replace(CONTEXT, generation_defaults=advice)).request
    assert (request.stop_conditions.max_tokens, request.sampling.temperature) == (64, 1.0)


def test_vllm_sampling_params_reach_the_request():
    request = read_tokens(
        {"n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": -1, "presence_penalty": 1,
         "frequency_penalty": -1, "repetition_penalty": 1.1, "stop": ["a"] * 9, "stop_token_ids": [3], "max_tokens": 99,
         "min_tokens": 2, "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
         "logprobs": 2, "logprob_token_ids": [3, 4], "prompt_logprobs": 1, "logit_bias": {"3": 1.0},
         "allowed_token_ids": [1, 2], "bad_words": ["x"], "stream_interval": 3, "flat_logprobs": True,
         "repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 2}, "extra_args": {"a": 1},
         "structured_outputs": {"regex": "a"}, "watermarking": True, "output_kind": 2, "skip_clone": True,
         "prompt_logprob_start": 0, "thinking_token_budget": -1},
        cache_salt="s", priority=3, reasoning_ended=True, token_offsets=None,
    ).request  # fmt: skip
    sampling, stop, options = request.sampling, request.stop_conditions, request.output_options
    assert (request.n, request.cache_salt, request.priority, request.banned_words) == (2, "s", 3, ["x"])
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (
        0.5, 0.9, 5, 0.1, None)  # fmt: skip
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.1)
    assert sampling.logit_bias == {3: 1.0} and sampling.allowed == [1, 2] and sampling.watermark
    assert (stop.strings, stop.ids, stop.max_tokens, stop.min_tokens) == (["a"] * 9, [3], 99, 2)
    assert stop.ignore_eos and stop.include_in_output and stop.repetition == RepetitionPattern(2, 3, 2)
    assert (options.logprobs, options.logprob_ids, options.prompt_logprobs) == (2, [3, 4], 1)
    assert not options.skip_special and options.stream_interval == 3
    assert request.grammar == Grammar("regex", "a", field="sampling_params.structured_outputs.regex")
    assert request.prompts == [TokensPrompt([5, 6], True)] and request.thinking_budget is None
    assert read_tokens({"thinking_token_budget": 0}).request.thinking_budget == 0
    assert read_tokens(reasoning_ended=False).request.prompts == [TokensPrompt([5, 6], False)]


def test_vllm_tokens_can_be_aborted_by_the_id_of_the_answer():
    assert read_tokens().request.cancel_ids == (ID, "mine")
    context = replace(CONTEXT, headers=JSON | {b"x-request-id": b"theirs"})
    assert read_tokens(context=context).request.cancel_ids == ("generate-tokens-theirs", "theirs")
    aborts = token_generation.read_abort_requests(b'{"request_ids":["a","b"]}', CONTEXT)
    assert (aborts.labels, aborts.answer.status, aborts.answer.body) == ({"a", "b"}, 200, b"")
    assert token_generation.read_abort_requests(b'{"request_ids":"a"}', CONTEXT).labels == {"a"}
    with pytest.raises(BadRequest, match="Missing 'request_ids' in request body"):
        token_generation.read_abort_requests(b"{}", CONTEXT)


REFUSALS: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # parameters, other members, part of the message
    ({}, {"token_ids": []}, "'type': 'too_short', 'loc': 'body.token_ids', 'msg': 'List should have at least 1 item"),
    ({}, {"token_ids": None}, "'loc': 'body.token_ids', 'msg': 'Field required'"),
    ({}, {"token_ids": [-1]}, "'loc': 'body.token_ids.0'"),
    ({}, {"sampling_params": None}, "'loc': 'body.sampling_params', 'msg': 'Field required'"),
    ({"temperature": 3}, {}, "temperature must be in [0, 2], got 3.0. (parameter=temperature, value=3.0)"),
    ({"n": 0}, {}, "n must be at least 1, got 0."),
    ({"n": 2, "temperature": 0}, {}, "n must be 1 when using greedy sampling, got 2."),
    ({"top_p": 0}, {}, "top_p must be in (0, 1], got 0.0. (parameter=top_p, value=0.0)"),
    ({"top_k": 1.5}, {}, "'loc': 'body.sampling_params.top_k'"),
    ({"max_tokens": 0}, {}, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"),
    ({"min_tokens": 9, "max_tokens": 2}, {}, "min_tokens must be less than or equal to max_tokens=2, got 9."),
    ({"stop": [""]}, {}, "stop cannot contain an empty string."),
    ({"stop": "a", "detokenize": False}, {}, "stop strings are only supported when detokenize is True."),
    ({"logprobs": 21}, {}, "Requested sample logprobs of 21, which is greater than max allowed: 20"),
    ({"logprobs": 1, "logprob_token_ids": [1, 2]}, {}, "Got logprobs=1, len(logprob_token_ids)=2."),
    ({"prompt_logprobs": 1}, {"stream": True}, "`prompt_logprobs` are not available when `stream=True`."),
    ({"detokenize": False}, {"output_mode": "text"}, "requires sampling_params.detokenize to be true"),
    ({}, {"output_mode": "x"}, "Input should be 'tokens' or 'text'"),
    ({}, {"cache_salt": "a@"}, "Parameter 'cache_salt' must be at most 128 characters"),
    ({"structured_outputs": {}}, {}, "You must use one kind of structured outputs constraint"),
]  # fmt: skip


@pytest.mark.parametrize(("params", "members", "sentence"), REFUSALS, ids=lambda value: str(value)[:40])
def test_vllm_tokens_refusals_use_original_wording(params, members, sentence):
    assert sentence in refusal(params, **members)["message"]


UNSUPPORTED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"features": {"mm_hashes": {}, "mm_placeholders": {}}}, "features"),
    ({}, {"content_parts": [{"type": "image_url", "url": "a"}]}, "content_parts"),
    ({"prompt_logprob_token_ids": [[1]]}, {}, "sampling_params.prompt_logprob_token_ids"),
    ({"trace_decode_token_ids": [1]}, {}, "sampling_params.trace_decode_token_ids"),
]


@pytest.mark.parametrize(("params", "members", "field"), UNSUPPORTED, ids=lambda value: str(value)[:40])
def test_vllm_tokens_refuse_by_name_what_the_engine_lacks(params, members, field):
    with pytest.raises(Unsupported) as caught:
        read_tokens(params, **members)
    assert caught.value.field == field
    assert read_tokens({"thinking_token_budget": -1}, features=None, content_parts=[], kv_transfer_params={})


TRANSFERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"kv_transfer_params": {"do_remote_decode": True}}),
    ({}, {"ec_transfer_params": {"a": 1}}),
    ({"extra_args": {"kv_transfer_params": {"a": 1}}}, {}),
]


@pytest.mark.parametrize(("params", "members"), TRANSFERS, ids=str)
def test_vllm_tokens_take_transfers_without_effect(params, members):
    assert read_tokens(params, **members).request == read_tokens().request
    for name in members:
        assert name in refusal({}, **{name: 5})["message"]


# -- answers

TOP = [token(1, -0.25, 1), token(2, -0.5, 2)]


def test_vllm_tokens_ignore_what_a_renderer_of_vllm_0_33_adds():
    """That context is for the parser of ``output_mode`` "derender", which is refused."""
    parse_context = {"tools": None, "tool_choice": "none", "chat_template_kwargs": {}, "history_tool_call_cnt": 0}
    assert read_tokens(parse_context=parse_context).request.prompts == [TokensPrompt([5, 6], None)]
    assert "'tokens' or 'text'" in refusal(parse_context=parse_context, output_mode="derender")["message"]


def test_vllm_tokens_answer_has_the_original_bytes():
    reply = read_tokens({"logprobs": 2})
    reply.request.model = "tiny"
    reply.add_events([PromptAccepted(0, [5, 6])])
    reply.add_events([ChoiceDelta(0, "b", tokens=[token(2, -0.5, 2, TOP)])])
    reply.add_events([ChoiceDelta(0, "", tokens=[token(3)]), ChoiceDone(0, "stop", USAGE)])
    first = (
        b'{"token_id":2,"logprob":-0.5,"rank":2,"top_logprobs":[{"token_id":2,"logprob":-0.5,"rank":2},'
        b'{"token_id":1,"logprob":-0.25,"rank":1}]}'
    )
    second = b'{"token_id":3,"logprob":-0.5,"rank":1,"top_logprobs":[{"token_id":3,"logprob":-0.5,"rank":1}]}'
    details = b'{"cached_tokens":0,"created_cache_tokens":null,"multimodal_tokens":null}'
    assert reply.render_body(USAGE) == (
        b'{"request_id":"generate-tokens-mine","model":"tiny","created":1700000000,"usage":{"prompt_tokens":2,'
        b'"total_tokens":4,"completion_tokens":2,"prompt_tokens_details":' + details + b',"completion_tokens_details":'
        b'null},"prompt_logprobs":null,"prompt_token_id_logprobs":null,"prompt_token_ids":null,"mm_placeholders":null,'
        b'"metrics":null,"kv_transfer_params":null,"ec_transfer_params":null,"output_mode":"tokens","choices":[{"index":'
        b'0,"finish_reason":"stop","stop_reason":null,"token_ids":[2,3],' + NULLS + b',"logprobs":{"content":['
        + first + b"," + second + b"]}}]}"
    )  # fmt: skip


def test_vllm_tokens_text_mode_adds_text_and_names_tokens():
    reply = read_tokens({"logprobs": 0, "prompt_logprobs": 0}, output_mode="text", return_token_ids=True)
    reply.add_events([PromptAccepted(0, [5, 6]), PromptScored(0, [TokenInfo(5, "e", b"e"), token(6)])])
    reply.add_events([ChoiceDelta(0, "b", tokens=[token(2, -0.5, 2, TOP)]), ChoiceDone(0, "stop", USAGE, stop=2)])
    answer = json.loads(reply.render_body(USAGE))
    (choice,) = answer["choices"]
    named = {"token": "b", "logprob": -0.5, "bytes": [98]}
    assert choice["logprobs"] == {"content": [named | {"top_logprobs": [named]}]}
    assert (choice["text"], choice["stop_reason"], answer["output_mode"]) == ("b", 2, "text")
    assert answer["prompt_token_ids"] == [5, 6]
    assert answer["prompt_logprobs"] == [None, {"6": {"logprob": -0.5, "rank": 1, "decoded_token": "f"}}]
    context = replace(CONTEXT, api_options=ApiOptions(return_tokens_as_token_ids=True))
    reply = read_tokens({"logprobs": 0}, context, output_mode="text")
    reply.add_events([ChoiceDelta(0, "b", tokens=[token(2)]), ChoiceDone(0, "stop", USAGE)])
    (scored,) = json.loads(reply.render_body(USAGE))["choices"][0]["logprobs"]["content"]
    assert (scored["token"], scored["bytes"]) == ("token_id:2", None)


def test_vllm_tokens_stream_has_the_original_bytes():
    options = {"include_usage": True, "continuous_usage_stats": True}
    plain, counted = read_tokens(stream=True), read_tokens(stream=True, stream_options=options, return_token_ids=True)
    events = [PromptAccepted(0, [5, 6]), ChoiceDelta(0, "", tokens=[token(1)])]
    choice = b'"choices":[{"index":0,"finish_reason":null,"stop_reason":null,"token_ids":[1],' + NULLS
    start = b'data: {"request_id":"generate-tokens-mine",'
    assert plain.render_chunk(events) == (
        start + b'"usage":null,"output_mode":"tokens",' + choice + b',"logprobs":null}]}\n\n'
    )
    usage = b'"usage":{"prompt_tokens":2,"total_tokens":3,"completion_tokens":1,'
    usage += b'"prompt_tokens_details":null,"completion_tokens_details":null},'
    assert counted.render_chunk(events) == (
        start + usage + b'"prompt_token_ids":[5,6],"output_mode":"tokens",' + choice + b',"logprobs":null}]}\n\n'
    )
    end = plain.render_chunk([ChoiceDone(0, "cancel", USAGE)])
    assert b'"finish_reason":"abort","stop_reason":null,"token_ids":[]' in end
    assert plain.render_chunk([ChoiceDelta(0, "text alone")]) == b""
    assert plain.finish_stream(USAGE) == b"data: [DONE]\n\n"
    assert counted.finish_stream(USAGE) == (
        start + b'"usage":{"prompt_tokens":2,"total_tokens":4,"completion_tokens":2,"prompt_tokens_details":'
        b'{"cached_tokens":0}},"output_mode":"tokens","choices":[]}\n\ndata: [DONE]\n\n'
    )
    assert plain.fail_stream(EngineError("broken")).endswith(b'"code": 500}}\n\ndata: [DONE]\n\n')


# -- rendered prompts


def test_vllm_rendered_chat_has_the_original_bytes():
    body = {
        "model": "m", "messages": [{"role": "user", "content": "a"}], "n": 2, "temperature": 0.5, "stop": ["a", "b"],
        "stop_token_ids": [3], "logprobs": True, "top_logprobs": 2, "seed": 5, "structured_outputs": {"regex": "a"},
        "logit_bias": {"3": 1.0}, "bad_words": ["x"], "request_id": "x",
    }  # fmt: skip
    reply = render.read_chat_rendering(json.dumps(body).encode(), CONTEXT)
    structured = (
        b'{"json":null,"regex":"a","choice":null,"grammar":null,"json_object":null,"disable_any_whitespace":false,'
        b'"disable_additional_properties":false,"whitespace_pattern":null,"structural_tag":null}'
    )
    params = (
        b'{"n":2,"temperature":0.5,"seed":5,"stop":["a","b"],"stop_token_ids":[3],"max_tokens":7,"logprobs":2,'
        b'"output_kind":2,"skip_clone":true,"structured_outputs":' + structured + b',"logit_bias":{"3":1.0},'
        b'"bad_words":["x"],"skip_reading_prefix_cache":false}'
    )
    rest = b'"model":"m","reasoning_ended":null,"reasoning_parser_kwargs":null,"return_token_ids":null,"output_mode":'
    rest += b'"tokens","stream":false,"stream_options":null,"cache_salt":null,"priority":0,"kv_transfer_params":null,'
    rendered = (
        b'{"request_id":"chatcmpl-x","token_ids":[1,2],"token_offsets":null,"features":null,"content_parts":null,'
        b'"sampling_params":' + params + b"," + rest + b'"ec_transfer_params":null}'
    )
    assert reply.render_prompts([RenderedPrompt([1, 2], 7)]) == rendered
    inside = rendered.replace(b'"reasoning_ended":null', b'"reasoning_ended":false')
    assert reply.render_prompts([RenderedPrompt([1, 2], 7, False)]) == inside


def rendered_request(request_id: bytes, params: bytes, options: bytes = b"null", stream: bytes = b"false") -> bytes:
    """Return the body that continues the tokens 1 and 2."""
    return (
        b'{"request_id":"' + request_id + b'","token_ids":[1,2],"token_offsets":null,"features":null,'
        b'"content_parts":null,"sampling_params":' + params + b',"model":"m","reasoning_ended":null,'
        b'"reasoning_parser_kwargs":null,"return_token_ids":null,"output_mode":"tokens","stream":' + stream + b","
        b'"stream_options":' + options + b',"cache_salt":"s","priority":0,"kv_transfer_params":null,'
        b'"ec_transfer_params":null}'
    )


def test_vllm_rendered_message_continues_as_its_conversation():
    message = {"model": "m", "max_tokens": 7, "messages": [{"role": "user", "content": "a"}], "cache_salt": "s"}
    options = {"system": "b", "temperature": 0.5, "stop_sequences": ["END"]}
    reply = render.read_message_rendering(json.dumps(message | options).encode(), CONTEXT)
    (chat,) = reply.request.prompts
    assert [(turn.role, turn.content) for turn in chat.messages] == [("system", "b"), ("user", "a")]
    params = (
        b'{"temperature":0.5,"stop":["END"],"stop_token_ids":[],"max_tokens":7,"output_kind":%d,"skip_clone":true,'
        b'"output_text_buffer_length":2,"bad_words":[],"skip_reading_prefix_cache":false}'
    )
    assert reply.render_prompts([RenderedPrompt([1, 2], 7)]) == rendered_request(
        b"chatcmpl-0123456789abcdef", params % 2
    )
    streamed = render.read_message_rendering(json.dumps(message | options | {"stream": True}).encode(), CONTEXT)
    counted = b'{"include_usage":true,"continuous_usage_stats":true}'
    expected = rendered_request(b"chatcmpl-0123456789abcdef", params % 1, counted, b"true")
    assert streamed.render_prompts([RenderedPrompt([1, 2], 7)]) == expected
    forced = message | {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}}
    with pytest.raises(BadRequest) as caught:
        render.read_message_rendering(json.dumps(forced).encode(), CONTEXT)
    assert caught.value.field == "tool_choice"


def test_vllm_rendered_response_continues_as_its_conversation():
    body = {"model": "m", "input": "a", "instructions": "b", "max_output_tokens": 7, "cache_salt": "s", "stream": True}
    reply = render.read_response_rendering(json.dumps(body).encode(), CONTEXT)
    (chat,) = reply.request.prompts
    assert [(turn.role, turn.content) for turn in chat.messages] == [("system", "b"), ("user", "a")]
    params = (
        b'{"stop":[],"stop_token_ids":[],"max_tokens":7,"output_kind":1,"skip_clone":true,"bad_words":[],'
        b'"skip_reading_prefix_cache":false}'
    )
    expected = rendered_request(b"resp_0123456789abcdef", params, stream=b"true")
    assert reply.render_prompts([RenderedPrompt([1, 2], 7)]) == expected
    own = {"request_id": "x", "kv_transfer_params": {"a": 1}, "ec_transfer_params": None}
    named = render.read_response_rendering(json.dumps(body | own).encode(), CONTEXT)
    rendered = json.loads(named.render_prompts([RenderedPrompt([1], 7)]))
    assert {name: rendered[name] for name in own} == own
    for members in ({"background": True}, {"background": True, "store": True}):  # where no responses are stored
        again = render.read_response_rendering(json.dumps(body | members).encode(), CONTEXT)
        assert again.render_prompts([RenderedPrompt([1, 2], 7)]) == expected
    for members, sentence in (
        ({"background": True, "store": False}, "`store` is true"),
        ({"conversation": "c"}, "A stor"),
    ):
        with pytest.raises(BadRequest, match=sentence):
            render.read_response_rendering(json.dumps(body | members).encode(), CONTEXT)
    with pytest.raises(BadRequest) as caught:
        render.read_response_rendering(json.dumps(body | {"previous_response_id": "resp_1"}).encode(), CONTEXT)
    assert json.loads(vllm_error_answer(caught.value).body) == {
        "error": {
            "message": "previous_response_id is not supported by the stateless render endpoint.",
            "type": "invalid_request_error",
            "param": "previous_response_id",
            "code": 400,
        }
    }


def test_vllm_rendered_prompts_have_the_places_of_their_tokens_on_request():
    hello = {"messages": [{"role": "user", "content": "a"}]}
    for members, wants in (
        ({}, False),
        ({"return_token_offsets": None}, False),
        ({"return_token_offsets": True}, True),
    ):
        body = {"prompt": "ab"} | members
        completion = render.read_completion_rendering(json.dumps(body).encode(), CONTEXT)
        chat = render.read_chat_rendering(json.dumps(hello | members).encode(), CONTEXT)
        assert completion.wants_spans is chat.wants_spans is wants
    (rendered,) = json.loads(completion.render_prompts([RenderedPrompt([1, 2], 7, spans=[(0, 1), (1, 2)])]))
    assert rendered["token_offsets"] == [[0, 1], [1, 2]]


USER_TURN = {"role": "user", "content": "a"}
CHUNK = {"request_id": "g", "choices": [{"index": 2, "token_ids": [7, 8]}]}
GENERATED = {"request_id": "g", "choices": [{"index": 0, "token_ids": [7, 8], "finish_reason": "length"}]}


def test_vllm_derendered_chat_has_the_original_bytes():
    body = {"model": "m", "generate_response": GENERATED, "prompt_tokens": 3}
    reply = derender.read_chat_derendering(json.dumps(body).encode(), CONTEXT)
    assert reply.request.prompts == [TokensPrompt([0])] and reply.request.output_options.unparsed
    assert reply.outputs == [EngineOutput("", 0, [7, 8], None, "length")]
    reply.add_events([ChoiceDelta(0, "ab", "content"), ChoiceDone(0, "length", USAGE)])
    assert reply.render_body(Usage(prompt_tokens=3, completion_tokens=2)) == (
        b'{"id":"g","object":"chat.completion","created":1700000000,"model":"m","choices":[{"index":0,"message":'
        b'{"role":"assistant","content":"ab","refusal":null,"annotations":null,"audio":null,"function_call":null,'
        b'"reasoning":null},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,'
        b'"routed_experts":null,"weight_versions":null}],"service_tier":null,"system_fingerprint":"fp_1","usage":'
        b'{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2,"prompt_tokens_details":null,'
        b'"completion_tokens_details":null},"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,'
        b'"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
    )


def test_vllm_derendering_reads_tokens_with_their_request():
    listed = [{"token_id": 7, "logprob": -0.5}, {"token_id": 9, "logprob": -1.5}]
    content = [{"token_id": 7, "logprob": -0.5, "rank": 1, "top_logprobs": listed}]
    choices = [
        {"index": 1, "token_ids": [8], "logprobs": {"content": content}},
        {"index": 0, "token_ids": [7], "logprobs": {"content": content}, "finish_reason": "stop"},
    ]
    request = {"messages": [{"role": "user", "content": "a"}], "stop": ["END"], "max_tokens": 5, "n": 9, "stream": True}
    body = {"generate_response": {"choices": choices}, "chat_request": request}
    reply = derender.read_chat_derendering(json.dumps(body).encode(), CONTEXT)
    score = TokenScore(-0.5, 1, [7, 9], [-0.5, -1.5])
    assert reply.outputs == [EngineOutput("", place, [7 + place], [score], "stop") for place in (0, 1)]
    assert (reply.request.n, reply.request.stream, reply.request.output_options.logprobs) == (2, False, 2)
    assert reply.request.stop_conditions.strings == ["END"] and reply.request.prompts[0].messages[0].content == "a"
    body = {"generate_responses": [GENERATED, GENERATED | {"prompt_token_ids": [4]}], "prompt_tokens": [1, 2]}
    reply = derender.read_completion_derendering(json.dumps(body).encode(), CONTEXT)
    assert reply.request.prompts == [TokensPrompt([0]), TokensPrompt([4])]
    assert (reply.prompt_tokens, [output.token_ids for output in reply.outputs]) == (3, [[7, 8], [7, 8]])
    for prompts, wanted in (([[1, 2], None], [[1, 2], [4]]), ([[1], [3]], [[1], [3]]), (None, [[0], [4]])):
        reply = derender.read_completion_derendering(json.dumps(body | {"prompt_token_ids": prompts}).encode(), CONTEXT)
        assert reply.request.prompts == list(map(TokensPrompt, wanted))


METRICS = {
    "time_to_first_token_ms": 1.5, "generation_time_ms": 2.0, "queue_time_ms": None, "mean_itl_ms": 0.5,
    "tokens_per_second": 9.0, "speculative_decoding": None,
}  # fmt: skip


def test_vllm_derendering_passes_on_what_the_generated_answer_has():
    passed = {
        "prompt_logprobs": [None, {"5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}],
        "kv_transfer_params": {"remote_host": "h", "ids": [[1]]},
        "metrics": METRICS,
    }
    reply = derender.read_chat_derendering(json.dumps({"generate_response": GENERATED | passed}).encode(), CONTEXT)
    reply.add_events([ChoiceDelta(0, "ab", "content"), ChoiceDone(0, "length", USAGE)])
    answer = json.loads(reply.render_body(Usage()))
    assert {name: answer[name] for name in passed} == passed
    other = GENERATED | {"kv_transfer_params": {"remote_host": "i"}}
    for responses, transfer, metrics in (
        ([GENERATED | passed], passed["kv_transfer_params"], METRICS),
        ([GENERATED | passed, GENERATED | passed], passed["kv_transfer_params"], None),
        ([GENERATED | passed, other], None, None),
    ):
        body = json.dumps({"generate_responses": responses}).encode()
        reply = derender.read_completion_derendering(body, CONTEXT)
        reply.add_events([ChoiceDone(index, "length", USAGE) for index in range(len(responses))])
        answer = json.loads(reply.render_body(Usage()))
        assert (answer["kv_transfer_params"], answer["metrics"]) == (transfer, metrics)


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"kv_transfer_params": []}, "kv_transfer_params"),
        ({"metrics": {"queue_time_ms": "soon"}}, "queue_time_ms"),
        ({"prompt_logprobs": [{"5": {"logprob": None}}]}, "prompt_logprobs"),
        ({"prompt_logprobs": [5]}, "prompt_logprobs"),
    ],
)
def test_vllm_derendering_refuses_wrong_members_to_pass_on(members, sentence):
    body = {"generate_response": GENERATED | members}
    with pytest.raises(BadRequest, match=sentence):
        derender.read_chat_derendering(json.dumps(body).encode(), CONTEXT)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_vllm_derendered_calls_end_with_tool_calls_unless_they_are_cut_off(reason):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    request = {"messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    response = {"choices": [{"index": 0, "token_ids": [7], "finish_reason": reason}]}
    body = json.dumps({"generate_response": response, "chat_request": request}).encode()
    reply = derender.read_chat_derendering(body, CONTEXT)
    call = ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(0, "call_1", "f", "{}"))
    reply.add_events([call, ChoiceDone(0, "tool" if reason == "stop" else "length", USAGE)])
    (choice,) = json.loads(reply.render_body(Usage()))["choices"]
    assert choice["finish_reason"] == {"stop": "tool_calls", "length": "length"}[reason]


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ([], "choices must not be empty"),
        ([{"index": 0, "token_ids": []}], "choice 0 has empty or null token_ids"),
        ([{"index": 0}], "choice 0 has empty or null token_ids"),
        ([{"index": 1, "token_ids": [5]}], "The indices of choices must be 0 to 0."),
        ([{"token_ids": [5] * 257}], r"token_ids length \(257\) in choice 0 exceeds max_model_len \(256\)."),
        ([{"token_ids": [5], "logprobs": {"content": []}}], "choice 0 has 1 tokens, but logprobs of 0"),
        ([{"token_ids": [5], "logprobs": {"content": [{"top_logprobs": [{}] * 21}]}}], r"exceeds maximum \(20\)"),
    ],
    ids=str,
)
def test_vllm_derendering_refuses_wrong_answers(choices, sentence):
    body = {"generate_response": {"choices": choices}}
    with pytest.raises(BadRequest, match=sentence):
        derender.read_chat_derendering(json.dumps(body).encode(), CONTEXT)


def test_vllm_derendering_refuses_uneven_answers():
    two = {"choices": [{"index": 0, "token_ids": [5]}, {"index": 1, "token_ids": [5]}]}
    for members, sentence in (
        ({"generate_responses": []}, "generate_responses must not be empty"),
        ({"generate_responses": [GENERATED, two]}, "the same number of choices"),
        ({"generate_responses": [GENERATED], "prompt_tokens": [1, 2]}, "must equal generate_responses length"),
        ({"generate_responses": [GENERATED], "prompt_token_ids": [[1], [2]]}, r"prompt_token_ids length \(2\) must"),
        ({"generate_responses": [GENERATED], "prompt_token_ids": [["a"]]}, "prompt_token_ids"),
    ):
        with pytest.raises(BadRequest, match=sentence):
            derender.read_completion_derendering(json.dumps(members).encode(), CONTEXT)


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({}, "generate_chunk"),
        ({"generate_chunk": {"choices": [{}, {}]}}, r"at most one choice per chunk \(got 2\)"),
        ({"generate_chunk": CHUNK, "stream_state": {"output_token_ids": [1]}}, r"got sum=0, len\(output_token_ids\)=1"),
        ({"generate_chunk": CHUNK, "chat_request": {"messages": [USER_TURN], "stop": "a"}}, "stop strings are not"),
        (
            {"generate_chunk": CHUNK, "prompt_token_ids": [1] * 255},
            r"\(255\) plus output_token_ids length \(0\) plus delta",
        ),
        ({"generate_chunk": CHUNK | {"output_mode": "text"}}, "output_mode"),
    ],
)
def test_vllm_derendering_refuses_wrong_chunks(members, sentence):
    with pytest.raises(BadRequest, match=sentence):
        derender.read_chat_derendering(json.dumps(members | {"stream": True}).encode(), CONTEXT)


def rendered_params(**members: Any) -> dict[str, Any]:
    body = {"prompt": ["a", "b"], "request_id": "x"} | members
    reply = render.read_completion_rendering(json.dumps(body).encode(), CONTEXT)
    first, second = json.loads(reply.render_prompts([RenderedPrompt([1], 16), RenderedPrompt([2], 9)]))
    assert (first["request_id"], second["request_id"]) == ("cmpl-x-0", "cmpl-x-1")
    assert (first["token_ids"], second["sampling_params"].pop("max_tokens")) == ([1], 9)
    assert first["sampling_params"] == second["sampling_params"]  # 16 tokens are the default
    return first["sampling_params"]


def test_vllm_rendered_completions_omit_defaults():
    bare = {"stop": [], "stop_token_ids": [], "output_kind": 2, "skip_clone": True, "bad_words": [],
            "skip_reading_prefix_cache": False}  # fmt: skip
    assert rendered_params() == bare
    assert rendered_params(stream=True) == bare | {"output_kind": 1}
    assert rendered_params(temperature=0, top_p=0.5, top_k=3, min_p=0.1) == bare | {"temperature": 0}
    assert rendered_params(temperature=0.001, top_k=3) == bare | {"temperature": 0.01, "top_k": 3}
    assert rendered_params(stop="END") == bare | {"stop": ["END"], "output_text_buffer_length": 2}
    written = rendered_params(response_format={"type": "json_object"}, prompt_logprobs=1, stream_interval=2)
    assert written["structured_outputs"]["json_object"] is True and written["structured_outputs"]["json"] is None
    assert (written["prompt_logprobs"], written["skip_reading_prefix_cache"], written["stream_interval"]) == (
        1,
        True,
        2,
    )


def test_vllm_tokens_route_reads_what_render_writes():
    """In any order of the members, both routes read the same request."""
    members = {
        "prompt": "a", "n": 2, "temperature": 0.5, "top_p": 0.9, "seed": 5, "stop": ["END"], "min_tokens": 2,
        "logprobs": 2, "logit_bias": {"3": 1.0}, "allowed_token_ids": [1, 2], "bad_words": ["x"], "ignore_eos": True,
        "structured_outputs": {"json": {"type": "object", "properties": {"a": {}}}, "disable_any_whitespace": True},
        "repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 2}, "max_tokens": 40,
        "cache_salt": "s", "priority": 2, "skip_special_tokens": False, "stream": True, "typical_p": 0.8,
        "no_repeat_ngram_size": 3, "watermarking": True,
    }  # fmt: skip
    rendering = render.read_completion_rendering(json.dumps(members).encode(), CONTEXT)
    (body,) = json.loads(rendering.render_prompts([RenderedPrompt([7], 40, True)]))
    wanted = rendering.request
    request = token_generation.read_token_request(json.dumps(body).encode(), CONTEXT).request
    assert request.prompts == [TokensPrompt([7], True)]
    for name in ("n", "sampling", "stop_conditions", "banned_words", "cache_salt", "priority", "stream"):
        assert getattr(request, name) == getattr(wanted, name), name
    assert (request.grammar.kind, request.grammar.value) == (wanted.grammar.kind, wanted.grammar.value)
    assert request.grammar.whitespace == wanted.grammar.whitespace == ""
    assert request.output_options.logprobs == 2 and not request.output_options.skip_special


UNRENDERED: list[tuple[dict[str, Any], str | None]] = [
    ({"use_beam_search": True}, None),
    ({"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}}, "response_format"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice"),
]


@pytest.mark.parametrize(("members", "field"), UNRENDERED, ids=str)
def test_vllm_render_refuses_what_tokens_cannot_express(members, field):
    body = {"messages": [{"role": "user", "content": "a"}]} | members
    with pytest.raises(BadRequest) as caught:
        render.read_chat_rendering(json.dumps(body).encode(), CONTEXT)
    assert caught.value.field == field
