"""Bodies of Anthropic's API: turns, blocks, tools and options, and the refusals of both manners."""

import json
from typing import Any

import pytest

from parley.dialects.anthropic import messages
from parley.dialects.anthropic.api_rules import LENIENT_ANTHROPIC_RULES, STRICT_ANTHROPIC_RULES, AnthropicRules
from parley.dialects.anthropic.error_answers import anthropic_error_sentence
from parley.dialects.anthropic.toolsets import COMPUTER_MEMBERS
from parley.dialects.anthropic.turns import check_order
from parley.dialects.fields import Fields
from parley.dialects.reasoning_seal import ReasoningSeal
from parley.dialects.request_context import RequestContext
from parley.dialects.summary_request import SUMMARY_REQUEST
from parley.errors import BadRequest, Unsupported
from parley.types import (
    ChatPrompt,
    ClearReasoning,
    ClearToolUses,
    ContextEdit,
    EncodedMedia,
    Media,
    MediaAddress,
    Message,
    PlacedMedia,
    Request,
    SummarizeContext,
    ToolCall,
)

SEAL = ReasoningSeal("secret")
VERSION = {b"anthropic-version": b"2023-06-01"}
CONTEXT = RequestContext("0f", 1, "fp", context_length=4096, headers=VERSION, tenant="t", reasoning_seal=SEAL)
SEES = RequestContext("0f", 1, "fp", context_length=4096, headers=VERSION, media_limits={"image": 2})
TURNS = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": "b"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "r"}
PNG = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
IMAGE = {"type": "image", "source": PNG}
OUT_OF_RANGE = (
    "temperature: Input should be greater than or equal to 0 and less than or equal to {high}, but got {value}"
)


def read(rules: AnthropicRules = LENIENT_ANTHROPIC_RULES, context: RequestContext = CONTEXT, **members: Any) -> Request:
    body = {"model": "m", "max_tokens": 2000, "messages": TURNS} | members
    return messages.read_messages_request(rules, json.dumps(body).encode(), context).request


def chat(
    rules: AnthropicRules = LENIENT_ANTHROPIC_RULES, context: RequestContext = CONTEXT, **members: Any
) -> ChatPrompt:
    prompt = read(rules, context, **members).prompts[0]
    assert isinstance(prompt, ChatPrompt)
    return prompt


def turns(
    *items: dict[str, Any], rules: AnthropicRules = LENIENT_ANTHROPIC_RULES, context: RequestContext = CONTEXT
) -> list[Message]:
    return chat(rules, context, messages=list(items)).messages


def user(*blocks: dict[str, Any] | str) -> dict[str, Any]:
    return {"role": "user", "content": blocks[0] if isinstance(blocks[0], str) else list(blocks)}


def assistant(*blocks: dict[str, Any] | str) -> dict[str, Any]:
    return user(*blocks) | {"role": "assistant"}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def unanswered_error(place: int, ids: str) -> str:
    return (
        f"messages.{place}: `tool_use` ids were found without `tool_result` blocks immediately after: {ids}. Each "
        "`tool_use` block must have a corresponding `tool_result` block in the next message."
    )


def orphan_error(place: str, use_id: str) -> str:
    return (
        f"messages.{place}: unexpected `tool_use_id` found in `tool_result` blocks: {use_id}. Each `tool_result` block "
        "must have a corresponding `tool_use` block in the previous message."
    )


def refusal(rules: AnthropicRules = LENIENT_ANTHROPIC_RULES, context: RequestContext = CONTEXT, **members: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        read(rules, context, **members)
    return anthropic_error_sentence(caught.value)


def test_anthropic_minimal_body_means_defaults():
    request = read()
    assert (request.id, request.model, request.n, request.stream) == ("0f", "m", 1, False)
    assert request.sampling.temperature == 1.0 and request.thinking_budget is None and request.grammar is None
    assert (request.stop_conditions.max_tokens, request.stop_conditions.reserved_tokens) == (2000, 1)
    prompt = chat()
    assert prompt.messages == [Message("user", "Hi")]
    assert prompt.thinking is False and prompt.reasoning_effort is None and prompt.tool_choice == "auto"
    assert prompt.add_generation_prompt and not prompt.continue_final


def test_anthropic_members_reach_the_request():
    request = read(temperature=0.5, top_p=0.9, top_k=40, seed=7, stop_sequences=["END"], stream=True, min_tokens=3,
                   ignore_eos=True, metadata={"user_id": "u" * 400}, service_tier="auto", inference_geo="eu",
                   speed="fast", diagnostics={}, billing_policy={}, container=None, mcp_servers=[],
                   thread={}, chat_template_kwargs={"a": 1})  # fmt: skip
    sampling, stop = request.sampling, request.stop_conditions
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 40, 7)
    assert (stop.strings, stop.min_tokens, stop.ignore_eos, request.stream) == (["END"], 3, True, True)
    assert isinstance(request.prompts[0], ChatPrompt) and request.prompts[0].options == {"a": 1}


# -- turns


def test_anthropic_joins_consecutive_messages_of_a_role():
    assert turns(user("a"), user(text("b"), text("c")), assistant("d"), assistant("e"), user("f")) == [
        Message("user", "a\nb\nc"), Message("assistant", "d\ne"), Message("user", "f")
    ]  # fmt: skip


def test_anthropic_reads_calls_and_their_results():
    thinking = {"type": "thinking", "thinking": "hm", "signature": ""}
    failed = {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True, "content": [text("x"), text("y")]}
    empty = {"type": "tool_result", "tool_use_id": "toolu_3"}
    read_turns = turns(
        user("a"), assistant(thinking, text("b"), USE), user(text("first"), RESULT, failed, empty, text("c"))
    )
    assert read_turns == [
        Message("user", "a"),
        Message("assistant", "b", None, "hm", [ToolCall("toolu_1", "f", '{"a":"b"}')]),
        Message("tool", "r", tool_call_id="toolu_1"),
        Message("tool", "Error: x\ny", tool_call_id="toolu_2"),
        Message("tool", "", tool_call_id="toolu_3"),
        Message("user", "first\nc"),
    ]
    assert turns(user("a"), assistant(USE), user(RESULT))[-1] == Message("tool", "r", tool_call_id="toolu_1")


