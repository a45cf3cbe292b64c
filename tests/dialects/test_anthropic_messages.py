"""Messages of Anthropic's API: the exact bytes of answers, streams and errors, and the routes."""

import json
from typing import Any

import msgspec
import pytest

from parley.dialects.admin_requests import TokenizeResult
from parley.dialects.anthropic import DIALECT, STRICT, messages, models
from parley.dialects.anthropic.api_rules import LENIENT_ANTHROPIC_RULES, STRICT_ANTHROPIC_RULES, AnthropicRules
from parley.dialects.anthropic.error_answers import anthropic_error_answer
from parley.dialects.facts import ModelCard, ServerFacts
from parley.dialects.reasoning_seal import ReasoningSeal
from parley.dialects.request_context import RequestContext
from parley.engine.scripted_engine import SCRIPTED_MODEL
from parley.errors import (
    BadRequest,
    ContextLength,
    EngineDied,
    EngineError,
    NotFound,
    Overloaded,
    ParleyError,
    TooLarge,
    Unauthorized,
    UnknownModel,
)
from parley.types import (
    AppliedEdit,
    ChoiceDelta,
    ChoiceDone,
    ClearReasoning,
    ClearToolUses,
    FinishReason,
    PromptAccepted,
    SummarizeContext,
    ToolCallDelta,
    Usage,
)

SEAL = ReasoningSeal("secret")
VERSION = {b"anthropic-version": b"2023-06-01"}
CONTEXT = RequestContext("0f", 1700000000, "fp", context_length=100, headers=VERSION, reasoning_seal=SEAL)
TURNS = [{"role": "user", "content": "Hi"}]
USAGE = Usage(prompt_tokens=12, completion_tokens=5, cached_tokens=8, reasoning_tokens=2)
ACCEPTED = PromptAccepted(0, list(range(12)))
TOOL = {"name": "f", "input_schema": {"type": "object"}}
THINKING = {"type": "enabled", "budget_tokens": 1024}
ID = "msg_01" + "1" * 21 + "G"  # 15 in base 58
START = (
    b'event: message_start\ndata: {"type":"message_start","message":{"model":"m","id":"%b","type":"message",'
    b'"role":"assistant","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":12,'
    b'"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"cache_creation":{"ephemeral_5m_input_tokens":0,'
    b'"ephemeral_1h_input_tokens":0},"output_tokens":0,"service_tier":"standard","inference_geo":"not_available"}}}\n\n'
) % ID.encode()
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


def read(rules: AnthropicRules = LENIENT_ANTHROPIC_RULES, **members: Any) -> messages.MessagesReply:
    body = {"model": "m", "max_tokens": 2000, "messages": TURNS} | members
    return messages.read_messages_request(rules, json.dumps(body).encode(), CONTEXT)


def refusal(rules: AnthropicRules = LENIENT_ANTHROPIC_RULES, **members: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        read(rules, **members)
    return json.loads(anthropic_error_answer(rules, caught.value).body)["error"]["message"]


def done(reason: FinishReason = "stop", stop: str | None = None) -> ChoiceDone:
    return ChoiceDone(0, reason, USAGE, stop)


def call(index: int, name: str, *pieces: str) -> list[ChoiceDelta]:
    first = ToolCallDelta(index, f"call_{index}", name)
    return [
        ChoiceDelta(0, "", "tool", tool_call=delta)
        for delta in (first, *(ToolCallDelta(index, arguments=p) for p in pieces))
    ]


def test_anthropic_call_of_a_toolset_has_the_name_of_its_member_and_of_the_toolset():
    tools = [{"type": "computer_toolset_20260801"}, TOOL]
    events = [ACCEPTED, *call(0, "computer_wait", '{"duration":1}'), *call(1, "f", "{}"), done("tool")]
    reply = read(tools=tools)
    reply.add_events(events)
    assert json.loads(reply.render_body(USAGE))["content"] == [
        {"type": "tool_use", "id": "toolu_0", "name": "wait", "input": {"duration": 1}, "toolset_name": "computer"},
        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}},
    ]
    start = (
        b'{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"toolu_0","name":"wait",'
        b'"input":{},"toolset_name":"computer"}}'
    )
    assert start in read(tools=tools, stream=True).render_chunk(events)


