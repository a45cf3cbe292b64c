"""Parses the answers of prefill instances, and repairs the results of servers other than parley.

Pure: bytes in, values out.
"""

from __future__ import annotations

import binascii

import msgspec

from parley.coordinator.proxy.http_client import Response
from parley.disagg.wire.headers import MISPLACED, UNKNOWN

DONE = b"data: [DONE]\n\n"
STREAM = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
WHOLE = [(b"content-type", b"application/json")]


class BadAnswer(Exception):
    """The body is not a valid answer of a prefill instance."""


class _Answer(msgspec.Struct, rename={"req_id": "reqId", "stream": "isStream", "last": "isLastResp"}):
    req_id: str
    stream: bool
    last: bool | None = None
    output: str | None = None
    headers: list[tuple[str, str]] | None = None
    status: int = 200
    records: str = ""
    encoding: str = ""


class _Refused(msgspec.Struct):
    refused: bool = False
    error: object = None


class First(msgspec.Struct, gc=False):
    """The answer of the prefill instance (P).

    ``status`` and ``headers`` start the client's answer. ``native``: P is a parley server; ``record`` then holds the
    engine outputs that produced ``output`` (MessagePack in base64).
    """

    stream: bool
    last: bool
    output: bytes
    status: int
    headers: list[tuple[bytes, bytes]]
    exact: bool
    record: bytes = b""


_ANSWER = msgspec.json.Decoder(_Answer)
_REFUSED = msgspec.json.Decoder(_Refused)


def first(body: bytes) -> First:
    """Parse the body of P's answer. Raises BadPrefillAnswer."""
    try:
        said = _ANSWER.decode(body)
        if said.last is None and (said.stream or said.output is not None):
            raise BadAnswer("It does not say whether it is the last.")
        if said.output is None and (said.stream or said.last):
            raise BadAnswer("It has no output.")
        output = (said.output or "").encode()
        if said.encoding == "base64":
            output = binascii.a2b_base64(output, strict_mode=True)
        headers = STREAM if said.stream else WHOLE
        if said.headers is not None:
            headers = _coded(said.headers)
        return First(
            said.stream, bool(said.last), output, said.status, headers, said.headers is not None, said.records.encode()
        )
    except (msgspec.MsgspecError, binascii.Error, UnicodeError) as error:
        raise BadAnswer("It is not of the form that was expected.") from error


def refused(answer: Response) -> bool:
    """Whether P reports that the decode instance (D) had no room."""
    if answer.status != 503:
        return False
    try:
        return _REFUSED.decode(answer.body).refused
    except (msgspec.MsgspecError, UnicodeError):
        return False


def misplaced(answer: Response) -> bool:
    """Whether P reports that it is not a prefill instance, or that its role is changing. Its status will say so too."""
    if answer.status not in (400, 503):
        return False
    try:
        return _REFUSED.decode(answer.body).error in (MISPLACED, UNKNOWN)
    except (msgspec.MsgspecError, UnicodeError):
        return False


class _Head(msgspec.Struct):
    status: int
    headers: list[tuple[str, str]]


def head(payload: bytes) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Parse the status and headers of an answer in one piece. Raises BadPrefillAnswer."""
    try:
        said = msgspec.json.decode(payload, type=_Head)
        return said.status, _coded(said.headers)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise BadAnswer("It is not of the form that was expected.") from error


def _coded(headers: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """Encode headers for the wire, with names in lower case. Raises UnicodeError."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def opening(payload: bytes) -> bool:
    """Whether this chunk only opens a chat stream (a role, and no content)."""
    if b'"role"' not in payload or not payload.startswith(b"data:") or payload.count(b"data:") > 1:
        return False
    try:
        choices = msgspec.json.decode(payload[5:].strip())["choices"]
        return bool(choices) and all(
            "role" in each["delta"] and not each["delta"].get("content") and not each["delta"].get("tool_calls")
            and not each["delta"].get("reasoning_content") and each.get("finish_reason") is None
            for each in choices
        )  # fmt: skip
    except (msgspec.MsgspecError, LookupError, TypeError, AttributeError):
        return False


def closed(payload: bytes, path: str) -> bytes:
    """Return the end of a stream, with the ``[DONE]`` mark of OpenAI's streams added if it is missing."""
    if not path.endswith("/completions") or payload.endswith(DONE):
        return payload
    return payload + DONE
