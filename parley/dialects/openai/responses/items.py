"""Input items of the Responses API, read as the turns of a conversation.

Consecutive reasoning, assistant messages and calls are one turn of the assistant. System and developer messages at the
beginning are one message, and so are neighbouring messages of the user: agents send several, and many chat templates
accept one system message and strictly alternating turns only. Ids in items are labels; only ``item_reference`` refers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from parley.dialects.fields import Fields
from parley.dialects.media import InterleavedText, check_media_counts
from parley.dialects.openai.custom_tools import custom_arguments
from parley.dialects.openai.media_parts import MediaReader
from parley.dialects.openai.responses import client_items, tools
from parley.dialects.openai.responses.client_tools import TOOL_SEARCH
from parley.dialects.openai.responses.content import ContentReader
from parley.dialects.openai.responses.response_rules import ResponsesRules, conversation_error, unserved_error
from parley.dialects.openai.tools import MAX_TOOLS
from parley.dialects.request_context import RequestContext
from parley.dialects.summary_request import summary_text
from parley.errors import BadRequest, InvalidValue, UnknownRecord, excerpt
from parley.types import Message, PlacedMedia, ToolCall

Item = dict[str, Any]
MAX_ITEMS = 10_000
MAX_NAME = 256  # characters of ids and names
ROLES = ("user", "assistant", "system", "developer")
TRIGGER = "compaction_trigger"  # asks for a summary as the answer
COVERS_ALL = "\x1e"  # before a sealed summary: all items before it are part of it
MESSAGE_JOINT = "\n\n"  # between messages that become one
TURN_JOINT = "\n"  # between the texts of one turn of the assistant
# Calls of tools that another provider ran: they hold no text for the model.
PASSED_ITEMS = frozenset(("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call"))
UNSERVED_ITEMS = frozenset(
    ("configuration_update", "mcp_call", "mcp_list_tools",
     "mcp_approval_request", "mcp_approval_response", "program", "program_output")
)  # fmt: skip


class InputItemReader:
    """Reads items one after another. ``messages``: the conversation; ``added_tools``: tools that items declare;
    ``summarizes``: the last item asks for a summary. ``covered_items``: how many of the items read so far a summary
    stands for, with its own item."""

    def __init__(self, rules: ResponsesRules, context: RequestContext):
        self.messages: list[Message] = []
        self.added_tools: list[Fields] = []
        self.summarizes = False
        self.covered_items = self._item_count = 0
        self._rules, self._context = rules, context
        self._limits = context.media_limits
        self._content_reader = ContentReader(rules, MediaReader(context.media_limits), context)
        self._reasoning: list[str] = []  # of the assistant's turn that is being read, like the next two
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []
        self._in_turn = False
        self._unanswered: dict[str, None] = {}  # ids of calls without output, in order
        self._call_ids: set[str] = set()
        self._item_calls: dict[str, str] = {}  # ids of calls by the ids of their items, by which outputs may name them

    def read_instructions(self, text: str | None) -> None:
        """Begin with the instructions of the request, if it has any."""
        if text:
            self._append_message("system", InterleavedText(text, []))

    def read_earlier(self, items: list[Item]) -> None:
        """Read the items of an earlier response or of a conversation, as they were stored."""
        self.read_items(Fields(item, f"earlier[{number}]") for number, item in enumerate(items))

    def read_items(self, items: Iterable[Fields]) -> None:
        """Read the items of one list. Raises BadRequest."""
        for item in items:
            kind = read_item_type(item, self._rules)
            if self.summarizes and kind != "compaction":  # clients send earlier ones with their answers
                raise conversation_error(f"An item of type '{TRIGGER}' must be the last one.")
            self.summarizes = False
            self._item_count += 1
            reader = ITEM_READERS.get(kind)
            if reader is not None:
                reader(self, item)

    def finish(self) -> list[Message]:
        """Return the whole conversation. Raises BadRequest."""
        self._end_turn()
        if self._rules.strict and self._unanswered:
            raise conversation_error(f"No tool output found for function call {next(iter(self._unanswered))[:60]}.")
        check_media_counts((placed.media for message in self.messages for placed in message.media), self._limits)
        return self.messages

    def _read_message(self, item: Fields) -> None:
        role = item.string("role", None, allowed=ROLES)
        if role is None:
            raise item.missing_member("role")
        content = self._content_reader.read_content(item, "content")
        if role == "assistant":
            self._in_turn = True
            self._texts.append(content.text)
        else:
            self._append_message("system" if role == "developer" else role, content)

    def _append_message(self, role: str, content: InterleavedText) -> None:
        """Add a message that is not the assistant's."""
        self._end_turn()
        last = self.messages[-1] if self.messages else None
        if last is not None and last.role == role and (role == "user" or len(self.messages) == 1):
            self.messages[-1] = _joined_message(last, content)
        else:
            self.messages.append(Message(role, content.text, media=content.media))

    def _read_function_call(self, item: Fields) -> None:
        name = tools.namespaced_name(item.string("namespace", "", cap=MAX_NAME), _required_string(item, "name"))
        self._add_call(item, name, item.string("arguments", "{}") or "{}")

    def _read_custom_call(self, item: Fields) -> None:
        name = tools.namespaced_name(item.string("namespace", "", cap=MAX_NAME), _required_string(item, "name"))
        text = item.string("input", None)
        if text is None:
            raise item.missing_member("input")
        self._add_call(item, name, custom_arguments(text))

    def _add_call(self, item: Fields, name: str, arguments: str) -> None:
        call_id = _required_string(item, "call_id")
        self._in_turn = True
        self._calls.append(ToolCall(call_id, name, arguments))
        self._call_ids.add(call_id)
        self._unanswered[call_id] = None

    def _read_client_call(self, item: Fields) -> None:
        """Read a call of a tool that OpenAI defines and clients run."""
        self._add_call(item, *client_items.read_client_call(item, item.string("type", "")))
        if (item_id := item.string("id", None, cap=MAX_NAME)) is not None:
            self._item_calls[item_id] = _required_string(item, "call_id")

    def _read_search_call(self, item: Fields) -> None:
        """Read a search for tools by the client. One by OpenAI's service holds no text for the model."""
        if item.has_value("call_id"):
            self._add_call(item, TOOL_SEARCH.name, client_items.read_search_arguments(item))
        elif self._rules.strict:
            raise _unread_item(item, item.string("type", ""))

    def _read_search_output(self, item: Fields) -> None:
        """Read the tools that a search has found; a search by the client has a result in the conversation."""
        if not item.has_value("call_id"):
            self._read_added_tools(item)
            return
        found = list(item.objects("tools", cap=MAX_TOOLS))
        self.added_tools += found
        output = InterleavedText(client_items.search_result(found), [])
        self._add_output(_required_string(item, "call_id"), output)

    def _read_call_output(self, item: Fields) -> None:
        self._add_output(_required_string(item, "call_id"), self._content_reader.read_content(item, "output"))

    def _read_shell_output(self, item: Fields) -> None:
        output = client_items.read_shell_output(item)
        self._add_output(_required_string(item, "call_id"), InterleavedText(output, []))

    def _read_local_shell_output(self, item: Fields) -> None:
        """Read the output of the older shell, which names its call by ``id`` in OpenAI's form."""
        name = _required_string(item, "call_id" if item.has_value("call_id") else "id")
        self._add_output(self._item_calls.get(name, name), self._content_reader.read_content(item, "output"))

    def _read_patch_output(self, item: Fields) -> None:
        output = client_items.read_patch_output(item)
        self._add_output(_required_string(item, "call_id"), InterleavedText(output, []))

    def _read_screen_output(self, item: Fields) -> None:
        screenshot = self._content_reader.read_screenshot(item, "output")
        self._add_output(_required_string(item, "call_id"), screenshot)

    def _add_output(self, call_id: str, content: InterleavedText) -> None:
        """Add the result of a call."""
        if call_id not in self._call_ids and self._rules.pairs_calls:
            raise conversation_error(f"No tool call found for function call output with call_id {call_id[:60]}.")
        self._end_turn()
        self._unanswered.pop(call_id, None)
        self.messages.append(Message("tool", content.text, tool_call_id=call_id, media=content.media))

    def _read_reasoning(self, item: Fields) -> None:
        """Read reasoning: as it was sealed, else its text, else its summary, which is the reasoning itself here."""
        sealed = item.string("encrypted_content", None)
        content = "".join(_part_texts(item, "content", "reasoning_text"))
        summary = MESSAGE_JOINT.join(_part_texts(item, "summary", "summary_text"))
        self._in_turn = True
        text = content or summary if sealed is None else self._open_reasoning(item, sealed, content or summary)
        if text:
            self._reasoning.append(text)

    def _open_reasoning(self, item: Fields, sealed: str, visible: str) -> str:
        try:
            return self._context.open_reasoning(sealed).decode()
        except ValueError:
            if self._rules.strict:
                raise encrypted_content_error(item) from None
            return visible

    def _read_compaction(self, item: Fields) -> None:
        """Read a summary that stands for earlier turns, as this server returned it."""
        sealed = item.string("encrypted_content", None)
        if sealed is None:
            raise item.missing_member("encrypted_content")
        try:
            summary = self._context.open_reasoning(sealed).decode()
        except ValueError:
            raise encrypted_content_error(item) from None
        if summary.startswith(COVERS_ALL):
            self._drop_turns()
        self._append_message("user", InterleavedText(summary_text(summary.removeprefix(COVERS_ALL)), []))

    def _drop_turns(self) -> None:
        """Forget all but the instructions at the beginning, which a summary does not stand for. Outputs of the calls
        would have no call in the conversation, so they are unknown from now."""
        self._end_turn()
        self.covered_items = self._item_count
        self.messages = self.messages[:1] if self.messages and self.messages[0].role == "system" else []
        self._unanswered.clear()
        self._call_ids.clear()
        self._item_calls.clear()

    def _read_compaction_trigger(self, item: Fields) -> None:
        self.summarizes = True

    def _read_added_tools(self, item: Fields) -> None:
        if self._rules.strict:
            raise _unread_item(item, item.string("type", ""))
        self.added_tools += item.objects("tools", cap=MAX_TOOLS)

    def _end_turn(self) -> None:
        """Add the assistant's turn that is being read, if there is one."""
        if not self._in_turn:
            return
        self._in_turn = False
        text = TURN_JOINT.join(filter(None, self._texts)) if self._texts else None
        reasoning = TURN_JOINT.join(self._reasoning) or None
        if text is not None or reasoning is not None or self._calls:
            self.messages.append(Message("assistant", text, reasoning=reasoning, tool_calls=self._calls))
        self._reasoning, self._texts, self._calls = [], [], []


