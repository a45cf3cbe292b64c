"""Responses: the tools that OpenAI defines and clients run, as functions to the model and items to the client."""

import json
from typing import Any

import openai.types.responses as types
import pytest
from pydantic import TypeAdapter
from test_openai_responses import answer_body, call, done, events_of, messages_of, read, refusal, stream

from parley.dialects.openai.responses.client_tools import CLIENT_TOOLS
from parley.dialects.openai.responses.response_rules import STRICT
from parley.dialects.request_context import RequestContext
from parley.dialects.vllm.responses import RESPONSES_RULES
from parley.text.grammar.schemas.json_schema import prepare_for_llguidance
from parley.types import EncodedMedia, Event, Media, Message, ToolCall

SHELL, PATCH, LOCAL_SHELL = {"type": "shell", "environment": {"type": "local"}}, {"type": "apply_patch"}, {
    "type": "local_shell"}  # fmt: skip
SCREEN = {"type": "computer"}
PREVIEW = {"type": "computer_use_preview", "display_width": 800, "display_height": 600, "environment": "browser"}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Find tools.",
          "parameters": {"type": "object", "properties": {"goal": {"type": "string"}}}}  # fmt: skip
IMAGES = RequestContext("0f", 1700000000, "fp_1", media_limits={"image": 4})
GOAL = '"goal":"weather"'
LS = '"ls","-a"'
IMAGE = "data:image/png;base64,aGk="
SHELL_CALL = {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}}


def call_events(name: str, arguments: str, size: int = 1000, reason: str = "tool") -> list[Event]:
    pieces = [arguments[start : start + size] for start in range(0, len(arguments), size)]
    return [call(0, "call_1", name), *(call(0, arguments=piece) for piece in pieces), done(reason)]


def written(tool: dict[str, Any], arguments: str, size: int, reason: str = "tool") -> bytes:
    """Return the events of the stream's one item."""
    name = tool["type"].removesuffix("_use_preview")
    data = stream(read(context=IMAGES, tools=[tool], stream=True), *call_events(name, arguments, size, reason))
    frames = data.split(b"\n\n")
    return b"\n\n".join(frames[2:-3])


def frame(kind: str, members: str, number: int) -> bytes:
    line = members.replace("#", f'"sequence_number":{number}')
    return f'event: {kind}\ndata: {{"type":"{kind}",{line}}}'.encode()


def frames(*events: tuple[str, str]) -> bytes:
    return b"\n\n".join(frame(f"response.{kind}", members, number) for number, (kind, members) in enumerate(events, 2))


def test_shell_call_is_written_as_the_service_writes_it():
    item = '{"id":"sh_0f0000","type":"shell_call","status":"%s","action":{"commands":[%s],"max_output_length":%s,'
    item += '"timeout_ms":null},"call_id":"call_1"}'
    command = '"ls -a \\"~\\""'
    assert written(SHELL, '{"commands": ["ls -a \\"~\\""], "max_output_length": 8912}', 17) == frames(
        ("output_item.added", f'"item":{item % ("in_progress", "", "null")},"output_index":0,#'),
        ("shell_call_command.added", '"command":"","command_index":0,"output_index":0,#'),
        ("shell_call_command.delta", '"command_index":0,"delta":"ls","output_index":0,#'),
        ("shell_call_command.delta", '"command_index":0,"delta":" -a \\"~\\"","output_index":0,#'),
        ("shell_call_command.done", f'"command":{command},"command_index":0,"output_index":0,#'),
        ("output_item.done", f'"item":{item % ("completed", command, "8912")},"output_index":0,#'),
    )


def test_patch_is_announced_with_its_file_and_then_written():
    item = '{"id":"apc_0f0000","type":"apply_patch_call","status":"%s","call_id":"call_1","operation":{"type":'
    item += '"create_file","diff":"%s","path":"a.md"}}'
    place, diff = '"item_id":"apc_0f0000","output_index":0,#', "+** List\\n+\\n"
    kind = "apply_patch_call_operation_diff"
    assert written(PATCH, '{"type":"create_file","path":"a.md","diff":"+** List\\n+\\n"}', 48) == frames(
        ("output_item.added", f'"item":{item % ("in_progress", "")},"output_index":0,#'),
        (f"{kind}.delta", f'"delta":"+** ",{place}'),
        (f"{kind}.delta", f'"delta":"List\\n+\\n",{place}'),
        (f"{kind}.done", f'"diff":"{diff}",{place}'),
        ("output_item.done", f'"item":{item % ("completed", diff)},"output_index":0,#'),
    )


