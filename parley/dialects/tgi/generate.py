"""``POST /``, ``/generate``, ``/generate_stream``, ``/invocations``: text and parameters in, text and details out.

A stream has one event per token, and the last token's event also holds the whole text. So tokens that arrive in one
batch with the end of a choice wait for it; all others are sent at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from parley.dialects.dialect import Answer, Head, Headers, Reply, Timings
from parley.dialects.fields import Fields, decode
from parley.dialects.tgi import chat, completions, parameters, shared
from parley.dialects.tgi.shared import WORDS, Rules
from parley.errors import Invalid, ParleyError, Unsupported, WrongType
from parley.types import Accepted, Delta, Done, Event, Request, Scored, Text, Token, Usage, Want

INDEX = b'"index":%d,'
TOKEN = b'%b{%b"token":{"id":%d,"text":%b,"logprob":%b,"special":%b},"generated_text":null,"details":null}\n\n'
ENDLESS = Token(0, "", b"", special=True)  # used in the last event if a choice ends without a token of its own


def either(rules: Rules, body: bytes, head: Head) -> GenerateReply | Answer:
    """Read a body; its member ``stream`` selects a stream or one answer, a list. Both include the prompt by default."""
    return _either(rules, decode(body, WORDS), head)


def whole(rules: Rules, body: bytes, head: Head) -> GenerateReply:
    """Read a request for an answer in one piece. Raises BadRequest."""
    return GenerateReply(rules, decode(body, WORDS), head, stream=False)


def stream(rules: Rules, body: bytes, head: Head) -> GenerateReply | Answer:
    """Read a request for a stream. Raises BadRequest."""
    return _streamed(rules, decode(body, WORDS), head)


def invoked(rules: Rules, body: bytes, head: Head) -> Reply | Answer:
    """Read a body of ``POST /``, a conversation or a completion, recognized by its members. Raises BadRequest."""
    fields = decode(body, WORDS)
    if fields.has("inputs") or rules.old:
        return _either(rules, fields, head)
    if fields.has("messages"):
        return chat.of(rules, fields, head)
    if fields.has("prompt"):
        return completions.of(rules, fields, head)
    raise WrongType("data did not match any variant of untagged enum SagemakerRequest")


def _either(rules: Rules, fields: Fields, head: Head) -> GenerateReply | Answer:
    if rules.strict and fields.null("stream"):
        raise fields.mistyped("stream", "a boolean")
    if fields.boolean("stream", False):
        return _streamed(rules, fields, head, full=True)
    return GenerateReply(rules, fields, head, stream=False, full=True, listed=True)


def _streamed(rules: Rules, fields: Fields, head: Head, *, full: bool = False) -> GenerateReply | Answer:
    try:
        return GenerateReply(rules, fields, head, stream=True, full=full)
    except (Invalid, Unsupported) as error:
        if rules.strict:
            return shared.streamed(error, rules)
        raise


class Spelling:
    """Decodes tokens to text incrementally: an incomplete character adds nothing until it is complete."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: Token) -> str:
        """Return the text that this token adds."""
        return token.text if token.special else self._decoder.decode(token.raw)


