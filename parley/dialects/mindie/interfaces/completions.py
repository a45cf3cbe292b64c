"""MindIE's ``POST /v1/completions``: text or token ids in, text out. Lenient rules add several prompts and ``echo``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from parley.dialects.fields import MAX_I32, Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.interfaces import openai
from parley.dialects.mindie.interfaces.answers import shared_request_members
from parley.dialects.mindie.interfaces.openai import MindieOpenAIReply
from parley.dialects.mindie.members import choices, constraints, inputs, parameters
from parley.dialects.mindie.members.inputs import PromptInput
from parley.dialects.mindie.members.text_length import utf16_length
from parley.dialects.mindie.refusal_wording import MINDIE_WORDING
from parley.dialects.openai.completions import LogprobLists
from parley.dialects.request_context import RequestContext
from parley.dialects.sse import data_event
from parley.errors import Unsupported
from parley.types import (
    ChoiceDelta,
    ChoiceDone,
    Event,
    OutputOptions,
    Prompt,
    PromptScored,
    Request,
    TextPrompt,
    TokensPrompt,
    Usage,
)

MISSING_PROMPT = "Contains not prompt or prompt null"
WRONG_PROMPT_TYPE = "The type of prompt is abnormal,prompt must be str or integer list."
WRONG_TEXT_LENGTH = "Length of Prompt text should be greater than 0 and less than or equal to {}, but got {}"
NO_PROMPT_TOKENS = (
    f"Length of Prompt token should be greater than 0 and less than or equal to {inputs.MAX_INPUT_IDS}, but got 0"
)
COMPLETION_INPUT = PromptInput(
    "prompt", MISSING_PROMPT, WRONG_PROMPT_TYPE, "Prompt array cannot be empty.", WRONG_TEXT_LENGTH, NO_PROMPT_TOKENS
)
MAX_PROMPTS = 1024


def read_mindie_completion(rules: MindieRules, body: bytes, context: RequestContext) -> MindieCompletionReply:
    """Read a completion request. Raises BadRequest."""
    return MindieCompletionReply(rules, decode_fields(body, MINDIE_WORDING), context)


class MindieCompletionReply(MindieOpenAIReply):
    """A reply to one or more prompts, as a stream of events or in one piece."""

    field_names: ClassVar[Mapping[str, str]] = {**MindieOpenAIReply.field_names, "top_logprobs": "logprobs"}
    unknown_model_text = "Not found given model, please check modelName in config file."

    def __init__(self, rules: MindieRules, body: Fields, context: RequestContext):
        self.model_name = openai.read_mindie_model_name(body, rules)
        prompts = _read_completion_prompts(body, rules)
        interface = parameters.COMPLETIONS_TABLE.under_rules(rules)
        values = parameters.read_mindie_parameters(body, interface)
        counts = choices.count_choices(body, values, interface, rules)
        grammar = constraints.read_mindie_format(body)
        echo = False
        if not rules.strict:
            echo = body.boolean("echo", False)
            if body.string("suffix", ""):
                raise Unsupported("Parameter suffix is not available on this server.", field="suffix")
        super().__init__(rules, context, COMPLETION_INPUT, counts.n * len(prompts))
        self._top_logprobs = values["logprobs"]
        name_options = False, values["skip_special_tokens"] is not False
        self._logprob_lists = [
            None if self._top_logprobs is None else LogprobLists(self._top_logprobs, *name_options)
            for _ in self._choices
        ]
        self.request = Request(
            **shared_request_members(rules, context),
            model=self.model_name,
            prompts=prompts,
            sampling=parameters.mindie_sampling(values, rules),
            stop_conditions=openai.mindie_stop_conditions(values),
            output_options=OutputOptions(
                logprobs=self._top_logprobs,
                prompt_logprobs=self._top_logprobs if echo else None,
                echo=echo,
                skip_special=values["skip_special_tokens"] is not False,
                token_costs=rules.token_costs,
            ),
            **counts._asdict(),
            grammar=grammar,
            stream=bool(values["stream"]),
        )

    # -- streaming

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return an event for each piece of output; an echoed prompt comes first."""
        parts: list[bytes] = []
        held_deltas: dict[int, ChoiceDelta] = {}
        for event in events:
            match event:
                case PromptScored() if self.request.output_options.echo:
                    parts += [
                        self._completion_event(ChoiceDelta(index, event.text), prompt=event)
                        for index in self.request.prompt_choices(event.prompt)
                    ]
                case ChoiceDelta():
                    if (previous := held_deltas.pop(event.index, None)) is not None:
                        parts.append(self._completion_event(previous))
                    held_deltas[event.index] = event
                case ChoiceDone():
                    parts.append(
                        self._completion_event(held_deltas.pop(event.index, ChoiceDelta(event.index, "")), event)
                    )
        parts += [self._completion_event(delta) for delta in held_deltas.values()]
        return b"".join(parts)

    def _completion_event(
        self, event: ChoiceDelta, done: ChoiceDone | None = None, prompt: PromptScored | None = None
    ) -> bytes:
        choice = self._choices[event.index]
        self._take_delta(event, prompt)
        text = "".join(choice.content)
        if self._rules.full_text:
            choice.content = [text]
        else:
            choice.content = []
        chunk = self._mindie_envelope("text_completion") | {
            "choices": [self._completion_choice_object(event.index, text, done)]
        }
        if done is not None:
            if self._rules.full_text:
                chunk["full_text"] = text
            chunk["usage"] = self._usage_object(done.usage, choice.costs)
        return data_event(chunk)

    # -- in one piece

    def add_events(self, events: Sequence[Event]) -> None:
        """Collect the output of these events by choice."""
        for event in events:
            match event:
                case ChoiceDelta():
                    self._take_delta(event)
                case ChoiceDone():
                    self._choices[event.index].done_event = event
                case PromptScored() if self.request.output_options.echo:
                    for index in self.request.prompt_choices(event.prompt):
                        self._take_delta(ChoiceDelta(index, event.text), event)

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        choice_objects = [
            self._completion_choice_object(index, "".join(choice.content), choice.done_event)
            for index, choice in enumerate(self._choices)
        ]
        answer = self._mindie_envelope("text_completion")
        return encode_json(
            answer | {"choices": choice_objects, "usage": self._usage_object(usage, self._longest_costs)}
        )

    # -- shared by both

    def _take_delta(self, event: ChoiceDelta, prompt: PromptScored | None = None) -> None:
        choice, scores = self._choices[event.index], self._logprob_lists[event.index]
        if event.output_part != "tool":
            choice.content.append(event.text)
        choice.take_tokens(event.tokens)
        choice.tokens = []
        if scores is not None and prompt is not None:
            scores.add_prompt(prompt.tokens, prompt.text)
        elif scores is not None:
            scores.add_output(event.tokens)

    def _completion_choice_object(self, index: int, text: str, done: ChoiceDone | None) -> dict[str, Any]:
        scores = self._logprob_lists[index]
        logprobs = None if scores is None else scores.take_lists()
        return {
            "index": index,
            "text": text,
            "logprobs": None if logprobs is None else {name: logprobs[name] for name in sorted(logprobs)},
            "stop_reason": None if done is None or self._rules.strict else done.stop,
            "finish_reason": None if done is None else "length" if done.reason == "length" else "stop",
        }


