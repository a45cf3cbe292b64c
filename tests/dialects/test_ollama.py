"""Ollama: meaning of bodies, refusals in its form, and the exact bytes of lines and answers."""

import dataclasses
import json
import struct
from typing import Any

import msgspec
import pytest

from parley.dialects.facts import ModelCard, ServerFacts
from parley.dialects.ollama import DIALECT, STRICT, chat, embeddings, generate, models
from parley.dialects.ollama.api_rules import LENIENT_OLLAMA_RULES, STRICT_OLLAMA_RULES, OllamaRules
from parley.dialects.ollama.go_encoding import JSON_TYPE
from parley.dialects.reply import Acknowledgement, Answer, RequestTimings
from parley.dialects.request_context import RequestContext
from parley.engine.scripted_engine import SCRIPTED_MODEL
from parley.errors import (
    ContextLength,
    EngineDied,
    NotAllowed,
    NotFound,
    NotReady,
    Overloaded,
    ParleyError,
    UnknownModel,
)
from parley.types import (
    ChatPrompt,
    ChoiceDelta,
    ChoiceDone,
    EncodedMedia,
    Grammar,
    Media,
    Message,
    PlacedMedia,
    PoolingOptions,
    PromptAccepted,
    PromptVector,
    SamplingOptions,
    StopConditions,
    TextPrompt,
    TokenInfo,
    ToolCall,
    ToolCallDelta,
    Usage,
)

CONTEXT = RequestContext("0f", 1795331521, "fp", context_length=100, model_names=("m",), media_limits={"image": 2})
PLAIN = dataclasses.replace(CONTEXT, abilities=frozenset({"chat"}), media_limits={})
USAGE = Usage(prompt_tokens=26, completion_tokens=2)
TIMINGS = RequestTimings(total=0.412, validation=0.005, queue=0.004, inference=0.4, prefill=0.12, decode=0.28)
METRICS = (
    b'"total_duration":412000000,"load_duration":9000000,"prompt_eval_count":26,"prompt_eval_duration":120000000,'
    b'"eval_count":2,"eval_duration":280000000'
)
HELLO = [{"role": "user", "content": "Hello"}]
CHAT_HEAD = b'{"model":"m:latest","created_at":"2026-11-22T07:12:01.000000001Z","message":{"role":"assistant",'
TEXT_HEAD = b'{"model":"m","created_at":"2026-11-22T07:12:01.000000001Z","response":'
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"function": {"name": "f", "arguments": {"a": [1, "<"]}}}


def read_chat(rules: OllamaRules = LENIENT_OLLAMA_RULES, context: RequestContext = CONTEXT, **members: Any) -> Any:
    body = {"model": "m:latest", "messages": HELLO} | members
    return chat.read_ollama_chat(rules, json.dumps(body).encode(), context)


def read_ollama_generate(
    rules: OllamaRules = LENIENT_OLLAMA_RULES, context: RequestContext = CONTEXT, **members: Any
) -> Any:
    return generate.read_ollama_generate(rules, json.dumps({"model": "m", "prompt": "Hi"} | members).encode(), context)


def refusal(read: Any, *arguments: Any, **members: Any) -> tuple[int, str]:
    with pytest.raises(ParleyError) as caught:
        read(*arguments, **members)
    status, data, content_type = DIALECT.render_error(caught.value)
    assert content_type == b"application/json; charset=utf-8"
    return status, json.loads(data)["error"]


def stream(reply: Any, *batches: list[Any], done: str = "stop") -> list[bytes]:
    """Return the lines of a stream; each batch has the events of a step."""
    parts = [reply.render_chunk(batch) for batch in batches]
    token_ids = [token.id for batch in batches for event in batch for token in getattr(event, "tokens", ())]
    parts.append(reply.render_chunk([ChoiceDone(0, done, USAGE, token_ids=token_ids)]))
    reply.timings = TIMINGS
    return (b"".join(parts) + reply.finish_stream(USAGE)).splitlines(keepends=True)


def answer_body(reply: Any, *events: Any, done: str = "stop") -> bytes:
    reply.add_events([*events, ChoiceDone(0, done, USAGE)])
    reply.timings = TIMINGS
    return reply.render_body(USAGE)


# -- bytes


def test_ollama_chat_stream_has_one_object_per_line():
    lines = stream(read_chat(), [ChoiceDelta(0, "Hel")], [ChoiceDelta(0, 'l<o>&"\u2028é')])
    assert lines == [
        CHAT_HEAD + b'"content":"Hel"},"done":false}\n',
        CHAT_HEAD + '"content":"l\\u003co\\u003e\\u0026\\"\\u2028é"},"done":false}\n'.encode(),
        CHAT_HEAD + b'"content":""},"done":true,"done_reason":"stop",' + METRICS + b"}\n",
    ]


