"""TGI's ``POST /v1/completions``: reads one or more texts, writes a chunk for each token or one whole answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parley.dialects.fields import MAX_F32, MAX_U32, Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.reply import Answer, HeaderList, RequestTimings
from parley.dialects.request_context import RequestContext
from parley.dialects.tgi import images, openai, parameters
from parley.dialects.tgi.answer_parts import tgi_event
from parley.dialects.tgi.api_rules import TgiRules
from parley.dialects.tgi.parameters import TgiParameters
from parley.dialects.tgi.refusal_wording import TGI_WORDING
from parley.errors import InvalidValue, WrongType
from parley.types import ChoiceDelta, ChoiceDone, Event, OutputOptions, PromptAccepted, Request, Usage

FINISH_REASONS = {"eos_token": "stop"}  # for answers in one piece; streams end with native reasons


def read_tgi_completion(rules: TgiRules, body: bytes, context: RequestContext) -> TgiCompletionReply | Answer:
    """Read the body of a completion request. Raises BadRequest."""
    return tgi_completion_reply(rules, decode_fields(body, rules.wording), context)


def tgi_completion_reply(rules: TgiRules, body: Fields, context: RequestContext) -> TgiCompletionReply | Answer:
    """Return the reply to a decoded completion request, or an error as a stream. Raises BadRequest."""
    reply: TgiCompletionReply | Answer = openai.reply_or_error_stream(
        rules, body, lambda: TgiCompletionReply(rules, body, context)
    )
    return reply


class TgiCompletionReply(openai.TgiOpenAIReply):
    """A reply to one or more texts, as a stream of chunks or in one piece."""

    def __init__(self, rules: TgiRules, body: Fields, context: RequestContext):
        stream = openai.read_stream_member(body, rules)
        texts = _read_prompt_texts(body)
        params = TgiParameters(
            **openai.read_shared_members(body, rules),
            repetition_penalty=body.number("repetition_penalty", None, -MAX_F32, MAX_F32),
            max_new_tokens=body.integer("max_tokens", None, 0, MAX_U32),
        )
        if body.string("suffix", None) is not None:
            raise InvalidValue(
                "Suffix is not supported and can be achieved by preprocessing the prompt.",
                field="suffix",
                code="suffix not supported",
            )
        if len(texts) > rules.max_prompts:
            raise InvalidValue(
                f"Number of prompts exceeds the maximum allowed batch size of {rules.max_prompts}",
                field="prompt",
                code="batch size exceeded",
            )
        parameters.check_tgi_parameters(
            params, rules, empty=not all(texts), stream=stream, context=context.context_length
        )
        super().__init__(body, rules, context, params, sum(map(len, texts)))
        self.request = Request(
            id=context.unique_id,
            model=self._requested_model(),
            prompts=[images.read_text_with_images(text, "prompt", context) for text in texts],
            sampling=params.neutral_sampling,
            stop_conditions=params.stop_conditions,
            output_options=OutputOptions(ids=stream),
            stream=stream,
        )
        self._texts: list[list[str]] = [[] for _ in texts]
        self._prompt_lengths = [0] * len(texts)
        self._done_events: list[ChoiceDone] = []  # in the order the choices ended; the answer keeps it

    # -- streaming

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return a chunk for each token of these events."""
        frames: list[bytes] = []
        pending: dict[int, str] = {}  # last text of each choice, held back until it is known whether it is the last
        for event in events:
            match event:
                case ChoiceDelta(index):
                    for text in [text for _, text in openai.split_delta(event)] or [event.text]:
                        if index in pending:
                            frames.append(self._completion_chunk(index, pending[index]))
                        pending[index] = text
                case ChoiceDone(index):
                    frames.append(self._last_chunk(index, pending.pop(index, ""), event))
                case PromptAccepted():
                    self._prompt_lengths[event.prompt] = len(event.token_ids)
        frames += [self._completion_chunk(index, text) for index, text in pending.items()]
        return b"".join(frames)

    def _completion_chunk(self, index: int, text: str) -> bytes:
        chunk_object = {
            "object": "text_completion",
            "id": "",
            "created": self._context.created,
            "choices": [_choice_object(index, text, "")],
            "model": self._model_name(),
            "system_fingerprint": openai.SYSTEM_FINGERPRINT,
        }
        return tgi_event(chunk_object)

    def _last_chunk(self, index: int, text: str, done: ChoiceDone) -> bytes:
        choice_usage = Usage(self._prompt_lengths[index], done.usage.completion_tokens)
        return tgi_event(self._completion_object([_choice_object(index, text, self._end_reason(done))], choice_usage))

    # -- in one piece

    def add_events(self, events: Sequence[Event]) -> None:
        """Collect the text of these events by choice."""
        for event in events:
            match event:
                case ChoiceDelta(index, text):
                    self._texts[index].append(text)
                case ChoiceDone():
                    self._done_events.append(event)

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        self._usage = usage
        choices = []
        for done in self._done_events:
            native_reason = self._end_reason(done)
            choices.append(
                _choice_object(
                    done.index, "".join(self._texts[done.index]), FINISH_REASONS.get(native_reason, native_reason)
                )
            )
        return encode_json(self._completion_object(choices, usage))

    def answer_headers(self, timings: RequestTimings | None) -> HeaderList:
        """Return the usual headers without ``x-compute-time``: the prompts may have been computed separately."""
        return [header for header in super().answer_headers(timings) if header[0] != b"x-compute-time"]

    def _completion_object(self, choices: list[Any], total_usage: Usage) -> dict[str, Any]:
        return {
            "object": "text_completion",
            "id": "",
            "created": self._context.created,
            "model": self._model_name(),
            "system_fingerprint": openai.SYSTEM_FINGERPRINT,
            "choices": choices,
            "usage": openai.tgi_usage_object(total_usage),
        }


def _choice_object(index: int, text: str, reason: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def _read_prompt_texts(body: Fields) -> list[str]:
    """Read a text or a list of texts. Token ids are refused as a wrong type."""
    value = body.raw_value("prompt")
    if value is None:
        raise (
            body.mistyped_member("prompt", "a string or an array of strings")
            if body.is_null("prompt")
            else body.missing_member("prompt")
        )
    if isinstance(value, str):
        return [value]
    if value == []:
        raise WrongType("prompt: Empty array detected. Do not use an empty array for the prompt.", field="prompt")
    for number, text in enumerate(body.array("prompt", cap=MAX_U32)):
        if not isinstance(text, str):
            raise TGI_WORDING.type_error(f"prompt[{number}]", "a string", text)
    return list(value)
