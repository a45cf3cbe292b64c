"""MindIE's form of TGI's interface: ``POST /``, ``/generate`` and ``/generate_stream``.

It took after version 0.9.4: 20 tokens unless told otherwise, either of two members asks for all details. An event of a
stream is what one step of the engine gave, so its token is a list of ids. The original knows neither
log-probabilities nor texts of tokens and says null; here as there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from parley.dialects.dialect import Head, Headers, Reply, Timings
from parley.dialects.fields import Fields, decode
from parley.dialects.mindie import shared
from parley.dialects.mindie.shared import F32, I32, MAX_STOP, MAX_STOPS, TEXT, U64, Words, encode
from parley.dialects.tgi.shared import reason
from parley.errors import Malformed, ParleyError, Unsupported
from parley.types import Accepted, Delta, Done, Event, Request, Sampling, Stop, Text, Usage, Want

ROOT = Words("Failed to parse context to json body")
NEITHER = Words(
    encode(
        {
            "Error": "`inputs` or `prompt` must be necessary and data type must be string. "
            "Additionally, the request body must be valid json",
            "error_type": "validation",
        }
    ).decode()
)
STREAM = Words("Failed to parse request context to json")

TOKENS = 20  # unless told otherwise
ADAPTER = re.compile(r"[a-zA-Z0-9_./-]{1,256}")
NO_ADAPTER = "None"


def either(body: bytes, head: Head) -> TextReply:
    """The member ``stream`` decides; in one piece the answer is a list of one."""
    fields = decode(body, ROOT)
    if fields.has("stream") and not isinstance(fields.raw("stream"), bool):
        raise fields.fail("stream", "Stream must be boolean type.")
    return TextReply(fields, head, stream=fields.boolean("stream", False), listed=True)


def whole(body: bytes, head: Head) -> TextReply:
    fields = decode(body, NEITHER)
    if fields.has("prompt"):
        raise Unsupported("The interface that takes `prompt` is not available on this server.", field="prompt")
    if not fields.has("inputs"):
        raise Malformed(NEITHER.unread)
    return TextReply(fields, head, stream=False)


def stream(body: bytes, head: Head) -> TextReply:
    return TextReply(decode(body, STREAM), head, stream=True)


class TextReply(Reply):
    media_type: ClassVar[str] = "text/event-stream"
    names: ClassVar[Mapping[str, str]] = {"prompt": "inputs"}
    ping: ClassVar[bytes] = b""

    def __init__(self, body: Fields, head: Head, *, stream: bool, listed: bool = False):
        text = _inputs(body)
        given = body.object("parameters") or Fields({}, "parameters", ROOT)
        # In the original's order: of several faults the first in it is told.
        stops = _stops(given)
        sampling = _sampling(given)
        _adapter(given)
        self._limit = _integer(given, "max_new_tokens", TOKENS)
        details = given.boolean("details", False)
        self._prefilled = given.boolean("decoder_input_details", False)
        full = given.boolean("return_full_text", False)
        truncate = _integer(given, "truncate", None)
        if stream and self._prefilled:
            raise given.fail("decoder_input_details", "The decoder_input_details must not be true when stream is true.")
        self._details = details or self._prefilled
        self._listed = listed
        self._head = head
        self._before = text + " " if full else ""
        self._said: list[str] = []
        self._ids: list[int] = []
        self._prompt: Sequence[int] = ()
        self._seed = 0
        self._done: Done | None = None
        self.request = Request(
            id=head.id,
            model="",
            prompts=[Text(text)],
            sampling=sampling,
            stop=Stop(strings=stops, max_tokens=self._limit, reserve=1),
            want=Want(ids=True),
            stream=stream,
            truncate=truncate,
        )

    # -- a stream

    def chunk(self, events: Sequence[Event]) -> bytes:
        said, counted = len(self._said), len(self._ids)
        self.add(events)
        ids, text = self._ids[counted:], "".join(self._said[said:])
        if not ids and not text and self._done is None:
            return b""
        answer: dict[str, Any] = {
            "token": {"id": ids, "text": text, "logprob": None, "special": None},
            "generated_text": None,
            "details": None,
        }
        if self._done is not None:
            answer["generated_text"] = self._text
            if self._details:
                answer["details"] = self._told(self._done)
        return b"data: " + encode(answer) + b"\n\n"

    def end(self, usage: Usage) -> bytes:
        return b""

    def fail(self, error: ParleyError) -> bytes:
        return shared.failure(error)

    # -- one answer

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Delta():
                    self._said.append(event.text)
                    self._ids += [token.id for token in event.tokens]
                case Accepted():
                    self._prompt, self._seed = event.token_ids, event.seed
                case Done():
                    self._done = event

    def body(self, usage: Usage) -> bytes:
        answer: dict[str, Any] = {}
        if self._details:
            assert self._done is not None
            told = self._told(self._done)
            seed = told.pop("seed")
            prefill = [_token(id) for id in self._prompt] if self._prefilled else []
            answer["details"] = told | {"prefill": prefill, "seed": seed, "tokens": [_token(id) for id in self._ids]}
        answer["generated_text"] = self._text
        return encode([answer] if self._listed else answer)

    def headers(self, timings: Timings | None) -> Headers:
        return [(b"requestuuid", self._head.id.encode())]

    @property
    def _text(self) -> str:
        return self._before + "".join(self._said)

    def _told(self, done: Done) -> dict[str, Any]:
        return {
            "prompt_tokens": len(self._prompt),
            "finish_reason": reason(done, self._limit),
            "generated_tokens": done.usage.completion_tokens,
            "seed": self._seed,
        }


def _token(id: int) -> dict[str, Any]:
    return {"id": id, "logprob": None, "special": None, "text": None}


def _inputs(body: Fields) -> str:
    """The text, or the texts of a list of parts. Raises BadRequest."""
    value = body.raw("inputs")
    if value is None:
        raise body.missing("inputs")
    if isinstance(value, list):
        if not value:
            raise body.fail("inputs", "Inputs arr is empty")
        value = "".join(_part(body, part) for part in value)
    if not isinstance(value, str):
        raise body.fail("inputs", "The type of inputs is abnormal")
    if not 0 < len(value) <= TEXT:
        raise body.fail("inputs", f"Inputs length must be in (0, {TEXT}], but got {len(value)}")
    return value


def _part(body: Fields, part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise body.fail("inputs", "The type of inputs is abnormal")
    kind = part["type"]
    if kind != "text":
        if part.get(kind) is None:
            raise body.fail("inputs", f"Request param {kind[:60]} null")
        raise Unsupported(f"Request param {kind[:60]} is not available on this server", field="inputs")
    if not isinstance(part.get("text"), str):
        raise body.fail("inputs", "Request param text must be string")
    return part["text"]


def _stops(given: Fields) -> list[str]:
    value = given.raw("stop")
    if value is None:
        return []
    if isinstance(value, str):
        if not 1 <= len(value) <= MAX_STOP:
            text = f"Input validation error: length of `stop` must be in [1, {MAX_STOP}], but got {len(value)}"
            raise given.fail("stop", text)
        return [value]
    if not isinstance(value, list):
        raise given.fail("stop", "Input validation error: param stop must be string or list[string]")
    sound = len(value) <= MAX_STOP and all(isinstance(each, str) and 1 <= len(each) <= MAX_STOP for each in value)
    if not sound or sum(map(len, value)) > MAX_STOPS:
        text = (
            "Input validation error: `stop` must be list[string] if list, "
            f"and item length in [1, {MAX_STOP}] with total <= {MAX_STOPS}"
        )
        raise given.fail("stop", text)
    return value


def _sampling(given: Fields) -> Sampling:
    temperature = given.number("temperature", None, 0, F32, open=True)
    top_k = _integer(given, "top_k", None)
    top_p = given.number("top_p", None, 0, 1, open=True)
    if top_p == 1:
        raise ROOT.outside("top_p", 1.0, 0, 1, open=True)
    given.number("typical_p", None, 0, 1, open=True)  # looked at, as watermark is, and of no effect
    wanted = given.boolean("do_sample", None)
    seed = _integer(given, "seed", None, 0, U64)
    repetition = given.number("repetition_penalty", 1.0, 0, F32, open=True)
    given.boolean("watermark", False)
    draws = any(value is not None for value in (temperature, top_k, top_p)) if wanted is None else wanted
    return Sampling(
        temperature=(1.0 if temperature is None else temperature) if draws else 0.0,
        top_k=top_k or 0,
        top_p=1.0 if top_p is None else top_p,
        seed=seed,
        repetition_penalty=repetition,
    )


def _adapter(given: Fields) -> None:
    name = given.string("adapter_id", NO_ADAPTER)
    if not ADAPTER.fullmatch(name):
        raise given.fail("adapter_id", "The format of adapter_id is invalid.")
    if name != NO_ADAPTER:
        raise Unsupported("Parameter adapter_id is not available on this server.", field="adapter_id")


def _integer(given: Fields, name: str, default: Any, low: int = 1, high: int = I32) -> Any:
    """As ``Fields.integer``, but 5.0 is none."""
    if isinstance(given.raw(name), float):
        raise given.mistyped(name, "an integer")
    return given.integer(name, default, low, high)