def _read_completion_prompts(body: Fields, rules: MindieRules) -> list[Prompt]:
    """Read a prompt; lenient rules also accept a list of prompts. Raises BadRequest."""
    value = body.raw_value("prompt")
    if value is None:
        raise body.member_error("prompt", MISSING_PROMPT)
    if not rules.strict and isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > MAX_PROMPTS:
            raise body.member_error("prompt", f"At most {MAX_PROMPTS} prompts are allowed, but got {len(value)}")
        return [_read_completion_prompt(body, item, rules) for item in value]
    return [_read_completion_prompt(body, value, rules)]


def _read_completion_prompt(body: Fields, value: Any, rules: MindieRules) -> Prompt:
    if isinstance(value, str):
        length, max_length = utf16_length(value), rules.body_megabytes << 20
        if not 0 < length <= max_length:
            raise body.member_error("prompt", WRONG_TEXT_LENGTH.format(max_length, length))
        return TextPrompt(value)
    if not isinstance(value, list):
        raise body.member_error("prompt", WRONG_PROMPT_TYPE)
    if not value:
        raise body.member_error("prompt", COMPLETION_INPUT.empty)
    if set(map(type, value)) != {int}:
        raise body.member_error("prompt", "All elements of the prompt array must be integers.")
    if not 0 <= min(value) <= max(value) <= MAX_I32:
        raise body.member_error("prompt", "All elements of the prompt array must be integers.")
    return TokensPrompt(value)
