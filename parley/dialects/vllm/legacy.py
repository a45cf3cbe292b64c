"""``POST /generate`` of vLLM's old demo server: a prompt and sampling members in, texts that begin with the prompt out.

A stream is a sequence of JSON records, each with the whole text so far of all choices, terminated by NUL up to version
0.6.3 and by a newline since. It has no content type. Clients of many servers still use this form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from parley.dialects import output_constraints, sampling_members
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai import vllm_members
from parley.dialects.openai.common_members import (
    MAX_TOKENS,
    read_stop_conditions,
    read_stream_interval,
    unsupported_member_error,
)
from parley.dialects.openai.reading_rules import OPENAI_RULES, ReadingRules
from parley.dialects.reply import Answer, Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.sampling_members import MAX_ALTERNATIVES, ChoiceCounts
from parley.dialects.vllm.error_answers import vllm_error_answer
from parley.dialects.vllm.refusal_wording import VLLM_WORDING
from parley.errors import BadRequest, ParleyError
from parley.types import (
    ChoiceDelta,
    ChoiceDone,
    Event,
    Grammar,
    OutputOptions,
    Prompt,
    PromptScored,
    Request,
    TextPrompt,
    TokensPrompt,
    Usage,
)

DEFAULT_TOKENS = 16
MAX_TEMPERATURE = 3.4028234663852886e38
PLAIN_500 = Answer(500, b"Internal Server Error", b"text/plain; charset=utf-8")

# Arguments of the original's sampling parameters, from all versions that had this server.
KNOWN_MEMBERS = {
    "prompt", "stream", "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature",
    "top_p", "top_k", "min_p", "seed", "use_beam_search", "length_penalty", "early_stopping", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "detokenize",
    "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "logit_bias", "logits_processors",
    "bad_words", "allowed_token_ids", "guided_decoding", "structured_outputs",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DemoVersion:
    """The version of the server. ``strict``: as in the original, unknown members are refused, and every refusal is a
    plain 500."""

    strict: bool
    terminator: bytes = b"\n"


LENIENT_VERSION = DemoVersion(strict=False)
STRICT_VERSION = DemoVersion(strict=True)
OLD_VERSION = DemoVersion(strict=True, terminator=b"\0")


def read_demo_request(version: DemoVersion, body: bytes, context: RequestContext) -> DemoGenerateReply:
    """Read a request. Raises BadRequest."""
    fields = decode_fields(body, VLLM_WORDING)
    unknown = set(fields.member_names) - KNOWN_MEMBERS
    if version.strict and unknown:
        raise fields.member_error(min(unknown), "is not a sampling parameter.")
    return DemoGenerateReply(version, fields, context)


def render_plain_error(error: ParleyError) -> Answer:
    """Return a plain 500 for a wrong request, as the original did, and vLLM's form for other errors."""
    return PLAIN_500 if isinstance(error, BadRequest) else vllm_error_answer(error)


class DemoGenerateReply(Reply):
    """A request of the demo server."""

    field_names: ClassVar[Mapping[str, str]] = {"stop_ids": "stop_token_ids"}
    media_type: ClassVar[str] = ""
    reading_rules: ClassVar[ReadingRules] = OPENAI_RULES

    def __init__(self, version: DemoVersion, body: Fields, context: RequestContext):
        prompt = _read_demo_prompt(body)
        max_tokens = body.integer("max_tokens", DEFAULT_TOKENS, 1, MAX_TOKENS)
        counts = _read_demo_choices(body)
        _check_ignored_members(body)
        extra_members = vllm_members.read_vllm_members(body, context, max_tokens=max_tokens)
        stream = body.raw_value("stream")
        self.request = Request(
            id=context.unique_id,
            model="",
            prompts=[prompt],
            sampling=sampling_members.read_sampling(body, max_temperature=MAX_TEMPERATURE),
            stop_conditions=read_stop_conditions(body, max_tokens, self.reading_rules),
            output_options=OutputOptions(
                echo=isinstance(prompt, TokensPrompt),
                skip_special=body.boolean("skip_special_tokens", True),
                stream_interval=read_stream_interval(body),
            ),
            banned_words=sampling_members.read_bad_words(body),
            **counts._asdict(),
            grammar=output_constraints.only_constraint(extra_members.grammar, _read_guided_decoding(body)),
            stream=bool(stream),
            **extra_members.request_members,
        )
        self._version = version
        self._texts = [[prompt.text] if isinstance(prompt, TextPrompt) else [] for _ in range(counts.n)]

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return a record with the whole text of all choices so far, or nothing if these events have no output."""
        if not any(isinstance(event, ChoiceDelta | ChoiceDone) for event in events):
            self.add_events(events)
            return b""
        self.add_events(events)
        return json.dumps({"text": self._whole_texts()}).encode() + self._version.terminator

    def finish_stream(self, usage: Usage) -> bytes:
        """Return nothing: the last record ends the stream."""
        return b""

    def fail_stream(self, error: ParleyError) -> bytes:
        """Raise the error, which cuts the connection: a stream has no record for errors."""
        raise error

    def add_events(self, events: Sequence[Event]) -> None:
        """Collect the text of these events by choice; an echoed prompt comes first."""
        for event in events:
            match event:
                case ChoiceDelta():
                    self._texts[event.index].append(event.text)
                case PromptScored():
                    for text in self._texts:
                        text.insert(0, event.text)

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole text of each choice as JSON."""
        return encode_json({"text": self._whole_texts()})

    def _whole_texts(self) -> list[str]:
        """Return the whole text of each choice so far, and keep it in one piece."""
        texts = ["".join(text) for text in self._texts]
        self._texts = [[text] for text in texts]
        return texts


def _read_demo_prompt(body: Fields) -> Prompt:
    """Read the prompt: a text, or an object with a text or with token ids."""
    value = body.raw_value("prompt")
    if value is None:
        raise body.missing_member("prompt")
    if isinstance(value, str):
        return TextPrompt(value)
    if not isinstance(value, dict):
        raise body.mistyped_member("prompt", "a string")
    prompt_object = body.object("prompt")
    assert prompt_object is not None
    ids = prompt_object.integers("prompt_token_ids", cap=2**31, low=0, high=sampling_members.MAX_TOKEN_ID)
    if ids:
        return TokensPrompt(ids)
    text = prompt_object.string("prompt", None)
    if text is None:
        raise prompt_object.missing_member("prompt")
    return TextPrompt(text)


def _read_demo_choices(body: Fields) -> ChoiceCounts:
    counts = sampling_members.read_choice_counts(body)
    if counts.beam is not None:
        if counts.beam.width < 2:
            raise body.member_error("best_of", "must be greater than 1 when using beam search.")
        if body.number("temperature", 1.0) != 0:
            raise body.member_error("temperature", "must be 0 when using beam search.")
    return counts


def _check_ignored_members(body: Fields) -> None:
    """Check the members that are accepted without effect: this form has no log-probabilities."""
    body.integer("logprobs", None, -1, MAX_ALTERNATIVES)
    body.integer("prompt_logprobs", None, -1, MAX_ALTERNATIVES)
    if not body.boolean("detokenize", True):
        raise unsupported_member_error(body, "detokenize", "An answer without text is")


def _read_guided_decoding(body: Fields) -> Grammar | None:
    """Read ``guided_decoding``, the older name of ``structured_outputs``."""
    options = body.object("guided_decoding")
    return output_constraints.read_structured_outputs(options) if options is not None and options.member_names else None