def test_deletion_of_a_file_has_no_diff():
    item = '{"id":"apc_0f0000","type":"apply_patch_call","status":"%s","call_id":"call_1","operation":{"type":'
    item += '"delete_file","path":"a.md"}}'
    assert written(PATCH, '{"type":"delete_file","path":"a.md","diff":"x"}', 5) == frames(
        ("output_item.added", f'"item":{item % "in_progress"},"output_index":0,#'),
        ("output_item.done", f'"item":{item % "completed"},"output_index":0,#'),
    )


def test_local_shell_call_and_screen_call_have_no_events_between():
    item = '{"id":"lsh_0f0000","type":"local_shell_call","status":"%s","action":{"type":"exec","command":[%s],"env":{}'
    assert written(LOCAL_SHELL, '{"command":["ls","-a"],"working_directory":"/root"}', 5) == frames(
        ("output_item.added", f'"item":{item % ("in_progress", "")}}},"call_id":"call_1"}},"output_index":0,#'),
        ("output_item.done", f'"item":{item % ("completed", LS)},"working_directory":"/root"}},'
         '"call_id":"call_1"},"output_index":0,#'),
    )  # fmt: skip
    item = '{"id":"cu_0f0000","type":"computer_call","status":"%s",%s"call_id":"call_1","pending_safety_checks":[]}'
    for tool, arguments, opening in (
        (SCREEN, '"actions":[{"type":"wait"},{"type":"move","x":1,"y":2}]', '"actions":[],'),
        (PREVIEW, '"action":{"type":"click","x":1,"y":2,"button":"left"}', ""),
    ):
        assert written(tool, f"{{{arguments}}}", 5) == frames(
            ("output_item.added", f'"item":{item % ("in_progress", opening)},"output_index":0,#'),
            ("output_item.done", f'"item":{item % ("completed", f"{arguments},")},"output_index":0,#'),
        )


CALLS: dict[str, tuple[dict[str, Any], str, str, dict[str, Any]]] = {  # tool, arguments, ending, members of the item
    "commands": (SHELL, '{"commands": ["a\\u00e9\\ud83d\\ude00", "", "b\n"], "timeout_ms": 5}', "tool",
                 {"action": {"commands": ["aé😀", "", "b\n"], "max_output_length": None, "timeout_ms": 5}}),
    "other order": (SHELL, '{"timeout_ms": 5, "commands": ["a"]}', "tool",
                    {"action": {"commands": ["a"], "max_output_length": None, "timeout_ms": 5}}),
    "one string": (SHELL, '{"commands": "a"}', "tool",
                   {"action": {"commands": ["a"], "max_output_length": None, "timeout_ms": None}}),
    "unknown members": (SHELL, '{"x": {"a": [1]}, "commands": ["a"]}', "tool",
                        {"action": {"commands": ["a"], "max_output_length": None, "timeout_ms": None}}),
    "cut commands": (SHELL, '{"commands": ["a", "b\\', "length",
                     {"action": {"commands": ["a", "b"], "max_output_length": None, "timeout_ms": None}}),
    "no object": (SHELL, "[1]", "tool",
                  {"action": {"commands": [], "max_output_length": None, "timeout_ms": None}}),
    "half a pair": (SHELL, '{"commands": ["a", "b\\ud83d"]}', "tool",
                    {"action": {"commands": ["a", "b"], "max_output_length": None, "timeout_ms": None}}),
    "update": (PATCH, '{"type": "update_file", "path": "a\\\\b", "diff": "@@\\n-a\\n+b"}', "tool",
               {"operation": {"type": "update_file", "diff": "@@\n-a\n+b", "path": "a\\b"}}),
    "diff first": (PATCH, '{"diff": "+b", "path": "a", "type": "create_file"}', "tool",
                   {"operation": {"type": "create_file", "diff": "+b", "path": "a"}}),
    "cut diff": (PATCH, '{"type": "create_file", "path": "a", "diff": "+b\\n', "length",
                 {"operation": {"type": "create_file", "diff": "+b\n", "path": "a"}}),
    "command": (LOCAL_SHELL, '{"command": ["a"], "env": {"B": "c"}, "timeout_ms": 1, "user": "u"}', "tool",
                {"action": {"type": "exec", "command": ["a"], "env": {"B": "c"}, "timeout_ms": 1, "user": "u"}}),
    "screen": (SCREEN, '{"actions": [{"type": "screenshot"}]}', "tool",
               {"actions": [{"type": "screenshot"}], "pending_safety_checks": []}),
    "cut screen": (SCREEN, '{"actions": [{"type": "scr', "length", {"actions": [], "pending_safety_checks": []}),
    "search": (SEARCH, '{"goal": "weather"}', "tool", {"arguments": {"goal": "weather"}, "execution": "client"}),
    "cut search": (SEARCH, '{"goal": "wea', "length", {"arguments": {}, "execution": "client"}),
    "preview": (PREVIEW, '{"action": {"type": "type", "text": "a"}}', "tool",
                {"action": {"type": "type", "text": "a"}, "pending_safety_checks": []}),
}  # fmt: skip
DELTAS = {"response.shell_call_command", "response.apply_patch_call_operation_diff"}
KNOWN_EVENT, KNOWN_RESPONSE = TypeAdapter(types.ResponseStreamEvent), TypeAdapter(types.Response)


