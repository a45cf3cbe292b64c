"""Cohere's chat: meaning of bodies, refusals in its form, and the exact bytes of events and answers."""

import dataclasses
import json
from typing import Any

import pytest

from parley.dialects.cohere import DIALECT, STRICT, chat
from parley.dialects.cohere.api_rules import LENIENT_COHERE_RULES, STRICT_COHERE_RULES, CohereRules
from parley.dialects.request_context import RequestContext
from parley.errors import ContextLength, EngineDied, NotReady, Overloaded, ParleyError, TimeLimitPassed, UnknownModel
from parley.types import (
    ChatPrompt,
    ChoiceDelta,
    ChoiceDone,
    EncodedMedia,
    Grammar,
    Media,
    Message,
    PlacedMedia,
    PromptAccepted,
    SamplingOptions,
    StopConditions,
    TokenInfo,
    ToolCall,
    ToolCallDelta,
    Usage,
)

CONTEXT = RequestContext("0f", 1795331521, "fp", context_length=100, model_names=("m",), media_limits={"image": 2})
PLAIN = dataclasses.replace(CONTEXT, abilities=frozenset({"chat", "tools"}), media_limits={})
ID = b"00000000-0000-0000-0000-00000000000f"
USAGE = Usage(prompt_tokens=70, completion_tokens=9, cached_tokens=16)
COUNTS = (
    b'"usage":{"billed_units":{"input_tokens":70,"output_tokens":9},"tokens":{"input_tokens":70,"output_tokens":9},'
    b'"cached_tokens":16}'
)
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "f_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}
START = (
    b'event: message-start\ndata: {"id":"%b","type":"message-start","delta":{"message":{"role":"assistant",'
    b'"content":[],"tool_plan":"","tool_calls":[],"citations":[]}}}\n\n' % ID
)


def read_chat(rules: CohereRules = LENIENT_COHERE_RULES, context: RequestContext = CONTEXT, **members: Any) -> Any:
    return chat.read_cohere_chat(rules, json.dumps({"model": "m", "messages": HELLO} | members).encode(), context)


def chat_of(**members: Any) -> ChatPrompt:
    (prompt,) = read_chat(**members).request.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def refusal(
    rules: CohereRules = LENIENT_COHERE_RULES, context: RequestContext = CONTEXT, **members: Any
) -> tuple[int, str]:
    with pytest.raises(ParleyError) as caught:
        read_chat(rules, context, **members)
    status, data, content_type = DIALECT.render_error(caught.value)
    assert content_type == b"application/json" and list(json.loads(data)) == ["message"]
    return status, json.loads(data)["message"]


def stream(reply: Any, *events: Any, done: str = "stop", stop: str | None = None) -> list[bytes]:
    """Return the events of a stream, each of which comes in a step of its own."""
    batches = [PromptAccepted(0, [1]), *events, ChoiceDone(0, done, USAGE, stop)]
    data = b"".join(reply.render_chunk([event]) for event in batches) + reply.finish_stream(USAGE)
    return [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]


def answer_body(reply: Any, *events: Any, done: str = "stop", stop: str | None = None) -> bytes:
    reply.add_events([*events, ChoiceDone(0, done, USAGE, stop)])
    return reply.render_body(USAGE)


def named(event: bytes) -> bytes:
    """Return an event with its name before it."""
    return b"event: %b\ndata: %b\n\n" % (json.loads(event)["type"].encode(), event)


def token(number: int, logprob: float | None) -> TokenInfo:
    return TokenInfo(number, "", b"", logprob)


def call_delta(index: int, call_id: str | None = None, name: str | None = None, arguments: str = "") -> ChoiceDelta:
    return ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(index, call_id, name, arguments))


CALLS = [
    call_delta(0, "call_0123456789abcdef", "f", '{"a"'),
    call_delta(0, arguments=":1}"),
    call_delta(1, "own-id", "g"),
]

# -- bytes