ITEM_READERS: dict[str, Callable[[InputItemReader, Fields], None]] = {
    "message": InputItemReader._read_message,
    "function_call": InputItemReader._read_function_call,
    "custom_tool_call": InputItemReader._read_custom_call,
    "function_call_output": InputItemReader._read_call_output,
    "custom_tool_call_output": InputItemReader._read_call_output,
    "reasoning": InputItemReader._read_reasoning,
    "compaction": InputItemReader._read_compaction,
    TRIGGER: InputItemReader._read_compaction_trigger,
    "additional_tools": InputItemReader._read_added_tools,
    "tool_search_output": InputItemReader._read_search_output,
}
CLIENT_ITEM_READERS: dict[str, Callable[[InputItemReader, Fields], None]] = {
    "tool_search_call": InputItemReader._read_search_call,
    **dict.fromkeys(client_items.CALL_READERS, InputItemReader._read_client_call),
    "shell_call_output": InputItemReader._read_shell_output,
    "local_shell_call_output": InputItemReader._read_local_shell_output,
    "apply_patch_call_output": InputItemReader._read_patch_output,
    "computer_call_output": InputItemReader._read_screen_output,
}
ITEM_READERS |= CLIENT_ITEM_READERS


def input_with_items(
    body: Fields, find_item: Callable[[str], Item], *, may_be_missing: bool = False
) -> tuple[Fields, list[Any]]:
    """Return the body with items as its ``input``, and these items: a text is a message of the user, and a reference
    is the stored item.

    ``may_be_missing``: there are earlier items. Raises BadRequest, and the errors of ``find_item``.
    """
    value = body.raw_value("input")
    if value is None and not may_be_missing:
        raise body.missing_member("input")
    if value is not None and not isinstance(value, str | list):
        raise body.mistyped_member("input", "a string or an array of items")
    if value is not None and not value and not may_be_missing:
        raise body.empty_member("input", "string" if isinstance(value, str) else "array")
    if isinstance(value, str):
        new_items: list[Any] = [{"type": "message", "role": "user", "content": value}] if value else []
    else:
        new_items = [_referred_item(item, find_item) for item in body.array("input", cap=MAX_ITEMS)]
    return body.with_members({"input": new_items}), new_items


