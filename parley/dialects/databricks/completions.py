"""Prompts and their completions, in Databricks' format.

Unless ``use_raw_prompt`` is set, a prompt becomes a user's turn in the chat template. ``suffix`` is appended to each
choice. Under strict rules a choice's index is its prompt's, as documented, and the answer names no model; under lenient
rules choices are numbered consecutively.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from parley.dialects.databricks import members
from parley.dialects.databricks.answer_parts import RunningTokenCount, answer_uuid, served_model_header
from parley.dialects.databricks.api_rules import DatabricksRules
from parley.dialects.databricks.error_answers import databricks_failure_events
from parley.dialects.databricks.members import wants_usage
from parley.dialects.databricks.refusal_wording import DatabricksErrorWording
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai.common_members import MAX_TOKENS, read_capped_choices, read_openai_sampling
from parley.dialects.openai.reading_rules import ReadingRules
from parley.dialects.openai.token_objects import FINISH_REASONS
from parley.dialects.openai.token_usage import running_usage
from parley.dialects.reply import HeaderList, Reply, RequestTimings
from parley.dialects.request_context import RequestContext
from parley.dialects.sampling_members import MAX_STOP_CHARACTERS, MAX_STOPS
from parley.dialects.sse import STREAM_DONE, data_event
from parley.errors import ParleyError
from parley.types import (
    ChoiceDelta,
    ChoiceDone,
    Event,
    OutputOptions,
    PromptScored,
    Request,
    StopConditions,
    TextPrompt,
    Usage,
)

COMPLETION_WORDING = DatabricksErrorWording("Completion")
MAX_COMPLETION_PROMPTS = 1024
MAX_SUFFIX = 1 << 20  # characters


def read_databricks_completion(
    rules: DatabricksRules, body: bytes, context: RequestContext
) -> DatabricksCompletionReply:
    """Read a completion request. Raises BadRequest."""
    return DatabricksCompletionReply(rules, decode_fields(body, COMPLETION_WORDING), context)


class DatabricksCompletionReply(Reply):
    """A reply to one or more prompts, as a stream of chunks or in one piece."""

    ping_bytes: ClassVar[bytes] = b""

    def __init__(self, rules: DatabricksRules, body: Fields, context: RequestContext):
        if rules.strict:
            members.check_databricks_members(body, members.COMPLETION_TREE)
            members.check_sampling_ranges(body)
        members.check_client_information(body)
        raw = body.boolean("use_raw_prompt", False)
        prompts = _read_databricks_prompts(body)
        max_tokens = body.integer("max_tokens", None, 1, MAX_TOKENS)
        behavior = body.string("error_behavior", "error", allowed=("error", "truncate"))
        stream = body.boolean("stream", False)
        counts = read_capped_choices(body, len(prompts), ReadingRules(best_of=False))
        self.request = Request(
            id=context.unique_id,
            model=body.string("model", "", cap=256),
            prompts=[TextPrompt(text, as_user_turn=not raw) for text in prompts],
            sampling=read_openai_sampling(body),
            stop_conditions=StopConditions(
                strings=body.strings("stop", cap=MAX_STOPS, total=MAX_STOP_CHARACTERS),
                max_tokens=max_tokens,
                reserved_tokens=1 if behavior == "truncate" else None,
            ),
            output_options=OutputOptions(echo=body.boolean("echo", False), ids=True, unparsed=True),
            **counts._asdict(),
            stream=stream,
            return_partial=behavior == "truncate",
        )
        self._suffix = body.string("suffix", "", cap=MAX_SUFFIX)
        self._with_usage = wants_usage(body, stream)
        self._rules = rules
        self._context = context
        self._token_count = RunningTokenCount()
        self._texts: list[list[str]] = [[] for _ in range(counts.n * len(prompts))]
        self._done_events: dict[int, ChoiceDone] = {}

    # -- streaming

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return a chunk for each event that has output; each reports the usage up to it."""
        parts: list[bytes] = []
        for event in events:
            self._token_count.count_event(event)
            match event:
                case ChoiceDelta(index, text) if text:
                    parts.append(self._choice_frame(self._databricks_choice(index, text, None)))
                case ChoiceDone(index):
                    parts.append(self._choice_frame(self._databricks_choice(index, self._suffix, event)))
                case PromptScored(prompt, text=text):
                    parts += [
                        self._choice_frame(self._databricks_choice(index, text, None))
                        for index in self.request.prompt_choices(prompt)
                    ]
        return b"".join(parts)

    def finish_stream(self, usage: Usage) -> bytes:
        """Return the mark that ends a stream."""
        return STREAM_DONE

    def fail_stream(self, error: ParleyError) -> bytes:
        """Return the error event that ends the stream."""
        return databricks_failure_events(error)

    def _choice_frame(self, choice: dict[str, Any]) -> bytes:
        usage = {"usage": self._token_count.usage_so_far()} if self._with_usage else {}
        return data_event(self._databricks_envelope([choice]) | usage)

    # -- in one piece

    def add_events(self, events: Sequence[Event]) -> None:
        """Collect the text of these events by choice; an echoed prompt comes first."""
        for event in events:
            match event:
                case ChoiceDelta(index, text):
                    self._texts[index].append(text)
                case ChoiceDone(index):
                    self._done_events[index] = event
                case PromptScored(prompt, text=text):
                    for index in self.request.prompt_choices(prompt):
                        self._texts[index].insert(0, text)

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        choices = [
            self._databricks_choice(index, "".join(text) + self._suffix, self._done_events[index])
            for index, text in enumerate(self._texts)
        ]
        usage_object = running_usage(usage.prompt_tokens, usage.completion_tokens)
        return encode_json(self._databricks_envelope(choices) | {"usage": usage_object})

    def answer_headers(self, timings: RequestTimings | None) -> HeaderList:
        """Return the header that names the served model."""
        return served_model_header(self)

    # -- shared by both

    def _databricks_choice(self, index: int, text: str, done: ChoiceDone | None) -> dict[str, Any]:
        finish = None if done is None else FINISH_REASONS[done.reason]
        choice = {
            "index": index // self.request.n if self._rules.strict else index,
            "text": text,
            "finish_reason": finish,
        }
        if not self._rules.strict and not self.request.stream:
            choice["finishReason"] = finish  # the name that Databricks' SDK reads
        return choice

    def _databricks_envelope(self, choices: list[Any]) -> dict[str, Any]:
        model_member = {} if self._rules.strict else {"model": self.request.model}
        return {
            "id": f"cmpl_{answer_uuid(self._context)}",
            "object": "text_completion",
            "created": self._context.created,
            **model_member,
            "choices": choices,
        }


def _read_databricks_prompts(body: Fields) -> list[str]:
    prompts = body.strings("prompt", cap=MAX_COMPLETION_PROMPTS, total=2**31)
    if not prompts:
        raise body.empty_member("prompt", "array") if body.has_value("prompt") else body.missing_member("prompt")
    return prompts
