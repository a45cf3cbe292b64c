"""Bodies of multipart/form-data (RFC 7578), read within limits as the members of one object.

A text is a member like those of a JSON body, so that dialects read it with ``Fields``, and a file is an
``UploadedFile``. Names have the forms that clients write: ``name[]``, or a name that occurs again, is an array;
``name[key]`` is a member of an object.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from parley.dialects.error_wording import ErrorWording
from parley.dialects.fields import Fields
from parley.errors import BadRequest, MalformedBody, excerpt
from parley.interrupt import stop_if_abandoned

MAX_PARTS = 128
MAX_HEADERS = 8  # of a part
MAX_HEADER_SIZE = 4096  # bytes of one header
MAX_TEXT_SIZE = 1 << 20  # bytes of all texts together
PARSED_AT_ONCE = 1 << 20  # bytes between two checks of whether the client still waits
NAME_PATTERN = re.compile(r"([\w.-]{1,64})(?:\[([\w.-]{0,64})\])?", re.ASCII)
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
INTEGER_TEXT = re.compile(r"[+-]?[0-9]{1,20}")
NUMBER_TEXT = re.compile(r"[+-]?([0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20})(e[+-]?[0-9]{1,3})?", re.IGNORECASE)

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it warns of each broken body of a client


@dataclass(frozen=True)
class UploadedFile:
    """A file of a form. ``filename``: the client's name for it; None if it has none. ``media_type``: as the client
    says, without parameters; "" if it does not."""

    content: bytes = field(repr=False)
    filename: str | None = None
    media_type: str = ""


class FormWording(ErrorWording):
    """OpenAI's wording for members of forms, where all types arrive as texts."""

    def convert_value(self, path: str, expected: str, value: Any) -> Any:
        """Convert a text to a boolean, an integer or a number. Raises BadRequest."""
        text = value.strip().lower() if isinstance(value, str) else ""
        if expected == "a boolean" and text in BOOLEANS:
            return BOOLEANS[text]
        if expected == "an integer" and INTEGER_TEXT.fullmatch(text):
            return int(text)
        if expected == "a number" and NUMBER_TEXT.fullmatch(text):
            return float(text)
        if isinstance(value, str):
            raise self.invalid_error(path, f"must be {expected}, but got {excerpt(value)}.")
        raise self.type_error(path, expected, value)


FORM_WORDING = FormWording()


def decode_form(
    body: bytes, content_type: bytes, file_names: Collection[str], wording: ErrorWording = FORM_WORDING
) -> Fields:
    """Return the members of a form. Parts named in ``file_names`` are files, also without a file name.

    Empty texts count as absent. Raises MalformedBody.
    """
    boundary = read_boundary(content_type)
    if not body.startswith(b"--" + boundary):
        raise MalformedBody("The body must begin with the boundary that its Content-Type names.")
    members = _read_members(body, boundary, file_names)
    return Fields(members, "", wording.for_body(members))


def read_boundary(content_type: bytes) -> bytes:
    """Return the boundary between the parts of a form. Raises MalformedBody if the body is no form."""
    media_type, options = parse_options_header(content_type[:MAX_HEADER_SIZE])
    if media_type.strip() != b"multipart/form-data":
        raise MalformedBody("The body must be multipart/form-data, with the file as one of its parts.")
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= 200:
        raise MalformedBody("The Content-Type multipart/form-data needs a boundary of 1 to 200 characters.")
    return boundary


def model_in_form(body: bytes) -> str:
    """Return the text named "model" in a form, or "". The first line of the body is its boundary."""
    first_line = body[: body.find(b"\r\n", 0, 256)]
    if not first_line.startswith(b"--"):
        return ""
    try:
        model = _read_members(body, first_line[2:], ()).get("model")
    except BadRequest:
        return ""
    return model if isinstance(model, str) else ""


def peek_model_in_form(body: bytes) -> tuple[str, bytes]:
    """Return the model named in a form, and no prompt: the cost of a clip is unknown before it is decoded."""
    return model_in_form(body), b""