def answer_body(events: list[Any], usage: Usage = USAGE, **members: Any) -> dict[str, Any]:
    reply = read(**members)
    reply.add_events([ACCEPTED, *events])
    return json.loads(reply.render_body(usage))


def stream(events: list[Any], **members: Any) -> bytes:
    reply = read(stream=True, **members)
    return b"".join([reply.render_chunk([ACCEPTED]), *(reply.render_chunk([event]) for event in events)]) + (
        reply.finish_stream(USAGE)
    )


def event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()


def block_event(kind: str, index: int, member: str, value: str) -> bytes:
    return event(f"content_block_{kind}", f'{{"type":"content_block_{kind}","index":{index},"{member}":{value}}}')


def block_stop(index: int) -> bytes:
    return event("content_block_stop", f'{{"type":"content_block_stop","index":{index}}}')


def end_of_message(reason: str, more: str = "") -> bytes:
    counts = '"input_tokens":4,"cache_creation_input_tokens":0,"cache_read_input_tokens":8,"output_tokens":5'
    delta = f'{{"stop_reason":"{reason}","stop_sequence":null}}'
    return event("message_delta", f'{{"type":"message_delta","delta":{delta},"usage":{{{counts}{more}}}}}') + STOP


def test_anthropic_writes_a_message():
    reply = read()
    reply.add_events([ACCEPTED, ChoiceDelta(0, "Hel"), ChoiceDelta(0, "lo"), done()])
    assert reply.render_body(USAGE) == (
        b'{"model":"m","id":"%b","type":"message","role":"assistant","content":[{"type":"text","text":"Hello"}],'
        b'"stop_reason":"end_turn","stop_sequence":null,"usage":{"input_tokens":4,"cache_creation_input_tokens":0,'
        b'"cache_read_input_tokens":8,"cache_creation":{"ephemeral_5m_input_tokens":0,"ephemeral_1h_input_tokens":0},'
        b'"output_tokens":5,"service_tier":"standard","inference_geo":"not_available"}}' % ID.encode()
    )


def test_anthropic_streams_a_text():
    text = [ChoiceDelta(0, "Hel"), ChoiceDelta(0, "lo"), done()]
    assert stream(text) == START + b"".join([
        block_event("start", 0, "content_block", '{"type":"text","text":""}'),
        PING,
        block_event("delta", 0, "delta", '{"type":"text_delta","text":"Hel"}'),
        block_event("delta", 0, "delta", '{"type":"text_delta","text":"lo"}'),
        block_stop(0),
        end_of_message("end_turn"),
    ])  # fmt: skip


def test_anthropic_streams_thinking_text_and_calls():
    """One block is open at a time; a call without arguments has the empty first piece alone."""
    events = [
        ChoiceDelta(0, "hm", "reasoning"),
        ChoiceDelta(0, "So"),
        *call(0, "f", '{"a":', "1}"),
        *call(1, "g"),
        done("tool"),
    ]
    signature = json.dumps(SEAL.seal("", b"hm"))
    thinking = ',"output_tokens_details":{"thinking_tokens":2}'
    assert stream(events, thinking=THINKING, tools=[TOOL]) == START + b"".join([
        block_event("start", 0, "content_block", '{"type":"thinking","thinking":"","signature":""}'),
        PING,
        block_event("delta", 0, "delta", '{"type":"thinking_delta","thinking":"hm"}'),
        block_event("delta", 0, "delta", f'{{"type":"signature_delta","signature":{signature}}}'),
        block_stop(0),
        block_event("start", 1, "content_block", '{"type":"text","text":""}'),
        block_event("delta", 1, "delta", '{"type":"text_delta","text":"So"}'),
        block_stop(1),
        block_event("start", 2, "content_block", '{"type":"tool_use","id":"toolu_0","name":"f","input":{}}'),
        block_event("delta", 2, "delta", '{"type":"input_json_delta","partial_json":""}'),
        block_event("delta", 2, "delta", r'{"type":"input_json_delta","partial_json":"{\"a\":"}'),
        block_event("delta", 2, "delta", '{"type":"input_json_delta","partial_json":"1}"}'),
        block_stop(2),
        block_event("start", 3, "content_block", '{"type":"tool_use","id":"toolu_1","name":"g","input":{}}'),
        block_event("delta", 3, "delta", '{"type":"input_json_delta","partial_json":""}'),
        block_stop(3),
        end_of_message("tool_use", thinking),
    ])  # fmt: skip


