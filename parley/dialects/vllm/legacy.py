"""``POST /generate`` of vLLM's old demo server: a prompt and sampling members in, texts that begin with the prompt out.

A stream is a sequence of JSON records, each with the whole text so far of all choices, terminated by NUL up to version
0.6.3 and by a newline since. It has no content type. Clients of many servers still use this form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from parley.dialects import forms, parameters
from parley.dialects.dialect import Answer, Head, Reply
from parley.dialects.fields import Fields, decode
from parley.dialects.openai import extras
from parley.dialects.openai.shared import MAX_TOKENS, RULES, Rules, interval, stop, unsupported
from parley.dialects.parameters import MAX_TOP, Choices
from parley.dialects.vllm import shared
from parley.dialects.vllm.words import WORDS
from parley.errors import BadRequest, ParleyError
from parley.types import Delta, Done, Event, Grammar, Prompt, Request, Scored, Text, Tokens, Usage, Want

DEFAULT_TOKENS = 16
HOTTEST = 3.4028234663852886e38
MISTAKE = Answer(500, b"Internal Server Error", b"text/plain; charset=utf-8")

# Arguments of the original's sampling parameters, from all versions that had this server.
KNOWN = {
    "prompt", "stream", "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature",
    "top_p", "top_k", "min_p", "seed", "use_beam_search", "length_penalty", "early_stopping", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "detokenize",
    "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "logit_bias", "logits_processors",
    "bad_words", "allowed_token_ids", "guided_decoding", "structured_outputs",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Manner:
    """The version of the server. ``strict``: as in the original, unknown members are refused, and every refusal is a
    plain 500."""

    strict: bool
    terminator: bytes = b"\n"


LENIENT = Manner(strict=False)
STRICT = Manner(strict=True)
OLD = Manner(strict=True, terminator=b"\0")


def read(manner: Manner, body: bytes, head: Head) -> GenerateReply | Answer:
    """Read a request. Raises BadRequest, unless strict."""
    try:
        fields = decode(body, WORDS)
        unknown = set(fields.names) - KNOWN
        if manner.strict and unknown:
            raise fields.fail(min(unknown), "is not a sampling parameter.")
        return GenerateReply(manner, fields, head)
    except BadRequest:
        if manner.strict:
            return MISTAKE
        raise


class GenerateReply(Reply):
    """A request of the demo server."""

    names: ClassVar[Mapping[str, str]] = {"stop_ids": "stop_token_ids"}
    media_type: ClassVar[str] = ""
    rules: ClassVar[Rules] = RULES

    def __init__(self, manner: Manner, body: Fields, head: Head):
        prompt = _prompt(body)
        max_tokens = body.integer("max_tokens", DEFAULT_TOKENS, 1, MAX_TOKENS)
        wish = _choices(body)
        _check(body)
        more = extras.read(body, head, max_tokens=max_tokens)
        stream = body.raw("stream")
        self.request = Request(
            id=head.id,
            model="",
            prompts=[prompt],
            sampling=parameters.sampling(body, hottest=HOTTEST),
            stop=stop(body, max_tokens, self.rules),
            want=Want(
                echo=isinstance(prompt, Tokens),
                skip_special=body.boolean("skip_special_tokens", True),
                interval=interval(body),
            ),
            banned=parameters.bad_words(body),
            **wish._asdict(),
            grammar=forms.one(more.grammar, _guided(body)),
            stream=bool(stream),
            **more.members,
        )
        self._manner = manner
        self._texts = [[prompt.text] if isinstance(prompt, Text) else [] for _ in range(wish.n)]

    def chunk(self, events: Sequence[Event]) -> bytes:
        if not any(isinstance(event, Delta | Done) for event in events):
            self.add(events)
            return b""
        self.add(events)
        return json.dumps({"text": self._told()}).encode() + self._manner.terminator

    def end(self, usage: Usage) -> bytes:
        return b""

    def fail(self, error: ParleyError) -> bytes:
        raise error

    def refusal(self, error: ParleyError) -> Answer | None:
        return MISTAKE if self._manner.strict and isinstance(error, BadRequest) else None

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Delta():
                    self._texts[event.index].append(event.text)
                case Scored():
                    for text in self._texts:
                        text.insert(0, event.text)

    def body(self, usage: Usage) -> bytes:
        return shared.encode({"text": self._told()})

    def _told(self) -> list[str]:
        """Return the whole text of each choice so far, and keep it in one piece."""
        told = ["".join(text) for text in self._texts]
        self._texts = [[text] for text in told]
        return told


def _prompt(body: Fields) -> Prompt:
    """Read the prompt: a text, or an object with a text or with token ids."""
    value = body.raw("prompt")
    if value is None:
        raise body.missing("prompt")
    if isinstance(value, str):
        return Text(value)
    if not isinstance(value, dict):
        raise body.mistyped("prompt", "a string")
    wish = body.object("prompt")
    assert wish is not None
    ids = wish.integers("prompt_token_ids", cap=2**31, low=0, high=parameters.MAX_ID)
    if ids:
        return Tokens(ids)
    text = wish.string("prompt", None)
    if text is None:
        raise wish.missing("prompt")
    return Text(text)


def _choices(body: Fields) -> Choices:
    wish = parameters.choices(body)
    if wish.beam is not None:
        if wish.beam.width < 2:
            raise body.fail("best_of", "must be greater than 1 when using beam search.")
        if body.number("temperature", 1.0) != 0:
            raise body.fail("temperature", "must be 0 when using beam search.")
    return wish


def _check(body: Fields) -> None:
    """Check the members that are accepted without effect: this form has no log-probabilities."""
    body.integer("logprobs", None, -1, MAX_TOP)
    body.integer("prompt_logprobs", None, -1, MAX_TOP)
    if not body.boolean("detokenize", True):
        raise unsupported(body, "detokenize", "An answer without text is")


def _guided(body: Fields) -> Grammar | None:
    """Read ``guided_decoding``, the older name of ``structured_outputs``."""
    wish = body.object("guided_decoding")
    return forms.structured(wish) if wish is not None and wish.names else None
