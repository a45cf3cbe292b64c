"""A made-up API, added as outsiders would: ``POST /repeat`` with ``question`` and ``length``, answered as a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence

from parley.dialects.bench import BenchApi, EventSummary, LoadShape
from parley.dialects.dialect import Dialect, PromptMembers
from parley.dialects.fields import decode_fields
from parley.dialects.reply import Answer, Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.route import Route
from parley.errors import ParleyError
from parley.metrics.model_metrics import ModelSnapshot
from parley.metrics.series import scalar_lines
from parley.types import ChoiceDelta, ChoiceDone, Event, Request, StopConditions, TextPrompt, Usage


class RepeatReply(Reply):
    def __init__(self, body: bytes, head: RequestContext):
        fields = decode_fields(body)
        question = fields.string("question", None)
        if question is None:
            raise fields.missing_member("question")
        length = fields.integer("length", 16, 1, 4096)
        self.request = Request(
            id=head.unique_id,
            model="",
            prompts=[TextPrompt(question)],
            stop_conditions=StopConditions(max_tokens=length),
            stream=True,
        )

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        return b"".join(self._event_line(event) for event in events)

    def _event_line(self, event: Event) -> bytes:
        if isinstance(event, ChoiceDelta):
            return b"data: " + json.dumps({"said": event.text}).encode() + b"\n\n"
        if not isinstance(event, ChoiceDone):
            return b""
        usage = {"read": event.usage.prompt_tokens, "written": event.usage.completion_tokens}
        return b"data: " + json.dumps({"over": usage}).encode() + b"\n\n"

    def finish_stream(self, usage: Usage) -> bytes:
        return b""

    def fail_stream(self, error: ParleyError) -> bytes:
        return b"data: " + json.dumps({"wrong": error.message}).encode() + b"\n\n"

    def add_events(self, events: Sequence[Event]) -> None:
        raise AssertionError("an answer is always a stream")

    def render_body(self, usage: Usage) -> bytes:
        raise AssertionError("an answer is always a stream")


def refusal_answer(error: ParleyError) -> Answer:
    return Answer(error.status, json.dumps({"wrong": error.message}).encode())


def parrot_metrics(views: Sequence[ModelSnapshot]) -> str:
    return scalar_lines("counter", "parrot_words", "Tokens generated.", [("", [("", views[0].stats.generated_tokens)])])


def bench_body(shape: LoadShape, text: str) -> dict[str, object]:
    return {"question": text, "length": shape.output_tokens}


def bench_event(data: bytes) -> EventSummary:
    event = json.loads(data)
    usage = event.get("over")
    if usage is not None:
        return EventSummary(prompt_tokens=usage["read"], output_tokens=usage["written"], last=True)
    return EventSummary(output=bool(event.get("said")), error=event.get("wrong", ""))


DIALECT = Dialect(
    name="parrot",
    title="Parrot",
    base_path="",
    render_error=refusal_answer,
    prompt_members=PromptMembers(prompts=("question",)),
    routes=(Route("POST", "/repeat", "generate", reader=RepeatReply),),
    shared_metrics=parrot_metrics,
    bench_apis={"parrot": BenchApi("/repeat", bench_body, bench_event, takes_token_ids=False)},
)