def test_anthropic_omits_thinking_and_still_signs_it():
    events = [ChoiceDelta(0, "hm", "reasoning"), ChoiceDelta(0, "So"), done()]
    omitted = {"type": "adaptive", "display": "omitted"}
    signature = SEAL.seal("", b"hm")
    assert b"thinking_delta" not in stream(events, thinking=omitted) and signature.encode() in stream(
        events, thinking=omitted
    )
    thinking, text = answer_body(events, thinking=omitted)["content"]
    assert thinking == {"type": "thinking", "thinking": "", "signature": signature}
    assert text == {"type": "text", "text": "So"}


@pytest.mark.parametrize("rules", [LENIENT_ANTHROPIC_RULES, STRICT_ANTHROPIC_RULES])
def test_anthropic_shows_thinking_as_updates(rules: AnthropicRules):
    reply = read(rules, thinking={"type": "adaptive", "display": "updates"})
    reply.add_events([ACCEPTED, ChoiceDelta(0, "hm", "reasoning"), ChoiceDelta(0, "So"), done()])
    thinking, _ = json.loads(reply.render_body(USAGE))["content"]
    assert thinking["thinking"] == "hm"


def test_anthropic_hides_thinking_that_was_not_asked_for():
    events = [ChoiceDelta(0, "hm", "reasoning"), ChoiceDelta(0, "So"), done()]
    assert answer_body(events)["content"] == [{"type": "text", "text": "So"}]
    assert b"thinking" not in stream(events)


def join_blocks(data: bytes) -> list[dict[str, Any]]:
    """The blocks of a stream, put together as clients do it."""
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for frame in data.decode().removesuffix("\n\n").split("\n\n"):
        name, _, text = frame.partition("\n")
        value = json.loads(text.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        if value["type"] == "content_block_start":
            assert value["index"] == len(blocks)
            blocks.append(value["content_block"])
            arguments = ""
        elif value["type"] == "content_block_delta":
            assert value["index"] == len(blocks) - 1
            delta = value["delta"]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
                if arguments:
                    blocks[-1]["input"] = json.loads(arguments) if arguments.endswith("}") else None
            else:
                member = delta["type"].removesuffix("_delta")
                blocks[-1][member] += delta[member]
    return blocks


def test_anthropic_stream_joins_to_the_whole_message():
    events = [
        ChoiceDelta(0, "h", "reasoning"), ChoiceDelta(0, "m", "reasoning"), ChoiceDelta(0, "So"), ChoiceDelta(0, " é"),
        *call(0, "f", '{"a":', "1}"), *call(1, "g"), done("tool"),
    ]  # fmt: skip
    for thinking in (THINKING, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
        members: dict[str, Any] = {"thinking": thinking, "tools": [TOOL]}
        assert join_blocks(stream(events, **members)) == answer_body(events, **members)["content"]


def test_anthropic_writes_calls_as_objects_and_broken_ones_as_text():
    message = answer_body([*call(0, "f", '{"a": 1}'), *call(1, "g", "{broken"), *call(2, "h", "[1]"), done("tool")])
    assert message["content"] == [
        {"type": "tool_use", "id": "toolu_0", "name": "f", "input": {"a": 1}},
        {"type": "text", "text": "g({broken)"},
        {"type": "text", "text": "h([1])"},
    ]
    assert message["stop_reason"] == "tool_use"
    assert answer_body([*call(0, "f", "{"), done("tool")])["stop_reason"] == "end_turn"
    assert answer_body([*call(0, "f"), done("tool")])["content"][0]["input"] == {}


@pytest.mark.parametrize("arguments", ["", "{", '{"a": 1, "b": "x'])
def test_anthropic_shows_a_call_that_was_cut_off_without_its_arguments(arguments: str):
    message = answer_body([ChoiceDelta(0, "a"), *call(0, "f", arguments), done("length")])
    assert message["content"] == [
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "toolu_0", "name": "f", "input": {}},
    ]
    assert message["stop_reason"] == "max_tokens"


def test_anthropic_keeps_call_ids_that_a_model_writes():
    delta = ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(0, "functions.f:0", "f", "{}"))
    assert answer_body([delta, done("tool")])["content"][0]["id"] == "functions.f:0"