@pytest.mark.parametrize("size", [1, 2, 7, 100])
@pytest.mark.parametrize("name", CALLS)
def test_stream_of_a_client_tool_ends_with_the_answer_in_one_piece(name, size):
    tool, arguments, ending, expected = CALLS[name]
    events = call_events(tool["type"].removesuffix("_use_preview"), arguments, size, ending)
    answer = answer_body(read(context=IMAGES, tools=[tool]), *events)
    streamed = events_of(stream(read(context=IMAGES, tools=[tool], stream=True), *events))
    (item,) = answer["output"]
    assert {key: item[key] for key in expected} == expected and answer["tools"] == [tool]
    assert streamed[-1]["response"] == answer and streamed[-2]["item"] == item
    assert item["status"] != "completed" or ending != "length"
    texts: dict[tuple[str, int], str] = {}
    for event in streamed:
        kind, _, step = event["type"].rpartition(".")
        key = (kind, event.get("command_index", 0))
        if kind in DELTAS and step == "delta":
            assert event["delta"] or len(expected.get("action", {}).get("commands", ())) == 3
            texts[key] = texts.get(key, "") + event["delta"]
        elif kind in DELTAS and step == "done":
            assert texts.pop(key, "") == event.get("diff", event.get("command"))
        if "apply_patch_call_operation" not in kind:  # of which OpenAI's SDK has no type
            KNOWN_EVENT.validate_python(event)
    assert not texts
    KNOWN_RESPONSE.validate_python(answer)


def test_client_tools_are_functions_whose_calls_follow_a_schema():
    reply = read(STRICT, IMAGES, tools=[SHELL, PATCH, LOCAL_SHELL, SCREEN])
    functions = [tool["function"] for tool in reply.request.prompts[0].tools]
    assert [function["name"] for function in functions] == ["shell", "apply_patch", "local_shell", "computer"]
    for function in functions:
        assert function["strict"] and function["description"]
        prepare_for_llguidance(function["parameters"])  # raises GrammarRefused
    (preview,) = read(context=IMAGES, tools=[PREVIEW]).request.prompts[0].tools
    sentence = " The screen is 800 pixels wide and 600 pixels high. It shows a browser."
    assert preview["function"]["description"].endswith(sentence)
    assert read(tools=[{"type": "shell"}]).request.prompts[0].tools[0]["function"] == functions[0]


def test_skills_of_a_shell_are_described_to_the_model():
    skill = {"name": "pdf", "description": "Reads PDF files.", "path": "/skills/pdf"}
    tool = {"type": "shell", "environment": {"type": "local", "skills": [skill]}}
    description = read(tools=[tool]).request.prompts[0].tools[0]["function"]["description"]
    assert description.endswith("\n- pdf: Reads PDF files. (in /skills/pdf)")