class Sequel:
    """The tokens and text of one choice so far."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.tokens: list[dict[str, Any]] = []
        self.top: list[list[dict[str, Any]]] = []
        self.spelling = Spelling()
        self.sum = 0.0  # of log-probabilities
        self.done: Done | None = None

    @property
    def mean(self) -> float:
        """The mean log-probability of the tokens."""
        return self.sum / max(1, len(self.tokens))


class GenerateReply(Reply):
    """A reply to one text, as a stream of token events or in one piece."""

    media_type: ClassVar[str] = "text/event-stream"
    names: ClassVar[Mapping[str, str]] = {"prompt": "inputs"}
    ping: ClassVar[bytes] = b":\n\n"
    silence: ClassVar[float | None] = 15.0

    def __init__(
        self, rules: Rules, body: Fields, head: Head, *, stream: bool, full: bool = False, listed: bool = False
    ):
        inputs = body.string("inputs", None)
        if inputs is None:
            raise body.mistyped("inputs", "a string") if body.null("inputs") else body.missing("inputs")
        wish = parameters.read(body, rules)
        parameters.check(wish, rules, empty=not inputs, stream=stream, context=head.context)
        n = max(1, wish.best_of or 1)
        self._details = wish.details or wish.decoder_input_details
        tokens = stream or self._details or n > 1
        self.request = Request(
            id=head.id,
            model="",
            prompts=[Text(inputs)],
            sampling=wish.sampling,
            grammar=wish.form("grammar"),
            stop=wish.stopping,
            want=Want(
                logprobs=(wish.top_n_tokens or 0) if tokens else None,
                prompt_logprobs=0 if wish.decoder_input_details else None,
            ),
            n=n,
            stream=stream,
            truncate=wish.truncate,
            adapter=wish.adapter_id,
        )
        full = full if wish.return_full_text is None else wish.return_full_text
        self._before = inputs if full else ""
        self._characters = len(inputs)
        self._rules, self._wish = rules, wish
        self._listed = listed
        self._device = head.device
        self._sequels = [Sequel() for _ in range(n)]
        self._best = 0
        self._events = 0
        self._seed = 0
        self._prompt_tokens = 0
        self._prefill: list[dict[str, Any]] = []

    # -- streaming

    def chunk(self, events: Sequence[Event]) -> bytes:
        """Return an event for each token of these events."""
        sequel = self._sequels[0]
        tokens: list[Token] = []
        frames: list[bytes] = []
        for event in events:
            match event:
                case Delta():
                    sequel.text.append(event.text)
                    tokens += event.tokens
                case Done():
                    last = tokens.pop() if tokens else ENDLESS
                    frames += [self._event(token) for token in tokens]
                    frames.append(self._event(last, event))
                    tokens = []
                case Accepted():
                    self._accept(event)
        frames += [self._event(token) for token in tokens]
        return b"".join(frames)

    def end(self, usage: Usage) -> bytes:
        """Return nothing: the last token's event ends the stream."""
        return b""

    def fail(self, error: ParleyError) -> bytes:
        """Return the error event that ends the stream."""
        return shared.failure(error, self._rules)

    def refusal(self, error: ParleyError) -> Answer | None:
        """Return an error before the first event; strict streams report it with status 200."""
        return shared.streamed(error, self._rules) if self._rules.strict and self.request.stream else None

    def _event(self, token: Token, done: Done | None = None) -> bytes:
        self._events += 1
        text = self._sequels[0].spelling.add(token)
        top = token.top if self._wish.top_n_tokens else []
        if done is None and not top:  # the fast path, for nearly all events
            logprob, special = shared.encode(shared.single(token.logprob)), b"true" if token.special else b"false"
            index = b"" if self._rules.old else INDEX % self._events
            return TOKEN % (self._rules.lead, index, token.id, shared.encode(text), logprob, special)
        event: dict[str, Any] = {} if self._rules.old else {"index": self._events}
        event["token"] = _token(token, text)
        if top:
            event["top_tokens"] = [_token(other, other.text) for other in top]
        event["generated_text"] = event["details"] = None
        if done is not None:
            event["generated_text"] = self._before + "".join(self._sequels[0].text)
            if self._details:
                event["details"] = self._end(0, done)
                if not self._rules.old:
                    event["details"]["input_length"] = self._prompt_tokens
        return shared.frame(event, self._rules)

    # -- in one piece

    def add(self, events: Sequence[Event]) -> None:
        """Collect the tokens and text of these events by choice."""
        for event in events:
            match event:
                case Delta():
                    self._add(self._sequels[event.index], event)
                case Done():
                    self._sequels[event.index].done = event
                case Accepted():
                    self._accept(event)
                case Scored():
                    self._prefill = [_scored(token, token.text) for token in event.tokens]

    def _add(self, sequel: Sequel, delta: Delta) -> None:
        sequel.text.append(delta.text)
        for token in delta.tokens:
            sequel.tokens.append(_token(token, sequel.spelling.add(token)))
            sequel.sum += token.logprob or 0.0
            if self._wish.top_n_tokens and token.top:
                sequel.top.append([_token(other, other.text) for other in token.top])

    def body(self, usage: Usage) -> bytes:
        """Return the choice with the highest mean log-probability as JSON, the others in its details."""
        # the first of equals, because it used the seed that was given or is reported
        self._best = max(range(len(self._sequels)), key=lambda k: (self._sequels[k].mean, -k))
        answer: dict[str, Any] = {"generated_text": self._text(self._best)}
        if self._details:
            details = self._told(self._best)
            top = details.pop("top_tokens", None)
            others = [k for k in range(len(self._sequels)) if k != self._best]
            if others:
                details["best_of_sequences"] = [{"generated_text": self._text(k), **self._told(k)} for k in others]
            if top:
                details["top_tokens"] = top
            answer["details"] = details
        return shared.encode([answer] if self._listed else answer)

    def headers(self, timings: Timings | None) -> Headers:
        """Return the timing and token headers."""
        done = self._sequels[self._best].done
        generated = done.usage.completion_tokens if done is not None else 0
        return shared.headers(self._rules, self._device, self._characters, timings, self._prompt_tokens, generated)

    def _text(self, index: int) -> str:
        return self._before + "".join(self._sequels[index].text)

    def _told(self, index: int) -> dict[str, Any]:
        """Return the details of one choice."""
        sequel = self._sequels[index]
        assert sequel.done is not None
        told = self._end(index, sequel.done) | {"prefill": self._prefill, "tokens": sequel.tokens}
        return told | {"top_tokens": sequel.top} if sequel.top else told

    # -- shared by both

    def _accept(self, event: Accepted) -> None:
        self._seed = event.seed
        self._prompt_tokens = len(event.token_ids)

    def _end(self, index: int, done: Done) -> dict[str, Any]:
        generated = done.usage.completion_tokens
        return {
            "finish_reason": shared.reason(done, self._wish.max_new_tokens),
            "generated_tokens": generated,
            "seed": (self._seed + index) & shared.U64 if self._wish.samples else None,
        }


def _token(token: Token, text: str) -> dict[str, Any]:
    return _scored(token, text) | {"special": token.special}


def _scored(token: Token, text: str) -> dict[str, Any]:
    return {"id": token.id, "text": text, "logprob": shared.single(token.logprob)}
