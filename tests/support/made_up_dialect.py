"""A made-up API, added as outsiders would: ``POST /repeat`` with ``question`` and ``length``, answered as a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence

from parley.dialects.bench import Api, Seen, Shape
from parley.dialects.dialect import Answer, Dialect, Head, PromptMembers, Reply, Route
from parley.dialects.fields import decode
from parley.errors import ParleyError
from parley.metrics.recorded import View
from parley.metrics.series import scalar
from parley.types import Delta, Done, Event, Request, Stop, Text, Usage


class Repetition(Reply):
    def __init__(self, body: bytes, head: Head):
        fields = decode(body)
        question = fields.string("question", None)
        if question is None:
            raise fields.missing("question")
        length = fields.integer("length", 16, 1, 4096)
        self.request = Request(
            id=head.id, model="", prompts=[Text(question)], stop=Stop(max_tokens=length), stream=True
        )

    def chunk(self, events: Sequence[Event]) -> bytes:
        return b"".join(self._line(event) for event in events)

    def _line(self, event: Event) -> bytes:
        if isinstance(event, Delta):
            return b"data: " + json.dumps({"said": event.text}).encode() + b"\n\n"
        if not isinstance(event, Done):
            return b""
        usage = {"read": event.usage.prompt_tokens, "written": event.usage.completion_tokens}
        return b"data: " + json.dumps({"over": usage}).encode() + b"\n\n"

    def end(self, usage: Usage) -> bytes:
        return b""

    def fail(self, error: ParleyError) -> bytes:
        return b"data: " + json.dumps({"wrong": error.message}).encode() + b"\n\n"

    def add(self, events: Sequence[Event]) -> None:
        raise AssertionError("an answer is always a stream")

    def body(self, usage: Usage) -> bytes:
        raise AssertionError("an answer is always a stream")


def refuse(error: ParleyError) -> Answer:
    return Answer(error.status, json.dumps({"wrong": error.message}).encode())


def series(views: Sequence[View]) -> str:
    return scalar("counter", "parrot_words", "Tokens generated.", [("", [("", views[0].stats.generated_tokens)])])


def ask(shape: Shape, text: str) -> dict[str, object]:
    return {"question": text, "length": shape.output}


def see(data: bytes) -> Seen:
    event = json.loads(data)
    over = event.get("over")
    if over is not None:
        return Seen(prompt=over["read"], tokens=over["written"], last=True)
    return Seen(output=bool(event.get("said")), error=event.get("wrong", ""))


DIALECT = Dialect(
    name="parrot",
    title="Parrot",
    base="",
    error=refuse,
    members=PromptMembers(prompts=("question",)),
    routes=(Route("POST", "/repeat", "generate", read=Repetition),),
    series=series,
    bench={"parrot": Api("/repeat", ask, see, ids=False)},
)
