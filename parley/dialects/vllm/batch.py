"""``POST /v1/chat/completions/batch``: several conversations in one request of vLLM's, with one choice for each.

Each conversation is read and answered like a request of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from parley.dialects.dialect import Answer, Head, Headers, Timings, Whole
from parley.dialects.fields import Fields
from parley.dialects.openai.completions import MAX_PROMPTS
from parley.dialects.openai.shared import unsupported
from parley.dialects.vllm import requests
from parley.dialects.vllm.chat import ChatReply
from parley.types import Delta, Done, Event, Usage

ALONE = {  # features that are available only for a single conversation
    "stream": "Streams of several conversations are",
    "use_beam_search": "Beam search in several conversations is",
    "tools": "Tools in several conversations are",
    "functions": "Functions in several conversations are",
    "prompt_logprobs": "Log-probabilities of several conversations are",
    "return_prompt_text": "The text of several conversations is",
}


def read(body: bytes, head: Head) -> BatchReply | Answer:
    """Read a request with several conversations. Raises BadRequest."""
    return requests.read(BatchReply, body, head)


class BatchReply(Whole):
    """A request with several conversations."""

    names: ClassVar[Mapping[str, str]] = ChatReply.names

    def __init__(self, body: Fields, head: Head):
        for name, subject in ALONE.items():
            if body.has(name) and body.raw(name) is not False:
                raise unsupported(body, name, subject)
        if body.integer("n", 1) != 1:
            raise unsupported(body, "n", "More than one answer to each of several conversations is")
        self._replies = [ChatReply(each, head) for each in _apart(body)]
        self.request = self._replies[0].request
        self.request.prompts = [reply.request.prompts[0] for reply in self._replies]
        self.request.want = msgspec.structs.replace(self.request.want, prompt_logprobs=None)

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Delta | Done):
                self._replies[event.index].add([msgspec.structs.replace(event, index=0)])

    def body(self, usage: Usage) -> bytes:
        return self._replies[0].answer([reply.choice(index) for index, reply in enumerate(self._replies)], usage)

    def headers(self, timings: Timings | None) -> Headers:
        return self._replies[0].headers(timings)


def _apart(body: Fields) -> list[Fields]:
    """Return a body for each conversation. Raises BadRequest."""
    conversations = body.array("messages", cap=MAX_PROMPTS)
    if not conversations:
        raise body.empty("messages", "array") if body.has("messages") else body.missing("messages")
    rest = body.without({"messages"})
    for index, messages in enumerate(conversations):
        if not isinstance(messages, list):
            place = f"messages[{index}]"
            raise body.over({place: messages}).mistyped(place, "an array")
    return [rest.over({"messages": messages}) for messages in conversations]