def test_anthropic_replays_thinking_from_its_signature():
    """The client may have seen nothing of it; a signature of another tenant or server is worth nothing."""
    sealed = {"type": "thinking", "thinking": "", "signature": SEAL.seal("t", "héy\n".encode())}
    foreign = {"type": "thinking", "thinking": "shown", "signature": SEAL.seal("other", b"x")}
    redacted = {"type": "redacted_thinking", "data": "abc"}
    for block, reasoning in (
        (sealed, "héy\n"),
        (foreign, "shown"),
        (foreign | {"thinking": ""}, None),
        (redacted, None),
    ):
        assert turns(user("a"), assistant(block, text("b")), user("c"))[1].reasoning == reasoning
    assert refusal(STRICT_ANTHROPIC_RULES, messages=[user("a"), assistant(foreign, text("b")), user("c")]) == (
        "messages.1.content.0: Invalid `signature` in `thinking` block"
    )


def test_anthropic_continues_an_answer_that_the_client_begins():
    prompt = chat(messages=[*TURNS, assistant("The answer is")], thinking={"type": "adaptive"})
    assert prompt.continue_final and not prompt.add_generation_prompt and prompt.thinking is False
    assert not chat(messages=[*TURNS, assistant(USE)]).continue_final


def test_anthropic_drops_claude_codes_billing_line():
    billing = "x-anthropic-billing-header: cc_version=2.1.330.572; cc_entrypoint=sdk-cli; cch=%s;"
    prompts = [chat(system=[text(billing % code), text("You are"), text("rules")]) for code in ("a1b2", "c3d4")]
    assert prompts[0] == prompts[1] and prompts[0].messages[0] == Message("system", "You are\nrules")
    assert chat(system=billing % "a").messages == [Message("user", "Hi")]
    assert chat(system=billing % "a" + "\nYou are").messages[0] == Message("system", "You are")


def test_anthropic_keeps_system_messages_in_their_place():
    reminder = {"role": "system", "content": "env"}
    once = {"role": "system", "content": [text("once")], "clear_at": "next_user_message"}
    assert turns(user("a"), reminder, assistant("b"), once, user("c"), once) == [
        Message("user", "a"), Message("system", "env"), Message("assistant", "b"), Message("user", "c"),
        Message("system", "once"),
    ]  # fmt: skip
    assert chat(system="s", messages=[reminder, user("a")]).messages[0] == Message("system", "s\nenv")


# -- blocks


def test_anthropic_writes_documents_and_search_results_as_text():
    plain = {"type": "document", "title": "T", "context": "C", "citations": {"enabled": True},
             "source": {"type": "text", "media_type": "text/plain", "data": "D"}}  # fmt: skip
    parts = {"type": "document", "source": {"type": "content", "content": [text("x"), text("y")]}}
    found = {"type": "search_result", "source": "http://a", "title": "S", "content": [text("z")]}
    hosted = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{"type": "x", "text": "h"}]}
    gone = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}}
    assert turns(user(plain, parts, found), assistant(gone, hosted), user("q")) == [
        Message("user", "T\nC\nD\nx\ny\nS\nhttp://a\nz"), Message("assistant", "h"), Message("user", "q")
    ]  # fmt: skip


def test_anthropic_refuses_deeply_nested_documents():
    block = text("a")
    for _ in range(300):
        block = {"type": "document", "source": {"type": "content", "content": [block]}}
    assert "Input should be 'text' or 'image'" in refusal(messages=[user(block)])


def test_anthropic_reads_images_in_their_places():
    address = {"type": "image", "source": {"type": "url", "url": "https://a.b/c.png"}}
    (turn,) = turns(user(text("ab"), IMAGE, text("cd"), address), context=SEES)
    encoded = Media("image", EncodedMedia("iVBORw0KGgo=", "image/png"), "messages.0.content.1.source")
    linked = Media("image", MediaAddress("https://a.b/c.png"), "messages.0.content.3.source")
    assert turn == Message("user", "abcd", media=[PlacedMedia(2, encoded), PlacedMedia(4, linked)])


def test_anthropic_moves_images_of_results_to_the_user():
    result = RESULT | {"content": [text("seen"), IMAGE]}
    tool, after = turns(user("a"), assistant(USE), user(result, text("and?")), context=SEES)[2:]
    assert tool == Message("tool", "seen", tool_call_id="toolu_1")
    assert (after.role, after.content, [placed.position for placed in after.media]) == ("user", "and?", [0])


BLOCK_REFUSALS: list[tuple[dict[str, Any], str]] = [
    (IMAGE, "messages.0.content.0.type: this model reads text only, but got 'image'"),
    ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}},
     "messages.0.content.0.source.type: 'base64' is not supported by this server"),
    ({"type": "document", "source": {"type": "content", "content": [text("a"), {"type": "document", "source": {}}]}},
     "messages.0.content.0.source.content.1.type: Input should be 'text' or 'image', but got 'document'"),
    ({"type": "image"}, "messages.0.content.0.type: this model reads text only, but got 'image'"),
    ({"type": "x"}, "messages.0.content.0.type: Input tag 'x' does not match any of the expected tags"),
    ({"text": "a"}, "messages.0.content.0.type: Field required"),
    ({"type": "text"}, "messages.0.content.0.text: Field required"),
    ({"type": "tool_result", "content": "r"}, "messages.0.content.0.tool_use_id: Field required"),
    (text("a") | {"cache_control": {"type": "x"}},
     "messages.0.content.0.cache_control.type: Input should be 'ephemeral', but got 'x'"),
]  # fmt: skip