def test_cohere_stream_has_blocks_of_thinking_and_text():
    events = stream(
        read_chat(), ChoiceDelta(0, "Hm", "reasoning"), ChoiceDelta(0, "Hel"), ChoiceDelta(0, ""), ChoiceDelta(0, "lo")
    )
    assert events == [
        START,
        *map(
            named,
            [
                b'{"type":"content-start","index":0,"delta":{"message":{"content":{"type":"thinking","thinking":""}}}}',
                b'{"type":"content-delta","index":0,"delta":{"message":{"content":{"thinking":"Hm"}}}}',
                b'{"type":"content-end","index":0}',
                b'{"type":"content-start","index":1,"delta":{"message":{"content":{"type":"text","text":""}}}}',
                b'{"type":"content-delta","index":1,"delta":{"message":{"content":{"text":"Hel"}}}}',
                b'{"type":"content-delta","index":1,"delta":{"message":{"content":{"text":"lo"}}}}',
                b'{"type":"content-end","index":1}',
                b'{"type":"message-end","delta":{"finish_reason":"COMPLETE",' + COUNTS + b"}}",
            ],
        ),
        b"data: [DONE]\n\n",
    ]


def test_cohere_stream_has_calls_one_after_the_other():
    events = stream(read_chat(tools=[TOOL]), ChoiceDelta(0, "So."), *CALLS, done="tool")
    call = b'{"type":"tool-call-start","index":%d,"delta":{"message":{"tool_calls":{"id":"%b","type":"function",'
    call += b'"function":{"name":"%b","arguments":""}}}}}'
    piece = b'{"type":"tool-call-delta","index":0,"delta":{"message":{"tool_calls":{"function":{"arguments":%b}}}}}'
    assert events[3:] == [
        *map(
            named,
            [
                b'{"type":"content-end","index":0}',
                call % (0, b"f_0123456789ab", b"f"),
                piece % b'"{\\"a\\""',
                piece % b'":1}"',
                b'{"type":"tool-call-end","index":0}',
                call % (1, b"own-id", b"g"),
                b'{"type":"tool-call-end","index":1}',
                b'{"type":"message-end","delta":{"finish_reason":"TOOL_CALL",' + COUNTS + b"}}",
            ],
        ),
        b"data: [DONE]\n\n",
    ]


def test_cohere_stream_gives_every_token_of_the_text_its_logprob():
    """Tokens without text come with the next text, or with an empty one at the end of the block."""
    events = stream(
        read_chat(logprobs=True),
        ChoiceDelta(0, "", tokens=[token(5, -0.5)]),
        ChoiceDelta(0, "é", tokens=[token(6, float("-inf"))]),
        ChoiceDelta(0, "", tokens=[token(7, None)]),
    )
    delta = '{"type":"content-delta","index":0,"delta":{"message":{"content":{"text":%s}}},"logprobs":%s}'
    assert events[2:5] == [
        named((delta % ('"é"', '{"text":"é","token_ids":[5,6],"logprobs":[-0.5,-9999.0]}')).encode()),
        named((delta % ('""', '{"text":"","token_ids":[7],"logprobs":[-9999.0]}')).encode()),
        named(b'{"type":"content-end","index":0}'),
    ]


def test_cohere_stream_gives_each_block_the_logprobs_of_its_own_tokens():
    events = stream(
        read_chat(logprobs=True),
        ChoiceDelta(0, "Hm", "reasoning", [token(4, -1.0)]),
        ChoiceDelta(0, "", "reasoning", [token(5, -1.0)]),
        ChoiceDelta(0, "", tokens=[token(6, -1.0)]),
        ChoiceDelta(0, "é", tokens=[token(7, -1.0)]),
    )
    items = [json.loads(event.partition(b"data: ")[2]) for event in events[1:-1]]
    assert [(item["index"], item["logprobs"]["token_ids"]) for item in items if "logprobs" in item] == [
        (0, [4]),
        (0, [5]),
        (1, [6, 7]),
    ]


def test_cohere_stream_gives_tokens_of_an_empty_block_to_the_next_one():
    events = stream(
        read_chat(logprobs=True),
        ChoiceDelta(0, "", "reasoning", [token(4, -1.0)]),
        ChoiceDelta(0, "So", tokens=[token(5, -1.0)]),
        *CALLS,
    )
    assert b'"text":"So","token_ids":[4,5]' in events[2] and b'"tool-call-start"' in events[4]


def test_cohere_stream_without_output_has_an_empty_text():
    events = stream(read_chat(), done="length")
    assert events[1:4] == [
        named(b'{"type":"content-start","index":0,"delta":{"message":{"content":{"type":"text","text":""}}}}'),
        named(b'{"type":"content-end","index":0}'),
        named(b'{"type":"message-end","delta":{"finish_reason":"MAX_TOKENS",' + COUNTS + b"}}"),
    ]