def test_ollama_chat_stream_sends_thinking_and_each_call_whole():
    events = [
        ChoiceDelta(0, "Hm", "reasoning"),
        ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(0, "call_0123456789ab", "f", '{"a"')),
        ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(0, arguments=":1}")),
        ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(1, "call_ffffffffffff", "g", "")),
    ]
    lines = stream(read_chat(tools=[TOOL]), *([event] for event in events), done="tool")
    call = b'"content":"","tool_calls":[{"id":"call_%b","function":{"index":%d,"name":"%b","arguments":%b}}]}'
    call += b',"done":false}\n'
    assert lines == [
        CHAT_HEAD + b'"content":"","thinking":"Hm"},"done":false}\n',
        CHAT_HEAD + call % (b"01234567", 0, b"f", b'{"a":1}'),
        CHAT_HEAD + call % (b"ffffffff", 1, b"g", b"{}"),
        CHAT_HEAD + b'"content":""},"done":true,"done_reason":"stop",' + METRICS + b"}\n",
    ]


def test_ollama_chat_answer_is_the_last_line_with_everything_joined():
    events = [
        ChoiceDelta(0, "Hm", "reasoning"),
        ChoiceDelta(0, "A"),
        ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(0, "call_01234567", "f", "{}")),
    ]
    answer = answer_body(read_chat(stream=False, tools=[TOOL]), *events)
    assert answer == (
        CHAT_HEAD
        + b'"content":"A","thinking":"Hm","tool_calls":[{"id":"call_01234567","function":{"index":0,"name":"f",'
        b'"arguments":{}}}]},"done":true,"done_reason":"stop",' + METRICS + b"}"
    )


def test_ollama_leaves_out_a_call_that_was_cut_off():
    cut = ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(0, "call_01234567", "f", '{"a'))
    answer = json.loads(answer_body(read_chat(stream=False, tools=[TOOL]), cut, done="length"))
    assert (answer["message"], answer["done_reason"]) == ({"role": "assistant", "content": ""}, "length")


def test_ollama_generate_writes_metrics_before_calls_and_log_probabilities():
    token = TokenInfo(5, "A", b"A", -0.5, 1, [TokenInfo(5, "A", b"A", -0.5), TokenInfo(6, "", b"", float("-inf"))])
    reply = read_ollama_generate(logprobs=True, top_logprobs=2)
    lines = stream(reply, [PromptAccepted(0, [1, 2])], [ChoiceDelta(0, "A", tokens=[token])])
    scored = (
        b'"logprobs":[{"token":"A","logprob":-0.5,"bytes":[65],"top_logprobs":[{"token":"A","logprob":-0.5,'
        b'"bytes":[65]},{"token":"","logprob":-9999.0}]}]'
    )
    assert lines == [
        TEXT_HEAD + b'"A","done":false,' + scored + b"}\n",
        TEXT_HEAD + b'"","done":true,"done_reason":"stop","context":[1,2,5],' + METRICS + b"}\n",
    ]
    reply = read_ollama_generate(logprobs=True, top_logprobs=2, raw=True)
    answer = answer_body(
        reply, PromptAccepted(0, [1, 2]), ChoiceDelta(0, "H", "reasoning"), ChoiceDelta(0, "A", tokens=[token])
    )
    assert answer == (
        TEXT_HEAD + b'"A","thinking":"H","done":true,"done_reason":"stop",' + METRICS + b"," + scored + b"}"
    )


def test_ollama_stream_ends_with_an_error_line():
    reply = read_chat()
    assert reply.render_chunk([ChoiceDelta(0, "A")])
    assert reply.fail_stream(EngineDied("gone & <lost>")) == b'{"error":"gone \\u0026 \\u003clost\\u003e"}\n'


def test_ollama_reports_the_model_as_loaded_for_a_request_without_text():
    answer = read_chat(messages=[])
    assert type(answer) is Acknowledgement
    assert answer.body == CHAT_HEAD + b'"content":""},"done":true,"done_reason":"load"}'
    assert json.loads(read_chat(messages=[], keep_alive=0).body)["done_reason"] == "unload"
    assert read_ollama_generate(prompt="").body == TEXT_HEAD + b'"","done":true,"done_reason":"load"}'
    assert refusal(read_chat, messages=[], model="x") == (404, "model 'x' not found")
    encoder = dataclasses.replace(PLAIN, generates=False)
    assert refusal(read_chat, messages=[], context=encoder) == (400, '"m:latest" does not support chat')
    assert refusal(read_ollama_generate, prompt="", context=encoder) == (400, '"m" does not support generate')
    assert json.loads(read_ollama_generate(prompt="", keep_alive=0, context=encoder).body)["done_reason"] == "unload"


# -- what a body means


