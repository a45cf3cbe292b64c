"""TGI's ``POST /v1/completions``: reads one or more texts, writes a chunk for each token or one whole answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parley.dialects.dialect import Answer, Head, Headers, Timings
from parley.dialects.fields import Fields, decode
from parley.dialects.tgi import openai, parameters, shared
from parley.dialects.tgi.parameters import Parameters
from parley.dialects.tgi.shared import F32, U32, WORDS, Rules
from parley.errors import Invalid, WrongType
from parley.types import Accepted, Delta, Done, Event, Request, Text, Usage, Want

FINISH = {"eos_token": "stop"}  # for answers in one piece; streams end with native reasons


def read(rules: Rules, body: bytes, head: Head) -> CompletionReply | Answer:
    """Read the body of a completion request. Raises BadRequest."""
    return of(rules, decode(body, WORDS), head)


def of(rules: Rules, body: Fields, head: Head) -> CompletionReply | Answer:
    """Return the reply to a decoded completion request, or an error as a stream. Raises BadRequest."""
    reply: CompletionReply | Answer = openai.read_stream(rules, body, lambda: CompletionReply(rules, body, head))
    return reply


class CompletionReply(openai.Spoken):
    """A reply to one or more texts, as a stream of chunks or in one piece."""

    def __init__(self, rules: Rules, body: Fields, head: Head):
        stream = openai.streams(body, rules)
        texts = _prompts(body)
        wish = Parameters(
            **openai.common(body, rules),
            repetition_penalty=body.number("repetition_penalty", None, -F32, F32),
            max_new_tokens=body.integer("max_tokens", None, 0, U32),
        )
        if body.string("suffix", None) is not None:
            raise Invalid(
                "Suffix is not supported and can be achieved by preprocessing the prompt.",
                field="suffix",
                code="suffix not supported",
            )
        if len(texts) > rules.max_prompts:
            raise Invalid(
                f"Number of prompts exceeds the maximum allowed batch size of {rules.max_prompts}",
                field="prompt",
                code="batch size exceeded",
            )
        parameters.check(wish, rules, empty=not all(texts), stream=stream, context=head.context)
        super().__init__(body, rules, head, wish, sum(map(len, texts)))
        self.request = Request(
            id=head.id,
            model=self._model or "",
            prompts=[Text(text) for text in texts],
            sampling=wish.sampling,
            stop=wish.stopping,
            want=Want(ids=stream),
            stream=stream,
        )
        self._texts: list[list[str]] = [[] for _ in texts]
        self._lengths = [0] * len(texts)
        self._done: list[Done] = []  # in the order the choices ended; the answer keeps it

    # -- streaming

    def chunk(self, events: Sequence[Event]) -> bytes:
        """Return a chunk for each token of these events."""
        frames: list[bytes] = []
        held: dict[int, str] = {}  # last text of each choice, held back until it is known whether it is the last
        for event in events:
            match event:
                case Delta(index):
                    for text in [text for _, text in openai.pieces(event)] or [event.text]:
                        if index in held:
                            frames.append(self._piece(index, held[index]))
                        held[index] = text
                case Done(index):
                    frames.append(self._last(index, held.pop(index, ""), event))
                case Accepted():
                    self._lengths[event.prompt] = len(event.token_ids)
        frames += [self._piece(index, text) for index, text in held.items()]
        return b"".join(frames)

    def _piece(self, index: int, text: str) -> bytes:
        told = {
            "object": "text_completion",
            "id": "",
            "created": self._head.created,
            "choices": [_choice(index, text, "")],
            "model": self._name(),
            "system_fingerprint": openai.FINGERPRINT,
        }
        return shared.frame(told)

    def _last(self, index: int, text: str, done: Done) -> bytes:
        used = Usage(self._lengths[index], done.usage.completion_tokens)
        return shared.frame(self._whole([_choice(index, text, self._ended(done))], used))

    # -- in one piece

    def add(self, events: Sequence[Event]) -> None:
        """Collect the text of these events by choice."""
        for event in events:
            match event:
                case Delta(index, text):
                    self._texts[index].append(text)
                case Done():
                    self._done.append(event)

    def body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        self._usage = usage
        choices = []
        for done in self._done:
            told = self._ended(done)
            choices.append(_choice(done.index, "".join(self._texts[done.index]), FINISH.get(told, told)))
        return shared.encode(self._whole(choices, usage))

    def headers(self, timings: Timings | None) -> Headers:
        """Return the usual headers without ``x-compute-time``: the prompts may have been computed separately."""
        return [header for header in super().headers(timings) if header[0] != b"x-compute-time"]

    def _whole(self, choices: list[Any], used: Usage) -> dict[str, Any]:
        return {
            "object": "text_completion",
            "id": "",
            "created": self._head.created,
            "model": self._name(),
            "system_fingerprint": openai.FINGERPRINT,
            "choices": choices,
            "usage": openai.usage(used),
        }


def _choice(index: int, text: str, reason: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def _prompts(body: Fields) -> list[str]:
    """Read a text or a list of texts. Token ids are refused as a wrong type."""
    value = body.raw("prompt")
    if value is None:
        raise (
            body.mistyped("prompt", "a string or an array of strings")
            if body.null("prompt")
            else body.missing("prompt")
        )
    if isinstance(value, str):
        return [value]
    if value == []:
        raise WrongType("prompt: Empty array detected. Do not use an empty array for the prompt.", field="prompt")
    for number, text in enumerate(body.array("prompt", cap=U32)):
        if not isinstance(text, str):
            raise WORDS.mistyped(f"prompt[{number}]", "a string", text)
    return list(value)
