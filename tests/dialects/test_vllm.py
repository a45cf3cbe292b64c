"""vLLM's chat and completions: reading of bodies, wording of refusals, and the exact bytes of answers."""

import dataclasses
import json
from typing import Any

import pytest

from parley.dialects.facts import ModelCard, ServerFacts
from parley.dialects.openai import chat as plain
from parley.dialects.reply import Answer, RequestTimings
from parley.dialects.request_context import RequestContext
from parley.dialects.vllm import chat, completions, control, requests
from parley.dialects.vllm.error_answers import BUSY_SENTENCE, UnsupportedCall, vllm_error_answer
from parley.dialects.vllm.pooling import embeddings
from parley.errors import (
    BadRequest,
    ContextLength,
    EngineError,
    NotAllowed,
    NotFound,
    NotReady,
    Overloaded,
    ParleyError,
    TooLarge,
    Unauthorized,
    UnknownModel,
)
from parley.types import (
    ChoiceDelta,
    ChoiceDone,
    PromptAccepted,
    PromptScored,
    TextPrompt,
    TokenInfo,
    ToolCallDelta,
    Usage,
)

JSON = {b"content-type": b"application/json; charset=utf-8"}
CONTEXT = RequestContext(
    "0123456789abcdef0123456789abcdef",
    1700000000,
    "fp_1",
    context_length=256,
    headers=JSON,
    abilities=frozenset({"chat", "tools", "thinking"}),
)
ID = CONTEXT.unique_id[:16]
MESSAGES = [{"role": "user", "content": "Hi"}]
USAGE = Usage(prompt_tokens=11, completion_tokens=3, cached_tokens=4)
TIMINGS = RequestTimings(1.0, 0.1, 0.2, 0.7)
TOOL = {"type": "function", "function": {"name": "f"}}


def read_chat(context: RequestContext = CONTEXT, **members: Any) -> chat.VllmChatReply:
    reply = chat.read_vllm_chat(json.dumps({"model": "tiny", "messages": MESSAGES} | members).encode(), context)
    assert isinstance(reply, chat.VllmChatReply), reply
    return reply


def read_completion(context: RequestContext = CONTEXT, **members: Any) -> completions.VllmCompletionReply:
    reply = completions.read_vllm_completion(json.dumps({"model": "tiny", "prompt": "Hi"} | members).encode(), context)
    assert isinstance(reply, completions.VllmCompletionReply), reply
    return reply


READERS = {"chat": read_chat, "text": read_completion}


@pytest.fixture(params=READERS)
def read(request) -> Any:
    return READERS[request.param]


def error_object(error: ParleyError) -> dict[str, Any]:
    return json.loads(vllm_error_answer(error).body)["error"]


def refusal(read, **members) -> dict[str, Any]:
    with pytest.raises(BadRequest) as caught:
        read(**members)
    answer = vllm_error_answer(caught.value)
    assert answer.status == 400
    return error_object(caught.value)


# -- bodies read differently from OpenAI's


def test_vllm_max_tokens_is_cut_to_the_context(read):
    assert read(max_tokens=250).request.stop_conditions.reserved_tokens == 1
    assert read(max_tokens=256).request.stop_conditions.max_tokens == 256


def test_vllm_uses_generation_defaults_of_the_model(read):
    advice = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.05,
              "max_new_tokens": 64}  # fmt: skip
    context = RequestContext(
        CONTEXT.unique_id, 1700000000, "fp_1", context_length=256, headers=JSON, generation_defaults=advice
    )
    request = read(context, top_p=None, temperature=0, max_tokens=100).request
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0, 20, 0.9, 0.1)
    assert sampling.repetition_penalty == 1.05 and request.stop_conditions.max_tokens == 64
    assert read(context, max_tokens=5).request.stop_conditions.max_tokens == 5
    searched = read(context, n=2, best_of=5, use_beam_search=True).request
    assert (searched.beam.width, searched.sampling.top_k, searched.sampling.top_p, searched.sampling.min_p) == (
        2,
        0,
        1.0,
        0.0,
    )
    assert read(context).request.stop_conditions.max_tokens == (64 if read is read_chat else 16)


