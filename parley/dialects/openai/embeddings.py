"""``POST /v1/embeddings``: texts or token ids in, one vector for each out, in the order of the input.

vLLM's additions are read too: a conversation in place of texts, truncation of long texts, and other vector encodings.
``prompt_name`` is sentence-transformers': the name of the model's own prompt to put before each text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from parley.dialects import vectors
from parley.dialects.dialect import Head, Headers, Timings, Whole
from parley.dialects.fields import Fields, decode
from parley.dialects.openai import extras, prompts, shared
from parley.dialects.openai.messages import conversation
from parley.dialects.openai.shared import RULES, Rules
from parley.types import Event, Pooling, Prompt, Request, Usage, Vector

MAX_INPUTS = 2048
MAX_DIMENSIONS = 2**31 - 1
CODINGS = ("float", "base64", "bytes", "bytes_only")
DTYPES = ("float32", "float16", "bfloat16", *vectors.FLOAT8)
ORDERS = ("native", "little", "big")
BINARY = b"application/octet-stream"


def read(body: bytes, head: Head) -> EmbeddingReply:
    """Read an embedding request. Raises BadRequest."""
    return EmbeddingReply(decode(body), head)


class EmbeddingReply(Whole):
    """An embedding request, answered in OpenAI's form."""

    names: ClassVar[Mapping[str, str]] = {"prompt": "input"}
    rules: ClassVar[Rules] = RULES

    def __init__(self, body: Fields, head: Head):
        more = extras.pooling(body, head)
        self.request = Request(
            id=head.id,
            model=body.string("model", "", cap=256),
            prompts=self._prompts(body),
            **more.members,
            pooling=Pooling(
                body.integer("dimensions", None, 1, MAX_DIMENSIONS),
                _normalize(body),
                body.string("prompt_name", None, cap=extras.MAX_NAME),
            ),
        )
        self._coding = body.string("encoding_format", "float", allowed=CODINGS)
        self._dtype = body.string("embed_dtype", "float32", allowed=DTYPES)
        self._order = body.string("endianness", "native", allowed=ORDERS)
        body.string("user", None, cap=extras.MAX_NAME)
        self._name = more.name or head.id
        self._head = head
        self._vectors: dict[int, bytes] = {}
        if self._coding.startswith("bytes"):
            self.type = BINARY

    def _prompts(self, body: Fields) -> list[Prompt]:
        if body.has("messages") and not body.has("input"):
            asked = body.over({"add_generation_prompt": False})  # no answer follows
            return [conversation(asked, self.rules)[0]]
        return prompts.read(body, "input", cap=MAX_INPUTS)

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Vector):
                self._vectors[event.prompt] = event.values

    def body(self, usage: Usage) -> bytes:
        if self._coding.startswith("bytes"):
            self._usage = usage
            return b"".join(self._binary())
        data = [
            {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(self._told())
        ]
        return shared.encode(self.envelope(data, usage))

    def envelope(self, data: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """Return the answer with its vectors."""
        told = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        return {"object": "list", "data": data, "model": self.request.model, "usage": told}

    def headers(self, timings: Timings | None) -> Headers:
        """Return the metadata that an answer in raw bytes cannot contain."""
        if self._coding != "bytes":
            return ()
        data, start = [], 0
        for index, vector in enumerate(self._binary()):
            end = start + len(vector)
            size = len(self._vectors[index]) // 4
            place = {"index": index, "embed_dtype": self._dtype, "endianness": self._order}
            data.append(place | {"start": start, "end": end, "shape": [size]})
            start = end
        told = self.envelope(data, self._usage) | {"id": f"embd-{self._name}", "created": self._head.created}
        return [(b"metadata", _ascii(shared.encode(told)))]

    def _told(self) -> list[Any]:
        if self._coding == "base64":
            return list(map(vectors.text, self._binary()))
        return [vectors.numbers(self._vectors[index]) for index in range(len(self._vectors))]

    def _binary(self) -> list[bytes]:
        big = self._order == "big"
        return [vectors.form(self._vectors[index], self._dtype, big=big) for index in range(len(self._vectors))]


def _normalize(body: Fields) -> bool | None:
    """Return the current member ``use_activation``, or ``normalize``, its older name."""
    return body.boolean("use_activation", body.boolean("normalize", None))


def _ascii(data: bytes) -> bytes:
    """Return JSON in printable ASCII, as a header requires; names may contain any characters."""
    return re.sub(r"[^\x20-\x7e]", lambda match: _escape(match[0]), data.decode()).encode()


def _escape(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