@pytest.mark.parametrize(("block", "sentence"), BLOCK_REFUSALS)
def test_anthropic_refuses_blocks_by_their_path(block: dict[str, Any], sentence: str):
    assert refusal(messages=[user(block)]) == sentence


def test_anthropic_refuses_too_many_images_and_files_on_the_server():
    assert "at most 2 image items" in refusal(context=SEES, messages=[user(IMAGE, IMAGE, IMAGE)])
    for source in (
        {"type": "url", "url": "file:///etc/passwd"}, {"type": "file", "file_id": "file_1"}, PNG | {"data": ""},
    ):  # fmt: skip
        assert "messages.0.content.0.source." in refusal(
            context=SEES, messages=[user({"type": "image", "source": source})]
        )


# -- tools


def test_anthropic_reads_tools_and_the_choice_among_them():
    prompt = chat(tools=[TOOL | {"strict": True, "eager_input_streaming": True, "input_examples": [{}]}])
    assert prompt.tools == [{"type": "function", "function": {
        "name": "f", "description": "d", "parameters": TOOL["input_schema"], "strict": True}}]  # fmt: skip
    assert prompt.schema_fields == {"f": "tools[0].input_schema"}
    choices = {
        "auto": {"type": "auto"}, "none": {"type": "none"}, "any": {"type": "any", "disable_parallel_tool_use": True},
        "tool": {"type": "tool", "name": "f"},
    }  # fmt: skip
    prompts = {name: chat(tools=[TOOL], tool_choice=choice) for name, choice in choices.items()}
    seen = {name: (prompt.tool_choice, prompt.forced_tool, prompt.parallel_calls) for name, prompt in prompts.items()}
    assert seen == {
        "auto": ("auto", None, True), "none": ("none", None, True), "any": ("required", None, False),
        "tool": ("required", "f", True),
    }  # fmt: skip


def tool_names(**members: Any) -> list[str]:
    return [tool["function"]["name"] for tool in chat(**members).tools]


def test_anthropic_shows_deferred_tools_when_they_are_referred_to():
    deferred = TOOL | {"name": "g", "defer_loading": True}
    search = TOOL | {"name": "ToolSearch"}
    reference = RESULT | {"content": [{"type": "tool_reference", "tool_name": "g"}]}
    revealing = [user("a"), assistant(USE), user(reference)]
    assert tool_names(tools=[TOOL, deferred]) == ["f", "g"]  # nothing could reveal it
    assert tool_names(tools=[search, deferred]) == ["ToolSearch"]
    assert tool_names(tools=[search, deferred], messages=revealing) == ["ToolSearch", "g"]


def test_anthropic_changes_tools_within_the_conversation():
    def change(kind: str, tool: dict[str, Any]) -> list[dict[str, Any]]:
        return [user("a"), {"role": "system", "content": [{"type": kind, "tool": tool}]}, user("b")]

    by_name = {"type": "tool_reference", "name": "f"}
    inline = {"type": "tool_definition", "definition": TOOL | {"name": "h"}}
    assert tool_names(tools=[TOOL], messages=change("tool_removal", by_name)) == []
    assert tool_names(tools=[TOOL], messages=change("tool_addition", by_name)) == ["f"]
    assert tool_names(tools=[TOOL], messages=change("tool_addition", inline)) == ["f", "h"]
    assert "mcp_tool_reference" in refusal(messages=change("tool_addition", {"type": "mcp_tool_reference"}))


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         "tools.0.type: 'web_search_20250305' is not supported by this server"),
        ({"tools": [TOOL | {"name": "a b"}]},
         "tools.0.name: String should match pattern '^[a-zA-Z0-9_-]{1,128}$', but got 'a b'"),
        ({"tools": [TOOL, TOOL]}, "tools: Tool names must be unique."),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "Tool 'g' not found in provided tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: 'any' may only be specified while providing `tools`."),
        ({"tool_choice": {}}, "tool_choice.type: Field required"),
    ],
)  # fmt: skip
def test_anthropic_refuses_tools_by_name(members: dict[str, Any], sentence: str):
    assert refusal(**members) == sentence


# -- options


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ({"type": "enabled", "budget_tokens": 1500}, (True, 1500)),
        ({"type": "adaptive"}, (True, None)),
        ({"type": "between_tools"}, (True, None)),
        ({"type": "disabled"}, (False, None)),
    ],
)
def test_anthropic_reads_thinking(thinking: dict[str, Any], expected: tuple[bool, int | None]):
    request = read(thinking=thinking)
    assert isinstance(request.prompts[0], ChatPrompt)
    assert (request.prompts[0].thinking, request.thinking_budget) == expected
    forced = chat(thinking=thinking, tools=[TOOL], tool_choice={"type": "any"})
    assert forced.thinking is False  # a forced call begins at once


def test_anthropic_reads_the_form_of_the_answer():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
    form = {"schema": schema, "type": "json_schema"}
    for members in ({"output_config": {"format": form, "effort": "xhigh", "task_budget": {}}}, {"output_format": form}):
        grammar = read(**members).grammar
        assert grammar is not None and (grammar.kind, grammar.value) == ("json", schema)
    assert chat(output_config={"effort": "xhigh"}).reasoning_effort == "xhigh"
    assert refusal(output_config={"format": {"type": "json_schema"}}) == "output_config.format.schema: Field required"


def edits(*given: dict[str, Any], **members: Any) -> list[ContextEdit]:
    return chat(context_management={"edits": list(given)}, **members).edits