def test_failed_cohere_stream_ends_with_the_error():
    end = b'event: message-end\ndata: {"type":"message-end","delta":{"error":%b,"finish_reason":"%b"}}\n\n'
    done = b"data: [DONE]\n\n"
    assert read_chat().fail_stream(EngineDied("It ended.")) == end % (b'"It ended."', b"ERROR") + done
    late = TimeLimitPassed("Too late.", limit="server")
    assert read_chat().fail_stream(late) == end % (b'"Too late."', b"TIMEOUT") + done


def test_whole_cohere_answer_has_thinking_text_and_logprobs():
    body = answer_body(
        read_chat(logprobs=True),
        ChoiceDelta(0, "Hm", "reasoning", [token(4, -1.0)]),
        ChoiceDelta(0, "Hel", tokens=[token(5, -0.5), token(6, -0.25)]),
        ChoiceDelta(0, "lo", tokens=[token(7, -2.0)]),
    )
    assert body == (
        b'{"id":"%b","message":{"role":"assistant","content":[{"type":"thinking","thinking":"Hm"},{"type":"text",'
        b'"text":"Hello"}]},"finish_reason":"COMPLETE",%b,"logprobs":[{"text":"Hm","token_ids":[4],"logprobs":[-1.0]},'
        b'{"text":"Hel","token_ids":[5,6],"logprobs":[-0.5,-0.25]},{"text":"lo","token_ids":[7],"logprobs":[-2.0]}]}'
        % (ID, COUNTS)
    )


def test_whole_cohere_answer_has_calls():
    body = answer_body(read_chat(tools=[TOOL]), *CALLS, done="tool")
    assert body == (
        b'{"id":"%b","message":{"role":"assistant","tool_calls":[{"id":"f_0123456789ab","type":"function","function":'
        b'{"name":"f","arguments":"{\\"a\\":1}"}},{"id":"own-id","type":"function","function":{"name":"g","arguments":'
        b'""}}]},"finish_reason":"TOOL_CALL",%b}' % (ID, COUNTS)
    )


def test_empty_cohere_answer_has_an_empty_text():
    message = json.loads(answer_body(read_chat()))["message"]
    assert message == {"role": "assistant", "content": [{"type": "text", "text": ""}]}


@pytest.mark.parametrize(
    ("done", "stop", "expected"),
    [
        ("stop", None, "COMPLETE"),
        ("stop", "END", "STOP_SEQUENCE"),
        ("length", None, "MAX_TOKENS"),
        ("tool", None, "TOOL_CALL"),
        ("cancel", None, "ERROR"),
    ],
)
def test_cohere_finish_reasons(done, stop, expected):
    assert json.loads(answer_body(read_chat(), done=done, stop=stop))["finish_reason"] == expected


def test_cohere_usage_counts_images_apart():
    reply = read_chat()
    reply.add_events([ChoiceDone(0, "stop", USAGE)])
    usage = Usage(prompt_tokens=70, completion_tokens=2, media_tokens={"image": 60})
    assert json.loads(reply.render_body(usage))["usage"] == {
        "billed_units": {"input_tokens": 70, "output_tokens": 2},
        "tokens": {"input_tokens": 10, "output_tokens": 2, "image_tokens": 60},
        "cached_tokens": 0,
    }


# -- what bodies mean


def test_plain_cohere_request_has_the_documented_defaults():
    request = read_chat().request
    assert request.sampling == SamplingOptions(temperature=0.3, top_p=0.75)
    assert request.stop_conditions == StopConditions(reserved_tokens=1)
    assert (request.stream, request.priority, request.grammar) == (False, 0, None)
    assert request.prompts == [ChatPrompt([Message("user", "Hello")])]


@pytest.mark.parametrize("rules", [LENIENT_COHERE_RULES, STRICT_COHERE_RULES])
def test_cohere_members_steer_the_answer(rules):
    request = read_chat(
        rules, temperature=0.5, p=0.9, k=7, seed=3, frequency_penalty=0.25, max_tokens=5, stop_sequences=["a", "b"],
        stream=True, priority=999, logprobs=True, thinking={"type": "enabled", "token_budget": 9},
        response_format={"type": "json_object", "json_schema": {"type": "object"}},
    ).request  # fmt: skip
    assert request.sampling == SamplingOptions(temperature=0.5, top_p=0.9, top_k=7, seed=3, frequency_penalty=0.25)
    assert request.stop_conditions == StopConditions(strings=["a", "b"], max_tokens=5, reserved_tokens=1)
    assert (request.stream, request.priority, request.thinking_budget) == (True, 999, 9)
    assert request.output_options.logprobs == 0 and request.prompts[0].thinking is True
    assert request.grammar == Grammar("json", {"type": "object"}, field="response_format.json_schema")