@pytest.mark.parametrize(
    ("end", "usage", "expected"),
    [
        (done(), USAGE, ("end_turn", None)),
        (done("stop", "END"), USAGE, ("stop_sequence", "END")),
        (done("length"), USAGE, ("max_tokens", None)),
        (done("length"), Usage(prompt_tokens=90, completion_tokens=10), ("model_context_window_exceeded", None)),
        (done("cancel"), USAGE, ("end_turn", None)),
    ],
)
def test_anthropic_says_why_a_message_ended(end: ChoiceDone, usage: Usage, expected: tuple[str, str | None]):
    message = answer_body([ChoiceDelta(0, "a"), end], usage)
    assert (message["stop_reason"], message["stop_sequence"]) == expected


def test_anthropic_counts_what_the_cache_found_and_stores():
    """The three input counts add up to the prompt, so that clients do not count tokens twice."""
    for control, hour in (({"type": "ephemeral"}, False), ({"type": "ephemeral", "ttl": "1h"}, True)):
        for members in (
            {"cache_control": control},
            {"system": [{"type": "text", "text": "a", "cache_control": control}]},
            {"tools": [TOOL | {"cache_control": control}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": control}]}]},
        ):
            usage = answer_body([ChoiceDelta(0, "a"), done()], **members)["usage"]
            assert (usage["input_tokens"], usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]) == (
                0,
                4,
                8,
            )
            assert usage["cache_creation"] == {
                "ephemeral_5m_input_tokens": 0 if hour else 4, "ephemeral_1h_input_tokens": 4 if hour else 0,
            }  # fmt: skip


def input_counts(usage: dict[str, Any]) -> dict[str, int]:
    """Return the counts that clients add up to the length of the prompt."""
    return {name: usage[name] for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")}


@pytest.mark.parametrize("control", [None, {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}])
def test_anthropic_stream_counts_no_token_twice(control: dict[str, str] | None):
    """Claude Code keeps the counts of message_start for which message_delta says 0."""
    events = stream([ChoiceDelta(0, "a"), done()], cache_control=control)
    data = [json.loads(line[6:]) for line in events.splitlines() if line.startswith(b"data: ")]
    first = next(event["message"]["usage"] for event in data if event["type"] == "message_start")
    last = next(event["usage"] for event in data if event["type"] == "message_delta")
    assert sum(input_counts(first).values()) == sum(input_counts(last).values()) == 12
    kept = {name: count or input_counts(first)[name] for name, count in input_counts(last).items()}
    assert kept == input_counts(last)
    assert sum(first["cache_creation"].values()) == first["cache_creation_input_tokens"]


def test_anthropic_reports_no_edits_of_the_context():
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert answer_body([done()], context_management=edits)["context_management"] == {"applied_edits": []}
    assert b'"output_tokens":5},"context_management":{"applied_edits":[]}}' in stream(
        [done()], context_management=edits
    )


def test_anthropic_reports_the_edits_that_cleared_something():
    members = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
    applied = [
        AppliedEdit(ClearReasoning(1), 3, 15000),
        AppliedEdit(ClearToolUses("tokens", 100_000, 3), 8, 50000),
    ]
    events = [PromptAccepted(0, [1] * 12, applied_edits=applied), ChoiceDelta(0, "a"), done()]
    written = (
        b'"context_management":{"applied_edits":[{"type":"clear_thinking_20251015","cleared_thinking_turns":3,'
        b'"cleared_input_tokens":15000},{"type":"clear_tool_uses_20250919","cleared_tool_uses":8,'
        b'"cleared_input_tokens":50000}]}}'
    )
    reply = read(**members)
    reply.add_events(events)
    assert reply.render_body(USAGE).endswith(b'"inference_geo":"not_available"},' + written)
    reply = read(stream=True, **members)
    streamed = reply.render_chunk(events) + reply.finish_stream(USAGE)
    assert b'"output_tokens":5},' + written + b"\n\nevent: message_stop" in streamed
    assert b"context_management" not in streamed.partition(b"event: message_delta")[0]


# -- errors

ERRORS: list[tuple[ParleyError, int, str, str]] = [
    (BadRequest("wrong"), 400, "invalid_request_error", "wrong"),
    (Unauthorized("no key"), 401, "authentication_error", "no key"),
    (NotFound("nothing here"), 404, "not_found_error", "nothing here"),
    (UnknownModel("There is no model 'x'.", name="x", served=["m"]), 404, "not_found_error", "model: x"),
    (TooLarge("large"), 413, "request_too_large", "large"),
    (Overloaded("full"), 429, "rate_limit_error", "full"),
    (EngineError("broken"), 500, "api_error", "broken"),
    (EngineDied("dead"), 503, "overloaded_error", "dead"),
    (
        ContextLength("long", limit=4096, prompt=5000, requested=1),
        400,
        "invalid_request_error",
        "prompt is too long: 5000 tokens > 4095 maximum",
    ),
    (
        ContextLength("long", limit=4096, prompt_over=16384),
        400,
        "invalid_request_error",
        "prompt is too long: 16385 tokens > 4095 maximum",
    ),
]


@pytest.mark.parametrize(("error", "status", "kind", "sentence"), ERRORS)
def test_anthropic_errors_have_its_form(error: ParleyError, status: int, kind: str, sentence: str):
    error.request_uuid = "0f"
    answer = DIALECT.render_error(error)
    assert answer.status == status
    assert answer.body == (
        f'{{"type":"error","error":{{"type":"{kind}","message":"{sentence}"}},"request_id":"req_0f"}}'.encode()
    )


def test_anthropic_strict_overload_has_the_original_status():
    assert STRICT.render_error(EngineDied("dead")).status == 529


def test_anthropic_ends_a_failed_stream_with_an_error_event():
    assert read(stream=True).fail_stream(EngineDied("dead")) == (
        b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"dead"},'
        b'"request_id":"req_0f"}\n\n'
    )


def test_anthropic_counts_prompts_that_are_too_long():
    assert read().request.counted_tokens == 400


# -- tokens and models


def test_anthropic_counts_tokens_of_the_same_prompt():
    members: dict[str, Any] = {"system": "s", "tools": [TOOL], "thinking": THINKING, "messages": TURNS}
    body = json.dumps({"model": "m"} | members).encode()
    assert messages.read_count(LENIENT_ANTHROPIC_RULES, body, CONTEXT).prompt == read(**members).request.prompts[0]
    managed = messages.read_count(
        LENIENT_ANTHROPIC_RULES,
        json.dumps({"model": "m", "messages": TURNS, "context_management": {}}).encode(),
        CONTEXT,
    )
    assert managed.writer is not None
    assert json.loads(managed.writer(TokenizeResult([1, 2, 3], None, 9))) == {
        "input_tokens": 3, "context_management": {"original_input_tokens": 3}
    }  # fmt: skip
    edited = TokenizeResult([1, 2, 3], None, 9, original_tokens=70000)
    assert managed.writer(edited) == b'{"input_tokens":3,"context_management":{"original_input_tokens":70000}}'
    with pytest.raises(BadRequest, match="Extra inputs are not permitted"):
        messages.read_count(
            STRICT_ANTHROPIC_RULES, json.dumps({"model": "m", "messages": TURNS, "max_tokens": 5}).encode(), CONTEXT
        )


FACTS = ServerFacts("1", [ModelCard(name, 1770000000, 4096 if name == "a" else None) for name in "abc"], True)


def list_models(query: bytes = b"") -> dict[str, Any]:
    context = RequestContext("0f", 1, "fp", query_string=query)
    return json.loads(models.answer_anthropic_models(b"", context, FACTS).body)


@pytest.mark.parametrize(
    ("members", "abilities", "supported"),
    [
        ({}, {"chat"}, {"batch", "context_management", "structured_outputs"}),
        (
            {"media_kinds": {"image"}},
            {"chat", "thinking"},
            {"batch", "context_management", "structured_outputs", "image_input", "thinking", "effort"},
        ),
        ({"features": frozenset()}, {"chat"}, {"batch", "context_management"}),
        ({}, set(), set()),
        ({"generates": False}, {"chat"}, set()),
    ],
)
def test_anthropic_models_tell_what_they_can_do(members, abilities, supported):
    info = msgspec.structs.replace(SCRIPTED_MODEL, **members)
    facts = ServerFacts("1", [ModelCard("m", 0, 64, info=info, abilities=frozenset(abilities))], True)
    (model,) = json.loads(models.answer_anthropic_models(b"", CONTEXT, facts).body)["data"]
    assert {name for name, group in model["capabilities"].items() if group["supported"]} == supported
    assert model["capabilities"]["thinking"]["types"]["adaptive"]["supported"] is ("thinking" in supported)


def test_anthropic_lists_models_by_pages():
    page = list_models()
    assert page["data"][0] == {
        "type": "model", "id": "a", "display_name": "a", "created_at": "2026-02-02T02:40:00Z",
        "max_input_tokens": 4096, "max_tokens": 4096, "capabilities": None, "lifecycle": "active", "line": None,
        "deprecated_at": None, "retires_at": None,
    }  # fmt: skip
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "a", "c")
    shown = {query: [model["id"] for model in list_models(query)["data"]] for query in (
        b"limit=2", b"limit=2&after_id=b", b"limit=1&before_id=c", b"after_id=c",
    )}  # fmt: skip
    assert list(shown.values()) == [["a", "b"], ["c"], ["b"], []]
    assert list_models(b"limit=2")["has_more"] and list_models(b"limit=1&before_id=c")["has_more"]