TOOL_EDIT = {"type": "clear_tool_uses_20250919"}
THINKING_EDIT = {"type": "clear_thinking_20251015"}


def test_anthropic_reads_edits_of_the_context():
    assert edits() == chat(context_management=None).edits == chat(context_management={}).edits == []
    assert edits(TOOL_EDIT) == [ClearToolUses("tokens", 100_000, 3)]
    options = {
        "trigger": {"type": "tool_uses", "value": 7},
        "keep": {"type": "tool_uses", "value": 0},
        "clear_at_least": {"type": "input_tokens", "value": 500},
        "exclude_tools": ["f", "g"],
    }
    assert edits(TOOL_EDIT | options | {"clear_tool_inputs": True}) == [
        ClearToolUses("tool_uses", 7, 0, 500, ["f", "g"], True)
    ]
    assert edits(THINKING_EDIT, TOOL_EDIT | {"clear_tool_inputs": ["g"]}) == [
        ClearReasoning(1),
        ClearToolUses("tokens", 100_000, 3, cleared_inputs=["g"]),
    ]
    nulls = dict.fromkeys(("clear_at_least", "exclude_tools", "clear_tool_inputs"))
    far = {"trigger": {"type": "input_tokens", "value": 5000}}
    assert edits(TOOL_EDIT | nulls | far) == [ClearToolUses("tokens", 5000, 3)]
    assert edits(THINKING_EDIT) == [ClearReasoning(1)]
    assert edits(THINKING_EDIT | {"keep": {"type": "thinking_turns", "value": 4}}) == [ClearReasoning(4)]
    assert edits(THINKING_EDIT | {"keep": "all"}) == edits(THINKING_EDIT | {"keep": {"type": "all"}}) == []


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        ({}, "0.type: Field required"),
        ({"type": "x"}, "0.type: Input should be 'clear_thinking_20251015' or 'clear_tool_uses_20250919' or "
                        "'compact_20260112', but got 'x'"),
        (TOOL_EDIT | {"trigger": {"value": 1}}, "0.trigger.type: Field required"),
        (TOOL_EDIT | {"trigger": {"type": "input_tokens"}}, "0.trigger.value: Field required"),
        (TOOL_EDIT | {"trigger": {"type": "turns", "value": 1}},
         "0.trigger.type: Input should be 'input_tokens' or 'tool_uses', but got 'turns'"),
        (TOOL_EDIT | {"trigger": {"type": "tool_uses", "value": 0}},
         "0.trigger.value: Input should be greater than or equal to 1 and less than or equal to 2147483647, but got 0"),
        (TOOL_EDIT | {"keep": {"type": "tool_uses", "value": "1"}},
         "0.keep.value: Input should be a valid integer, but got a string"),
        (TOOL_EDIT | {"keep": "all"}, "0.keep: Input should be a valid dictionary, but got a string"),
        (TOOL_EDIT | {"exclude_tools": "f"}, "0.exclude_tools: Input should be a valid list, but got a string"),
        (TOOL_EDIT | {"clear_tool_inputs": 1},
         "0.clear_tool_inputs: Input should be a valid boolean, but got an integer"),
        (THINKING_EDIT | {"keep": {"type": "thinking_turns", "value": 0}},
         "0.keep.value: Input should be greater than or equal to 1 and less than or equal to 2147483647, but got 0"),
    ],
)  # fmt: skip
def test_anthropic_refuses_wrong_edits(edit: dict[str, Any], sentence: str):
    for rules in (LENIENT_ANTHROPIC_RULES, STRICT_ANTHROPIC_RULES):
        members = {"context_management": {"edits": [edit]}, "thinking": {"type": "adaptive"}}
        assert refusal(rules, **members) == f"context_management.edits.{sentence}"


@pytest.mark.parametrize("edit", [TOOL_EDIT, THINKING_EDIT | {"keep": "all"}, {"type": "compact_20260112"}])
def test_anthropic_refuses_a_type_of_edit_that_occurs_twice(edit: dict[str, Any]):
    sentence = refusal(context_management={"edits": [edit, edit]})
    assert sentence == f"context_management.edits.1.type: '{edit['type']}' may occur only once"


def test_anthropic_strict_has_the_rules_of_the_original_for_edits():
    thinking = {"type": "adaptive"}
    for given, members, sentence in (
        ([TOOL_EDIT, THINKING_EDIT], {"thinking": thinking},
         "context_management.edits: `clear_thinking_20251015` must be the first edit"),
        ([THINKING_EDIT], {}, "`clear_thinking_20251015` strategy requires `thinking` to be enabled or adaptive"),
        ([TOOL_EDIT | {"x": 1}], {},
         "context_management.edits.0.clear_tool_uses_20250919.x: Extra inputs are not permitted"),
    ):  # fmt: skip
        assert refusal(STRICT_ANTHROPIC_RULES, context_management={"edits": given}, **members) == sentence
        chat(context_management={"edits": given}, **members)
    chat(STRICT_ANTHROPIC_RULES, context_management={"edits": [THINKING_EDIT, TOOL_EDIT]}, thinking=thinking)


def test_anthropic_tells_images_of_results_from_those_of_the_user():
    result = RESULT | {"content": [IMAGE]}
    after = turns(user("a"), assistant(USE), user(text("and?"), result, IMAGE), context=SEES)[-1]
    assert [(placed.position, placed.tool_call_id) for placed in after.media] == [(0, "toolu_1"), (4, None)]