def test_tool_choice_names_client_tools_by_their_type():
    for tool, kind, name in (
        (SHELL, "shell", "shell"),
        (PATCH, "apply_patch", "apply_patch"),
        (LOCAL_SHELL, "local_shell", "local_shell"),
        (SCREEN, "computer", "computer"),
        (SCREEN, "computer_use", "computer"),
        (PREVIEW, "computer_use_preview", "computer"),
    ):
        for rules in ({}, {"rules": STRICT}):
            reply = read(context=IMAGES, tools=[tool], tool_choice={"type": kind}, **rules)
            chat = reply.request.prompts[0]
            assert (chat.tool_choice, chat.forced_tool) == ("required", name)
            assert answer_body(reply, done())["tool_choice"] == {"type": kind}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "shell"}]}
    assert read(tools=[SHELL, PATCH], tool_choice=choice).request.prompts[0].allowed_tools == ["shell"]
    assert read(tools=[SHELL], tool_choice="required").request.prompts[0].tool_choice == "required"


def test_calls_and_outputs_of_client_tools_become_turns():
    chunk = {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
    late = {"stdout": "", "stderr": "e", "outcome": {"type": "timeout"}}
    action = {"commands": ["ls", "x"], "timeout_ms": 9, "max_output_length": None}
    operation = {"type": "delete_file", "path": "a"}
    command = {"type": "exec", "command": ["ls"], "env": {}, "working_directory": "/r", "user": None}
    messages = messages_of(
        {"type": "shell_call", "id": "sh_1", "call_id": "c1", "action": action, "status": "completed"},
        {"type": "shell_call_output", "call_id": "c1", "output": [chunk, late], "max_output_length": 5},
        {"type": "apply_patch_call", "call_id": "c2", "operation": operation, "status": "completed"},
        {"type": "local_shell_call", "id": "lsh_1", "call_id": "c3", "action": command, "status": "completed"},
        {"type": "apply_patch_call_output", "call_id": "c2", "status": "failed", "output": "No file."},
        {"type": "local_shell_call_output", "id": "lsh_1", "output": '{"a": 1}'},
    )
    text = "Exit code: 0\nOutput:\na\n\nThe command took too long and was stopped.\nErrors:\ne"
    assert messages == [
        Message("assistant", tool_calls=[ToolCall("c1", "shell", '{"commands":["ls","x"],"timeout_ms":9}')]),
        Message("tool", text, tool_call_id="c1"),
        Message("assistant", tool_calls=[
            ToolCall("c2", "apply_patch", '{"type":"delete_file","path":"a","diff":""}'),
            ToolCall("c3", "local_shell", '{"command":["ls"],"working_directory":"/r"}')]),
        Message("tool", "The patch was not applied.\nNo file.", tool_call_id="c2"),
        Message("tool", '{"a": 1}', tool_call_id="c3"),
    ]  # fmt: skip
    others = messages_of(
        SHELL_CALL,
        {"type": "local_shell_call", "call_id": "d", "action": {"command": ["a"]}},
        {"type": "apply_patch_call", "call_id": "e", "operation": {"type": "create_file", "path": "p", "diff": "+"}},
        {"type": "shell_call_output", "call_id": "c", "output": "as text"},
        {"type": "local_shell_call_output", "call_id": "d", "output": "out"},
        {"type": "apply_patch_call_output", "call_id": "e", "status": "completed"},
    )
    assert [message.content for message in others[1:]] == ["as text", "out", "The patch was applied."]


def test_screenshots_are_images_in_the_conversation():
    action = {"type": "click", "x": 1, "y": 2, "button": "left"}
    output = {"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": IMAGE}}
    for members, arguments in (
        ({"actions": [action]}, f'{{"actions":[{json.dumps(action, separators=(",", ":"))}]}}'),
        ({"action": action}, f'{{"action":{json.dumps(action, separators=(",", ":"))}}}'),
    ):
        items = [{"type": "computer_call", "call_id": "c", "pending_safety_checks": []} | members,
                 output | {"call_id": "c", "acknowledged_safety_checks": []}]  # fmt: skip
        made, seen = messages_of(*items, context=IMAGES)
        assert made.tool_calls == [ToolCall("c", "computer", arguments)]
        (placed,) = seen.media
        source = EncodedMedia("aGk=", "image/png")
        assert placed.media == Media("image", source, "input[1].output.image_url") and seen.role == "tool"
    error = refusal(input=items)
    assert (error.field, error.code) == ("input[1].output.type", "unsupported_value") and "text only" in error.message