def test_lenient_cohere_requests_have_the_members_of_other_apis():
    request = read_chat(top_p=0.5, top_k=3, min_p=0.1, min_tokens=2, presence_penalty=-1, stop_sequences="a").request
    assert request.sampling == SamplingOptions(temperature=0.3, top_p=0.5, top_k=3, min_p=0.1, presence_penalty=-1)
    assert request.stop_conditions == StopConditions(strings=["a"], min_tokens=2, reserved_tokens=1)
    assert read_chat(response_format={"type": "json_object", "schema": {}}).request.grammar.field.endswith(".schema")


def test_cohere_response_format_without_schema_is_any_object():
    assert read_chat(response_format={"type": "json_object"}).request.grammar.value == {"type": "object"}
    assert read_chat(response_format={"type": "text"}).request.grammar is None


def test_cohere_conversation_has_calls_results_and_thinking():
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]},
        *HELLO,
        {"role": "assistant", "tool_plan": "I call f.", "tool_calls": [CALL], "citations": []},
        {"role": "tool", "tool_call_id": "f_1", "content": [
            {"type": "document", "document": {"id": "0", "data": '{"x": 1}'}},
            {"type": "document", "document": {"data": {"y": 2}}},
            {"type": "text", "text": "done"},
        ]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "So."}]},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    for rules in (LENIENT_COHERE_RULES, STRICT_COHERE_RULES):
        assert chat_of(rules=rules, messages=messages).messages == [
            Message("system", "Be\nkind."),
            Message("user", "Hello"),
            Message("assistant", None, reasoning="I call f.", tool_calls=[ToolCall("f_1", "f", '{"a":1}')]),
            Message("tool", '{"x": 1}\n{"y":2}\ndone', tool_call_id="f_1"),
            Message("assistant", "So.", reasoning="Hm"),
            Message("user", "And?"),
        ]


def test_cohere_tools_and_their_choice():
    prompt = chat_of(tools=[TOOL], tool_choice="REQUIRED", strict_tools=True)
    signature = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert prompt.tools == [{"type": "function", "function": signature}] and prompt.tool_choice == "required"
    assert prompt.schema_fields == {"f": "tools[0].function.parameters"}
    assert chat_of(tools=[TOOL], tool_choice="NONE").tool_choice == "none"


def test_cohere_images_stand_in_their_place():
    content = [{"type": "text", "text": "a"}, IMAGE, {"type": "text", "text": "b"}]
    (message,) = chat_of(messages=[{"role": "user", "content": content}]).messages
    image = Media(
        "image", EncodedMedia("AAAA", "image/png"), "messages[0].content[1].image_url", "low", processor_options={}
    )
    assert message == Message("user", "ab", media=[PlacedMedia(1, image)])


def test_single_cohere_part_may_stand_for_a_list():
    assert chat_of(messages=[{"role": "user", "content": {"type": "text", "text": "a"}}]).messages[0].content == "a"


def test_cohere_documents_may_have_ids_among_their_data():
    documents = [{"data": {"id": 5, "name": "a"}}, {"data": {"id": 5}}, {"id": "b", "data": {"id": [1]}}]
    assert chat_of(documents=documents).options == {"documents": [{"id": 5, "name": "a"}, {"id": 5}, {"id": [1]}]}
    text = "Document 0:\nid: 5\nname: a\n\nDocument 1:\nid: 5\n\nDocument b:\nid: [1]\n\nHello"
    assert chat_of(context=PLAIN, documents=documents).messages == [Message("user", text)]
    part = {"type": "document", "document": documents[0]}
    (result,) = chat_of(messages=[{"role": "tool", "tool_call_id": "f", "content": [part]}]).messages
    assert result.content == '{"id":5,"name":"a"}'