@pytest.mark.parametrize("name", ["container", "mcp_servers", "thread"])
def test_anthropic_refuses_what_would_change_the_answer(name: str):
    with pytest.raises(Unsupported, match=f"{name}: not supported"):
        read(**{name: {"a": 1}})


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"messages": None}, "messages: Field required"),
        ({"messages": []}, "messages: at least one message is required"),
        ({"model": None}, "model: Field required"),
        ({"max_tokens": "5"}, "max_tokens: Input should be a valid integer, but got a string"),
        ({"temperature": 3}, OUT_OF_RANGE.format(high=2, value=3)),
        ({"messages": [{"role": "x", "content": "a"}]},
         "messages.0.role: Input should be 'user' or 'assistant' or 'system', but got 'x'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
        ({"stop_sequences": [""]}, "stop_sequences.0: String should have at least 1 character"),
    ],
)  # fmt: skip
def test_anthropic_refuses_wrong_members(members: dict[str, Any], sentence: str):
    assert refusal(**members) == sentence


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"foo": 1}, "foo: Extra inputs are not permitted"),
        ({"messages": [user(text("a") | {"foo": 1})]}, "messages.0.content.0.text.foo: Extra inputs are not permitted"),
        ({"tools": [TOOL | {"foo": 1}]}, "tools.0.custom.foo: Extra inputs are not permitted"),
        ({"temperature": 1.5}, OUT_OF_RANGE.format(high=1, value=1.5)),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}},
         "thinking.enabled.budget_tokens: Input should be greater than or equal to 1024 and less than or equal to "
         "2147483647, but got 5"),
        ({"thinking": {"type": "adaptive", "foo": 1}}, "thinking.adaptive.foo: Extra inputs are not permitted"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}},
         "`max_tokens` must be greater than `thinking.budget_tokens`."),
        ({"thinking": {"type": "adaptive"}, "temperature": 0.5}, messages.SAMPLING_CONFLICT),
        ({"thinking": {"type": "adaptive"}, "tools": [TOOL], "tool_choice": {"type": "any"}},
         "Thinking may not be enabled when tool_choice forces tool use."),
        ({"messages": [assistant("a")]}, 'messages: first message must use the "user" role'),
        ({"messages": [*TURNS, assistant("a ")]},
         "messages: final assistant content cannot end with trailing whitespace"),
        ({"messages": [*TURNS, assistant("a")], "thinking": {"type": "adaptive"}},
         "This model does not support assistant message prefill. The conversation must end with a user message."),
        ({"messages": [user(text(""))]}, "messages: text content blocks must be non-empty"),
        ({"messages": [user("")]}, "messages: text content blocks must be non-empty"),
        ({"stop_sequences": "END"}, "stop_sequences: Input should be a valid list, but got a string"),
        ({"stop_sequences": ["\n"]}, "stop_sequences: each stop sequence must contain non-whitespace"),
        ({"messages": [*TURNS, assistant(USE), user("b")]}, unanswered_error(2, "toolu_1")),
        ({"messages": [*TURNS, assistant(USE), {"role": "system", "content": "s"}, user("b")]},
         unanswered_error(3, "toolu_1")),
        ({"messages": [*TURNS, assistant(text("a"), USE)]}, unanswered_error(2, "toolu_1")),
        ({"messages": [*TURNS, assistant(USE, text("a")), user(RESULT)]}, unanswered_error(2, "toolu_1")),  # recorded
        ({"messages": [*TURNS, assistant(USE, USE | {"id": "b"}, USE | {"id": "c"}), user(RESULT)]},
         unanswered_error(2, "b, c")),
        ({"messages": [user(RESULT)]}, orphan_error("0.content.0", "toolu_1")),
        ({"messages": [*TURNS, assistant(USE), user(RESULT, text("b"), *(RESULT | {"tool_use_id": i} for i in "cd"))]},
         orphan_error("2.content.2", "c")),
        ({"messages": [*TURNS, assistant({"type": "server_tool_use"})]},
         "messages.1.content.0.type: 'server_tool_use' is not supported by this server"),
        ({"speed": "fast"}, "speed: 'fast' is not supported by this server"),
        ({"metadata": {"user_id": "u" * 300}},
         "metadata.user_id: String should have at most 256 characters, but has 300"),
    ],
)  # fmt: skip
def test_anthropic_strict_refuses_what_the_original_refuses(members: dict[str, Any], sentence: str):
    assert refusal(STRICT_ANTHROPIC_RULES, **members) == sentence
    if "message" not in sentence and "server_tool_use" not in str(members):
        read(LENIENT_ANTHROPIC_RULES, **members)


def test_anthropic_strict_needs_a_version():
    with pytest.raises(BadRequest, match="anthropic-version: header is required"):
        read(STRICT_ANTHROPIC_RULES, RequestContext("0f", 1, "fp"))
    read(STRICT_ANTHROPIC_RULES)


# -- tools that Anthropic defines and clients run


@pytest.mark.parametrize("rules", [LENIENT_ANTHROPIC_RULES, STRICT_ANTHROPIC_RULES])
@pytest.mark.parametrize(
    ("kind", "name", "members", "required"),
    [
        ("bash_20250124", "bash", ["command", "restart"], []),
        ("text_editor_20250124", "str_replace_editor",
         ["command", "path", "view_range", "file_text", "old_str", "new_str", "insert_line"], ["command", "path"]),
        ("text_editor_20250728", "str_replace_based_edit_tool",
         ["command", "path", "view_range", "file_text", "old_str", "new_str", "insert_line", "insert_text"],
         ["command", "path"]),
        ("memory_20250818", "memory",
         ["command", "path", "view_range", "file_text", "old_str", "new_str", "insert_line", "insert_text", "old_path",
          "new_path"], ["command"]),
    ],
)  # fmt: skip
def test_anthropic_knows_the_schemas_of_tools_that_clients_run(
    rules: AnthropicRules, kind: str, name: str, members: list[str], required: list[str]
):
    (tool,) = chat(rules, tools=[{"type": kind, "name": name, "cache_control": {"type": "ephemeral"}}]).tools
    function = tool["function"]
    assert function["name"] == name
    assert list(function["parameters"]["properties"]) == members
    assert function["parameters"]["required"] == required