def test_vllm_converts_types_leniently(read):
    request = read(n="2", temperature="0.5", top_k=True, seed="7", stream="yes", ignore_eos=1, max_tokens="5.0").request
    assert (request.n, request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (2, 0.5, 1, 7)
    assert request.stream and request.stop_conditions.ignore_eos and request.stop_conditions.max_tokens == 5
    assert read(top_p=True).request.sampling.top_p == 1.0
    for members in ({"n": "2x"}, {"n": 1.5}, {"stream": "maybe"}, {"temperature": "1" * 400}, {"n": []}):
        assert refusal(read, **members)["type"] == "Bad Request"


def test_vllm_ignores_old_members(read):
    assert read(best_of=9, frobnicate=1).request == read().request


def test_vllm_accepts_any_role():
    (prompt,) = read_chat(messages=[{"role": "wizard", "content": "a"}]).request.prompts
    assert prompt.messages[0].role == "wizard"


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
INCOMPLETE_MESSAGES: list[tuple[dict[str, Any], str | None]] = [
    ({"role": "user"}, ""),
    ({"role": "user", "content": None}, ""),
    ({"role": "assistant"}, ""),
    ({"role": "assistant", "tool_calls": [CALL]}, None),
    ({"role": "tool", "content": "sunny"}, "sunny"),  # without tool_call_id
    ({"role": "user", "content": ["a", {"type": "text", "text": "b"}]}, "a\nb"),
    ({"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
]


@pytest.mark.parametrize(("message", "content"), INCOMPLETE_MESSAGES, ids=str)
def test_vllm_accepts_messages_with_missing_members(message, content):
    (prompt,) = read_chat(messages=[*MESSAGES, message]).request.prompts
    assert prompt.messages[1].content == content
    with pytest.raises(BadRequest):  # OpenAI's rules refuse it
        plain.read_chat_request(json.dumps({"messages": [*MESSAGES, message | {"tool_calls": None}]}).encode(), CONTEXT)


def test_vllm_continues_final_message_of_any_role():
    (prompt,) = read_chat(continue_final_message=True).request.prompts
    assert prompt.continue_final and not prompt.add_generation_prompt


def test_vllm_chat_accepts_prediction():
    assert read_chat(prediction={"type": "content", "content": "a"}).request.prediction == "a"


def test_vllm_takes_request_id_from_header_or_body(read):
    def name(reply):
        reply.add_events([ChoiceDone(0, "stop", USAGE)])
        return json.loads(reply.render_body(USAGE))["id"].partition("-")[2]

    def headed(value):
        return RequestContext(
            CONTEXT.unique_id, 1700000000, "fp_1", context_length=256, headers=JSON | {b"x-request-id": value}
        )

    assert name(read()) == ID
    assert name(read(request_id="mine")) == "mine"
    assert name(read(headed(b"abc"), request_id="mine")) == "abc"
    assert name(read(headed(b"a\tb"))) == ID


@pytest.mark.parametrize(
    ("form", "header"),
    [
        (b"TEXT", b"TEXT named_metrics.num_requests_waiting=2.0, named_metrics.kv_cache_usage_perc=0.25"),
        (b"json", b'JSON {"named_metrics": {"num_requests_waiting": 2.0, "kv_cache_usage_perc": 0.25}}'),
    ],
)
def test_vllm_reports_load_metrics_in_header(read, form, header):
    """Load balancers read this header to choose a server."""
    asks = JSON | {b"endpoint-load-metrics-format": form}
    context = RequestContext(
        CONTEXT.unique_id,
        1700000000,
        "fp_1",
        context_length=256,
        headers=asks,
        cached_tokens=5,
        cache_capacity=20,
        waiting_sequences=2,
    )
    assert list(read(context).answer_headers(TIMINGS)) == [(b"endpoint-load-metrics", header)]
    assert not read(context).answer_headers(None) and not read().answer_headers(TIMINGS)  # a stream has no such header


# -- refusals

SENTENCES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"temperature": 3}, "temperature must be in [0, 2], got 3.0. (parameter=temperature, value=3.0)", "temperature"),
    ({"temperature": -1}, "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)",
     "temperature"),
    ({"top_p": 0}, "top_p must be in (0, 1], got 0.0. (parameter=top_p, value=0.0)", "top_p"),
    ({"top_p": 1.1}, "top_p must be in (0, 1], got 1.1. (parameter=top_p, value=1.1)", "top_p"),
    ({"top_k": -2}, "top_k must be 0 (disable), or at least 1, got -2.", None),
    ({"min_p": 2}, "min_p must be in [0, 1], got 2.0.", None),
    ({"n": 0}, "n must be at least 1, got 0.", None),
    ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling, got 2.", None),
    ({"presence_penalty": 3}, "presence_penalty must be in [-2, 2], got 3.0.", None),
    ({"frequency_penalty": -3}, "frequency_penalty must be in [-2, 2], got -3.0.", None),
    ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero, got 0.0.", None),
    ({"max_tokens": -5}, "max_tokens must be at least 1, got -5. (parameter=max_tokens, value=-5)", "max_tokens"),
    ({"max_tokens": 257}, "max_tokens=257 cannot be greater than max_model_len=256. Please request fewer output "
     "tokens. "
     "(parameter=max_tokens, value=257)", "max_tokens"),
    ({"stop": ""}, "stop cannot contain an empty string.", None),
    ({"stream_options": {"include_usage": None}}, "Stream options can only be defined when `stream=True`. "
     "(parameter=stream_options)", "stream_options"),
    ({"logprobs": 1, "logprob_token_ids": [5], "use_beam_search": True}, "`logprob_token_ids` is not supported with "
     "beam search. (parameter=logprob_token_ids)", "logprob_token_ids"),
    ({"prompt_logprobs": 1, "stream": True},
     "`prompt_logprobs` are not available when `stream=True`. (parameter=prompt_logprobs)", "prompt_logprobs"),
    ({"mm_processor_kwargs": {"a": 1}}, "Per-request mm_processor_kwargs are disabled by default because they can "
     "change multimodal preprocessing resource usage. Start the server with --trust-request-mm-kwargs only when "
     "clients are trusted. (parameter=mm_processor_kwargs)", "mm_processor_kwargs"),
    ({"use_beam_search": True, "stream": True}, "Streaming is not currently supported with beam search", None),
    ({"structured_outputs": {}}, "You must use one kind of structured outputs constraint but none are "
     "specified: {'json': "
     "None, 'regex': None, 'choice': None, 'grammar': None, 'json_object': None, 'structural_tag': None}", None),
    ({"response_format": {"type": "json_schema"}}, "When response_format type is 'json_schema', the "
     "'json_schema' field "
     "must be provided. (parameter=response_format)", "response_format"),
    ({"bad_words": [""]}, "bad_words cannot contain an empty string. Got bad_words=['']", None),
    ({"allowed_token_ids": []}, "allowed_token_ids is not None and empty! "
     "(parameter=allowed_token_ids, value=[])", "allowed_token_ids"),
    ({"cache_salt": ""}, "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)",
     "cache_salt"),
    ({"cache_salt": 5}, "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)",
     "cache_salt"),
    ({"cache_salt": "a" * 129}, "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', "
     "'\\\\', or NUL. (parameter=cache_salt)", "cache_salt"),
    ({"cache_salt": "a@b"}, "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', "
     "'\\\\', or NUL. (parameter=cache_salt)", "cache_salt"),
    ({"logit_bias": {"x": 1}}, "logit_bias contains key(s) that cannot be converted to integer token IDs: ['x'] "
     "(parameter=logit_bias, value=['x'])", "logit_bias"),
    ({"min_tokens": 5, "max_tokens": 2}, "min_tokens must be less than or equal to max_tokens=2, got 5.", None),
    ({"truncate_prompt_tokens": 200, "max_tokens": 100},
     "truncate_prompt_tokens=200 cannot be greater than max_model_len - max_tokens = 156. Please request a smaller "
     "truncation size. (parameter=truncate_prompt_tokens, value=200)", "truncate_prompt_tokens"),
    ({"logprob_token_ids": []}, "`logprob_token_ids` must not be an empty list. (parameter=logprob_token_ids)",
     "logprob_token_ids"),
    ({"seed": 2**63}, "1 validation error:\n  {'type': 'less_than_equal', 'loc': 'body.seed', 'msg': 'Input should be "
     "less than or equal to 9223372036854775807', 'input': '9223372036854775808', 'ctx': {'le': 9223372036854775807}}",
     "body.seed"),
    ({"logit_bias": {"5": 101}}, "1 validation error:\n  {'type': 'less_than_equal', 'loc': "
     "'body.logit_bias.5', 'msg': "
     "'Input should be less than or equal to 100', 'input': '101', 'ctx': {'le': 100}}", "body.logit_bias.5"),
]  # fmt: skip