def test_anthropic_lists_capabilities_of_loaded_models():
    info = msgspec.structs.replace(SCRIPTED_MODEL, media_kinds=frozenset(("image",)))
    thinker = ModelCard("a", 1, 64, info=info, abilities=frozenset(("chat", "thinking")))
    others = [
        ModelCard("b", 1, 64, info=SCRIPTED_MODEL, abilities=frozenset(("chat",))),
        ModelCard("c", 1, 64, info=SCRIPTED_MODEL, purpose="vectors"),
    ]
    facts = ServerFacts("1", [thinker, *others], True)
    page = json.loads(models.answer_anthropic_models(b"", RequestContext("0f", 1, "fp"), facts).body)["data"]
    first, second, third = (model["capabilities"] for model in page)
    flat = {name: support["supported"] for name, support in first.items()}
    assert [name for name, supported in flat.items() if supported] == [
        "batch", "context_management", "effort", "image_input", "structured_outputs", "thinking",
    ]  # fmt: skip
    assert {level for level, support in first["effort"].items() if support == {"supported": True}} == {
        "low", "medium", "high", "xhigh", "max",
    }  # fmt: skip
    assert all(support == {"supported": True} for support in first["thinking"]["types"].values())
    assert [name for name, support in second.items() if support["supported"]] == [
        "batch", "context_management", "structured_outputs",
    ]  # fmt: skip
    types = second["thinking"]["types"]
    assert {name for name, support in types.items() if support["supported"]} == {"disabled", "between_tools"}
    assert not any(support["supported"] for support in third.values())
    assert first.keys() == second.keys() == third.keys()