def test_anthropic_knows_the_commands_of_each_version_of_the_editor():
    def commands(kind: str, name: str) -> list[str]:
        (tool,) = chat(tools=[{"type": kind, "name": name}]).tools
        names: list[str] = tool["function"]["parameters"]["properties"]["command"]["enum"]
        return names

    assert commands("text_editor_20250124", "str_replace_editor")[-1] == "undo_edit"
    assert commands("text_editor_20250429", "str_replace_based_edit_tool") == [
        "view",
        "create",
        "str_replace",
        "insert",
    ]


@pytest.mark.parametrize("rules", [LENIENT_ANTHROPIC_RULES, STRICT_ANTHROPIC_RULES])
def test_anthropic_describes_the_screen_and_the_actions_of_a_computer(rules: AnthropicRules):
    def computer(version: str, **members: Any) -> tuple[str, list[str], list[str]]:
        size = {"display_width_px": 1024, "display_height_px": 768}
        (tool,) = chat(rules, tools=[{"type": f"computer_{version}", "name": "computer", **size, **members}]).tools
        properties = tool["function"]["parameters"]["properties"]
        return tool["function"]["description"], properties["action"]["enum"], list(properties)

    sentence, actions, members = computer("20241022", display_number=1)
    assert sentence.endswith(" The screen of display 1 is 1024 pixels wide and 768 pixels high.")
    assert actions[-1] == "cursor_position" and members == ["action", "coordinate", "text"]
    _, actions, members = computer("20250124")
    assert actions[-1] == "triple_click" and members[-1] == "duration"
    assert computer("20251124")[1] == actions
    _, zooming, members = computer("20251124", enable_zoom=True)
    assert zooming == [*actions, "zoom"] and members[-1] == "region"


TOOLSET = {"type": "computer_toolset_20260801"}
BROWSER = {"type": "browser_toolset_20260801"}
TABS = [{"tab_id": "1", "title": "Home", "url": "http://a/", "active": True}, {"tab_id": "2", "title": "", "url": ""}]


@pytest.mark.parametrize("rules", [LENIENT_ANTHROPIC_RULES, STRICT_ANTHROPIC_RULES])
def test_anthropic_toolset_is_a_function_for_each_member_that_is_enabled(rules: AnthropicRules):
    configs = {"zoom": {"enabled": False}, "wait": {"enabled": True, "defer_loading": True}, "key": None}
    cached = {"cache_control": {"type": "ephemeral"}}
    functions = {
        tool["function"]["name"]: tool["function"]
        for tool in chat(rules, tools=[TOOLSET | cached | {"configs": configs}, TOOL]).tools
    }
    assert len(functions) == 17 and "computer_zoom" not in functions
    assert {"computer_screenshot", "computer_type", "computer_wait", "f"} <= functions.keys()
    scroll = functions["computer_scroll"]
    assert scroll["strict"] and scroll["parameters"]["required"] == ["scroll_direction", "scroll_amount"]
    search = TOOL | {"name": "tool_search"}
    hidden = [tool["function"]["name"] for tool in chat(rules, tools=[TOOLSET | {"configs": configs}, search]).tools]
    assert "computer_wait" not in hidden and "computer_key" in hidden


@pytest.mark.parametrize("rules", [LENIENT_ANTHROPIC_RULES, STRICT_ANTHROPIC_RULES])
def test_anthropic_browser_offers_some_members_only_where_they_are_enabled(rules: AnthropicRules):
    def names(**configs: Any) -> set[str]:
        tools = chat(rules, tools=[BROWSER | {"configs": configs}, TOOLSET]).tools
        return {tool["function"]["name"] for tool in tools} - {f"computer_{name}" for name in COMPUTER_MEMBERS}

    shown = names()
    assert len(shown) == 27 and {"browser_navigate", "browser_type", "browser_read_page"} <= shown
    assert not {"browser_javascript_exec", "browser_file_upload"} & shown
    assert names(javascript_exec={"enabled": True}, zoom={"enabled": False}, wait={}) == (
        shown | {"browser_javascript_exec"}
    ) - {"browser_zoom"}
    assert names(read_console={"defer_loading": False}) == shown
    assert names(**{"find": {"enabled": False}}) == shown - {"browser_find"}


def test_anthropic_shows_the_state_of_a_browser_as_text():
    changes = [
        {"type": "tab_opened", "tab_id": "2"},
        {"type": "download_completed", "download_id": "d", "url": "http://b/", "path": "/f", "size_bytes": 3},
        {"type": "download_failed", "download_id": "e", "url": "http://c/"},
    ]
    state = {"type": "browser_state", "tabs": TABS, "state_changes": changes}
    use = USE | {"name": "navigate", "toolset_name": "browser"}
    for rules in (LENIENT_ANTHROPIC_RULES, STRICT_ANTHROPIC_RULES):
        result = RESULT | {"content": [{"type": "text", "text": "Done."}, state], "toolset_name": "browser"}
        assert turns({"role": "user", "content": "a"}, assistant(use), user(result), rules=rules)[2].content == (
            "Done.\nOpen tabs:\n1 (active): Home <http://a/>\n2:  <>\nOpened tab 2\n"
            "Completed download d, http://b/, /f, 3 bytes\nFailed download e, http://c/"
        )
    shown = turns({"role": "user", "content": "a"}, assistant(use), user(RESULT | {"content": [state | {"tabs": []}]}))
    assert shown[2].content.startswith("No tab is open.\n")
    path = "messages.2.content.0.content.0"
    for block, sentence in (
        ({"type": "browser_state"}, f"{path}.tabs: Field required"),
        (state | {"tabs": [{"tab_id": "1", "url": ""}]}, f"{path}.tabs.0.title: Field required"),
        (state | {"state_changes": [{"type": "download_started", "download_id": "d"}]},
         f"{path}.state_changes.0.url: Field required"),
        (state | {"state_changes": [{}]}, f"{path}.state_changes.0.type: Field required"),
    ):  # fmt: skip
        result = user(RESULT | {"content": [block]})
        assert refusal(messages=[{"role": "user", "content": "a"}, assistant(use), result]) == sentence


