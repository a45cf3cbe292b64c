"""``POST /v2/embed`` of Cohere's API as vLLM answers it: texts in, their vectors in several encodings out.

``input_type`` is the name of the model's own prompt to put before each text. Only texts are supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from parley.dialects import vectors
from parley.dialects.dialect import Answer, Head, Whole
from parley.dialects.fields import Fields
from parley.dialects.openai import extras
from parley.dialects.openai.embeddings import MAX_DIMENSIONS, MAX_INPUTS
from parley.dialects.openai.prompts import MAX_SIZE
from parley.dialects.openai.shared import MAX_TOKENS, unsupported
from parley.dialects.vllm import requests, shared
from parley.errors import Invalid
from parley.types import Event, Pooling, Request, Text, Usage, Vector

FORMS = ("float", "base64", "binary", "ubinary")
SIDES = {"END": "right", "START": "left"}  # the side to cut of a text that is too long
ONE = "Exactly one of texts, images, or inputs must be provided and non-empty"


def read(body: bytes, head: Head) -> EmbedReply | Answer:
    """Read an embedding request in Cohere's form. Raises BadRequest."""
    return requests.read(EmbedReply, body, head)


class EmbedReply(Whole):
    """An embedding request in Cohere's form."""

    names: ClassVar[Mapping[str, str]] = {
        "prompt": "texts", "prompt_name": "input_type", "dimensions": "output_dimension"
    }  # fmt: skip

    def __init__(self, body: Fields, head: Head):
        self._texts = _texts(body)
        self._forms = _forms(body) or ["float"]
        more = extras.pooling(_cut(body, head), head)
        self.request = Request(
            id=head.id,
            model=body.string("model", "", cap=256),
            prompts=[Text(text) for text in self._texts],
            **more.members,
            pooling=Pooling(
                body.integer("output_dimension", None, 1, MAX_DIMENSIONS),
                prompt=body.string("input_type", None, cap=extras.MAX_NAME),
            ),
        )
        self._name = requests.name(head, more.name or head.id)
        self._vectors: dict[int, bytes] = {}

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Vector):
                self._vectors[event.prompt] = event.values

    def body(self, usage: Usage) -> bytes:
        given = [self._vectors[index] for index in range(len(self._texts))]
        billed = {"input_tokens": usage.prompt_tokens, "image_tokens": 0}
        return shared.encode(
            {
                "id": f"embd-{self._name}",
                "embeddings": {form: [_told(values, form) for values in given] for form in self._forms},
                "texts": self._texts,
                "meta": {"api_version": {"version": "2"}, "billed_units": billed},
                "response_type": "embeddings_by_type",
            }
        )


def _texts(body: Fields) -> list[str]:
    for name in ("images", "inputs"):
        if body.array(name, cap=MAX_INPUTS):
            raise unsupported(body, name, "Anything but texts is")
    texts = body.strings("texts", cap=MAX_INPUTS, total=MAX_SIZE)
    if not texts:
        raise Invalid(ONE)
    return texts


def _forms(body: Fields) -> list[str]:
    """Return the encodings in which each vector is requested, without duplicates."""
    forms = body.strings("embedding_types", cap=len(FORMS), total=MAX_SIZE)
    for index, form in enumerate(forms):
        place = f"embedding_types[{index}]"
        body.over({place: form}).string(place, None, allowed=FORMS)
    return list(dict.fromkeys(forms))


def _cut(body: Fields, head: Head) -> Fields:
    """Return the body with its truncation in vLLM's own members; ``NONE`` refuses long texts instead."""
    truncate = body.string("truncate", "END", allowed=("NONE", *SIDES))
    most = body.integer("max_tokens", -1, 1, MAX_TOKENS)
    if truncate in SIDES:
        count = min(most, head.context) if head.context else most
        return body.over({"truncate_prompt_tokens": count, "truncation_side": SIDES[truncate]})
    if most > 0:
        raise body.fail("max_tokens", "needs a 'truncate' of START or END.")
    return body


def _told(values: bytes, form: str) -> Any:
    if form == "base64":
        return vectors.text(values)
    numbers = vectors.numbers(values)
    if form == "float":
        return numbers
    bits = "".join("1" if number >= 0 else "0" for number in numbers)
    octets = int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")
    return [octet - 128 if form == "binary" else octet for octet in octets]
