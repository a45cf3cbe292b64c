"""The content of an item: a text, or parts with texts, images, files and audio."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from parley.dialects import media
from parley.dialects.fields import Fields
from parley.dialects.file_types import guess_media_type, is_text_type
from parley.dialects.media import InterleavedText
from parley.dialects.openai.media_parts import MediaReader
from parley.dialects.openai.responses.response_rules import ResponsesRules, unserved_error
from parley.dialects.openai.uploaded_files import with_uploaded_file
from parley.dialects.request_context import RequestContext
from parley.errors import BadMedia, Unsupported
from parley.types import EncodedMedia, Media, MediaKind

MAX_PARTS = 1024
PART_JOINT = "\n"  # separates two parts with text
TEXT_MEMBERS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
CHAT_TEXT_MEMBERS = TEXT_MEMBERS | {"text": "text"}  # chat's name, a common error of gateways
MEDIA_PARTS = ("input_image", "input_file", "input_audio")
SCREENSHOT = "computer_screenshot"
DATA_MEMBERS = {
    "input_image": "image_url",
    SCREENSHOT: "image_url",
    "input_file": "file_data",
}  # in place of ``file_id``
IMAGE_DETAILS = ("auto", "low", "high", "original")
MEDIA_KINDS_BY_TYPE: dict[str, MediaKind] = {"image": "image", "video": "video", "audio": "audio"}


class ContentReader:
    """Reads contents. ``limits`` of ``media_reader``: the media that the model reads."""

    def __init__(self, rules: ResponsesRules, media_reader: MediaReader, context: RequestContext):
        self._media_reader = media_reader
        self._context = context
        self._text_members = TEXT_MEMBERS if rules.strict else CHAT_TEXT_MEMBERS

    def read_content(self, item: Fields, name: str) -> InterleavedText:
        """Return the text and the media of a member that is a string or an array of parts. Raises BadRequest."""
        value = item.raw_value(name)
        if value is None:
            raise item.missing_member(name)
        if isinstance(value, str):
            return InterleavedText(value, [])
        if not isinstance(value, list):
            raise item.mistyped_member(name, "a string or an array of content parts")
        return media.interleave_parts(map(self._read_part, item.objects(name, cap=MAX_PARTS)), PART_JOINT)

    def read_screenshot(self, item: Fields, name: str) -> InterleavedText:
        """Return the image of a member that is a computer's screen. Raises BadRequest."""
        screenshot = item.object(name)
        if screenshot is None:
            raise item.missing_member(name)
        if screenshot.string("type", None, allowed=(SCREENSHOT,)) is None:
            raise screenshot.missing_member("type")
        if screenshot.has_value("file_id"):
            screenshot = _with_upload(screenshot, SCREENSHOT, self._context)
        if not self._media_reader.limits:
            raise _text_only_error(screenshot, SCREENSHOT)
        image = self._media_reader.read_item(screenshot, "input_image", plain_urls=True)
        return media.interleave_parts([image], PART_JOINT)

    def _read_part(self, part: Fields) -> str | Media:
        kind = part.string("type", None, allowed=(*self._text_members, *MEDIA_PARTS))
        if kind is None:
            raise part.missing_member("type")
        if (text_member := self._text_members.get(kind)) is not None:
            text = part.string(text_member, None)
            if text is None:
                raise part.missing_member(text_member)
            return text
        if part.has_value("file_id"):
            part = _with_upload(part, kind, self._context)
        if kind == "input_file":
            return self._read_file(part)
        if not self._media_reader.limits:
            raise _text_only_error(part, kind)
        return self._media_reader.read_item(part, kind, plain_urls=True)

    def _read_file(self, part: Fields) -> str | Media:
        """Return the text of a text file, or the image, video or clip that another file is."""
        if part.has_value("file_url"):
            raise unserved_error("Files at URLs are not available on this server.", part.member_path("file_url"))
        part.string("detail", "auto", allowed=IMAGE_DETAILS)
        path, source = part.member_path("file_data"), _read_file_data(part)
        main_type = source.media_type.partition("/")[0]
        if is_text_type(source.media_type):
            return _decode_text(part, source)
        if main_type not in MEDIA_KINDS_BY_TYPE:
            raise unserved_error(
                f"'{path}' is a file of type {source.media_type or 'unknown'!r}; text, images, video and audio are "
                "available on this server. A data: URL or the end of 'filename' says the type.",
                path,
            )
        if not self._media_reader.limits:
            raise _text_only_error(part, "input_file")
        kind = MEDIA_KINDS_BY_TYPE[main_type]
        self._media_reader.check_kind(part, "input_file", kind)
        return Media(kind, source, path)


def _read_file_data(part: Fields) -> EncodedMedia:
    """Return a file that is a data: URL, or base64 alone: then the end of its name says its type. Raises BadRequest."""
    data, filename = part.string("file_data", None), part.string("filename", "", cap=1024)
    if data is None:
        raise part.missing_member("file_data")
    if not data.startswith("data:"):
        return EncodedMedia(data, guess_media_type(filename))
    try:
        return media.read_data_url(data, "image", part.member_path("file_data"))
    except BadMedia:
        raise part.member_error("file_data", "a data: URL must have the form data:TYPE;base64,DATA.") from None


def _decode_text(part: Fields, source: EncodedMedia) -> str:
    try:
        return base64.b64decode(source.base64, validate=True).decode("utf-8")
    except (binascii.Error, ValueError):  # ValueError: not UTF-8
        raise part.member_error("file_data", "the text must be UTF-8 in base64.") from None


def _with_upload(part: Fields, kind: str, context: RequestContext) -> Fields:
    """Return a part of this type with the file that it names by ``file_id``.

    Raises BadRequest, and UnknownRecord if there is no such file.
    """
    if not context.records.are_kept or kind not in DATA_MEMBERS:
        raise unserved_error("Uploaded files are not available on this server.", part.member_path("file_id"))
    return with_uploaded_file(part, DATA_MEMBERS[kind], context)


def inline_uploaded_files(item: Any, place: str, context: RequestContext) -> Any:
    """Return an item with uploaded files in place of their ids; the item itself if it names none.

    ``place``: of the item in the body. Raises BadRequest, and UnknownRecord if there is no such file.
    """
    if not isinstance(item, dict):
        return item
    changes = {}
    for name in ("content", "output"):
        parts = item.get(name)
        if isinstance(parts, dict):  # a screenshot
            changes[name] = _inlined_part(parts, f"{place}.{name}", context)
            continue
        if not isinstance(parts, list) or not any(isinstance(part, dict) and part.get("file_id") for part in parts):
            continue
        changes[name] = [_inlined_part(part, f"{place}.{name}[{number}]", context) for number, part in enumerate(parts)]
    return item | changes if changes else item


def _inlined_part(part: Any, place: str, context: RequestContext) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in DATA_MEMBERS or part.get("file_id") is None:
        return part
    data_member = DATA_MEMBERS[kind]
    inlined = _with_upload(Fields(part, place), kind, context)
    others = {name: value for name, value in part.items() if name != "file_id"}
    return others | {data_member: inlined.raw_value(data_member)}


def _text_only_error(part: Fields, kind: str) -> Unsupported:
    path = part.member_path("type")
    return unserved_error(f"'{path}' is '{kind}', but this model reads text only.", path)
