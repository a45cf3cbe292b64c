"""Files that clients have uploaded as the sources of images and documents in messages.

At a coordinator, which keeps them, instances get the files in place of their ids.
"""

from __future__ import annotations

import base64
import re
from typing import Any

import msgspec

from parley.dialects.anthropic.refusal_wording import ANTHROPIC_WORDING
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.file_types import is_text_type
from parley.dialects.json_answer import encode_json
from parley.dialects.records import InlinedRequest
from parley.dialects.request_context import RequestContext
from parley.dialects.stored_files import read_named_file
from parley.dialects.stored_objects import ObjectKind
from parley.errors import UnknownRecord, excerpt

FILES = ObjectKind("anthropic-file", "file_")
FILE_PATTERN = re.compile(rb'"file_id"')  # in every message that names a file
TEXT_TYPE = "text/plain"
LISTED_BLOCKS = ("image", "document", "tool_result")  # blocks with a source, or with such blocks
MAX_DEPTH = 4  # of blocks within blocks


class StoredFile(msgspec.Struct):
    """A record: a file as clients get it, and its times in seconds since the epoch."""

    file: dict[str, Any]
    created: int
    expires: int | None

    @property
    def record_name(self) -> str:
        """The name of the record."""
        return FILES.record_name(self.file["id"], self.created)


def find_source_file(context: RequestContext, file_id: str) -> StoredFile | None:
    """Return a file, None if there is none or it has expired."""
    data = FILES.find(context.records, file_id)
    return None if data is None else unexpired_file(data, context.created)


def unexpired_file(data: bytes, now: int) -> StoredFile | None:
    """Return the file of a record, None if it has expired. ``now``: in seconds since the epoch."""
    stored = msgspec.json.decode(data, type=StoredFile)
    return None if stored.expires is not None and stored.expires <= now else stored


def load_file(context: RequestContext, file_id: str) -> StoredFile:
    """Return a file. Raises UnknownRecord."""
    stored = find_source_file(context, file_id)
    if stored is None:
        raise UnknownRecord(f"File not found: {excerpt(file_id)}")
    return stored


def with_file_content(source: Fields, block_type: str, context: RequestContext) -> Fields:
    """Return the source of an image or a document that names a file as one that has the file's content.

    Raises BadRequest, TooLarge, and UnknownRecord if there is no such file.
    """
    file_id = source.string("file_id", None, cap=256)
    if file_id is None:
        raise source.missing_member("file_id")
    if not context.records.are_kept:
        raise source.member_error("type", "'file' is not supported by this server, which stores no files")
    stored = load_file(context, file_id)
    content = read_named_file(context, file_id)
    if content is None:
        raise UnknownRecord(f"The content of the file {excerpt(file_id)} is not stored any more.")
    media_type: str = stored.file["mime_type"]
    if block_type == "document":
        if not is_text_type(media_type):
            sentence = f"the file is of type {media_type!r}, but documents of this server are texts"
            raise source.member_error("file_id", sentence)
        try:
            text = content.decode()
        except UnicodeDecodeError:
            raise source.member_error("file_id", f"the file {excerpt(file_id)} is not UTF-8") from None
        return source.with_members({"type": "text", "media_type": TEXT_TYPE, "data": text})
    encoded = base64.b64encode(content).decode()
    return source.with_members({"type": "base64", "media_type": media_type, "data": encoded})


def inline_files(body: bytes, context: RequestContext) -> InlinedRequest:
    """Return a request with the files that its messages name. Raises BadRequest, UnknownRecord, TooLarge."""
    fields = decode_fields(body, ANTHROPIC_WORDING)
    messages = fields.raw_value("messages")
    if not context.records.are_kept or not isinstance(messages, list):
        return InlinedRequest(body)
    inlined = [
        _with_files(message, f"messages[{number}].content", context, MAX_DEPTH)
        for number, message in enumerate(messages)
    ]
    if inlined == messages:
        return InlinedRequest(body)
    members = {name: fields.raw_value(name) for name in fields.member_names}
    return InlinedRequest(encode_json(members | {"messages": inlined}))


def _with_files(holder: Any, path: str, context: RequestContext, depth: int) -> Any:
    """Return a message or a block, whose content is at ``path``, with files in place of their ids; itself if it names
    none."""
    blocks = holder.get("content") if isinstance(holder, dict) and depth else None
    if not isinstance(blocks, list):
        return holder
    inlined = [_block_with_file(block, f"{path}[{number}]", context, depth) for number, block in enumerate(blocks)]
    return holder | {"content": inlined} if inlined != blocks else holder


def _block_with_file(block: Any, path: str, context: RequestContext, depth: int) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in LISTED_BLOCKS:
        return block
    source = block.get("source")
    if isinstance(source, dict) and source.get("type") == "file":
        fields = with_file_content(Fields(source, f"{path}.source", ANTHROPIC_WORDING), kind, context)
        return block | {"source": {name: fields.raw_value(name) for name in ("type", "media_type", "data")}}
    if isinstance(source, dict) and source.get("type") == "content":  # blocks in a document
        inlined = _with_files(source, f"{path}.source.content", context, depth - 1)
        return block | {"source": inlined} if inlined is not source else block
    return _with_files(block, f"{path}.content", context, depth - 1)