@pytest.mark.parametrize("query", [b"limit=0", b"limit=1001", b"limit=x", b"after_id=zz", b"before_id=zz"])
def test_anthropic_refuses_pages_that_do_not_exist(query: bytes):
    with pytest.raises(BadRequest) as caught:
        list_models(query)
    assert caught.value.message.startswith(query.partition(b"=")[0].decode() + ": ")


def test_anthropic_writes_a_summary_before_the_answer():
    edits = [AppliedEdit(SummarizeContext(0, "?", "Summary:"))]
    first = Usage(12, 3, cached_tokens=2)
    events = [
        PromptAccepted(0, [1] * 12, applied_edits=edits), ChoiceDone(0, "stop", first, summary="They met."),
        PromptAccepted(1, [1] * 6), ChoiceDelta(1, "Hi"), ChoiceDone(1, "stop", Usage(6, 4)),
    ]  # fmt: skip
    usage = Usage(18, 7, cached_tokens=2)
    signature = SEAL.seal("", b"They met.").encode()
    management = {"context_management": {"edits": [{"type": "compact_20260112"}]}}
    reply = read(stream=True, **management)
    no_cache = b'"cache_creation":{"ephemeral_5m_input_tokens":0,"ephemeral_1h_input_tokens":0}'
    iterations = (
        b'"iterations":[{"type":"compaction","input_tokens":10,"cache_creation_input_tokens":0,'
        b'"cache_read_input_tokens":2,%b,"output_tokens":3},{"type":"message","input_tokens":6,'
        b'"cache_creation_input_tokens":0,"cache_read_input_tokens":0,%b,"output_tokens":4}]' % (no_cache, no_cache)
    )
    assert reply.render_chunk(events) + reply.finish_stream(usage) == (
        START + b'event: content_block_start\ndata: {"type":"content_block_start","index":0,"content_block":'
        b'{"type":"compaction","content":null,"signature":"%b"}}\n\n'
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":'
        b'{"type":"compaction_delta","content":"They met."}}\n\n'
        b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        b'event: content_block_start\ndata: {"type":"content_block_start","index":1,"content_block":'
        b'{"type":"text","text":""}}\n\n'
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":1,"delta":'
        b'{"type":"text_delta","text":"Hi"}}\n\n'
        b'event: content_block_stop\ndata: {"type":"content_block_stop","index":1}\n\n'
        b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn",'
        b'"stop_sequence":null},"usage":{"input_tokens":6,"cache_creation_input_tokens":0,'
        b'"cache_read_input_tokens":0,"output_tokens":4,%b},"context_management":{"applied_edits":[]}}\n\n'
        % (signature, iterations)
        + STOP
    )
    for summary, block in (
        ("They met.", {"type": "compaction", "content": "They met.", "signature": signature.decode()}),
        ("", {"type": "compaction", "content": None}),
    ):
        reply = read(**management)
        reply.add_events([events[0], ChoiceDone(0, "stop", first, summary=summary), *events[2:]])
        body = reply.render_body(usage)
        assert json.loads(body)["content"] == [block, {"type": "text", "text": "Hi"}]
        assert json.loads(body)["usage"]["input_tokens"] == 6 and iterations in body