def test_vllm_response_format_replaces_constraint_of_same_kind(read):
    schema, tag = {"type": "integer"}, {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}
    json_schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    constraint = {"json": {}, "disable_any_whitespace": True}
    grammar = read(structured_outputs=constraint, response_format=json_schema).request.grammar
    assert (grammar.kind, grammar.value, grammar.whitespace) == ("json", schema, "")
    grammar = read(structured_outputs={"json_object": True}, response_format={"type": "json_object"}).request.grammar
    assert (grammar.kind, grammar.value) == ("json", {"type": "object"})
    grammar = read(structured_outputs={"structural_tag": "{}"}, response_format=tag).request.grammar
    assert (grammar.kind, grammar.value) == ("choice", ["a"])
    grammar = read(structured_outputs={"regex": "a"}, response_format={"type": "text"}).request.grammar
    assert (grammar.kind, grammar.value) == ("regex", "a")
    beside = {"type": "json_schema", "json_schema": {}, "value": {"schema": schema}}
    grammar = read(structured_outputs=constraint, response_format=beside).request.grammar
    assert (grammar.kind, grammar.value) == ("json", schema)
    wrong = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert refusal(read, structured_outputs=constraint, response_format=wrong)["code"] == 400


@pytest.mark.parametrize(("members", "sentence", "param"), SENTENCES, ids=lambda value: str(value)[:40])
def test_vllm_refusals_use_original_wording(read, members, sentence, param):
    error = refusal(read, **members)
    assert error["message"] == sentence
    assert (error["param"], error["code"]) == (param, 400)
    assert error["type"] == ("Bad Request" if sentence.startswith("1 ") else "BadRequestError")


ONE_CONSTRAINT = "You can only use one kind of constraints for structured outputs ('json', 'regex' or 'choice')."
NAMED_USAGE = 'in `tool_choice`! Correct usage: `{"type": "function", "function": {"name": "my_function"}}` '
CHAT_SENTENCES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"logprobs": True, "top_logprobs": 30},
     "Requested sample logprobs of 30, which is greater than max allowed: 20 (parameter=logprobs, value=30)",
     "logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "Requested sample logprobs of the whole vocabulary, which is greater than "
     "max allowed: 20 (parameter=logprobs, value=-1)", "logprobs"),
    ({"logprobs": True, "top_logprobs": -2},
     "`top_logprobs` must be a positive value or -1. (parameter=top_logprobs, value=-2)", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": "5"}, "`top_logprobs` must be an integer. (parameter=top_logprobs, value=5)",
     "top_logprobs"),
    ({"thinking_token_budget": -2}, "`thinking_token_budget` must be a non-negative integer or -1 for unlimited. "
     "(parameter=thinking_token_budget, value=-2)", "thinking_token_budget"),
    ({"logprob_token_ids": [5]}, "when using `logprob_token_ids`, `logprobs` must be set to true. "
     "(parameter=logprob_token_ids)", "logprob_token_ids"),
    ({"structured_outputs": {"json": {"a": 1}, "regex": "b"}}, ONE_CONSTRAINT, None),
    ({"top_logprobs": 2}, "when using `top_logprobs`, `logprobs` must be set to true. (parameter=top_logprobs)",
     "top_logprobs"),
    ({"tools": []},
     "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely. "
     "(parameter=tools)", "tools"),
    ({"tool_choice": "required"}, "When using `tool_choice`, `tools` must be set. (parameter=tool_choice)",
     "tool_choice"),
    ({"tool_choice": "any"}, "When using `tool_choice`, `tools` must be set. (parameter=tool_choice)", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "any"}, "Invalid value for `tool_choice`: any! Only named tools, \"none\", "
     "\"auto\" or \"required\" are supported. (parameter=tool_choice)", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "Invalid value for `function`: `None` " + NAMED_USAGE
     + "(parameter=tool_choice.function)", "tool_choice.function"),
    ({"tools": [TOOL], "tool_choice": {"function": {}}}, "Expected field `name` in `function` " + NAMED_USAGE
     + "(parameter=tool_choice.function.name)", "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": {"function": {"name": 5}}}, "Invalid `name` in `function`: `5` " + NAMED_USAGE
     + "(parameter=tool_choice.function.name)", "tool_choice.function.name"),
    ({"tool_choice": "auto", "tools": None}, "When using `tool_choice`, `tools` must be set. (parameter=tool_choice)",
     "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}},
      "structured_outputs": {"regex": "a"}},
     "You can only either use constraints for structured outputs or tools, not both.", None),
    ({"chat_template": "x"}, "Chat template is passed with request, but --trust-request-chat-template is not set. "
     "Refused request with untrusted chat template.", None),
    ({"chat_template_kwargs": {"chat_template": "x"}}, requests.UNTRUSTED_TEMPLATE, None),
    ({"continue_final_message": True, "add_generation_prompt": True},
     "Cannot set both `continue_final_message` and `add_generation_prompt` to True.", None),
    ({"messages": []}, "Cannot apply chat template to an empty conversation. Provide at least one message.", None),
    ({"max_completion_tokens": 0},
     "max_completion_tokens must be at least 1, got 0. (parameter=max_completion_tokens, value=0)",
     "max_completion_tokens"),
]  # fmt: skip
COMPLETION_SENTENCES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"logprobs": 30}, "Requested sample logprobs of 30, which is greater than max allowed: 20 (parameter=logprobs, "
     "value=30)", "logprobs"),
    ({"logprobs": -1}, "Requested sample logprobs of the whole vocabulary, which is greater than max allowed: 20 "
     "(parameter=logprobs, value=-1)", "logprobs"),
    ({"prompt_logprobs": -1}, "Requested prompt logprobs of the whole vocabulary, which is greater than max allowed: "
     "20 (parameter=prompt_logprobs, value=-1)", "prompt_logprobs"),
    ({"logprobs": -2}, "`logprobs` must be a positive value or -1. (parameter=logprobs, value=-2)", "logprobs"),
    ({"logprobs": "x"}, "`logprobs` must be an integer. (parameter=logprobs, value=x)", "logprobs"),
    ({"logprob_token_ids": [5]}, "when using `logprob_token_ids`, `logprobs` must be set. "
     "(parameter=logprob_token_ids)", "logprob_token_ids"),
    ({"structured_outputs": {"json": {"a": 1}, "regex": "a"}}, f"{ONE_CONSTRAINT} (parameter=structured_outputs)",
     "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
     f"{ONE_CONSTRAINT} (parameter=structured_outputs)", "structured_outputs"),
    ({"prompt": []}, "You must pass at least one prompt", None),
    ({"prompt": None}, "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", "prompt"),
    ({"prompt": None, "prompt_embeds": []},
     "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", "prompt"),
    ({"prompt": [[1], []]}, "The decoder prompt cannot be empty", None),
    ({"prompt": ["a", ""]}, "The decoder prompt cannot be empty", None),
    ({"prompt": [[-1]]}, "1 validation error:\n  {'type': 'greater_than_equal', 'loc': 'body.prompt.0.0', 'msg': "
     "'Input should be greater than or equal to 0', 'input': '-1', 'ctx': {'ge': 0}}", "body.prompt.0.0"),
    ({"suffix": "x"}, "suffix is only supported for models with FIM completion rendering", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "members", "sentence", "param"),
    [("chat", *case) for case in CHAT_SENTENCES] + [("text", *case) for case in COMPLETION_SENTENCES],
    ids=lambda value: str(value)[:40],
)
def test_vllm_refusals_of_one_route_use_original_wording(kind, members, sentence, param):
    error = refusal(READERS[kind], **members)
    assert (error["message"], error["param"]) == (sentence, param)