DEFERRED = [
    {"type": "function", "name": "f", "defer_loading": True},
    {"type": "function", "name": "shown"},
    {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "g", "defer_loading": True}]},
]


def names_of(**members: Any) -> list[str]:
    return [tool["function"]["name"] for tool in read(**members).request.prompts[0].tools]


def test_search_for_tools_by_the_client_is_written_as_the_service_writes_it():
    item = '{"id":"tsc_0f0000","type":"tool_search_call","status":"%s","arguments":%s,"call_id":"call_1",'
    item += '"execution":"client"}'
    assert written(SEARCH, '{"goal":"weather"}', 5) == frames(
        ("output_item.added", f'"item":{item % ("in_progress", "{}")},"output_index":0,#'),
        ("output_item.done", f'"item":{item % ("completed", "{" + GOAL + "}")},"output_index":0,#'),
    )
    (function,) = [tool["function"] for tool in read(tools=[SEARCH]).request.prompts[0].tools]
    assert function == {"name": "tool_search"} | {name: SEARCH[name] for name in ("description", "parameters")}
    (default,) = read(tools=[{"type": "tool_search", "execution": "client"}]).request.prompts[0].tools
    assert default["function"]["strict"] and list(default["function"]["parameters"]["properties"]) == ["query"]
    assert read(tools=[SEARCH], tool_choice={"type": "tool_search"}).request.prompts[0].forced_tool == "tool_search"


def test_deferred_tools_are_hidden_until_the_clients_search_has_found_them():
    assert names_of(tools=DEFERRED) == ["f", "shown", "ns__g"]  # nothing could find them
    tools = [*DEFERRED, SEARCH]
    assert names_of(tools=tools) == ["shown", "tool_search"]
    assert answer_body(read(tools=tools), done())["tools"][0]["defer_loading"] is True
    call_item = {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"goal": "weather"}}
    output = {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [DEFERRED[2], DEFERRED[1]]}
    items = [{"role": "user", "content": "a"}, call_item, output]
    assert names_of(tools=tools, input=items) == ["shown", "tool_search", "ns__g"]
    assert messages_of(*items)[1:] == [
        Message("assistant", tool_calls=[ToolCall("c", "tool_search", '{"goal":"weather"}')]),
        Message("tool", "These tools are available now: ns__g, shown.", tool_call_id="c"),
    ]
    texts = messages_of(call_item | {"arguments": '{"goal":"b"}'}, output | {"tools": []})
    assert texts[0].tool_calls[0].arguments == '{"goal":"b"}' and texts[1].content == "No tool was found."
    read(STRICT, tools=tools, input=items)


