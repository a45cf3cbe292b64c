"""``POST /v1/completions`` as vLLM answers it: OpenAI's members, its own form of chunks and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai import completions
from parley.dialects.openai.completions import LogprobLists
from parley.dialects.openai.reading_rules import ReadingRules
from parley.dialects.openai.timings import metrics_member
from parley.dialects.openai.token_objects import FINISH_REASONS, prompt_logprob_maps
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.sse import data_event
from parley.dialects.vllm import requests
from parley.dialects.vllm.answer_parts import attach_done, vllm_envelope
from parley.dialects.vllm.stream_mixin import VllmStreamMixin
from parley.dialects.vllm.token_usage import vllm_running_usage, vllm_usage
from parley.types import ChoiceDelta, ChoiceDone, Event, PromptAccepted, PromptScored, TokenInfo, Usage

PLAIN_CHOICE = (
    b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,'
    b'"token_ids":null}'
)


def read_vllm_completion(body: bytes, context: RequestContext) -> VllmCompletionReply | Answer:
    """Read a completion request. Raises BadRequest."""
    return requests.read_vllm_request(VllmCompletionReply, body, context)


class VllmCompletionReply(VllmStreamMixin, completions.CompletionReply):
    """A completion request, answered in vLLM's form."""

    reading_rules: ClassVar[ReadingRules] = requests.VLLM_RULES

    def __init__(self, body: Fields, context: RequestContext):
        body = requests.without_idle_members(body)
        requests.check_prompt(body, context)
        requests.check_generation(body, context)
        super().__init__(requests.with_response_format(body), context)
        self.request.stop_conditions = requests.cap_max_tokens(self.request.stop_conditions, context)
        self.request.sampling = requests.search_sampling(self.request)
        self._answer_id = requests.choose_answer_id(context, self._answer_id)
        self._plain = not (self._wants_ids or self._usage_per_chunk) and self.request.output_options.logprobs is None
        self._opened: set[int] = set()

    # -- a stream

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return the chunks in vLLM's form. An echoed prompt comes first."""
        parts: list[bytes] = []
        pieces: list[tuple[ChoiceDelta | None, ChoiceDone | None]] = []
        for event in events:
            match event:
                case ChoiceDelta() if event.output_part != "tool":
                    pieces.append((event, None))
                case ChoiceDone():
                    attach_done(pieces, event)
                case PromptAccepted():
                    self._prompt_ids[event.prompt] = event.token_ids
                case PromptScored() if self.request.output_options.echo:
                    parts += [self._echo_chunk(index, event) for index in self.request.prompt_choices(event.prompt)]
        return b"".join(parts + [self._output_chunk(delta, done) for delta, done in pieces])

    def _output_chunk(self, delta: ChoiceDelta | None, done: ChoiceDone | None) -> bytes:
        if delta is None:
            return b"" if done is None else self._text_choice_chunk(done.index, "", None, [], done)
        if done is None and self._plain:
            if not delta.text:
                return b""
            return self._start_of_chunk() + PLAIN_CHOICE % (delta.index, encode_json(delta.text)) + b"]}\n\n"
        if done is None and not delta.text and not delta.tokens:
            return b""
        logprobs = self._choices[delta.index].logprobs
        if logprobs is not None:
            logprobs.add_output(delta.tokens)
        return self._text_choice_chunk(delta.index, delta.text, logprobs if delta.tokens else None, delta.tokens, done)

    def _echo_chunk(self, index: int, event: PromptScored) -> bytes:
        logprobs = self._choices[index].logprobs
        if logprobs is not None:
            logprobs.add_prompt(event.tokens, event.text)
        return self._text_choice_chunk(index, event.text, logprobs, [])

    def _text_choice_chunk(
        self,
        index: int,
        text: str,
        logprobs: LogprobLists | None,
        fresh: list[TokenInfo],
        done: ChoiceDone | None = None,
    ) -> bytes:
        """Return a chunk. ``logprobs`` are written now; ``fresh`` are the choice's own new tokens."""
        state = self._choices[index]
        state.sent_tokens += len(fresh)
        prompt = None
        if self._wants_ids and index not in self._opened:
            self._opened.add(index)
            prompt = self._prompt_ids.get(index // self.request.n)
        choice = {
            "index": index,
            "text": text,
            "logprobs": None if logprobs is None else ordered_lists(logprobs.take_lists()),
            "finish_reason": None if done is None else FINISH_REASONS[done.reason],
            "stop_reason": None if done is None else done.stop,
            "prompt_token_ids": prompt,
            "token_ids": [token.id for token in fresh] if self._wants_ids else None,
        }
        chunk = self._chunk_envelope([choice])
        if self._usage_per_chunk:
            chunk["usage"] = vllm_running_usage(
                len(self._prompt_ids.get(index // self.request.n, ())), state.sent_tokens
            )
        return data_event(chunk)

    def _chunk_envelope(self, choices: list[Any]) -> dict[str, Any]:
        return vllm_envelope(self.answer_name, "text_completion", self._context, self.request, choices)

    @property
    def answer_name(self) -> str:
        """The answer's id."""
        return f"cmpl-{self._answer_id}"

    def usage_members(self, usage: Usage) -> dict[str, Any]:
        """Return the usage of the whole answer."""
        return vllm_usage(usage)

    # -- one answer

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON in vLLM's form."""
        choices = [self._choice_answer(index, state) for index, state in enumerate(self._choices)]
        return encode_json(
            self._chunk_envelope(choices)
            | {
                "service_tier": None,
                "system_fingerprint": self._context.fingerprint,
                "usage": self.usage_members(usage),
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
            | metrics_member(self, self._options, usage)
            | self.passed_members()
        )

    def _choice_answer(self, index: int, state: completions.CompletionChoice) -> dict[str, Any]:
        assert state.done is not None
        prompt = index // self.request.n
        scores, top = self._prompt_scores.get(prompt), self._prompt_alternatives
        return {
            "index": index,
            "text": "".join(state.text),
            "logprobs": None if state.logprobs is None else ordered_lists(state.logprobs.take_lists()),
            "finish_reason": FINISH_REASONS[state.done.reason],
            "stop_reason": state.done.stop,
            "token_ids": state.ids if self._wants_ids else None,
            "prompt_logprobs": None if scores is None or top is None else prompt_logprob_maps(scores, top),
            "prompt_token_ids": self._prompt_ids.get(prompt) if self._wants_ids else None,
            "routed_experts": None,
            "weight_versions": None,
        }


def ordered_lists(lists: dict[str, Any]) -> dict[str, Any]:
    """Return the lists of log-probabilities in the original's order."""
    return {name: lists[name] for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs")}