def test_vllm_reads_a_suffix_if_the_model_has_marks_for_it():
    able = dataclasses.replace(CONTEXT, abilities=frozenset({"insert"}))
    assert read_completion(able, suffix="x").request.prompts == [TextPrompt("Hi", suffix="x")]


SHAPES: list[tuple[bytes, str, str]] = [
    (b'{"model":"m"}', "{'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', 'input': "
     "'<dict of 1 items>'}", "body.messages"),
    (b'{"messages":[{"content":"a"}]}', "{'type': 'missing', 'loc': 'body.messages.0.role', 'msg': 'Field required', "
     "'input': '<dict of 1 items>'}", "body.messages.0.role"),
    (b'{"messages": tru}', "{'type': 'json_invalid', 'loc': 'body.13', 'msg': 'JSON decode error', 'input': "
     "'<dict of 0 items>', 'ctx': {'error': 'Expecting value'}}", "body.13"),
    (b"[]", "{'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be a valid dictionary or object to "
     "extract fields from', 'input': '<list of 0 items>'}", "body"),
    (b'{"messages":5}', "{'type': 'list_type', 'loc': 'body.messages', 'msg': 'Input should be a valid list', 'input': "
     "'5'}", "body.messages"),
    (b'{"messages":[{"role":"user","content":"a"}],"n":"x"}', "{'type': 'int_parsing', 'loc': 'body.n', 'msg': 'Input "
     "should be a valid integer, unable to parse string as an integer', 'input': 'x'}", "body.n"),
    (b'{"messages":[{"role":"user","content":"a"}],"reasoning_effort":"x"}', "{'type': 'literal_error', 'loc': "
     "'body.reasoning_effort', 'msg': \"Input should be 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or "
     "'max'\", "
     "'input': 'x', 'ctx': {'expected': \"'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'\"}}",
     "body.reasoning_effort"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "entry", "param"), SHAPES, ids=lambda value: str(value)[:40])
def test_vllm_shape_errors_use_original_wording(body, entry, param):
    with pytest.raises(BadRequest) as caught:
        chat.read_vllm_chat(body, CONTEXT)
    assert error_object(caught.value) == {
        "message": f"1 validation error:\n  {entry}", "type": "Bad Request", "param": param, "code": 400
    }  # fmt: skip


def test_vllm_reports_too_many_stop_strings_as_two_errors(read):
    error = refusal(read, stop=list("abcde"))
    first, second, third = error["message"].split("\n")
    assert first == "2 validation errors:" and "'string_type'" in second and "'too_long'" in third
    assert "List should have at most 4 items after validation, not 5" in third
    assert "'loc': 'body.stop'," in second and "'loc': 'body.stop'," in third and error["param"] == "body.stop"
    assert read(stop=list("abcd")).request.stop_conditions.strings == list("abcd")


