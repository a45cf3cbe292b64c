"""Prompts and their completions, in Databricks' format.

Unless ``use_raw_prompt`` is set, a prompt becomes a user's turn in the chat template. ``suffix`` is appended to each
choice. Under strict rules a choice's index is its prompt's, as documented, and the answer names no model; under lenient
rules choices are numbered consecutively.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from parley.dialects.databricks import members, shared
from parley.dialects.databricks.shared import Count, Rules, Words
from parley.dialects.dialect import Head, Headers, Reply, Timings
from parley.dialects.fields import Fields, decode
from parley.dialects.openai import shared as openai
from parley.dialects.openai.shared import FINISH, MAX_TOKENS
from parley.errors import ParleyError
from parley.types import Delta, Done, Event, Request, Scored, Stop, Text, Usage, Want

WORDS = Words("Completion")
MAX_PROMPTS = 1024
MAX_SUFFIX = 1 << 20  # characters


def read(rules: Rules, body: bytes, head: Head) -> CompletionReply:
    """Read a completion request. Raises BadRequest."""
    return CompletionReply(rules, decode(body, WORDS), head)


class CompletionReply(Reply):
    """A reply to one or more prompts, as a stream of chunks or in one piece."""

    ping: ClassVar[bytes] = b""

    def __init__(self, rules: Rules, body: Fields, head: Head):
        if rules.strict:
            members.known(body, members.COMPLETION)
            members.drawing(body)
        members.context(body)
        raw = body.boolean("use_raw_prompt", False)
        prompts = _prompts(body)
        max_tokens = body.integer("max_tokens", None, 1, MAX_TOKENS)
        behavior = body.string("error_behavior", "error", allowed=("error", "truncate"))
        stream = body.boolean("stream", False)
        wish = openai.choices(body, len(prompts), openai.Rules(best_of=False))
        self.request = Request(
            id=head.id,
            model=body.string("model", "", cap=256),
            prompts=[Text(text, turn=not raw) for text in prompts],
            sampling=openai.sampling(body),
            stop=Stop(
                strings=body.strings("stop", cap=openai.MAX_STOPS, total=openai.MAX_STOP_CHARACTERS),
                max_tokens=max_tokens,
                reserve=1 if behavior == "truncate" else None,
            ),
            want=Want(echo=body.boolean("echo", False), ids=True, plain=True),
            **wish._asdict(),
            stream=stream,
            partial=behavior == "truncate",
        )
        self._suffix = body.string("suffix", "", cap=MAX_SUFFIX)
        self._usage = shared.told_usage(body, stream)
        self._manner = rules
        self._head = head
        self._count = Count()
        self._texts: list[list[str]] = [[] for _ in range(wish.n * len(prompts))]
        self._ends: dict[int, Done] = {}

    # -- streaming

    def chunk(self, events: Sequence[Event]) -> bytes:
        """Return a chunk for each event that has output; each reports the usage up to it."""
        parts: list[bytes] = []
        for event in events:
            self._count.add(event)
            match event:
                case Delta(index, text) if text:
                    parts.append(self._frame(self._choice(index, text, None)))
                case Done(index):
                    parts.append(self._frame(self._choice(index, self._suffix, event)))
                case Scored(prompt, text=text):
                    parts += [self._frame(self._choice(index, text, None)) for index in self._of(prompt)]
        return b"".join(parts)

    def end(self, usage: Usage) -> bytes:
        """Return the mark that ends a stream."""
        return shared.DONE

    def fail(self, error: ParleyError) -> bytes:
        """Return the error event that ends the stream."""
        return shared.failure(error)

    def _frame(self, choice: dict[str, Any]) -> bytes:
        usage = {"usage": self._count.told()} if self._usage else {}
        return shared.frame(self._envelope([choice]) | usage)

    # -- in one piece

    def add(self, events: Sequence[Event]) -> None:
        """Collect the text of these events by choice; an echoed prompt comes first."""
        for event in events:
            match event:
                case Delta(index, text):
                    self._texts[index].append(text)
                case Done(index):
                    self._ends[index] = event
                case Scored(prompt, text=text):
                    for index in self._of(prompt):
                        self._texts[index].insert(0, text)

    def body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        choices = [
            self._choice(index, "".join(text) + self._suffix, self._ends[index])
            for index, text in enumerate(self._texts)
        ]
        counted = shared.usage(usage.prompt_tokens, usage.completion_tokens)
        return shared.encode(self._envelope(choices) | {"usage": counted})

    def headers(self, timings: Timings | None) -> Headers:
        """Return the header that names the served model."""
        return shared.served_header(self)

    # -- shared by both

    def _of(self, prompt: int) -> range:
        """Return the indexes of a prompt's choices."""
        return range(prompt * self.request.n, (prompt + 1) * self.request.n)

    def _choice(self, index: int, text: str, done: Done | None) -> dict[str, Any]:
        finish = None if done is None else FINISH[done.reason]
        choice = {
            "index": index // self.request.n if self._manner.strict else index,
            "text": text,
            "finish_reason": finish,
        }
        if not self._manner.strict and not self.request.stream:
            choice["finishReason"] = finish  # the name that Databricks' SDK reads
        return choice

    def _envelope(self, choices: list[Any]) -> dict[str, Any]:
        named = {} if self._manner.strict else {"model": self.request.model}
        return {
            "id": f"cmpl_{shared.identity(self._head)}",
            "object": "text_completion",
            "created": self._head.created,
            **named,
            "choices": choices,
        }


def _prompts(body: Fields) -> list[str]:
    prompts = body.strings("prompt", cap=MAX_PROMPTS, total=2**31)
    if not prompts:
        raise body.empty("prompt", "array") if body.has("prompt") else body.missing("prompt")
    return prompts