def test_ollama_defaults_are_those_of_ollama():
    request = read_chat().request
    assert request.sampling == SamplingOptions(temperature=0.8, top_k=40, top_p=0.9)
    assert request.stop_conditions == StopConditions(reserved_tokens=1)
    assert (request.stream, request.grammar, request.context_limit, request.on_overflow) == (
        True,
        None,
        None,
        "oldest_turns",
    )
    assert request.prompts == [ChatPrompt([Message("user", "Hello")], thinking=True)]
    advised = dataclasses.replace(
        CONTEXT, generation_defaults={"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    )
    sampling = read_chat(context=advised, options={"top_k": 5}).request.sampling
    assert sampling == SamplingOptions(temperature=0.6, top_k=5, top_p=0.9, repetition_penalty=1.1, penalty_window=64)


OPTIONS: dict[str, tuple[Any, str, Any]] = {  # an option: a value, its type, and what it changes in the sampling
    "temperature": (0, "float32", {"temperature": 0.0}),
    "top_k": (-1, "integer", {"top_k": 0}),
    "top_p": (1, "float32", {"top_p": 1.0}),
    "min_p": (0.1, "float32", {"min_p": 0.1}),
    "typical_p": (0.7, "float32", {"typical_p": 0.7}),
    "seed": (7.0, "integer", {"seed": 7}),
    "repeat_penalty": (1.2, "float32", {"repetition_penalty": 1.2, "penalty_window": 64}),
    "presence_penalty": (0.5, "float32", {"presence_penalty": 0.5, "penalty_window": 64}),
    "frequency_penalty": (-0.5, "float32", {"frequency_penalty": -0.5, "penalty_window": 64}),
    "num_keep": (4, "integer", {}),
    "num_batch": (512, "integer", {}),
    "num_gpu": (-1, "integer", {}),
    "main_gpu": (0, "integer", {}),
    "num_thread": (8, "integer", {}),
    "draft_num_predict": (4, "integer", {}),
    "use_mmap": (True, "boolean", {}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_ollama_reads_each_option(name):
    value, go_type, changes = OPTIONS[name]
    plain = read_chat().request.sampling
    assert read_chat(options={name: value}).request.sampling == msgspec.structs.replace(plain, **changes)
    assert read_chat(options={name: None, "mirostat": "gone"}).request.sampling == plain
    text = f'option "{name}" must be of type {go_type}'
    assert refusal(read_chat, options={name: "x"}) == (400, text)
    assert refusal(read_chat, STRICT_OLLAMA_RULES, options={name: "x"}) == (500, text)


def test_ollama_reads_limits_and_stops():
    request = read_chat(options={"num_predict": 5, "num_ctx": 64.0, "stop": ["a", "b"]}, truncate=False).request
    assert request.stop_conditions == StopConditions(strings=["a", "b"], max_tokens=5, reserved_tokens=1)
    assert (request.context_limit, request.on_overflow) == (64, "refuse")
    assert read_chat(shift=True).request == read_chat(shift=False).request == read_chat().request
    for none in (-1, -2, 0):
        assert read_chat(options={"num_predict": none, "num_ctx": 0}).request == read_chat().request
    assert read_chat(options={"stop": "a"}).request.stop_conditions.strings == ["a"]
    assert refusal(read_chat, STRICT_OLLAMA_RULES, options={"stop": "a"}) == (
        500,
        'option "stop" must be of type array',
    )
    assert refusal(read_chat, options={"stop": [1]}) == (400, 'option "stop" must be of an array of strings')


def test_ollama_penalties_look_at_the_last_tokens():
    plain = read_chat().request.sampling
    for options, window in (({}, 64), ({"repeat_last_n": 32}, 32), ({"repeat_last_n": -1}, 2**31 - 1)):
        sampling = read_chat(options=options | {"repeat_penalty": 1.2}).request.sampling
        assert sampling == msgspec.structs.replace(plain, repetition_penalty=1.2, penalty_window=window)
        assert read_chat(options=options).request.sampling == plain
    assert read_chat(options={"repeat_penalty": 1.2, "repeat_last_n": 0}).request.sampling == plain
    advised = dataclasses.replace(CONTEXT, generation_defaults={"repetition_penalty": 1.1})
    sampling = read_chat(context=advised, options={"repeat_last_n": 8}).request.sampling
    assert (sampling.repetition_penalty, sampling.penalty_window) == (1.1, 8)


def test_ollama_penalties_follow_an_engine_without_windows():
    context = dataclasses.replace(CONTEXT, engine_features=CONTEXT.engine_features - {"penalty_window"})
    for options, window in (({}, 0), ({"repeat_last_n": -1}, 0), ({"repeat_last_n": 32}, 32)):
        sampling = read_chat(context=context, options=options | {"repeat_penalty": 1.2}).request.sampling
        assert (sampling.repetition_penalty, sampling.penalty_window) == (1.2, window)


def test_ollama_reads_the_form_of_an_answer():
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "string"}}}
    assert read_chat(format=schema).request.grammar == Grammar("json", schema, field="format")
    assert read_chat(format="json").request.grammar == Grammar("json", {"type": "object"}, field="format")
    assert read_chat(format="").request.grammar is read_chat(format=None).request.grammar is None
    expected = 'invalid format: "xml"; expected "json" or a valid JSON Schema object'
    assert refusal(read_chat, format="xml") == (400, expected)


def test_ollama_reads_think():
    levels = {True: (True, None), False: (False, None), "low": (True, "low"), "max": (True, "max")}
    for think, (thinking, effort) in levels.items():
        (prompt,) = read_chat(think=think).request.prompts
        assert (prompt.thinking, prompt.reasoning_effort) == (thinking, effort)
    assert read_chat(context=PLAIN).request.prompts[0].thinking is None
    assert read_chat(context=PLAIN, think=False).request.prompts[0].thinking is None
    assert refusal(read_chat, context=PLAIN, think=True) == (400, '"m:latest" does not support thinking')
    expected = 'invalid think value: "x" (must be "high", "medium", "low", "max", true, or false)'
    assert refusal(read_chat, think="x") == (400, expected)
    hidden = read_chat(think=False)
    assert hidden.render_chunk([ChoiceDelta(0, "Hm", "reasoning")]) == b""


@pytest.mark.parametrize("value", [0, -1, 1.5, "5m", "1h30m", "300ms", "-1m", "0", None])
def test_ollama_takes_a_time_to_keep_the_model(value):
    assert read_chat(STRICT_OLLAMA_RULES, keep_alive=value).request == read_chat().request


def test_ollama_refuses_other_times():
    assert refusal(read_chat, keep_alive="x") == (400, 'time: invalid duration "x"')
    assert refusal(read_chat, STRICT_OLLAMA_RULES, keep_alive="-1") == (400, 'time: missing unit in duration "-1"')
    assert read_chat(keep_alive="-1").request == read_chat().request


def test_ollama_reads_history_with_calls_and_images():
    history = [
        {"role": "System", "content": "Be brief."},
        {"role": "user", "content": "What?", "images": ["aGk=", "data:image/png;base64,aGo="]},
        {"role": "assistant", "thinking": "Hm", "tool_calls": [CALL | {"id": "call_1"}]},
        {"role": "tool", "content": "4", "tool_name": "f", "tool_call_id": "call_1"},
    ]
    (prompt,) = read_chat(messages=history, tools=[TOOL]).request.prompts
    images = [
        PlacedMedia(0, Media("image", EncodedMedia("aGk="), "messages[1].images[0]")),
        PlacedMedia(0, Media("image", EncodedMedia("aGo=", "image/png"), "messages[1].images[1]")),
    ]
    assert prompt.messages == [
        Message("system", "Be brief."),
        Message("user", "What?", media=images),
        Message("assistant", "", None, "Hm", [ToolCall("call_1", "f", '{"a":[1,"<"]}')]),
        Message("tool", "4", "f", tool_call_id="call_1"),
    ]
    assert prompt.tools == [TOOL]


def test_ollama_reads_arguments_in_text_unless_strict():
    in_text = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}]
    (prompt,) = read_chat(messages=in_text).request.prompts
    assert prompt.messages[0].tool_calls == [ToolCall("", "f", '{"a":1}')]
    assert refusal(read_chat, STRICT_OLLAMA_RULES, messages=in_text) == (
        400,
        "json: cannot unmarshal string into Go struct field ChatRequest.messages.tool_calls.function.arguments of type "
        "map[string]interface {}",
    )


