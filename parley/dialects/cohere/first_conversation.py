"""The conversation and the tools of the first version's chat: a message, the history before it, and results of tools.

Calls have no ids in this version. A result names its call by tool and parameters: it answers the earliest call of the
chatbot's last turn that is equal and has no result yet. Results of other calls follow a turn that makes these calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from parley.dialects.cohere.api_rules import CohereRules
from parley.dialects.cohere.conversation import (
    JOINT,
    MAX_CALLS,
    MAX_DOCUMENTS,
    MAX_ID_CHARACTERS,
    MAX_MESSAGES,
    MAX_NAME_CHARACTERS,
    Document,
    result_text,
)
from parley.dialects.cohere.options import MAX_TOOLS, CohereToolMembers, check_tool_name
from parley.dialects.cohere.refusal_wording import check_cohere_members
from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.errors import InvalidValue, excerpt
from parley.types import Message, ToolCall

HISTORY_ROLES = ("USER", "CHATBOT", "SYSTEM", "TOOL")  # older clients write them as "User" and "Chatbot"
TURN_MEMBERS = {"role", "message", "tool_calls"}
RESULTS_MEMBERS = {"role", "tool_results"}
CALL_MEMBERS = {"name", "parameters"}
RESULT_MEMBERS = {"call", "outputs"}
TOOL_MEMBERS = {"name", "description", "parameter_definitions"}
PARAMETER_MEMBERS = {"description", "type", "required"}
MAX_PARAMETERS = 512  # of a tool
MAX_TYPE_CHARACTERS = 256
NO_MESSAGE = "invalid request: message must be at least 1 token long or tool results must be specified."
TYPE_NAMES = {  # of Python, in small letters, and those of JSON Schema
    "str": "string", "string": "string", "int": "integer", "integer": "integer", "float": "number",
    "number": "number", "bool": "boolean", "boolean": "boolean", "list": "array", "array": "array", "tuple": "array",
    "set": "array", "dict": "object", "object": "object",
}  # fmt: skip
GENERIC_TYPE = re.compile(r"(?:typing\.)?(\w+)\[(.*)\]", re.DOTALL)


# -- the conversation


class FirstConversation:
    """The conversation of a request. ``messages``: as the model reads them. ``history``: the turns that the client
    sent, in the API's form, which answers repeat."""

    def __init__(self, body: Fields, rules: CohereRules):
        self._rules = rules
        self._open_calls: list[ToolCall] = []  # of the last turn, without results
        self._call_count = 0
        self.messages: list[Message] = []
        self.history: list[Any] = [*body.array("chat_history", cap=MAX_MESSAGES)]
        if preamble := body.string("preamble", ""):
            self.messages.append(Message("system", preamble))
        for item in body.objects("chat_history", cap=MAX_MESSAGES):
            self._add_turn(item)
        message = body.string("message", None)
        if message is None:
            raise body.missing_member("message")
        results = body.array("tool_results", cap=MAX_CALLS)
        if not message and not results:
            raise InvalidValue(NO_MESSAGE, field="message")
        if message:
            self._add_message("user", message)
            self.history.append({"role": "USER", "message": message})
        if results:
            self._add_results(body)
            self.history.append({"role": "TOOL", "tool_results": results})

    def _add_turn(self, item: Fields) -> None:
        role = item.string("role", "", cap=MAX_NAME_CHARACTERS).upper()
        if not role:
            raise item.missing_member("role")
        if role not in HISTORY_ROLES:
            item.string("role", None, allowed=HISTORY_ROLES)
        check_cohere_members(item, RESULTS_MEMBERS if role == "TOOL" else TURN_MEMBERS, self._rules)
        if role == "TOOL":
            self._add_results(item)
            return
        calls = [self._read_call(call) for call in item.objects("tool_calls", cap=MAX_CALLS)]
        text = item.string("message", None)
        if text is None and not calls:
            raise item.missing_member("message")
        if role == "CHATBOT":
            self._add_calls(text or None, calls)
        else:
            self._add_message("user" if role == "USER" else "system", text or "")

    def _add_message(self, role: str, text: str) -> None:
        self._open_calls = []
        self.messages.append(Message(role, text))

    def _add_calls(self, text: str | None, calls: list[ToolCall]) -> None:
        """Add a turn of the chatbot."""
        self._open_calls = list(calls)
        self.messages.append(Message("assistant", text if text or calls else "", None, None, calls))

    def _add_results(self, item: Fields) -> None:
        """Add the results in an object's ``tool_results``, after a turn with those calls that are not open."""
        results: list[Message] = []
        new_results: list[Message] = []
        new_calls: list[ToolCall] = []
        for result in item.objects("tool_results", cap=MAX_CALLS):
            check_cohere_members(result, RESULT_MEMBERS, self._rules)
            call_fields = result.object("call")
            if call_fields is None:
                raise result.missing_member("call")
            call = self._read_call(call_fields)
            text = JOINT.join(_output_texts(result))
            answered = next((other for other in self._open_calls if _is_same_call(other, call)), None)
            if answered is not None:
                self._open_calls.remove(answered)
                results.append(Message("tool", text, call.name, tool_call_id=answered.id))
            else:
                new_calls.append(call)
                new_results.append(Message("tool", text, call.name, tool_call_id=call.id))
        self.messages += results
        if new_calls:
            self._add_calls(None, new_calls)
            self._open_calls = []
            self.messages += new_results

    def _read_call(self, call: Fields) -> ToolCall:
        """Read a call, and give it an id."""
        check_cohere_members(call, CALL_MEMBERS, self._rules)
        name = call.string("name", None, cap=MAX_NAME_CHARACTERS)
        if not name:
            raise call.missing_member("name")
        self._call_count += 1
        return ToolCall(f"{name}_{self._call_count}", name, encode_json(call.free_object("parameters")).decode())


