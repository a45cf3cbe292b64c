"""The conversation of a session: its items, kept as records of the connection, and the prompt that they form."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai.labels import MAX_LABEL
from parley.dialects.openai.realtime.audio import CommittedAudio, decode_realtime_audio, wave_file
from parley.dialects.openai.realtime.events import new_id
from parley.dialects.socket_session import ConnectionRecords
from parley.errors import InvalidValue, Overloaded, Unsupported, excerpt

MAX_ITEMS = 1024
MAX_PARTS = 64
MAX_PART_TEXT = 1 << 26  # characters of a text, or of an image or audio in base64
MAX_CALL_TEXT = 1 << 24  # characters of a call's arguments or output
ITEM_TYPES = ("message", "function_call", "function_call_output")
ROLES = ("user", "assistant", "system")
TEXT_PARTS = ("input_text", "output_text", "text")
PART_TYPES = (*TEXT_PARTS, "input_audio", "input_image")
CALL_MEMBERS = {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id", "output")}
DROPPED_SENTENCE = "An item of the conversation was dropped, because the server has no memory for it."
ItemWithAudio = tuple[dict[str, Any], CommittedAudio | None]
FIRST_ITEM = "root"  # names the position before all items


class RealtimeConversation:
    """All items, in order."""

    def __init__(self, records: ConnectionRecords):
        self._records = records
        self._order: list[str] = []  # ids
        self._audio: dict[str, CommittedAudio] = {}  # of items that are committed audio
        self._sizes: dict[str, int] = {}  # of each item's record, in bytes

    @property
    def size(self) -> int:
        """The bytes of all items and their audio."""
        return sum(self._sizes.values()) + sum(audio.size for audio in tuple(self._audio.values()))

    def check_room(self) -> None:
        """Check that an item may be added. Raises InvalidValue."""
        if len(self._order) >= MAX_ITEMS:
            raise InvalidValue(f"A conversation has at most {MAX_ITEMS} items; delete one first.", field="item")

    def add_item(
        self, item: dict[str, Any], previous_id: str | None = None, audio: CommittedAudio | None = None
    ) -> str | None:
        """Add an item after another, or at the end. Return the id of the item before it. Raises InvalidValue."""
        self.check_room()
        if item["id"] in self._order:
            raise InvalidValue(f"Item with id {excerpt(item['id'])} already exists.", field="item.id")
        position = len(self._order)
        if previous_id is not None:
            position = 0 if previous_id == FIRST_ITEM else self._find_position(previous_id, "previous_item_id") + 1
        self._save_item(item)
        if audio is not None:
            self._audio[item["id"]] = audio
        self._order.insert(position, item["id"])
        return self._order[position - 1] if position else None

    def add_output(self, item: dict[str, Any]) -> str | None:
        """Add an item of a response at the end, or in place of one that the client has given the same id. Return the id
        of the item before it. There is always room: responses begin only if there is some."""
        if item["id"] not in self._order:
            self._order.append(item["id"])
        self._save_item(item)
        position = self._order.index(item["id"])
        return self._order[position - 1] if position else None

    def find_item(self, item_id: str) -> dict[str, Any]:
        """Return an item. Raises InvalidValue, Overloaded if it was dropped."""
        self._find_position(item_id, "item_id")
        data = self._records.find_record(f"item {item_id}")
        if data is None:
            raise Overloaded(DROPPED_SENTENCE)
        item: dict[str, Any] = msgspec.json.decode(data)
        return item

    def delete_item(self, item_id: str) -> None:
        """Forget an item. Raises InvalidValue."""
        del self._order[self._find_position(item_id, "item_id")]
        self._records.delete_record(f"item {item_id}")
        del self._sizes[item_id]
        if (audio := self._audio.pop(item_id, None)) is not None:
            audio.drop_audio()

    def discard_item(self, item_id: str) -> None:
        """Forget an item, if it is still there."""
        if item_id in self._order:
            self.delete_item(item_id)

    def note_transcript(self, item_id: str, transcript: str) -> None:
        """Add the text of an item that is audio, if it is still there."""
        data = self._records.find_record(f"item {item_id}")
        if item_id in self._audio and data is not None:
            item = msgspec.json.decode(data)
            item["content"][0]["transcript"] = transcript
            self._save_item(item)

    def find_with_audio(self, item_id: str) -> ItemWithAudio:
        """Return an item, and its audio if it is committed audio. Raises InvalidValue, Overloaded if it was dropped."""
        return self.find_item(item_id), self._audio.get(item_id)

    def list_items(self) -> list[ItemWithAudio]:
        """Return all items. Raises Overloaded if one was dropped, InvalidValue if one is deleted meanwhile."""
        return [self.find_with_audio(item_id) for item_id in tuple(self._order)]

    def _save_item(self, item: dict[str, Any]) -> None:
        data = encode_json(item)
        self._records.save_record(f"item {item['id']}", data)
        self._sizes[item["id"]] = len(data)

    def _find_position(self, item_id: str, field: str) -> int:
        if item_id not in self._order:
            raise InvalidValue(f"The conversation has no item with id {excerpt(item_id)}.", field=field)
        return self._order.index(item_id)


def read_realtime_item(fields: Fields) -> dict[str, Any]:
    """Return a client's item in the API's form. Raises BadRequest."""
    kind = fields.string("type", None, cap=MAX_LABEL)
    if kind is None:
        raise fields.missing_member("type")
    if kind not in ITEM_TYPES:
        raise Unsupported(
            f"Unsupported value: {excerpt(kind)}. Items are of the types {', '.join(ITEM_TYPES)}.",
            field=fields.member_path("type"),
        )
    item: dict[str, Any] = {"id": fields.string("id", "", cap=32) or new_id("item"), "object": "realtime.item"}
    item |= {"type": kind, "status": "completed"}
    if kind == "message":
        role = fields.string("role", None, allowed=ROLES)
        if role is None:
            raise fields.missing_member("role")
        parts = [_read_part(part) for part in fields.objects("content", cap=MAX_PARTS)]
        if not parts:
            raise fields.empty_member("content", "array")
        return item | {"role": role, "content": parts}
    for name in CALL_MEMBERS[kind]:
        value = fields.string(name, None, cap=MAX_CALL_TEXT)
        if value is None:
            raise fields.missing_member(name)
        item[name] = value
    return item


def _read_part(part: Fields) -> dict[str, Any]:
    kind = part.string("type", None, cap=MAX_LABEL)
    if kind not in PART_TYPES:
        message = f"Unsupported value: {excerpt(kind)}. Parts are of the types {', '.join(PART_TYPES)}."
        raise Unsupported(message, field=part.member_path("type"))
    name = "text" if kind in TEXT_PARTS else "image_url" if kind == "input_image" else "audio"
    value = part.string(name, None, cap=MAX_PART_TEXT)
    if value is None:
        raise part.missing_member(name)
    if name == "audio":
        decode_realtime_audio(value, part.member_path(name))
    return {"type": kind, name: value}


def input_item(item: dict[str, Any], rate: int, audio: CommittedAudio | None = None) -> dict[str, Any]:
    """Return an item as input of the Responses API. ``audio``: of one that is committed audio; ``rate``: of audio that
    is a part of an item. Raises Overloaded."""
    if item["type"] != "message":
        return {name: item[name] for name in ("type", *CALL_MEMBERS[item["type"]])}
    parts = [_input_part(part, item["role"], rate, audio) for part in item["content"]]
    return {"type": "message", "role": item["role"], "content": parts}


def _input_part(part: dict[str, Any], role: str, rate: int, audio: CommittedAudio | None) -> dict[str, Any]:
    match part["type"]:
        case "input_image":
            return part
        case "input_audio":
            if audio is not None:
                clip = wave_file(audio.read_samples(), audio.rate)
            else:
                clip = wave_file(base64.b64decode(part["audio"]), rate)
            data = base64.b64encode(clip).decode()
            return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    return {"type": "output_text" if role == "assistant" else "input_text", "text": part["text"]}