def test_ollama_generate_reads_a_turn_or_a_raw_prompt():
    turn = ChatPrompt([Message("system", "Be brief."), Message("user", "Hi")], thinking=False, preceding_ids=[5, 6])
    request = read_ollama_generate(system="Be brief.", context=CONTEXT, think=False, template="", suffix="").request
    assert request.prompts == [msgspec.structs.replace(turn, preceding_ids=[])]
    body = {"model": "m", "prompt": "Hi", "system": "Be brief.", "think": False, "context": [5, 6]}
    assert generate.read_ollama_generate(LENIENT_OLLAMA_RULES, json.dumps(body).encode(), CONTEXT).request.prompts == [
        turn
    ]
    raw = read_ollama_generate(raw=True).request
    assert raw.prompts == [TextPrompt("Hi")] and not raw.output_options.ids
    assert read_ollama_generate(suffix="there").request.prompts == [TextPrompt("Hi", suffix="there")]
    no_chat = dataclasses.replace(PLAIN, abilities=frozenset())
    assert read_ollama_generate(context=no_chat).request.prompts == [TextPrompt("Hi")]
    image = PlacedMedia(0, Media("image", EncodedMedia("aGk="), "images[0]"))
    assert read_ollama_generate(images=["aGk="]).request.prompts[0].messages == [Message("user", "Hi", media=[image])]