def _referred_item(item: Any, find_item: Callable[[str], Item]) -> Any:
    """Return the item that a reference names, or the item itself."""
    if not isinstance(item, dict):
        return item
    name = referred_name(item.get("type"), item.get("id"), item.get("role"))
    return item if name is None else find_item(name)


def referred_name(kind: Any, item_id: Any, role: Any) -> str | None:
    """Return the id of the item that an item with this type, id and role stands for; None if it is no reference."""
    is_reference = kind == "item_reference" or (kind is None and role is None)
    return item_id if is_reference and isinstance(item_id, str) else None


def encrypted_content_error(item: Fields) -> BadRequest:
    """Return the refusal of an encrypted content that this server did not make for this client."""
    path = item.member_path("encrypted_content")
    reason = "Reason: Encrypted content could not be decrypted or parsed."
    return InvalidValue(f"The encrypted content of '{path}' could not be verified. {reason}", field=path,
                   code="invalid_encrypted_content")  # fmt: skip


def unknown_item_error(item_id: str) -> UnknownRecord:
    """Return the error for a reference to an item that is not stored."""
    return UnknownRecord(
        f"Item with id {excerpt(item_id)} not found. Items are not persisted when `store` is set to false. Try again "
        "with `store` set to true, or remove this item from your input.",
        field="input",
    )