def test_cohere_takes_the_longest_call_id_that_it_gives():
    name = "f" * 256
    reply = read_chat(tools=[TOOL])
    message = json.loads(answer_body(reply, call_delta(0, "call_0123456789abcdef", name)))["message"]
    messages = [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a"}]
    for rules in (LENIENT_COHERE_RULES, STRICT_COHERE_RULES):
        assert chat_of(rules=rules, messages=messages).messages[1].tool_call_id == f"{name}_0123456789ab"


def test_cohere_documents_go_to_the_template_where_it_has_a_place_for_them():
    documents = ["Paris is large.", {"id": "doc-1", "data": {"title": "t", "size": 2}}]
    prompt = chat_of(documents=documents)
    assert prompt.options == {"documents": [{"text": "Paris is large."}, {"id": "doc-1", "title": "t", "size": 2}]}
    assert prompt.messages == [Message("user", "Hello")]


def test_cohere_documents_begin_the_last_turn_of_the_user_otherwise():
    documents = ["Paris is large.", {"id": "doc-1", "data": {"title": "t", "size": 2}}]
    messages = [*HELLO, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "So?"}]
    prompt = chat_of(context=PLAIN, documents=documents, messages=messages)
    text = "Document 0:\ntext: Paris is large.\n\nDocument doc-1:\ntitle: t\nsize: 2\n\nSo?"
    assert (prompt.options, prompt.messages[-1]) == ({}, Message("user", text))
    assert [message.content for message in prompt.messages[:-1]] == ["Hello", "Hi"]
    imaged = dataclasses.replace(PLAIN, media_limits={"image": 1})
    (turn,) = chat_of(
        context=imaged, documents=["x"], messages=[{"role": "user", "content": [IMAGE]}]
    ).messages  # fmt: skip
    assert turn.media[0].position == len("Document 0:\ntext: x\n\n")


def test_cohere_safety_mode_is_a_variable_of_the_template():
    assert chat_of(safety_mode="STRICT").options == {"safety_mode": "STRICT"}
    assert chat_of(context=PLAIN, safety_mode="OFF").options == {}
    status, sentence = refusal(context=PLAIN, safety_mode="STRICT")
    assert status == 400 and sentence.startswith("invalid request: safety_mode 'STRICT' is not supported by this model")


# -- refusals

REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"model": None}, 400, "a model parameter is required for this endpoint."),
    ({"messages": []}, 400, "invalid request: messages must not be empty."),
    ({"messages": None}, 400, "invalid request: required 'messages' param is missing or empty."),
    ({"messages": [{"role": "bot", "content": ""}]}, 400,
     "invalid request: messages[0].role must be one of 'user' or 'assistant' or 'system' or 'tool', but got 'bot'."),
    ({"messages": [{"role": "user"}]}, 400,
     "invalid request: required 'messages[0].content' param is missing or empty."),
    ({"messages": [{"role": "assistant"}]}, 400,
     "invalid request: required 'messages[0].content' param is missing or empty."),
    ({"messages": [{"role": "tool", "content": "a"}]}, 400,
     "tool call id must be provided with tool message: 'messages[0].tool_call_id'"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400,
     "invalid request: messages[0].content[0].type must be one of 'text' or 'image_url', but got 'document'."),
    ({"max_tokens": "5"}, 422,
     "invalid type: parameter 'max_tokens' is of type string but should be of type int32. For proper usage, please "
     "refer to https://docs.cohere.com/v2/reference/chat"),
    ({"max_tokens": 0}, 400, "invalid request: max_tokens must be between 1 and 2147483647 inclusive, but got 0."),
    ({"priority": 1000}, 400, "invalid request: priority must be between 0 and 999 inclusive, but got 1000."),
    ({"tool_choice": "REQUIRED"}, 400, "invalid request: 'tool_choice': REQUIRED is only allowed with tools."),
    ({"tools": [TOOL, TOOL]}, 400, "invalid request: 'tools[1].function.name': two tools are called 'f'."),
    ({"tools": [{"type": "function"}]}, 400,
     "invalid request: required 'tools[0].function' param is missing or empty."),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, 400,
     "invalid request: tool names can only contain certain characters (A-Za-z0-9_) and can't begin with a digit "
     "(provided name: 'a b'): 'tools[0].function.name'"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, 400,
     "invalid request: 'tools[0].function.parameters': schema must be an object, but it is of type 'array'."),
    ({"documents": [{"data": {}}]}, 400,
     "invalid request: document at index 0 cannot be empty: 'documents[0].data'"),
    ({"documents": [{"id": "a", "data": "x"}, {"id": "a", "data": "y"}]}, 400,
     "invalid request: duplicate document ID a at index 1 and 0: 'documents[1].id'"),
    ({"citation_options": {"mode": "FAST"}}, 400,
     "invalid request: citation_options.mode 'FAST' is not supported by this server, whose answers have no citations."),
    ({"thinking": {}}, 400, "invalid request: required 'thinking.type' param is missing or empty."),
    ({"thinking": {"type": "enabled", "token_budget": 0}}, 400,
     "invalid request: thinking.token_budget must be between 1 and 2147483647 inclusive, but got 0."),
    ({"response_format": {"type": "text", "json_schema": {}}}, 400,
     "invalid request: 'response_format.json_schema': only allowed with type 'json_object'."),
]  # fmt: skip


