"""``POST /``, ``/generate``, ``/generate_stream``, ``/invocations``: text and parameters in, text and details out.

A stream has one event per token, and the last token's event also holds the whole text. So tokens that arrive in one
batch with the end of a choice wait for it; all others are sent at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from parley.dialects import vectors
from parley.dialects.fields import MAX_U64, Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.reply import Answer, HeaderList, Reply, RequestTimings
from parley.dialects.request_context import RequestContext
from parley.dialects.tgi import chat, completions, images, parameters
from parley.dialects.tgi.answer_parts import TGI_FIELD_NAMES, tgi_answer_headers, tgi_event, tgi_finish_reason
from parley.dialects.tgi.api_rules import TgiRules
from parley.dialects.tgi.error_answers import error_as_stream, tgi_failure_event
from parley.errors import InvalidValue, ParleyError, Unsupported, WrongType
from parley.types import (
    ChoiceDelta,
    ChoiceDone,
    Event,
    OutputOptions,
    PromptAccepted,
    PromptScored,
    Request,
    TextPrompt,
    TokenInfo,
    Usage,
)

INDEX_MEMBER = b'"index":%d,'
TOKEN_EVENT = b'%b{%b"token":{"id":%d,"text":%b,"logprob":%b,"special":%b},"generated_text":null,"details":null}\n\n'
# Used in the last event if a choice ends without a token of its own.
EMPTY_TOKEN = TokenInfo(0, "", b"", is_special=True)


def read_generate_any(rules: TgiRules, body: bytes, context: RequestContext) -> Reply | Answer:
    """Read a body; its member ``stream`` selects a stream or one answer, a list. Both include the prompt by default."""
    fields = decode_fields(body, rules.wording)
    return _reply_by_stream_member(rules, fields, context)


def read_generate(rules: TgiRules, body: bytes, context: RequestContext) -> TgiGenerateReply:
    """Read a request for an answer in one piece. Raises BadRequest."""
    return TgiGenerateReply(rules, decode_fields(body, rules.wording), context, stream=False)


def read_generate_stream(rules: TgiRules, body: bytes, context: RequestContext) -> TgiGenerateReply | Answer:
    """Read a request for a stream. Raises BadRequest."""
    return _stream_reply(rules, decode_fields(body, rules.wording), context)


def read_sagemaker(rules: TgiRules, body: bytes, context: RequestContext) -> Reply | Answer:
    """Read a body of ``POST /``, a conversation or a completion, recognized by its members. Raises BadRequest."""
    fields = decode_fields(body, rules.wording)
    if fields.has_value("inputs") or rules.old:
        return _reply_by_stream_member(rules, fields, context)
    if fields.has_value("messages"):
        return chat.tgi_chat_reply(rules, fields, context)
    if fields.has_value("prompt"):
        return completions.tgi_completion_reply(rules, fields, context)
    raise WrongType("data did not match any variant of untagged enum SagemakerRequest")


def _reply_by_stream_member(rules: TgiRules, fields: Fields, context: RequestContext) -> TgiGenerateReply | Answer:
    if rules.strict and fields.is_null("stream"):
        raise fields.mistyped_member("stream", "a boolean")
    if fields.boolean("stream", False):
        return _stream_reply(rules, fields, context, with_prompt=True)
    return TgiGenerateReply(rules, fields, context, stream=False, with_prompt=True, as_list=True)


def _stream_reply(
    rules: TgiRules, fields: Fields, context: RequestContext, *, with_prompt: bool = False
) -> TgiGenerateReply | Answer:
    try:
        return TgiGenerateReply(rules, fields, context, stream=True, with_prompt=with_prompt)
    except (InvalidValue, Unsupported) as error:
        if rules.strict:
            return error_as_stream(error, rules)
        raise


class TokenDecoder:
    """Decodes tokens to text incrementally: an incomplete character adds nothing until it is complete."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def decode_token(self, token: TokenInfo) -> str:
        """Return the text that this token adds."""
        return token.text if token.is_special else self._decoder.decode(token.raw_bytes)