def test_anthropic_calls_of_a_toolset_keep_its_name_in_the_conversation():
    use = USE | {"name": "screenshot", "input": {}, "toolset_name": "computer"}
    answered = turns({"role": "user", "content": "a"}, assistant(use), user(RESULT | {"toolset_name": "computer"}))
    assert answered[1].tool_calls == [ToolCall("toolu_1", "computer_screenshot", "{}")]


def test_anthropic_forces_a_tool_that_clients_run():
    tools = [{"type": "bash_20250124", "name": "bash", "strict": True}, TOOL]
    forced = chat(tools=tools, tool_choice={"type": "tool", "name": "bash"})
    assert (forced.tool_choice, forced.forced_tool) == ("required", "bash")
    assert forced.tools[0]["function"]["strict"] is True


@pytest.mark.parametrize(
    ("tool", "sentence"),
    [
        ({"type": "bash_20250124", "name": "shell"}, "tools.0.name: Input should be 'bash', but got 'shell'"),
        ({"type": "bash_20250124"}, "tools.0.name: Field required"),
        (TOOLSET | {"configs": {"fly": {}}}, "tools.0.configs.fly: Extra inputs are not permitted"),
        (TOOLSET | {"configs": {"zoom": {"enabled": 1}}},
         "tools.0.configs.zoom.enabled: Input should be a valid boolean, but got an integer"),
        (BROWSER | {"configs": {"fly": {}}}, "tools.0.configs.fly: Extra inputs are not permitted"),
        ({"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 0},
         "tools.0.max_characters: Input should be greater than or equal to 1, but got 0"),
        ({"type": "web_fetch_20250910", "name": "web_fetch"},
         "tools.0.type: 'web_fetch_20250910' is not supported by this server"),
        ({"type": "computer_20250124", "name": "computer", "display_height_px": 9},
         "tools.0.display_width_px: Field required"),
        ({"type": "computer_20250124", "name": "computer", "display_width_px": 9, "display_height_px": 0},
         "tools.0.display_height_px: Input should be greater than or equal to 1 and less than or equal to 65536, "
         "but got 0"),
    ],
)  # fmt: skip
def test_anthropic_refuses_wrong_members_of_tools_that_clients_run(tool: dict[str, Any], sentence: str):
    assert refusal(tools=[tool]) == sentence


def test_anthropic_refuses_two_tools_with_the_same_name_for_the_model():
    for tools in ([TOOLSET, TOOLSET], [TOOLSET, TOOL | {"name": "computer_type"}]):
        assert refusal(tools=tools) == "tools: Tool names must be unique."


def test_anthropic_strict_refuses_a_schema_for_a_tool_that_clients_run():
    tool = {"type": "bash_20250124", "name": "bash", "input_schema": {"type": "object"}}
    sentence = "tools.0.bash_20250124.input_schema: Extra inputs are not permitted"
    assert refusal(STRICT_ANTHROPIC_RULES, tools=[tool]) == sentence


# -- summaries

COMPACT_EDIT = {"type": "compact_20260112", "pause_after_compaction": True}
COMPACTED = {"type": "compaction", "content": "They met."}
CALL = ToolCall("toolu_1", "f", '{"a":"b"}')


def test_anthropic_asks_for_a_summary():
    assert chat(compaction={"type": "summarize"}).edits == [SummarizeContext(0, SUMMARY_REQUEST)]
    assert chat(compaction={"type": "summarize", "instructions": " "}).edits == [SummarizeContext(0, SUMMARY_REQUEST)]
    assert chat(compaction={"type": "summarize", "instructions": "Be brief."}).edits == [
        SummarizeContext(0, "Be brief.")
    ]
    near = COMPACT_EDIT | {"trigger": {"type": "input_tokens", "value": 4095}}
    assert edits(TOOL_EDIT, near) == [ClearToolUses("tokens", 100_000, 3), SummarizeContext(4095, SUMMARY_REQUEST)]
    assert edits(near | {"instructions": "In French."}) == [SummarizeContext(4095, f"{SUMMARY_REQUEST}\n\nIn French.")]
    assert edits({"type": "compact_20260112"}) == []  # no prompt is that long
    (answered,) = edits(near | {"pause_after_compaction": False, "instructions": "In French."})
    assert (answered.threshold, answered.answer_heading) == (4095, "Summary of the conversation so far:")
    assert answered.question.startswith(SUMMARY_REQUEST) and answered.question.endswith("\n\nIn French.")
    body = {"model": "m", "messages": TURNS, "compaction": {"type": "summarize"}}
    counted = messages.read_count(LENIENT_ANTHROPIC_RULES, json.dumps(body).encode(), CONTEXT).prompt
    assert isinstance(counted, ChatPrompt) and counted.edits == []


@pytest.mark.parametrize("rules", [LENIENT_ANTHROPIC_RULES, STRICT_ANTHROPIC_RULES])
def test_anthropic_refuses_wrong_requests_for_a_summary(rules: AnthropicRules):
    summarize = {"type": "summarize"}
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    for members, sentence in (
        ({"compaction": {}}, "compaction.type: Field required"),
        ({"compaction": {"type": "x"}}, "compaction.type: Input should be 'summarize', but got 'x'"),
        ({"compaction": summarize, "stop_sequences": ["a"]},
         "stop_sequences: cannot be used together with `compaction`"),
        ({"compaction": summarize, "output_config": {"format": schema}},
         "output_config.format: cannot be used together with `compaction`"),
        ({"compaction": summarize, "context_management": {}},
         "context_management: cannot be used together with `compaction`"),
        ({"compaction": summarize, "tools": [TOOL], "tool_choice": {"type": "any"}},
         "tool_choice: cannot be used together with `compaction`"),
        ({"messages": [user("a"), assistant(COMPACTED | {"content": ""})]},
         "messages.1.content.0.content: String should have at least 1 character"),
    ):  # fmt: skip
        assert refusal(rules, **members) == sentence


def test_anthropic_summary_stands_for_all_before_it():
    summary = Message("user", "Summary of the conversation so far:\nThey met.")
    after = Message("user", "Summary of the conversation so far:\nThey met.\n\nGo on")
    for rules in (LENIENT_ANTHROPIC_RULES, STRICT_ANTHROPIC_RULES):
        for given, expected in (
            ([user("a"), assistant(text("b"), COMPACTED, text("c")), user("d")],
             [summary, Message("assistant", "c"), Message("user", "d")]),
            ([user("a"), assistant(USE), user(RESULT), assistant(COMPACTED), user("Go on")], [after]),
            ([assistant(COMPACTED), user("Go on")], [after]),
            ([user(COMPACTED, text("Go on"))], [after]),
            ([user("a"), assistant(COMPACTED | {"content": None}, text("b")), user("c")],
             [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]),
            ([user("a"), assistant(USE, COMPACTED), user(RESULT)], [summary]),
            ([user("a"), assistant(USE, COMPACTED), user(RESULT, text("Go on"))], [after]),
            ([user("a"), assistant(COMPACTED, USE), user(RESULT)],
             [summary, Message("assistant", None, tool_calls=[CALL]), Message("tool", "r", tool_call_id="toolu_1")]),
        ):  # fmt: skip
            assert turns(*given, rules=rules) == expected
    pictures = [user("a"), assistant(USE, COMPACTED), user(RESULT | {"content": [IMAGE]}, IMAGE, text("Go on"))]
    assert [placed.tool_call_id for turn in turns(*pictures, context=SEES) for placed in turn.media] == [None]
    assert turns(*pictures[:2], user(RESULT | {"content": [IMAGE]}), context=SEES) == [summary]
    image = user(COMPACTED, IMAGE, text("see"))
    (turn,) = turns(image, context=SEES)
    assert turn.content is not None and turn.content[turn.media[0].position :] == "see"
    changed = COMPACTED | {
        "tool_changes": [{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}}],
        "encrypted_content": None,
    }
    assert chat(messages=[assistant(changed), user("b")], tools=[TOOL, TOOL | {"name": "g"}]).tools[0]["function"][
        "name"
    ] == "g"  # fmt: skip
    system = chat(system="Be kind.", messages=[user("a"), assistant(COMPACTED), user("b")]).messages
    assert [message.role for message in system] == ["system", "user"]


