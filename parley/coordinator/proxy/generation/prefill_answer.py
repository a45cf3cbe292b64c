"""Parses the answers of prefill instances, and repairs the results of servers other than parley.

Pure: bytes in, values out.
"""

from __future__ import annotations

import binascii
import re

import msgspec

from parley.dialects.sse import STREAM_DONE
from parley.disagg.wire.headers import NOT_A_PREFILL_INSTANCE, UNKNOWN_STATUS
from parley.disagg.wire.vouched_client import UsedTokens
from parley.web.http_client import InstanceAnswer

SSE_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
JSON_HEADERS = [(b"content-type", b"application/json")]
BODILESS_STATUSES = (204, 205, 304)
HEADER_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")  # RFC 9110, section 5.6.2; in lower case
HEADER_BREAK = re.compile(rb"[\0\r\n]")
MAX_HEADER_BYTES = 64 << 10


class BadPrefillAnswer(Exception):
    """The body is not a valid answer of a prefill instance."""


class _PrefillAnswerBody(
    msgspec.Struct,
    rename={"req_id": "reqId", "is_stream": "isStream", "is_final": "isLastResp", "used_tokens": "usedTokens"},
):
    req_id: str
    is_stream: bool
    is_final: bool | None = None
    output: str | None = None
    headers: list[tuple[str, str]] | None = None
    status: int = 200
    records: str = ""
    encoding: str = ""
    used_tokens: UsedTokens | None = None


class _PrefillRefusalBody(msgspec.Struct):
    refused: bool = False
    error: object = None


class PrefillAnswer(msgspec.Struct, gc=False):
    """The answer of the prefill instance (P).

    ``status`` and ``headers`` start the client's answer. ``native``: P is a parley server; ``record`` then holds the
    engine outputs that produced ``output_bytes`` (MessagePack in base64). ``used_tokens``: the request's token usage so
    far, if this coordinator counts it.
    """

    is_stream: bool
    is_final: bool
    output_bytes: bytes
    status: int
    headers: list[tuple[bytes, bytes]]
    native: bool
    record: bytes = b""
    used_tokens: UsedTokens | None = None


_ANSWER_DECODER = msgspec.json.Decoder(_PrefillAnswerBody)
_REFUSAL_DECODER = msgspec.json.Decoder(_PrefillRefusalBody)


def parse_prefill_answer(body: bytes) -> PrefillAnswer:
    """Parse the body of P's answer. Raises BadPrefillAnswer."""
    try:
        answer_body = _ANSWER_DECODER.decode(body)
        if answer_body.is_final is None and (answer_body.is_stream or answer_body.output is not None):
            raise BadPrefillAnswer("The answer does not say whether it is the last.")
        if answer_body.output is None and (answer_body.is_stream or answer_body.is_final):
            raise BadPrefillAnswer("It has no output.")
        output = (answer_body.output or "").encode()
        if answer_body.encoding == "base64":
            output = binascii.a2b_base64(output, strict_mode=True)
        headers = SSE_HEADERS if answer_body.is_stream else JSON_HEADERS
        if answer_body.headers is not None:
            headers = _encode_headers(answer_body.headers)
        _check_status(answer_body.status)
        return PrefillAnswer(
            answer_body.is_stream,
            bool(answer_body.is_final),
            output,
            answer_body.status,
            headers,
            answer_body.headers is not None,
            answer_body.records.encode(),
            answer_body.used_tokens,
        )
    except (msgspec.MsgspecError, binascii.Error, UnicodeError) as error:
        raise BadPrefillAnswer("The answer does not have the expected form.") from error


def reports_full_decode(answer: InstanceAnswer) -> bool:
    """Whether P reports that the decode instance (D) had no room."""
    if answer.status != 503:
        return False
    try:
        return _REFUSAL_DECODER.decode(answer.body).refused
    except (msgspec.MsgspecError, UnicodeError):
        return False


def reports_wrong_role(answer: InstanceAnswer) -> bool:
    """Whether P reports that it is not a prefill instance, or that its role is changing. Its status will say so too."""
    if answer.status not in (400, 503):
        return False
    try:
        return _REFUSAL_DECODER.decode(answer.body).error in (NOT_A_PREFILL_INSTANCE, UNKNOWN_STATUS)
    except (msgspec.MsgspecError, UnicodeError):
        return False


class _AnswerHead(msgspec.Struct):
    status: int
    headers: list[tuple[str, str]]


def parse_answer_head(payload: bytes) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Parse the status and headers of an answer in one piece. Raises BadPrefillAnswer."""
    try:
        answer_head = msgspec.json.decode(payload, type=_AnswerHead)
        _check_status(answer_head.status)
        return answer_head.status, _encode_headers(answer_head.headers)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise BadPrefillAnswer("The answer does not have the expected form.") from error


def _check_status(status: int) -> None:
    """Raise BadPrefillAnswer for a status that no answer with a body has: the client would misread what follows."""
    if not 200 <= status <= 599 or status in BODILESS_STATUSES:
        raise BadPrefillAnswer("Its status is not that of an answer with a body.")


def _encode_headers(headers: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """Encode headers for the wire, with names in lower case. Raises UnicodeError, BadPrefillAnswer."""
    encoded_headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    for name, value in encoded_headers:
        if not HEADER_NAME.fullmatch(name) or HEADER_BREAK.search(value):
            raise BadPrefillAnswer("It has a header that HTTP does not allow.")
    if sum(len(name) + len(value) for name, value in encoded_headers) > MAX_HEADER_BYTES:
        raise BadPrefillAnswer(f"Its headers have more than {MAX_HEADER_BYTES} bytes.")
    return encoded_headers


def is_stream_opening(payload: bytes) -> bool:
    """Whether this chunk only opens a chat stream (a role, and no content)."""
    if b'"role"' not in payload or not payload.startswith(b"data:") or payload.count(b"data:") > 1:
        return False
    try:
        choices = msgspec.json.decode(payload[5:].strip())["choices"]
        return bool(choices) and all(
            "role" in choice["delta"] and not choice["delta"].get("content") and not choice["delta"].get("tool_calls")
            and not choice["delta"].get("reasoning_content") and choice.get("finish_reason") is None
            for choice in choices
        )  # fmt: skip
    except (msgspec.MsgspecError, LookupError, TypeError, AttributeError):
        return False


def append_done_mark(payload: bytes, path: str) -> bytes:
    """Return the end of a stream, with the ``[DONE]`` mark of OpenAI's streams added if it is missing."""
    if not path.endswith("/completions") or payload.endswith(STREAM_DONE):
        return payload
    return payload + STREAM_DONE