def read_item_type(item: Fields, rules: ResponsesRules) -> str:
    """Return the type of an item. Raises BadRequest if no conversation may have it."""
    kind = item.string("type", "message" if item.has_value("role") else None, cap=MAX_NAME)
    if kind is None:
        raise item.missing_member("type")
    is_passed = kind in PASSED_ITEMS and not rules.strict
    is_unserved = kind in CLIENT_ITEM_READERS and not rules.client_tools
    if is_unserved or (kind not in ITEM_READERS and not is_passed):
        raise _unread_item(item, kind)
    return kind


def _unread_item(item: Fields, kind: str) -> BadRequest:
    path = item.member_path("type")
    if kind in UNSERVED_ITEMS or kind in PASSED_ITEMS or kind in ITEM_READERS:
        return unserved_error(f"Input items of type {excerpt(kind)} are not served by this server.", path)
    return InvalidValue(f"Invalid value for '{path}': unsupported input item type {excerpt(kind)}.", field=path)


def _required_string(item: Fields, name: str) -> str:
    value = item.string(name, None, cap=MAX_NAME)
    if not value:
        raise item.missing_member(name)
    return value


def _part_texts(item: Fields, name: str, kind: str) -> list[str]:
    """Return the texts of the parts of a reasoning item."""
    texts = []
    for part in item.objects(name, cap=MAX_ITEMS):
        part.string("type", kind, allowed=(kind, "text"))
        texts.append(part.string("text", ""))
    return texts


def _joined_message(message: Message, content: InterleavedText) -> Message:
    """Return a message with more content after its own."""
    text = f"{message.content}{MESSAGE_JOINT}"
    moved = [PlacedMedia(len(text) + placed.position, placed.media) for placed in content.media]
    return msgspec.structs.replace(message, content=text + content.text, media=[*message.media, *moved])