@pytest.mark.parametrize("rules", [LENIENT_ANTHROPIC_RULES, STRICT_ANTHROPIC_RULES])
def test_anthropic_summary_that_was_cut_off_means_nothing(rules: AnthropicRules):
    nothing, result = COMPACTED | {"content": None}, Message("tool", "r", tool_call_id="toolu_1")
    a, joined, call = Message("user", "a"), Message("user", "a\nb"), Message("assistant", None, tool_calls=[CALL])
    for given, expected in (
        ([user("a"), assistant(nothing), user("b")], [joined]),
        ([user("a"), assistant(nothing), assistant(nothing, nothing), user("b")], [joined]),
        ([user("a"), assistant(nothing)], [a]),
        ([user("a"), user(nothing), user("b")], [joined]),
        ([user("a"), assistant(text("c")), assistant(nothing), user("b")],
         [a, Message("assistant", "c"), Message("user", "b")]),
        ([user("a"), assistant(USE), user(RESULT), assistant(nothing), user("b")],
         [a, call, result, Message("user", "b")]),
    ):  # fmt: skip
        assert turns(*given, rules=rules) == expected
    assert turns(assistant(nothing), user("a")) == [a]
    for given in ([assistant(nothing)], [user(nothing)]):
        assert refusal(messages=given) == "messages: at least one message is required"
    assert refusal(rules, messages=[user("a"), assistant(nothing | {"signature": 5})]).startswith(
        "messages.1.content.0"
    )


def test_anthropic_strict_checks_the_signature_of_a_summary():
    signed = COMPACTED | {"signature": SEAL.seal("t", b"They met.")}
    altered = signed | {"content": "They fought."}
    turns(user("a"), assistant(signed), user("b"), rules=STRICT_ANTHROPIC_RULES)
    turns(user("a"), assistant(altered), user("b"))
    sentence = refusal(STRICT_ANTHROPIC_RULES, messages=[user("a"), assistant(altered), user("b")])
    assert sentence == "messages.1.content.0: Invalid `signature` in `compaction` block"


class CountedId(str):
    """A call's id that counts how often it is compared with another."""

    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedId.comparisons += 1
        return super().__eq__(other)


@pytest.mark.parametrize("between", [[], [text("b")]])
def test_the_order_of_many_results_is_checked_in_few_steps(between: list[dict[str, Any]]):
    numbers = range(1000)
    calls = [USE | {"id": CountedId(number)} for number in numbers]
    results = [RESULT | {"tool_use_id": CountedId(number)} for number in reversed(numbers)]
    given = [user("a"), assistant(*between, *calls), user(*results)]
    CountedId.comparisons = 0
    check_order([(item["role"], Fields(item, f"messages[{number}]")) for number, item in enumerate(given)])
    assert CountedId.comparisons < 10 * len(numbers)