REFUSALS: list[tuple[Any, dict[str, Any], int, str]] = [
    (read_chat, {"model": ""}, 400, "model is required"),
    (read_ollama_generate, {"model": ""}, 404, "model '' not found"),
    (read_chat, {"top_logprobs": 21}, 400, "top_logprobs must be between 0 and 20"),
    (read_chat, {"context": PLAIN, "tools": [TOOL]}, 400, '"m:latest" does not support tools'),
    (read_chat, {"_debug_render_only": True}, 400, "'_debug_render_only' is not available on this server."),
    (read_ollama_generate, {"raw": True, "system": "x"}, 400, "raw mode does not support template, system, or context"),
    (read_ollama_generate, {"context": PLAIN, "suffix": "x"}, 400, '"m" does not support insert'),
    (read_ollama_generate, {"suffix": "x", "raw": True}, 400, "Invalid 'suffix': cannot be used together with 'raw'."),
    (
        read_ollama_generate,
        {"suffix": "x", "system": "x"},
        400,
        "Invalid 'system': cannot be used together with 'suffix'.",
    ),
    (read_ollama_generate, {"width": 64}, 400, "'width' is not available on this server: it makes no images."),
    (read_ollama_generate, {"height": 64}, 400, "'height' is not available on this server: it makes no images."),
    (read_ollama_generate, {"steps": 4}, 400, "'steps' is not available on this server: it makes no images."),
    (read_ollama_generate, {"context": PLAIN, "images": ["aGk="]}, 400, "'images': this model does not support vision"),
]


@pytest.mark.parametrize(("read", "members", "status", "text"), REFUSALS)
def test_ollama_refusals_use_original_wording(read, members, status, text):
    assert refusal(read, **members) == (status, text)


def test_ollama_refuses_chats_of_models_without_conversations():
    no_chat, encoder = (dataclasses.replace(CONTEXT, abilities=frozenset(), generates=made) for made in (True, False))
    for context in (no_chat, encoder):
        assert refusal(read_chat, context=context) == (400, '"m:latest" does not support chat')
    assert refusal(read_ollama_generate, context=encoder) == (400, '"m" does not support generate')


def test_ollama_errors_are_a_text_in_an_object():
    too_long = ContextLength("It has 9 tokens.", limit=8, prompt=9)
    errors = {
        Overloaded("full"): (503, "server busy, please try again.  maximum pending requests exceeded"),
        UnknownModel("?", name="x"): (404, "model 'x' not found"),
        UnknownModel("?", name="a b"): (400, "invalid model name"),
        too_long: (400, "the input length exceeds the context length: It has 9 tokens."),
        NotReady("loading"): (503, "loading"),
    }
    for error, (status, text) in errors.items():
        assert DIALECT.render_error(error) == Answer(
            status, json.dumps({"error": text}, separators=(",", ":")).encode(), JSON_TYPE
        )
    assert DIALECT.render_error(NotFound("x")) == Answer(404, b"404 page not found", b"text/plain")
    assert DIALECT.render_error(NotAllowed("x")) == Answer(405, b"405 method not allowed", b"text/plain")
    assert refusal(lambda: chat.read_ollama_chat(LENIENT_OLLAMA_RULES, b"", CONTEXT)) == (400, "missing request body")


# -- vectors