def test_vllm_refuses_content_type_other_than_json():
    for kind, good in ((b"text/plain", 0), (b"", 0), (b"application/x+json", 1), (b"Application/JSON;charset=x", 1)):
        context = RequestContext(CONTEXT.unique_id, 0, "", context_length=256, headers={b"content-type": kind})
        body = json.dumps({"prompt": "a"}).encode()
        if good:
            assert isinstance(completions.read_vllm_completion(body, context), completions.VllmCompletionReply)
            continue
        with pytest.raises(BadRequest) as caught:
            completions.read_vllm_completion(body, context)
        assert error_object(caught.value)["message"] == (
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        )


def test_vllm_stream_reports_engine_refusal_as_event():
    body = json.dumps({"prompt": "a", "logprobs": 30, "stream": True}).encode()
    answer = completions.read_vllm_completion(body, CONTEXT)
    assert isinstance(answer, Answer) and answer.status == 200
    assert answer.content_type == b"text/event-stream; charset=utf-8"
    assert answer.body == (
        b'data: {"error": {"message": "Requested sample logprobs of 30, which is greater than max allowed: 20 '
        b'(parameter=logprobs, value=30)", "type": "BadRequestError", "param": "logprobs", "code": 400}}\n\n'
        b"data: [DONE]\n\n"
    )


@pytest.mark.parametrize(
    ("error", "status", "body"),
    [
        (Unauthorized("x"), 401, {"error": "Unauthorized"}),
        (NotFound("x"), 404, {"detail": "Not Found"}),
        (NotAllowed("x"), 405, {"detail": "Method Not Allowed"}),
        (UnknownModel("x", name="nope", served=("tiny",), field="model"), 404,
         {"message": "The model `nope` does not exist. Valid aliases: tiny.", "type": "NotFoundError",
          "param": "model"}),
        (TooLarge("big"), 413, {"message": "big", "type": "Request Entity Too Large", "param": None}),
        (Overloaded("x"), 503, {"message": BUSY_SENTENCE, "type": "Service Unavailable", "param": None}),
        (NotReady("later"), 503, {"message": "later", "type": "Service Unavailable", "param": None}),
        (EngineError("broken"), 500, {"message": "broken", "type": "InternalServerError", "param": None}),
        (ParleyError("broken"), 500, {"message": "broken", "type": "InternalServerError", "param": None}),
        (UnsupportedCall("no"), 501, {"message": "no", "type": "NotImplementedError", "param": None}),
        (ContextLength("x", limit=256, prompt=257), 400,
         {"message": "This model's maximum context length is 256 tokens. However, your prompt contains at least "
          "257 input "
          "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input "
          "prompt. (parameter=input_tokens, value=257)", "type": "BadRequestError", "param": "input_tokens"}),
        (ContextLength("x", limit=256, prompt_over=256), 400,
         {"message": "This model's maximum context length is 256 tokens. However, your prompt contains at least "
          "257 input "
          "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input "
          "prompt. (parameter=input_tokens, value=257)", "type": "BadRequestError", "param": "input_tokens"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)  # fmt: skip
def test_vllm_errors_use_original_wording(error, status, body):
    answer = vllm_error_answer(error)
    response_body = json.loads(answer.body)
    if "message" in body:
        body = {"error": body | {"code": status}}
    assert (answer.status, response_body) == (status, body)


# -- bytes: chat

CHAT = b'data: {"id":"chatcmpl-%b","object":"chat.completion.chunk","created":1700000000,"model":"tiny","choices":[' % (
    ID.encode()
)


def test_vllm_chat_writes_body():
    reply = read_chat()
    reply.add_events([PromptAccepted(0, [1] * 11), ChoiceDelta(0, "yes"), ChoiceDone(0, "stop", USAGE)])
    assert reply.render_body(USAGE) == (
        b'{"id":"chatcmpl-%b","object":"chat.completion","created":1700000000,"model":"tiny","choices":[{"index":0,'
        b'"message":{"role":"assistant","content":"yes","refusal":null,"annotations":null,"audio":null,'
        b'"function_call":null,"reasoning":null},"logprobs":null,"finish_reason":"stop","stop_reason":null,'
        b'"token_ids":null,"routed_experts":null,"weight_versions":null}],"service_tier":null,'
        b'"system_fingerprint":"fp_1","usage":'
        b'{"prompt_tokens":11,"total_tokens":14,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4,'
        b'"created_cache_tokens":0,"multimodal_tokens":null},"completion_tokens_details":null},'
        b'"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,'
        b'"ec_transfer_params":null,"metrics":null}' % ID.encode()
    )


def test_vllm_chat_counts_whole_new_pages_of_the_cache():
    """Four of 11 tokens were found, and ten of them fill pages."""
    paged = dataclasses.replace(CONTEXT, page_tokens=5)
    for stream in (False, True):
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        reply = read_chat(paged, **options)
        reply.add_events([PromptAccepted(0, [1] * 11), ChoiceDone(0, "stop", USAGE)])
        data = reply.finish_stream(USAGE) if stream else reply.render_body(USAGE)
        assert b'"prompt_tokens_details":{"cached_tokens":4,"created_cache_tokens":6' in data


def test_vllm_chat_returns_prompt_text():
    events = [PromptAccepted(0, [1], 0, "<user>Hi"), ChoiceDelta(0, "yes"), ChoiceDone(0, "stop", USAGE)]
    reply = read_chat(return_prompt_text=True)
    reply.add_events(events)
    assert json.loads(reply.render_body(USAGE))["prompt_text"] == "<user>Hi"
    first, *_ = chunks(read_chat(return_prompt_text=True, stream=True).render_chunk(events))
    assert first["prompt_text"] == "<user>Hi"


def test_vllm_chat_writes_stream():
    reply = read_chat(stream=True, stream_options={"include_usage": True}, n=2)
    opening = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
    nulls = b'"prompt_token_ids":null,"prompt_text":null}\n\n'
    assert reply.render_chunk([PromptAccepted(0, [1] * 11)]) == CHAT + opening % 0 + nulls + CHAT + opening % 1 + nulls
    assert reply.render_chunk([ChoiceDelta(0, " cache")]) == CHAT + (
        b'{"index":0,"delta":{"content":" cache"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
    )
    assert reply.render_chunk([ChoiceDelta(0, "ang"), ChoiceDelta(1, "x"), ChoiceDone(0, "length", USAGE)]) == (
        CHAT + b'{"index":0,"delta":{"content":"ang"},"logprobs":null,"finish_reason":"length","stop_reason":null,'
        b'"token_ids":null}]}\n\n'
        + CHAT + b'{"index":1,"delta":{"content":"x"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
    )  # fmt: skip
    assert reply.render_chunk([ChoiceDone(1, "stop", USAGE, stop="END")]) == CHAT + (
        b'{"index":1,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":"END","token_ids":null}]}\n\n'
    )
    assert reply.finish_stream(USAGE) == (
        CHAT + b'],"usage":{"prompt_tokens":11,"total_tokens":14,"completion_tokens":3,"prompt_tokens_details":'
        b'{"cached_tokens":4,"created_cache_tokens":0}},"system_fingerprint":"fp_1"}\n\ndata: [DONE]\n\n'
    )  # fmt: skip


def test_vllm_chat_writes_stream_without_usage():
    reply = read_chat(stream=True)
    assert reply.render_chunk([ChoiceDone(0, "stop", USAGE)]) == CHAT + (
        b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null,"token_ids":null}],'
        b'"system_fingerprint":"fp_1"}\n\n'
    )
    assert reply.finish_stream(USAGE) == b"data: [DONE]\n\n"
    assert reply.fail_stream(EngineError("gön")) == (
        b'data: {"error": {"message": "g\\u00f6n", "type": "InternalServerError", "param": null, "code": 500}}\n\n'
        b"data: [DONE]\n\n"
    )


def chunks(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(frame.removeprefix("data: ")) for frame in data.decode().split("\n\n") if frame]


def test_vllm_chat_streams_tool_calls():
    reply = read_chat(stream=True, tools=[TOOL])
    reply.render_chunk([PromptAccepted(0, [1])])
    data = reply.render_chunk(
        [
            ChoiceDelta(0, "Ok "),
            ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(0, "call_0123456789abcdef01234567", "f")),
        ]
    )
    data += reply.render_chunk(
        [ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(0, arguments='{"x":')), ChoiceDone(0, "tool", USAGE)]
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(data)]
    assert deltas == [
        {"content": "Ok "},
        {"content": None, "tool_calls": [
            {"id": "chatcmpl-tool-89abcdef01234567", "type": "function", "index": 0, "function": {"name": "f"}}]},
        {"content": None, "tool_calls": [{"index": 0, "function": {"arguments": '{"x":'}}]},
        {},
    ]  # fmt: skip
    assert chunks(data)[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("parallel", [True, False])
def test_vllm_chat_writes_tool_calls(parallel):
    reply = read_chat(tools=[TOOL], parallel_tool_calls=parallel)
    assert reply.request.prompts[0].parallel_calls is parallel
    for index in range(1 + parallel):
        reply.add_events([ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(index, "call_" + "0" * 24, "f", "{}"))])
    reply.add_events([ChoiceDone(0, "tool", USAGE)])
    (choice,) = json.loads(reply.render_body(USAGE))["choices"]
    message = choice["message"]
    assert list(message)[5:8] == ["function_call", "tool_calls", "reasoning"]
    assert message["content"] is None and choice["finish_reason"] == "tool_calls"
    assert len(message["tool_calls"]) == (2 if parallel else 1)
    assert message["tool_calls"][0]["id"] == "chatcmpl-tool-" + "0" * 16