@pytest.mark.parametrize(("members", "status", "sentence"), REFUSED)
def test_cohere_refusals_name_member_value_and_range(members, status, sentence):
    for rules in (LENIENT_COHERE_RULES, STRICT_COHERE_RULES):
        assert refusal(rules, **members) == (status, sentence)


UNKNOWN = " is not a valid field. For proper usage, please refer to https://docs.cohere.com/v2/reference/chat"
STRICTLY_REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"top_p": 0.5}, 422, "unknown field: parameter 'top_p'" + UNKNOWN),
    ({"tools": [{"type": "function", "function": TOOL["function"] | {"strict": True}}]}, 422,
     "unknown field: parameter 'tools[0].function.strict'" + UNKNOWN),
    ({"temperature": 1.5}, 400, "invalid request: temperature must be between 0 and 1 inclusive, but got 1.5."),
    ({"p": 1}, 400, "invalid request: p must be between 0.01 and 0.99 inclusive, but got 1."),
    ({"k": 501}, 400, "invalid request: k must be between 0 and 500 inclusive, but got 501."),
    ({"presence_penalty": -1}, 400, "invalid request: presence_penalty must be between 0 and 1 inclusive, but got -1."),
    ({"presence_penalty": 1, "frequency_penalty": 1}, 400,
     "invalid request: cannot specify both frequency_penalty and presence_penalty."),
    ({"stop_sequences": list("abcdef")}, 400,
     "invalid request: stop_sequences must have at most 5 elements - received 6."),
    ({"stop_sequences": "a"}, 422,
     "invalid type: parameter 'stop_sequences' is of type string but should be of type array. For proper usage, please "
     "refer to https://docs.cohere.com/v2/reference/chat"),
    ({"response_format": {"type": "json_object"}, "documents": ["a"]}, 400,
     "invalid request: response_format is not supported with RAG."),
    ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, 400,
     "invalid request: response_format is not supported with tools."),
    ({"messages": [{"role": "tool", "tool_call_id": "f_1", "content": "a"}]}, 400,
     "tool call id not found in previous tool calls: 'messages[0].tool_call_id' is 'f_1'"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL, CALL]}]}, 400,
     "cannot have duplicate tool ids: 'messages[0].tool_calls[1].id' is 'f_1'"),
]  # fmt: skip


@pytest.mark.parametrize(("members", "status", "sentence"), STRICTLY_REFUSED)
def test_strict_cohere_refuses_what_the_original_refuses(members, status, sentence):
    assert refusal(STRICT_COHERE_RULES, **members) == (status, sentence)
    assert read_chat(LENIENT_COHERE_RULES, **members).request.model == "m"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UnknownModel("No model.", name="x"), 404,
         "model 'x' not found, make sure the correct model ID was used and that you have access to the model."),
        (ContextLength("Too long.", limit=100, prompt=120), 400,
         "too many tokens: total number of tokens in the prompt cannot exceed 99 - received 120. Try using a shorter "
         "prompt."),
        (ContextLength("Too long.", limit=100, prompt_over=400), 400,
         "too many tokens: total number of tokens in the prompt cannot exceed 99 - received 401. Try using a shorter "
         "prompt."),
        (ContextLength("Too long."), 400, "too many tokens: Too long."),
        (Overloaded("Busy."), 429, "Busy."),
        (NotReady("Loading."), 503, "Loading."),
    ],
)  # fmt: skip
def test_cohere_errors_have_an_id_and_a_message(error, status, message):
    error.request_uuid = "0f"
    answer = STRICT.render_error(error)
    assert (answer.status, json.loads(answer.body)) == (status, {"id": ID.decode(), "message": message})


def test_cohere_body_that_is_no_json_object_is_refused():
    for body in (b"", b"{", b"[]", b"\xff"):
        with pytest.raises(ParleyError, match=r"^invalid json syntax: "):
            chat.read_cohere_chat(LENIENT_COHERE_RULES, body, CONTEXT)