def vector_bytes(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def read_vectors(path: str, context: RequestContext = CONTEXT, **members: Any) -> Any:
    read = {"embed": embeddings.read_ollama_embed, "embeddings": embeddings.read_ollama_embeddings}[path]
    return read(LENIENT_OLLAMA_RULES, json.dumps({"model": "m"} | members).encode(), context)


def test_ollama_embed_answers_vectors_of_length_1():
    reply = read_vectors("embed", input=["a", "b"], dimensions=2, options={"num_ctx": None}, truncate=True)
    assert reply.request.prompts == [TextPrompt("a"), TextPrompt("b")]
    assert reply.request.pooling == PoolingOptions(2, normalize=True)
    assert (reply.request.max_prompt_tokens, reply.request.kept_side) == (100, "head")
    reply.add_events([PromptVector(1, vector_bytes(1, 0)), PromptVector(0, vector_bytes(0.6, 0.8))])
    reply.timings = TIMINGS
    assert reply.render_body(Usage(prompt_tokens=8)) == (
        b'{"model":"m","embeddings":[[0.6,0.8],[1.0,0.0]],"total_duration":412000000,"load_duration":9000000,'
        b'"prompt_eval_count":8}'
    )
    assert read_vectors("embed", input="a", truncate=False).request.max_prompt_tokens is None
    for nothing in ({}, {"input": []}, {"input": ""}):
        assert read_vectors("embed", **nothing).body == b'{"model":"m","embeddings":[]}'
    texts = read_vectors("embed", input=["", "a"]).request.prompts
    assert texts == [TextPrompt(""), TextPrompt("a")]
    for wrong in (5, [5], ["a", None]):
        assert refusal(read_vectors, "embed", input=wrong) == (400, "invalid input type")


def test_ollama_embed_takes_num_ctx_as_the_window_of_each_text():
    for path, member in (("embed", "input"), ("embeddings", "prompt")):
        for window, longest in ((30, 30), (None, 100), (1000, 100)):
            request = read_vectors(path, **{member: "a"}, options={"num_ctx": window}).request
            assert (request.max_prompt_tokens, request.context_limit) == (longest, window)
    answer_body = read_vectors("embed", input="a", options={"num_ctx": 30}, truncate=False).request
    assert (answer_body.max_prompt_tokens, answer_body.context_limit) == (None, 30)
    no_room = "input after truncation exceeds maximum context length"
    for path, member in (("embed", "input"), ("embeddings", "prompt")):
        assert refusal(read_vectors, path, **{member: "a"}, options={"num_ctx": 0}) == (400, no_room)
    narrow = read_vectors("embed", input="a", options={"num_ctx": 2})
    assert narrow.render_refusal(ContextLength("narrow")).body == b'{"error":"%b"}' % no_room.encode()


def test_ollama_embed_errors_use_original_wording():
    reply = read_vectors("embed", input="a", truncate=False)
    errors = {
        UnknownModel("?", name="x"): b'{"error":"model \\"x\\" not found, try pulling it first"}',
        ContextLength("long"): b'{"error":"the input length exceeds the context length"}',
    }
    assert {error: reply.render_refusal(error).body for error in errors} == errors
    assert reply.render_refusal(NotReady("loading")) is None


def test_ollama_embeddings_answers_one_vector_as_it_is():
    reply = read_vectors("embeddings", prompt="a")
    assert reply.request.pooling == PoolingOptions(normalize=False)
    reply.add_events([PromptVector(0, vector_bytes(0.5, 3))])
    assert reply.render_body(USAGE) == b'{"embedding":[0.5,3.0]}'
    assert read_vectors("embeddings", prompt="").body == b'{"embedding":[]}'
    for path, answer in (("embed", (404, "model '' not found")), ("embeddings", (400, "model is required"))):
        assert refusal(read_vectors, path, model="") == answer


# -- models

CONFIG = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
INFO = msgspec.structs.replace(
    SCRIPTED_MODEL, parameters=7_615_616_512, vocab_size=640, weights_bytes=15_000, dtype="bfloat16", device="cpu"
)
CARD = ModelCard(
    "org/m", 1795331521, 4096, "org/m", info=INFO, abilities=frozenset({"chat", "tools", "thinking"}), config=CONFIG,
    sampling_defaults={"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05, "max_new_tokens": 99},
)  # fmt: skip
LOADING = ModelCard("b:7b", 1, None, "b:7b", phase="loading")
FACTS = ServerFacts("1", [CARD, LOADING], True)
DETAILS = {
    "parent_model": "", "format": "safetensors", "family": "qwen3", "families": ["qwen3"], "parameter_size": "7.6B",
    "quantization_level": "BF16",
}  # fmt: skip


def show(context: RequestContext = CONTEXT, **members: Any) -> Any:
    return json.loads(models.answer_show(LENIENT_OLLAMA_RULES, json.dumps(members).encode(), context, FACTS).body)


def test_ollama_tags_list_models_with_a_tag():
    one, other = json.loads(models.write_tags([LOADING, CARD]))["models"]
    digest = one.pop("digest")
    assert len(digest) == 64 and int(digest, 16)
    assert one == {
        "name": "org/m:latest",
        "model": "org/m:latest",
        "modified_at": "2026-11-22T07:12:01.000000001Z",
        "size": 15_000,
        "details": DETAILS | {"context_length": 4096, "embedding_length": 64},
        "capabilities": ["completion", "tools", "thinking"],
    }
    assert (other["name"], other["size"]) == ("b:7b", 0)


def test_ollama_reads_the_older_name_next_to_an_empty_model():
    """Go's client sends both members, whichever a program has set."""
    assert show(model="", name="org/m", system="", template="")["model_info"]["general.basename"] == "m"
    assert refusal(show, model="", name="") == (400, "model is required")


def test_ollama_does_not_find_what_it_should_delete_or_copy():
    for route in DIALECT.routes:
        if route.path in ("/api/delete", "/api/copy"):
            for member in ("name", "model") if route.path == "/api/delete" else ("source",):
                body = json.dumps({member: "x", "destination": "y"}).encode()
                with pytest.raises(UnknownModel) as caught:
                    route.reader(body, CONTEXT, FACTS)
                quoted = '"x"' if route.path == "/api/copy" else "'x'"
                answer = (route.render_error or DIALECT.render_error)(caught.value)
                assert (answer.status, json.loads(answer.body)) == (404, {"error": f"model {quoted} not found"})


@pytest.mark.parametrize(("body", "sentence"), [
    (b"", "missing request body"),
    (b"x", "invalid character 'x' looking for beginning of value"),
    (b"<html>", "invalid character '<' looking for beginning of value"),
    ("\ufeff{}".encode(), "invalid character '\u00ef' looking for beginning of value"),
    (b'{"model"', "unexpected EOF"),
    (b'{"model":"m",}', "invalid character '}' looking for beginning of object key string"),
    (b"{'model':1}", "invalid character '\\'' looking for beginning of object key string"),
    (b'{"model" "m"}', "invalid character '\"' after object key"),
    (b'{"model":"m" "x"}', "invalid character '\"' after object key:value pair"),
    (b'{"messages":[1 2]}', "invalid character '2' after array element"),
    (b'{"messages":[1,]}', "invalid character ']' looking for beginning of value"),
    (b'{"model":"m"}x', "invalid character 'x' after top-level value"),
    (b'{"model":tru}', "invalid character '}' in literal true (expecting 'e')"),
    (b'{"model":None}', "invalid character 'N' looking for beginning of value"),
    (b"nope", "invalid character 'o' in literal null (expecting 'u')"),
    (b'{"model":-x}', "invalid character 'x' in numeric literal"),
    (b'{"model":"a\nb"}', "invalid character '\\n' in string literal"),
    (b'{"model":"x true\n"}', "invalid character '\\n' in string literal"),
    (b'{"model":"\\\\\\" t\x01"}', "invalid character '\\x01' in string literal"),
    (b'{"raw":tr\n}', "invalid character '\\n' in literal true (expecting 'u')"),
    (b'{"model":"\x01"}', "invalid character '\\x01' in string literal"),
    (b'{"model":"\\q"}', "invalid character 'q' in string escape code"),
    (b'{"model":"\\u12g4"}', r"invalid character 'g' in \u hexadecimal character escape"),
    (b"[1]", "json: cannot unmarshal array into Go value of type api.ChatRequest"),
    (b'"a"', "json: cannot unmarshal string into Go value of type api.ChatRequest"),
    (b'{"model":5}', "json: cannot unmarshal number into Go struct field ChatRequest.model of type string"),
    (b'{"model":"m","messages":"x"}',
     "json: cannot unmarshal string into Go struct field ChatRequest.messages of type []api.Message"),
    (b'{"model":"m","messages":[true]}',
     "json: cannot unmarshal bool into Go struct field ChatRequest.messages of type api.Message"),
    (b'{"model":"m","messages":[{"role":"user","content":[]}]}',
     "json: cannot unmarshal array into Go struct field ChatRequest.messages.content of type string"),
    (b'{"model":"m","messages":[{"role":"user","content":"a"}],"stream":{}}',
     "json: cannot unmarshal object into Go struct field ChatRequest.stream of type bool"),
])  # fmt: skip
def test_ollama_words_bodies_that_cannot_be_read_as_go_does(body, sentence):
    for rules in (LENIENT_OLLAMA_RULES, STRICT_OLLAMA_RULES):
        assert refusal(chat.read_ollama_chat, rules, body, CONTEXT) == (400, sentence)


@pytest.mark.parametrize(("path", "struct"), [
    ("/api/generate", "GenerateRequest"), ("/api/embed", "EmbedRequest"), ("/api/embeddings", "EmbeddingRequest"),
])  # fmt: skip
def test_ollama_names_go_type_of_each_body(path, struct):
    (route,) = (route for route in DIALECT.routes if route.path == path)
    expected = f"json: cannot unmarshal number into Go struct field {struct}.model of type string"
    assert refusal(route.reader, b'{"model":5,"input":"a"}', CONTEXT) == (400, expected)
    (route,) = (route for route in DIALECT.routes if route.path == "/api/copy")
    expected = "json: cannot unmarshal number into Go struct field CopyRequest.source of type string"
    assert refusal(route.reader, b'{"source":5}', CONTEXT, FACTS) == (400, expected)


def test_ollama_ps_lists_models_that_are_ready_and_never_unloaded():
    (entry,) = json.loads(models.write_running([CARD, LOADING]))["models"]
    assert (entry["expires_at"], entry["size_vram"], entry["context_length"]) == (
        "2318-01-01T00:00:00.000000001Z",
        0,
        4096,
    )
    on_device = dataclasses.replace(CARD, info=msgspec.structs.replace(INFO, device="cuda"))
    assert json.loads(models.write_running([on_device]))["models"][0]["size_vram"] == 15_000


def test_ollama_names_the_format_of_a_gguf_file():
    """Whatever its quantization: an encoder's numbers become plain ones."""
    (entry,) = json.loads(models.write_tags([dataclasses.replace(CARD, weight_format="gguf")]))["models"]
    assert (entry["details"]["format"], entry["details"]["quantization_level"]) == ("gguf", "BF16")


@pytest.mark.parametrize("member", ["model", "name"])
@pytest.mark.parametrize("name", ["org/m", "org/m:latest"])
def test_ollama_show_describes_a_model(member, name):
    answer = show(**{member: name}, verbose=True)
    assert answer["parameters"].splitlines() == [
        "temperature                    0.6",
        "top_k                          20",
        "repeat_penalty                 1.05",
    ]
    assert answer["details"] == DETAILS
    assert answer["model_info"] == {
        "general.architecture": "qwen3",
        "general.basename": "m",
        "general.parameter_count": 7_615_616_512,
        "qwen3.attention.head_count": 4,
        "qwen3.block_count": 2,
        "qwen3.context_length": 4096,
        "qwen3.embedding_length": 64,
        "qwen3.vocab_size": 640,
    }
    assert answer["capabilities"] == ["completion", "tools", "thinking"]
    assert ".Tools" in answer["template"] and ".Suffix" not in answer["template"]
    assert answer["modelfile"].splitlines() == [
        "FROM org/m:latest",
        f'TEMPLATE """{answer["template"]}"""',
        "PARAMETER temperature 0.6",
        "PARAMETER top_k 20",
        "PARAMETER repeat_penalty 1.05",
    ]
    assert read_ollama_generate(template=answer["template"], system="S").request.prompts[0].messages[0].content == "SHi"


@pytest.mark.parametrize(
    ("members", "names"),
    [({}, ["embedding"]), ({"dimensions": 0, "labels": ["a"]}, None), ({"dimensions": 0, "token_vectors": True}, None)],
)
def test_ollama_lists_encoders_of_texts_as_embedding_models(members, names):
    info = msgspec.structs.replace(INFO, generates=False, **members)
    card = dataclasses.replace(CARD, info=info, purpose="vectors", abilities=frozenset())
    (listed,) = json.loads(models.write_tags([card]))["models"]
    assert listed.get("capabilities") == names


def test_ollama_show_has_the_license_first():
    facts = ServerFacts("1", [dataclasses.replace(CARD, license="Apache <License>")], True)
    body = models.answer_show(LENIENT_OLLAMA_RULES, b'{"model":"org/m"}', CONTEXT, facts).body
    assert body.startswith(rb'{"license":"Apache \u003cLicense\u003e","modelfile":')


def test_ollama_show_names_the_model_as_copilot_does():
    copilot = dataclasses.replace(CONTEXT, headers={b"user-agent": b"GitHubCopilotChat/0.40"})
    assert show(copilot, model="org/m:latest")["model_info"]["general.basename"] == "org/m:latest"


def test_ollama_pull_reports_served_models_as_pulled():
    def pull(**members: Any) -> Any:
        return models.read_pull(json.dumps(members).encode(), CONTEXT, FACTS)

    assert pull(model="org/m", insecure=False).body == b'{"status":"pulling manifest"}\n{"status":"success"}\n'
    assert pull(model="org/m", stream=False).body == b'{"status":"success"}'
    other = pull(model="hf.co/x/y:latest")
    assert (other.model, other.refusal.status) == ("x/y", 500)
    assert b"this server does not pull models" in other.refusal.body
    lines = [other.write_progress(0.0), other.write_progress(0.5), other.success, other.write_failure(NotFound("no"))]
    assert lines == [
        b'{"status":"pulling manifest"}\n',
        b'{"status":"pulling 50%"}\n',
        b'{"status":"success"}\n',
        b'{"error":"no"}\n',
    ]


@pytest.mark.parametrize("dialect", [DIALECT, STRICT])
def test_ollama_refuses_to_change_models(dialect):
    subjects = {}
    for route in dialect.routes:
        if (route.method, route.path) in {("POST", "/api/create"), ("POST", "/api/copy"), ("POST", "/api/push"),
                                          ("DELETE", "/api/delete"), ("POST", "/api/blobs/{digest}")}:  # fmt: skip
            body = b'{"model":"org/m","source":"org/m","destination":"n"}'
            status, text = refusal(lambda route=route, body=body: route.reader(body, CONTEXT, FACTS))
            subjects[route.path] = text.partition(" is not available")[0]
            assert status == 400
    assert subjects == {
        "/api/create": "Creating models",
        "/api/copy": "Copying models",
        "/api/push": "Pushing models",
        "/api/delete": "Deleting models",
        "/api/blobs/{digest}": "Uploading files",
    }