NAMED = {"type": "function", "function": {"name": "f"}}


def test_vllm_chat_named_tool_call_finishes_with_stop():
    """The message has empty content, and finish_reason is stop."""
    reply = read_chat(tools=[TOOL], tool_choice=NAMED)
    call = ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(0, "call_" + "0" * 24, "f", "{}"))
    reply.add_events([call, ChoiceDone(0, "tool", USAGE)])
    (choice,) = json.loads(reply.render_body(USAGE))["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "")
    streamed = read_chat(tools=[TOOL], tool_choice=NAMED, stream=True).render_chunk(
        [call, ChoiceDone(0, "tool", USAGE)]
    )
    assert chunks(streamed)[-1]["choices"][0]["finish_reason"] == "stop"


def test_vllm_chat_reads_tool_choice():
    strict_tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}
    assert read_chat(tools=[strict_tool]).request.prompts[0].tools == [strict_tool]
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    form = {"type": "json_schema", "json_schema": {"name": "f", "strict": True, "schema": schema}}
    for structured in ({}, {"structured_outputs": {"json": {"type": "object"}}}):
        grammar = read_chat(response_format=form, **structured).request.grammar
        assert (grammar.kind, grammar.value) == ("json", schema)
    (chat_,) = read_chat(tools=[TOOL], tool_choice="none").request.prompts
    assert (chat_.tool_choice, len(chat_.tools)) == ("none", 1)  # the template still gets the tools
    assert read_chat(tools=[TOOL], tool_choice={"function": {"name": "f"}}).request.prompts[0].forced_tool == "f"
    other = {"type": "function", "function": {"name": "g"}}
    sentence = "The tool specified in `tool_choice` does not match any of the specified `tools` (parameter=tool_choice)"
    assert refusal(read_chat, tools=[TOOL], tool_choice=other)["message"] == sentence


