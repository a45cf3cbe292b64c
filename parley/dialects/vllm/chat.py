"""``POST /v1/chat/completions`` as vLLM answers it: OpenAI's members, its own form of chunks and answers.

A stream opens every choice before its first token, and the last text of a choice carries its finish reason. An answer
omits nothing: absent values are null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai import chat
from parley.dialects.openai.reading_rules import ReadingRules
from parley.dialects.openai.timings import metrics_member
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.sse import data_event
from parley.dialects.vllm import requests
from parley.dialects.vllm.answer_parts import attach_done, vllm_call_id, vllm_envelope
from parley.dialects.vllm.stream_mixin import VllmStreamMixin
from parley.dialects.vllm.token_usage import created_cache_tokens, vllm_running_usage, vllm_usage
from parley.errors import BadMedia, ParleyError
from parley.types import (
    ChatPrompt,
    ChoiceDelta,
    ChoiceDone,
    Event,
    OutputOptions,
    PromptAccepted,
    TokenInfo,
    ToolCallDelta,
    Usage,
)

PLAIN_CHUNK = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null,"token_ids":null}'


def read_vllm_chat(body: bytes, context: RequestContext) -> VllmChatReply | Answer:
    """Read a chat request. Raises BadRequest."""
    return requests.read_vllm_request(VllmChatReply, body, context)


class VllmChatReply(VllmStreamMixin, chat.ChatReply):
    """A chat request, answered in vLLM's form."""

    reading_rules: ClassVar[ReadingRules] = requests.VLLM_RULES

    def __init__(self, body: Fields, context: RequestContext):
        body = requests.without_idle_members(body)
        limit_field = "max_completion_tokens" if body.has_value("max_completion_tokens") else "max_tokens"
        requests.check_generation(body, context, limit_member=limit_field, least=1)
        requests.check_chat(body)
        super().__init__(requests.with_response_format(requests.with_choice_type(body)), context)
        self.request.stop_conditions = requests.cap_max_tokens(self.request.stop_conditions, context)
        self.request.sampling = requests.search_sampling(self.request)
        self._answer_id = requests.choose_answer_id(context, self._answer_id)
        self._messages = [
            message for prompt in self.request.prompts if isinstance(prompt, ChatPrompt) for message in prompt.messages
        ]
        self._legacy = False  # calls are always written in the newer form
        self._echoes = body.boolean("echo", False)
        self._wants_tokens = self._wants_ids or self.request.output_options.logprobs is not None
        if self._echoes and self.request.output_options.prompt_logprobs is None and not self.request.stream:
            self.request.output_options = _with_prompt_logprobs(self.request.output_options)

    def render_refusal(self, error: ParleyError) -> Answer | None:
        """Add to an error about an unknown item the item's number, which its sentence names."""
        if isinstance(error, BadMedia) and error.reason == "unknown_uuid":
            items = [placed.media for message in self._messages for placed in message.media]
            paths = [item.field for item in items if item.kind == error.kind]
            error.detail["index"] = paths.index(error.field) if error.field in paths else 0
        return None

    # -- a stream

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return the chunks in vLLM's form. An accepted prompt opens every choice."""
        parts: list[bytes] = []
        pieces: list[tuple[ChoiceDelta | None, ChoiceDone | None]] = []
        for event in events:
            match event:
                case PromptAccepted():
                    self._prompt_ids, self._prompt_text = event.token_ids, event.text
                    parts += [self._opening_chunks(index) for index in range(self.request.n)]
                case ChoiceDelta():
                    pieces.append((event, None))
                case ChoiceDone():
                    attach_done(pieces, event)
        return b"".join(parts + [self._output_chunks(delta, done) for delta, done in pieces])

    def _opening_chunks(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        opening: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._chunk_envelope([opening]) | self._chunk_usage(index)
        chunk |= {"prompt_token_ids": self._prompt_ids if self._wants_ids else None, "prompt_text": self._prompt_text}
        if not self._echo_text:
            return data_event(chunk)
        opening = opening | {"delta": {"content": self._echo_text}}
        return data_event(chunk) + data_event(self._chunk_envelope([opening]) | self._chunk_usage(index))

    def _output_chunks(self, delta: ChoiceDelta | None, done: ChoiceDone | None) -> bytes:
        """Return the chunks for new output, for the end of a choice, or for both."""
        plain = not (self._wants_tokens or self._usage_per_chunk)
        if delta is not None and done is None and plain and delta.output_part == "content" and delta.text:
            return self._start_of_chunk() + PLAIN_CHUNK % (delta.index, encode_json(delta.text)) + b"]}\n\n"
        deltas = [] if delta is None else self._delta_members(delta)
        tokens = [] if delta is None else delta.tokens
        if not deltas and done is not None:
            deltas = [{}]
        elif not deltas and tokens and self._wants_tokens:
            deltas = [{"content": ""}]
        if not deltas and delta is not None:
            self._choices[delta.index].sent_tokens += len(tokens)
        frames = []
        for number, piece in enumerate(deltas):
            last = number == len(deltas) - 1
            frames.append(self._choice_chunk(piece, delta, done if last else None, tokens if last else []))
        return b"".join(frames)

    def _choice_chunk(
        self, piece: dict[str, Any], delta: ChoiceDelta | None, done: ChoiceDone | None, tokens: list[TokenInfo]
    ) -> bytes:
        index = done.index if delta is None and done is not None else delta.index if delta is not None else 0
        self._choices[index].sent_tokens += len(tokens)
        choice: dict[str, Any] = {
            "index": index,
            "delta": piece,
            "logprobs": self._logprobs_member(tokens) if tokens else None,
            "finish_reason": None if done is None else self._finish_reason(done),
        }
        if done is not None:
            choice["stop_reason"] = done.stop
        choice["token_ids"] = [token.id for token in tokens] if self._wants_ids else None
        chunk = self._chunk_envelope([choice]) | self._chunk_usage(index)
        if done is not None and not self.request.output_options.usage:
            chunk["system_fingerprint"] = self._context.fingerprint
        return data_event(chunk)

    def _delta_members(self, event: ChoiceDelta) -> list[dict[str, Any]]:
        if event.tool_call is not None:
            return self._call_deltas(event.tool_call)
        if event.output_part == "tool" or not event.text:
            return []
        if event.output_part == "content":
            return [{"content": event.text}]
        return [{"reasoning": event.text, "reasoning_content": event.text}] if self._wants_reasoning else []

    def _call_deltas(self, call: ToolCallDelta) -> list[dict[str, Any]]:
        """Return the deltas of a call: its announcement without arguments, then the arguments as separate deltas."""
        pieces: list[dict[str, Any]] = []
        if call.name is not None:
            function = {"name": call.name}
            pieces.append({"id": vllm_call_id(call.id), "type": "function", "index": call.index, "function": function})
        if call.arguments:
            pieces.append({"index": call.index, "function": {"arguments": call.arguments}})
        return [{"content": None, "tool_calls": [piece]} for piece in pieces]

    def created_tokens(self, usage: Usage) -> int:
        """Return how many tokens of the prompt are in new pages of the prefix cache."""
        return created_cache_tokens(usage, self._context)

    def _chunk_envelope(self, choices: list[Any]) -> dict[str, Any]:
        return vllm_envelope(self.answer_name, "chat.completion.chunk", self._context, self.request, choices)

    def _chunk_usage(self, index: int) -> dict[str, Any]:
        if not self._usage_per_chunk:
            return {}
        return {"usage": vllm_running_usage(len(self._prompt_ids or ()), self._choices[index].sent_tokens)}

    @property
    def answer_name(self) -> str:
        """The answer's id."""
        return f"chatcmpl-{self._answer_id}"

    def usage_members(self, usage: Usage) -> dict[str, Any]:
        """Return the usage of the whole answer."""
        return vllm_usage(usage, self.created_tokens(usage))

    # -- one answer

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON in vLLM's form."""
        return self.answer_with(
            [self._choice_object(index, choice) for index, choice in enumerate(self._choices)],
            self.usage_members(usage),
            usage,
        )

    def first_choice(self, index: int) -> dict[str, Any]:
        """Return the first choice, with another index."""
        return self._choice_object(index, self._choices[0])

    def answer_with(self, choices: list[dict[str, Any]], usage_members: dict[str, Any], usage: Usage) -> bytes:
        """Return the answer with its choices."""
        answer = vllm_envelope(self.answer_name, "chat.completion", self._context, self.request, choices)
        return encode_json(
            answer
            | {
                "service_tier": None,
                "system_fingerprint": self._context.fingerprint,
                "usage": usage_members,
                "prompt_logprobs": self._prompt_logprobs_member(),
                "prompt_token_ids": self._prompt_ids if self._wants_ids else None,
                "prompt_text": self._prompt_text,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
            | metrics_member(self, self._options, usage)
            | self.passed_members()
        )

    def _choice_object(self, index: int, choice: chat.ChatChoice) -> dict[str, Any]:
        assert choice.done is not None
        reasoning = ("".join(choice.reasoning) if self._wants_reasoning else "") or None
        content: str | None = self._echo_text + "".join(choice.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None
            if not content and (choice.calls or choice.reasoning) and not self._tool_chosen
            else content,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        if choice.calls:
            message["tool_calls"] = [call | {"id": vllm_call_id(call["id"])} for call in choice.calls]
        message["reasoning"] = reasoning
        if reasoning is not None:
            message["reasoning_content"] = reasoning  # its name in older versions
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs_member(choice.tokens),
            "finish_reason": self._finish_reason(choice.done),
            "stop_reason": choice.done.stop,
            "token_ids": [token.id for token in choice.tokens] if self._wants_ids else None,
            "routed_experts": None,
            "weight_versions": None,
        }

    def _logprobs_member(self, tokens: list[TokenInfo]) -> dict[str, Any] | None:
        scored = super()._logprobs_member(tokens)
        return None if scored is None else {"content": scored["content"]}


def _with_prompt_logprobs(options: OutputOptions) -> OutputOptions:
    """Return the options with log-probabilities of the prompt: as many alternatives as for the output."""
    return msgspec.structs.replace(options, prompt_logprobs=options.logprobs or 0)