def _is_same_call(call: ToolCall, other: ToolCall) -> bool:
    return (call.name, call.arguments) == (other.name, other.arguments)


def _output_texts(result: Fields) -> Iterator[str]:
    """Yield the outputs of a call as the model reads them."""
    for output in result.array("outputs", cap=MAX_DOCUMENTS):
        yield result_text(Document(None, output)) if isinstance(output, dict) else encode_json(output).decode()


# -- documents


def read_first_documents(body: Fields) -> list[Document]:
    """Return the documents, without their ids and without the members that the model shall not read."""
    documents: list[Document] = []
    for item in body.objects("documents", cap=MAX_DOCUMENTS):
        document_id = item.string("id", None, cap=MAX_ID_CHARACTERS)
        hidden_names = {"id", "_excludes", *item.strings("_excludes", cap=MAX_DOCUMENTS, total=MAX_DOCUMENTS * 16)}
        data = {name: item.raw_value(name) for name in item.member_names if name not in hidden_names}
        if all(value in ("", None) for value in data.values()):
            index = len(documents)
            raise InvalidValue(
                f"invalid request: document at index {index} cannot be empty.", field=f"documents[{index}]"
            )
        documents.append(Document(document_id, data))
    return documents


# -- tools


def read_first_tools(body: Fields, rules: CohereRules) -> CohereToolMembers:
    """Read the tools, whose parameters have types of Python. Raises BadRequest."""
    tools: list[dict[str, Any]] = []
    schema_fields: dict[str, str] = {}
    for item in body.objects("tools", cap=MAX_TOOLS):
        check_cohere_members(item, TOOL_MEMBERS, rules)
        name = item.string("name", None)
        if name is None:
            raise item.missing_member("name")
        check_tool_name(item, name, rules)
        if name in schema_fields:
            raise item.member_error("name", f"two tools are called {excerpt(name)}.")
        schema_fields[name] = item.member_path("parameter_definitions")
        description = item.string("description", "")
        signature = {"name": name, "description": description, "parameters": _read_parameters(item, rules)}
        tools.append({"type": "function", "function": signature})
    return CohereToolMembers(tools, "auto", schema_fields)


def _read_parameters(tool: Fields, rules: CohereRules) -> dict[str, Any]:
    """Return the schema of a tool's parameters."""
    definitions = tool.object("parameter_definitions")
    properties: dict[str, Any] = {}
    required: list[str] = []
    if definitions is not None and len(definitions.member_names) > MAX_PARAMETERS:
        raise tool.member_error("parameter_definitions", f"must have at most {MAX_PARAMETERS} parameters.")
    for name in () if definitions is None else definitions.member_names:
        assert definitions is not None
        parameter = definitions.object(name)
        if parameter is None:
            raise definitions.missing_member(name)
        check_cohere_members(parameter, PARAMETER_MEMBERS, rules)
        type_name = parameter.string("type", None, cap=MAX_TYPE_CHARACTERS)
        if type_name is None:
            raise parameter.missing_member("type")
        properties[name] = schema_of_type(type_name)
        if description := parameter.string("description", ""):
            properties[name]["description"] = description
        if parameter.boolean("required", False):
            required.append(name)
    return {"type": "object", "properties": properties} | ({"required": required} if required else {})


def schema_of_type(type_name: str) -> dict[str, Any]:
    """Return the schema of a type in Python's notation: ``str``, ``List[int]``; of any other, one that takes all."""
    generic = GENERIC_TYPE.fullmatch(type_name.strip())
    if generic is None:
        known = TYPE_NAMES.get(type_name.strip().lower())
        return {} if known is None else {"type": known}
    outer, inner = generic[1].lower(), generic[2]
    if outer == "optional":
        return {"anyOf": [schema_of_type(inner), {"type": "null"}]}
    known = TYPE_NAMES.get(outer)
    if known == "array" and outer != "tuple":
        return {"type": "array", "items": schema_of_type(inner)}
    return {} if known not in ("array", "object") else {"type": known}