def test_vllm_chat_writes_reasoning_under_both_names():
    events = [ChoiceDelta(0, "hm", "reasoning"), ChoiceDelta(0, "yes"), ChoiceDone(0, "stop", USAGE)]
    reply = read_chat()
    reply.add_events(events)
    (choice,) = json.loads(reply.render_body(USAGE))["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["reasoning_content"]) == ("hm", "hm")
    silent = read_chat(include_reasoning=False)
    silent.add_events(events)
    (choice,) = json.loads(silent.render_body(USAGE))["choices"]
    assert choice["message"]["reasoning"] is None and "reasoning_content" not in choice["message"]
    streamed = chunks(read_chat(stream=True).render_chunk(events))
    assert [chunk["choices"][0]["delta"] for chunk in streamed] == [
        {"reasoning": "hm", "reasoning_content": "hm"},
        {"content": "yes"},
    ]
    assert len(chunks(read_chat(stream=True, include_reasoning=False).render_chunk(events))) == 1


def test_vllm_chat_writes_echo_with_prompt_logprobs():
    messages = [*MESSAGES, {"role": "assistant", "content": "Sure"}]
    reply = read_chat(messages=messages, echo=True)
    assert reply.request.output_options.prompt_logprobs == 0
    score = TokenInfo(7, "b", b"b", -0.5, 1)
    reply.add_events(
        [PromptScored(0, [TokenInfo(5, "a", b"a"), score]), ChoiceDelta(0, "!"), ChoiceDone(0, "stop", USAGE)]
    )
    answer = json.loads(reply.render_body(USAGE))
    assert answer["choices"][0]["message"]["content"] == "Sure!"
    assert answer["prompt_logprobs"] == [None, {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]
    opening, echoed = chunks(
        read_chat(messages=messages, echo=True, stream=True).render_chunk([PromptAccepted(0, [1])])
    )
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert echoed["choices"][0] == {
        "index": 0, "delta": {"content": "Sure"}, "logprobs": None, "finish_reason": None
    }  # fmt: skip


def test_vllm_chat_writes_token_ids_and_logprobs():
    other = TokenInfo(6, "b", b"b", -2.0, 2)
    token = TokenInfo(5, "a", b"a", -0.5, 1, [other])
    members = {"return_token_ids": True, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    scored = {"content": [{
        "token": "token_id:5", "logprob": -0.5, "bytes": [97],
        "top_logprobs": [{"token": "token_id:6", "logprob": -2.0, "bytes": [98]}],
    }]}  # fmt: skip
    reply = read_chat(**members)
    reply.add_events([PromptAccepted(0, [1, 2]), ChoiceDelta(0, "a", tokens=[token]), ChoiceDone(0, "stop", USAGE)])
    answer = json.loads(reply.render_body(USAGE))
    assert answer["prompt_token_ids"] == [1, 2]
    assert answer["choices"][0]["token_ids"] == [5] and answer["choices"][0]["logprobs"] == scored
    reply = read_chat(stream=True, **members)
    opening, piece = chunks(reply.render_chunk([PromptAccepted(0, [1, 2]), ChoiceDelta(0, "a", tokens=[token])]))
    assert opening["prompt_token_ids"] == [1, 2]
    assert piece["choices"][0]["token_ids"] == [5] and piece["choices"][0]["logprobs"] == scored


def test_vllm_stream_reports_usage_in_every_chunk(read):
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = read(stream=True, stream_options=options)
    token = TokenInfo(5, "a", b"a")
    data = reply.render_chunk([PromptAccepted(0, [1] * 11)])
    data += reply.render_chunk([ChoiceDelta(0, "a", tokens=[token])]) + reply.render_chunk(
        [ChoiceDelta(0, "bc", tokens=[token, token])]
    )
    data += reply.render_chunk([ChoiceDelta(0, "", tokens=[token]), ChoiceDone(0, "stop", USAGE)])
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks(data)]
    assert counts in ([0, 1, 3, 4], [1, 3, 4])  # a chat stream has an opening chunk
    assert chunks(data)[-1]["choices"][0].get("delta", {}) == {}
    assert list(chunks(data)[-1]["usage"]) == [
        "prompt_tokens", "total_tokens", "completion_tokens", "completion_tokens_details"
    ]  # fmt: skip


# -- bytes: completions

TEXT = b'data: {"id":"cmpl-%b","object":"text_completion","created":1700000000,"model":"tiny","choices":[' % ID.encode()


def test_vllm_completions_writes_body():
    reply = read_completion()
    reply.add_events([PromptAccepted(0, [1] * 11), ChoiceDelta(0, " cache"), ChoiceDone(0, "stop", USAGE, stop=7)])
    assert reply.render_body(USAGE) == (
        b'{"id":"cmpl-%b","object":"text_completion","created":1700000000,"model":"tiny","choices":[{"index":0,'
        b'"text":" cache","logprobs":null,"finish_reason":"stop","stop_reason":7,"token_ids":null,'
        b'"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null,"weight_versions":null}],"service_tier":null,'
        b'"system_fingerprint":"fp_1","usage":{"prompt_tokens":11,"total_tokens":14,"completion_tokens":3,'
        b'"prompt_tokens_details":{"cached_tokens":4,"created_cache_tokens":null,"multimodal_tokens":null},'
        b'"completion_tokens_details":null},"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
        % ID.encode()
    )


def test_vllm_completions_writes_stream():
    reply = read_completion(stream=True, prompt=["a", "b"])
    tail = b'"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n'
    assert reply.render_chunk([PromptAccepted(0, [1]), PromptAccepted(1, [2])]) == b""
    assert (
        reply.render_chunk([ChoiceDelta(1, " cache")]) == TEXT + b'{"index":1,"text":" cache","logprobs":null,' + tail
    )
    assert reply.render_chunk([ChoiceDelta(0, "x"), ChoiceDone(0, "length", USAGE)]) == TEXT + (
        b'{"index":0,"text":"x","logprobs":null,"finish_reason":"length","stop_reason":null,"prompt_token_ids":null,'
        b'"token_ids":null}]}\n\n'
    )
    assert reply.render_chunk([ChoiceDone(1, "stop", USAGE)]) == TEXT + (
        b'{"index":1,"text":"","logprobs":null,"finish_reason":"stop","stop_reason":null,"prompt_token_ids":null,'
        b'"token_ids":null}]}\n\n'
    )
    assert reply.finish_stream(USAGE) == b"data: [DONE]\n\n"


def test_vllm_completions_writes_echo_with_logprobs():
    token = TokenInfo(5, "a", b"a", -0.5, 1, [TokenInfo(6, "b", b"b", -2.0, 2)])
    events = [
        PromptAccepted(0, [9, 8]),
        PromptScored(0, [TokenInfo(9, "H", b"H"), TokenInfo(8, "i", b"i", -1.0, 1)], "Hi"),
        ChoiceDelta(0, "a", tokens=[token]),
        ChoiceDone(0, "stop", USAGE),
    ]
    lists = {
        "text_offset": [0, 1, 2], "token_logprobs": [None, -1.0, -0.5], "tokens": ["H", "i", "a"],
        "top_logprobs": [None, {"i": -1.0}, {"b": -2.0, "a": -0.5}],
    }  # fmt: skip
    reply = read_completion(echo=True, logprobs=1, return_token_ids=True, prompt_logprobs=0)
    reply.add_events(events)
    (choice,) = json.loads(reply.render_body(USAGE))["choices"]
    assert choice["text"] == "Hia" and choice["logprobs"] == lists and list(choice["logprobs"]) == list(lists)
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([5], [9, 8])
    assert choice["prompt_logprobs"] == [None, {"8": {"logprob": -1.0, "rank": 1, "decoded_token": "i"}}]
    first, last = chunks(
        read_completion(echo=True, logprobs=1, return_token_ids=True, stream=True).render_chunk(events)
    )
    assert first["choices"][0]["text"] == "Hi" and first["choices"][0]["token_ids"] == []
    assert first["choices"][0]["prompt_token_ids"] == [9, 8] and last["choices"][0]["prompt_token_ids"] is None
    assert last["choices"][0]["token_ids"] == [5] and last["choices"][0]["logprobs"]["text_offset"] == [2]


# -- the small routes


def test_vllm_lists_models():
    facts = ServerFacts("1", [ModelCard("tiny", 5, 256, "tiny"), ModelCard("alias", 5, 256, "tiny")], True)
    first, second = json.loads(control.answer_vllm_models(b"", CONTEXT, facts).body)["data"]
    assert json.dumps(first, separators=(",", ":")) == (
        '{"id":"tiny","object":"model","created":1700000000,"owned_by":"vllm","root":"tiny","parent":null,'
        f'"max_model_len":256,"permission":[{{"id":"modelperm-{ID}","object":"model_permission","created":1700000000,'
        '"allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,'
        '"allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}]}'
    )
    assert (second["id"], second["root"]) == ("alias", "tiny")
    assert second["permission"][0]["id"] != first["permission"][0]["id"]


def test_vllm_invocations_choose_task_by_body():
    for members, kind in (
        ({"messages": MESSAGES}, chat.VllmChatReply),
        ({"prompt": "a"}, completions.VllmCompletionReply),
        ({"messages": MESSAGES, "prompt": "a"}, chat.VllmChatReply),
        ({"input": "a"}, embeddings.VllmEmbeddingReply),
        ({"messages": MESSAGES, "encoding_format": "float"}, embeddings.VllmEmbeddingReply),
        ({"messages": [MESSAGES, MESSAGES]}, embeddings.VllmEmbeddingReply),
    ):
        assert isinstance(control.read_vllm_invocation(json.dumps(members).encode(), CONTEXT), kind)
    with pytest.raises(BadRequest):
        control.read_vllm_invocation(b"{}", CONTEXT)


def test_vllm_loads_and_unloads_adapters_by_name():
    def ask(read, **members):
        return read(True, json.dumps(members).encode(), CONTEXT)

    request = ask(
        control.read_load_adapter, lora_name="a/b", lora_path="./x", load_inplace=True, is_3d_lora_weight=True
    )
    assert (request.name, request.folder, request.replace_existing, request.model) == ("a/b", "./x", True, "")
    assert request.success.body == b"Success: LoRA adapter 'a/b' added successfully."
    assert not ask(control.read_load_adapter, lora_name="a", lora_path="./x").replace_existing
    request = ask(control.read_unload_adapter, lora_name="a", lora_int_id=5)
    assert (request.name, request.folder) == ("a", None)
    for members in ({"lora_name": 5}, {"lora_path": []}, {"load_inplace": "perhaps"}, {"is_3d_lora_weight": 5.5}):
        with pytest.raises(BadRequest):
            ask(control.read_load_adapter, **({"lora_name": "a", "lora_path": "x"} | members))
    with pytest.raises(BadRequest):
        ask(control.read_unload_adapter, lora_name="a", lora_int_id="x")


@pytest.mark.parametrize(
    ("members", "sentence", "param"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", "max_tokens"),
        ({"echo": True, "logprobs": 1, "use_beam_search": True}, "`echo` with `logprobs` is not supported with beam "
         "search because beam search does not compute prompt logprobs. (parameter=echo)", "echo"),
        ({"echo": True, "max_tokens": 0, "logprobs": 1, "logprob_token_ids": [5]}, "`logprob_token_ids` is not "
         "supported when `echo=True` and `max_tokens=0` because no output tokens are generated. "
         "(parameter=logprob_token_ids)", "logprob_token_ids"),
    ],
    ids=["no tokens", "beams", "no output"],
)  # fmt: skip
def test_vllm_completion_refusals_use_original_wording(members, sentence, param):
    error = refusal(read_completion, **members)
    assert (error["message"], error["param"], error["code"]) == (sentence, param, 400)


def test_vllm_takes_members_that_ask_for_nothing(read):
    assert read(stream_options={}).request == read().request
    assert read(stream=True, prompt_logprobs=0).request.output_options.prompt_logprobs is None
    assert read(mm_processor_kwargs={}, media_io_kwargs={}).request == read().request