class GeneratedChoice:
    """The tokens and text of one choice so far."""

    def __init__(self) -> None:
        self.text_parts: list[str] = []
        self.token_objects: list[dict[str, Any]] = []
        self.top_tokens: list[list[dict[str, Any]]] = []
        self.decoder = TokenDecoder()
        self.logprob_sum = 0.0  # of log-probabilities
        self.done_event: ChoiceDone | None = None

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of the tokens."""
        return self.logprob_sum / max(1, len(self.token_objects))


class TgiGenerateReply(Reply):
    """A reply to one text, as a stream of token events or in one piece."""

    media_type: ClassVar[str] = "text/event-stream"
    field_names: ClassVar[Mapping[str, str]] = TGI_FIELD_NAMES
    ping_bytes: ClassVar[bytes] = b":\n\n"
    ping_interval: ClassVar[float | None] = 15.0

    def __init__(
        self,
        rules: TgiRules,
        body: Fields,
        context: RequestContext,
        *,
        stream: bool,
        with_prompt: bool = False,
        as_list: bool = False,
    ):
        inputs = body.string("inputs", None)
        if inputs is None:
            raise (
                body.mistyped_member("inputs", "a string") if body.is_null("inputs") else body.missing_member("inputs")
            )
        params = parameters.read_tgi_parameters(body, rules)
        parameters.check_tgi_parameters(params, rules, empty=not inputs, stream=stream, context=context.context_length)
        n = max(1, params.best_of or 1)
        self._details = params.details or params.decoder_input_details
        with_tokens = stream or self._details or n > 1
        self.request = Request(
            id=context.unique_id,
            model="",
            prompts=[TextPrompt(inputs) if rules.old else images.read_text_with_images(inputs, "inputs", context)],
            sampling=params.neutral_sampling,
            grammar=params.build_grammar("grammar"),
            stop_conditions=params.stop_conditions,
            output_options=OutputOptions(
                logprobs=(params.top_n_tokens or 0) if with_tokens else None,
                prompt_logprobs=0 if params.decoder_input_details else None,
            ),
            n=n,
            stream=stream,
            max_prompt_tokens=params.truncate,
            adapter=parameters.choose_adapter(params.adapter_id, rules, context),
        )
        with_prompt = with_prompt if params.return_full_text is None else params.return_full_text
        self._text_start = inputs if with_prompt else ""
        self._characters = len(inputs)
        self._rules, self._params = rules, params
        self._as_list = as_list
        self._device = context.device
        self._choices = [GeneratedChoice() for _ in range(n)]
        self._best_index = 0
        self._event_count = 0
        self._seed = 0
        self._prompt_tokens = 0
        self._prefill: list[dict[str, Any]] = []

    # -- streaming

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return an event for each token of these events."""
        choice = self._choices[0]
        tokens: list[TokenInfo] = []
        frames: list[bytes] = []
        for event in events:
            match event:
                case ChoiceDelta():
                    choice.text_parts.append(event.text)
                    tokens += event.tokens
                case ChoiceDone():
                    last = tokens.pop() if tokens else EMPTY_TOKEN
                    frames += [self._token_frame(token) for token in tokens]
                    frames.append(self._token_frame(last, event))
                    tokens = []
                case PromptAccepted():
                    self._take_accepted(event)
        frames += [self._token_frame(token) for token in tokens]
        return b"".join(frames)

    def finish_stream(self, usage: Usage) -> bytes:
        """Return nothing: the last token's event ends the stream."""
        return b""

    def fail_stream(self, error: ParleyError) -> bytes:
        """Return the error event that ends the stream."""
        return tgi_failure_event(error, self._rules)

    def render_refusal(self, error: ParleyError) -> Answer | None:
        """Return an error before the first event; strict streams report it with status 200."""
        return error_as_stream(error, self._rules) if self._rules.strict and self.request.stream else None

    def _token_frame(self, token: TokenInfo, done: ChoiceDone | None = None) -> bytes:
        self._event_count += 1
        text = self._choices[0].decoder.decode_token(token)
        top = token.top_tokens if self._params.top_n_tokens else []
        if done is None and not top:  # the fast path, for nearly all events
            logprob = encode_json(vectors.shortest_float32(token.logprob))
            special = b"true" if token.is_special else b"false"
            index = b"" if self._rules.old else INDEX_MEMBER % self._event_count
            return TOKEN_EVENT % (self._rules.line_prefix, index, token.id, encode_json(text), logprob, special)
        event: dict[str, Any] = {} if self._rules.old else {"index": self._event_count}
        event["token"] = _token_object(token, text)
        if top:
            event["top_tokens"] = [_token_object(other, other.text) for other in top]
        event["generated_text"] = event["details"] = None
        if done is not None:
            event["generated_text"] = self._text_start + "".join(self._choices[0].text_parts)
            if self._details:
                event["details"] = self._end_details(0, done)
                if not self._rules.old:
                    event["details"]["input_length"] = self._prompt_tokens
        return tgi_event(event, self._rules)

    # -- in one piece

    def add_events(self, events: Sequence[Event]) -> None:
        """Collect the tokens and text of these events by choice."""
        for event in events:
            match event:
                case ChoiceDelta():
                    self._collect_delta(self._choices[event.index], event)
                case ChoiceDone():
                    self._choices[event.index].done_event = event
                case PromptAccepted():
                    self._take_accepted(event)
                case PromptScored():
                    self._prefill = [_scored_token(token, token.text) for token in event.tokens]

    def _collect_delta(self, choice: GeneratedChoice, delta: ChoiceDelta) -> None:
        choice.text_parts.append(delta.text)
        for token in delta.tokens:
            choice.token_objects.append(_token_object(token, choice.decoder.decode_token(token)))
            choice.logprob_sum += token.logprob or 0.0
            if self._params.top_n_tokens and token.top_tokens:
                choice.top_tokens.append([_token_object(other, other.text) for other in token.top_tokens])

    def render_body(self, usage: Usage) -> bytes:
        """Return the choice with the highest mean log-probability as JSON, the others in its details."""
        # the first of equals, because it used the seed that was given or is reported
        self._best_index = max(range(len(self._choices)), key=lambda k: (self._choices[k].mean_logprob, -k))
        answer: dict[str, Any] = {"generated_text": self._choice_text(self._best_index)}
        if self._details:
            details = self._choice_details(self._best_index)
            top = details.pop("top_tokens", None)
            other_indexes = [k for k in range(len(self._choices)) if k != self._best_index]
            if other_indexes:
                details["best_of_sequences"] = [
                    {"generated_text": self._choice_text(k), **self._choice_details(k)} for k in other_indexes
                ]
            if top:
                details["top_tokens"] = top
            answer["details"] = details
        return encode_json([answer] if self._as_list else answer)

    def answer_headers(self, timings: RequestTimings | None) -> HeaderList:
        """Return the timing and token headers."""
        done = self._choices[self._best_index].done_event
        generated = done.usage.completion_tokens if done is not None else 0
        return tgi_answer_headers(self._rules, self._device, self._characters, timings, self._prompt_tokens, generated)

    def _choice_text(self, index: int) -> str:
        return self._text_start + "".join(self._choices[index].text_parts)

    def _choice_details(self, index: int) -> dict[str, Any]:
        """Return the details of one choice."""
        choice = self._choices[index]
        assert choice.done_event is not None
        details = self._end_details(index, choice.done_event) | {
            "prefill": self._prefill,
            "tokens": choice.token_objects,
        }
        return details | {"top_tokens": choice.top_tokens} if choice.top_tokens else details

    # -- shared by both

    def _take_accepted(self, event: PromptAccepted) -> None:
        self._seed = event.seed
        self._prompt_tokens = len(event.token_ids)

    def _end_details(self, index: int, done: ChoiceDone) -> dict[str, Any]:
        generated = done.usage.completion_tokens
        return {
            "finish_reason": tgi_finish_reason(done, self._params.max_new_tokens),
            "generated_tokens": generated,
            "seed": (self._seed + index) & MAX_U64 if self._params.draws_tokens else None,
        }


def _token_object(token: TokenInfo, text: str) -> dict[str, Any]:
    return _scored_token(token, text) | {"special": token.is_special}


def _scored_token(token: TokenInfo, text: str) -> dict[str, Any]:
    return {"id": token.id, "text": text, "logprob": vectors.shortest_float32(token.logprob)}