def test_search_for_tools_by_the_service_adds_its_tools_alone():
    items = [
        {"role": "user", "content": "a"},
        {"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {"paths": ["f"]}},
        {"type": "tool_search_output", "call_id": None, "execution": "server", "tools": [DEFERRED[0]]},
    ]
    assert messages_of(*items) == [Message("user", "a")]
    assert names_of(tools=[DEFERRED[0], {"type": "tool_search"}], input=items) == ["f"]  # it is the same tool
    for number in (1, 2):
        error = refusal(STRICT, input=[items[0], items[number]])
        assert (error.field, error.code) == ("input[1].type", "unsupported_value")


REFUSED = [  # members, field and code of the refusal
    ({"tools": [{"type": "shell", "environment": {"type": "container_auto"}}]}, "tools[0].environment.type",
     "unsupported_value"),
    ({"tools": [{"type": "shell", "environment": {"type": "container_reference", "container_id": "c"}}]},
     "tools[0].environment.type", "unsupported_value"),
    ({"tools": [{"type": "shell", "environment": {"type": "moon"}}]}, "tools[0].environment.type", "invalid_value"),
    ({"tools": [{"type": "shell", "environment": "local"}]}, "tools[0].environment", "invalid_type"),
    ({"tools": [{"type": "shell", "environment": {"skills": [{"name": "a", "path": "b"}]}}]},
     "tools[0].environment.skills[0].description", "missing_required_parameter"),
    ({"tools": [SHELL, SHELL]}, "tools[1].name", "invalid_value"),
    ({"tools": [{"type": "function", "name": "shell"}, SHELL]}, "tools[1].name", "invalid_value"),
    ({"tools": [{"type": "namespace", "name": "ns", "tools": [SHELL]}]}, "tools[0].tools[0].type", "unsupported_value"),
    ({"tools": [SCREEN]}, "tools[0].type", "unsupported_value"),
    ({"tools": [PREVIEW]}, "tools[0].type", "unsupported_value"),
    ({"tools": [PREVIEW | {"display_width": None}], "context": IMAGES}, "tools[0].display_width",
     "missing_required_parameter"),
    ({"tools": [PREVIEW | {"display_width": 0}], "context": IMAGES}, "tools[0].display_width",
     "integer_below_min_value"),
    ({"tools": [PREVIEW | {"environment": "moon"}], "context": IMAGES}, "tools[0].environment", "invalid_value"),
    ({"tools": [SHELL], "tool_choice": {"type": "apply_patch"}}, "tool_choice.type", "invalid_value"),
    ({"tools": [SHELL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [PATCH]}},
     "tool_choice.tools[0].type", "invalid_value"),
    ({"tools": [SEARCH, SEARCH]}, "tools[1].name", "invalid_value"),
    ({"tools": [SEARCH | {"parameters": 5}]}, "tools[0].parameters", "invalid_type"),
    ({"input": [{"type": "tool_search_output", "call_id": "c", "tools": []}]}, "input", None),
    ({"input": [{"type": "tool_search_call", "call_id": "c", "arguments": 5}]}, "input[0].arguments", "invalid_type"),
    ({"input": [{"type": "shell_call", "call_id": "c"}]}, "input[0].action", "missing_required_parameter"),
    ({"input": [SHELL_CALL | {"action": {"commands": [1]}}]}, "input[0].action.commands", "invalid_type"),
    ({"input": [SHELL_CALL | {"call_id": None}]}, "input[0].call_id", "missing_required_parameter"),
    ({"input": [SHELL_CALL, {"type": "shell_call_output", "call_id": "c"}]}, "input[1].output",
     "missing_required_parameter"),
    ({"input": [SHELL_CALL, {"type": "shell_call_output", "call_id": "c", "output": [{"outcome": {"type": "x"}}]}]},
     "input[1].output[0].outcome.type", "invalid_value"),
    ({"input": [{"type": "shell_call_output", "call_id": "c", "output": []}]}, "input", None),
    ({"input": [{"type": "apply_patch_call", "call_id": "c", "operation": {"type": "x", "path": "a"}}]},
     "input[0].operation.type", "invalid_value"),
    ({"input": [{"type": "apply_patch_call", "call_id": "c", "operation": {"path": "a"}}]},
     "input[0].operation.type", "missing_required_parameter"),
    ({"input": [{"type": "apply_patch_call", "call_id": "c", "operation": {"type": "create_file"}}]},
     "input[0].operation.path", "missing_required_parameter"),
    ({"input": [{"type": "computer_call", "call_id": "c"}]}, "input[0].action", "missing_required_parameter"),
    ({"input": [{"type": "computer_call", "call_id": "c", "action": {"a": [[[[[1]]]]]}}]}, "input[0].action.type",
     "invalid_value"),
    ({"input": [{"type": "computer_call", "call_id": "c", "action": {"type": "wait"}},
                {"type": "computer_call_output", "call_id": "c"}]}, "input[1].output", "missing_required_parameter"),
]  # fmt: skip


@pytest.mark.parametrize(("members", "field", "code"), REFUSED)
def test_refusals_about_client_tools_name_the_member(members, field, code):
    error = refusal(**members)
    assert (error.field, error.code) == (field, code)


def test_vllm_surface_refuses_client_tools_as_before():
    for kind in CLIENT_TOOLS:
        assert refusal(RESPONSES_RULES, tools=[{"type": kind}]).field == "tools[0].type"
    assert refusal(RESPONSES_RULES, input=[{"type": "tool_search_call", "call_id": "c"}]).field == "input[0].type"
    assert names_of(rules=RESPONSES_RULES, tools=[*DEFERRED, SEARCH]) == ["f", "shown", "ns__g"]
    error = refusal(RESPONSES_RULES, input=[SHELL_CALL])
    assert (error.field, error.code) == ("input[0].type", "unsupported_value")
