"""MindIE's ``POST /v1/completions``: text or token ids in, text out. Lenient rules add several prompts and ``echo``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parley.dialects.dialect import Head
from parley.dialects.fields import Fields, decode
from parley.dialects.mindie import choices, constraints, inputs, openai, parameters
from parley.dialects.mindie.answers import common
from parley.dialects.mindie.inputs import Input
from parley.dialects.mindie.openai import OpenAIReply, frame
from parley.dialects.mindie.rules import Rules
from parley.dialects.mindie.shared import I32, UNREAD, encode, size
from parley.dialects.openai.completions import Logprobs
from parley.errors import Unsupported
from parley.types import Delta, Done, Event, Prompt, Request, Scored, Text, Tokens, Usage, Want

MISSING = "Contains not prompt or prompt null"
TYPE = "The type of prompt is abnormal,prompt must be str or integer list."
LENGTH = "Length of Prompt text should be greater than 0 and less than or equal to {}, but got {}"
TOKENS = f"Length of Prompt token should be greater than 0 and less than or equal to {inputs.IDS}, but got 0"
PROMPT = Input("prompt", MISSING, TYPE, "Prompt array cannot be empty.", LENGTH, TOKENS)
MAX_PROMPTS = 1024


def read(rules: Rules, body: bytes, head: Head) -> CompletionReply:
    """Read a completion request. Raises BadRequest."""
    return CompletionReply(rules, decode(body, UNREAD), head)


class CompletionReply(OpenAIReply):
    """A reply to one or more prompts, as a stream of events or in one piece."""

    unknown = "Not found given model, please check modelName in config file."

    def __init__(self, rules: Rules, body: Fields, head: Head):
        self.model = openai.model(body, rules)
        prompts = _prompts(body, rules)
        interface = parameters.COMPLETIONS.under(rules)
        values = parameters.read(body, interface)
        wish = choices.count(body, values, interface, rules)
        grammar = constraints.read(body)
        echo = False
        if not rules.strict:
            echo = body.boolean("echo", False)
            if body.string("suffix", ""):
                raise Unsupported("Parameter suffix is not available on this server.", field="suffix")
        super().__init__(rules, head, PROMPT, wish.n * len(prompts))
        self._logprobs = values["logprobs"]
        form = False, values["skip_special_tokens"] is not False
        self._scores = [None if self._logprobs is None else Logprobs(self._logprobs, *form) for _ in self._choices]
        self._each = wish.n
        self.request = Request(
            **common(rules, head),
            model=self.model,
            prompts=prompts,
            sampling=parameters.sampling(values, rules),
            stop=openai.stop(values),
            want=Want(
                logprobs=self._logprobs,
                prompt_logprobs=self._logprobs if echo else None,
                echo=echo,
                skip_special=values["skip_special_tokens"] is not False,
                costs=rules.figures,
            ),
            **wish._asdict(),
            grammar=grammar,
            stream=bool(values["stream"]),
        )

    # -- streaming

    def chunk(self, events: Sequence[Event]) -> bytes:
        """Return an event for each piece of output; an echoed prompt comes first."""
        parts: list[bytes] = []
        waiting: dict[int, Delta] = {}
        for event in events:
            match event:
                case Scored() if self.request.want.echo:
                    parts += [self._said(Delta(index, event.text), prompt=event) for index in self._of(event)]
                case Delta():
                    if (before := waiting.pop(event.index, None)) is not None:
                        parts.append(self._said(before))
                    waiting[event.index] = event
                case Done():
                    parts.append(self._said(waiting.pop(event.index, Delta(event.index, "")), event))
        parts += [self._said(delta) for delta in waiting.values()]
        return b"".join(parts)

    def _said(self, event: Delta, done: Done | None = None, prompt: Scored | None = None) -> bytes:
        choice = self._choices[event.index]
        self._take(event, prompt)
        text = "".join(choice.content)
        if self._rules.full_text:
            choice.content = [text]
        else:
            choice.content = []
        chunk = self._envelope("text_completion") | {"choices": [self._choice(event.index, text, done)]}
        if done is not None:
            if self._rules.full_text:
                chunk["full_text"] = text
            chunk["usage"] = self._usage(done.usage, choice.costs)
        return frame(chunk)

    # -- in one piece

    def add(self, events: Sequence[Event]) -> None:
        """Collect the output of these events by choice."""
        for event in events:
            match event:
                case Delta():
                    self._take(event)
                case Done():
                    self._choices[event.index].done = event
                case Scored() if self.request.want.echo:
                    for index in self._of(event):
                        self._take(Delta(index, event.text), event)

    def body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        told = [self._choice(index, "".join(choice.content), choice.done) for index, choice in enumerate(self._choices)]
        answer = self._envelope("text_completion")
        return encode(answer | {"choices": told, "usage": self._usage(usage, self._costs)})

    # -- shared by both

    def _of(self, event: Scored) -> range:
        """Return the indexes of a prompt's choices."""
        return range(event.prompt * self._each, (event.prompt + 1) * self._each)

    def _take(self, event: Delta, prompt: Scored | None = None) -> None:
        choice, scores = self._choices[event.index], self._scores[event.index]
        if event.part != "tool":
            choice.content.append(event.text)
        choice.take(event.tokens)
        choice.tokens = []
        if scores is not None and prompt is not None:
            scores.echo(prompt.tokens, prompt.text)
        elif scores is not None:
            scores.add(event.tokens)

    def _choice(self, index: int, text: str, done: Done | None) -> dict[str, Any]:
        scores = self._scores[index]
        taken = None if scores is None else scores.take()
        return {
            "index": index,
            "text": text,
            "logprobs": None if taken is None else {name: taken[name] for name in sorted(taken)},
            "stop_reason": None if done is None or self._rules.strict else done.stop,
            "finish_reason": None if done is None else "length" if done.reason == "length" else "stop",
        }


def _prompts(body: Fields, rules: Rules) -> list[Prompt]:
    """Read a prompt; lenient rules also accept a list of prompts. Raises BadRequest."""
    value = body.raw("prompt")
    if value is None:
        raise body.fail("prompt", MISSING)
    if not rules.strict and isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > MAX_PROMPTS:
            raise body.fail("prompt", f"At most {MAX_PROMPTS} prompts are allowed, but got {len(value)}")
        return [_prompt(body, each, rules) for each in value]
    return [_prompt(body, value, rules)]


def _prompt(body: Fields, value: Any, rules: Rules) -> Prompt:
    if isinstance(value, str):
        length, most = size(value), rules.limit << 20
        if not 0 < length <= most:
            raise body.fail("prompt", LENGTH.format(most, length))
        return Text(value)
    if not isinstance(value, list):
        raise body.fail("prompt", TYPE)
    if not value:
        raise body.fail("prompt", PROMPT.empty)
    if set(map(type, value)) != {int}:
        raise body.fail("prompt", "All elements of the prompt array must be integers.")
    if not 0 <= min(value) <= max(value) <= I32:
        raise body.fail("prompt", "All elements of the prompt array must be integers.")
    return Tokens(value)