def test_anthropic_writes_a_summary_as_a_block():
    applied = [AppliedEdit(SummarizeContext(0, "?"))]
    events = [
        PromptAccepted(0, [1] * 12, applied_edits=applied),
        ChoiceDelta(0, "hm", "reasoning"), ChoiceDelta(0, "They "), ChoiceDelta(0, "met."), done(),
    ]  # fmt: skip
    signature = SEAL.seal("", b"They met.")
    reply = read(compaction={"type": "summarize"}, stream=True)
    assert reply.render_chunk(events) + reply.finish_stream(USAGE) == (
        START
        + b'event: content_block_start\ndata: {"type":"content_block_start","index":0,"content_block":'
        + b'{"type":"compaction","content":null,"signature":"%b"}}\n\n' % signature.encode()
        + b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":'
        b'{"type":"compaction_delta","content":"They met."}}\n\n'
        b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"compaction",'
        b'"stop_sequence":null},"usage":{"input_tokens":4,"cache_creation_input_tokens":0,'
        b'"cache_read_input_tokens":8,"output_tokens":5}}\n\n' + STOP
    )
    reply = read(compaction={"type": "summarize"})
    reply.add_events(events)
    answer = json.loads(reply.render_body(USAGE))
    assert answer["content"] == [{"type": "compaction", "content": "They met.", "signature": signature}]
    assert answer["stop_reason"] == "compaction"
    reply = read(compaction={"type": "summarize"})
    reply.add_events([*events[:-1], done("length")])
    answer = json.loads(reply.render_body(USAGE))
    assert (answer["content"], answer["stop_reason"]) == ([{"type": "compaction", "content": None}], "max_tokens")
    for cut in (done("repetition"), done("cancel"), done("error"), done("stop", "m")):
        reply = read(compaction={"type": "summarize"})
        reply.add_events([*events[:-1], cut])
        assert json.loads(reply.render_body(USAGE))["content"] == [{"type": "compaction", "content": None}]
    edited = read(context_management={"edits": [{"type": "compact_20260112"}]})
    edited.add_events(events)
    assert json.loads(edited.render_body(USAGE))["context_management"] == {"applied_edits": []}