def _read_members(body: bytes, boundary: bytes, file_names: Collection[str]) -> dict[str, Any]:
    collector = _PartCollector(file_names)
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": collector.begin_part,
                "on_header_field": collector.add_header_name,
                "on_header_value": collector.add_header_value,
                "on_header_end": collector.end_header,
                "on_part_data": collector.add_data,
                "on_part_end": collector.end_part,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_SIZE,
        )
        for start in range(0, len(body), PARSED_AT_ONCE):
            stop_if_abandoned()
            parser.write(body[start : start + PARSED_AT_ONCE])
        parser.finalize()
    except FormParserError:
        raise MalformedBody("The body could not be parsed as multipart/form-data.") from None
    if not collector.is_complete:
        raise MalformedBody("The body ends before the last boundary of the form.")
    return collector.members


class _PartCollector:
    """Collects the parts of a form as members. ``is_complete``: no part is open."""

    def __init__(self, file_names: Collection[str]):
        self.members: dict[str, Any] = {}
        self.is_complete = True
        self._file_names = file_names
        self._part_count = 0
        self._text_size = 0

    def begin_part(self) -> None:
        """Begin a part. Raises MalformedBody if there are too many."""
        self._part_count += 1
        if self._part_count > MAX_PARTS:
            raise MalformedBody(f"The form has more than {MAX_PARTS} parts.")
        self.is_complete = False
        self._header_name, self._header_value = b"", b""
        self._headers: dict[bytes, bytes] = {}
        self._data: list[bytes] = []

    def add_header_name(self, data: bytes, start: int, end: int) -> None:
        """Continue the name of a header."""
        self._header_name += data[start:end]

    def add_header_value(self, data: bytes, start: int, end: int) -> None:
        """Continue the value of a header."""
        self._header_value += data[start:end]

    def end_header(self) -> None:
        """Keep a header."""
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name, self._header_value = b"", b""

    def add_data(self, data: bytes, start: int, end: int) -> None:
        """Continue the content of the part."""
        self._data.append(data[start:end])

    def end_part(self) -> None:
        """Add the part to the members. Raises MalformedBody."""
        self.is_complete = True
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = _decode_text(options.get(b"name", b""), "name of a part")
        if not (match := NAME_PATTERN.fullmatch(name)):
            raise MalformedBody(f"The form has a part with no valid name: {excerpt(name)}.")
        content = b"".join(self._data)
        if b"filename" in options or match[1] in self._file_names:
            filename = options.get(b"filename")
            media_type, _ = parse_options_header(self._headers.get(b"content-type", b""))
            value: Any = UploadedFile(
                content,
                None if filename is None else filename.decode("utf-8", "replace"),
                media_type.decode("latin-1").lower(),
            )
        else:
            self._text_size += len(content)
            if self._text_size > MAX_TEXT_SIZE:
                raise MalformedBody(f"The texts of the form have more than {MAX_TEXT_SIZE} bytes together.")
            value = _decode_text(content, f"part '{name}'")
        if value != "":
            _add_member(self.members, match[1], match[2], value)


def _decode_text(data: bytes, subject: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise MalformedBody(f"The {subject} is not UTF-8.") from None


def _add_member(members: dict[str, Any], name: str, key: str | None, value: Any) -> None:
    """Add a part to the members. ``key``: the text in brackets after its name; None without brackets."""
    present = members.get(name)
    if key:
        if not isinstance(members.setdefault(name, {}), dict):
            raise MalformedBody(f"The form has '{name}' both as an object and as another value.")
        members[name][key] = value
    elif isinstance(present, dict):
        raise MalformedBody(f"The form has '{name}' both as an object and as another value.")
    elif isinstance(present, list):
        present.append(value)
    elif present is not None:
        members[name] = [present, value]
    else:
        members[name] = [value] if key == "" else value


def with_arrays(form: Fields, names: Collection[str]) -> Fields:
    """Return the members with arrays at these names, where the form has one value without brackets."""
    single: Mapping[str, Any] = {name: [value] for name in names if isinstance(value := form.raw_value(name), str)}
    return form.with_members(single)
