"""Streams of ``/v1/chat/completions/derender`` and ``/v1/completions/derender``: one chunk of tokens in, its chunk out.

The server keeps nothing between chunks. The client passes on ``stream_state``, which has all earlier tokens and how
many came with each chunk: they are read again first, so that marks and characters which several chunks share are read
as in one stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai.common_members import MAX_TOKENS
from parley.dialects.render_reply import ChunkRenderer
from parley.dialects.request_context import RequestContext
from parley.dialects.sampling_members import MAX_CHOICES_PER_PROMPT, MAX_LISTED_IDS, MAX_TOKEN_ID
from parley.dialects.sse import read_event_data, split_events
from parley.dialects.vllm.chat import VllmChatReply
from parley.dialects.vllm.completions import VllmCompletionReply, ordered_lists
from parley.dialects.vllm.refusal_wording import value_error
from parley.dialects.vllm.token_routes import derender
from parley.errors import InvalidValue
from parley.types import ChatPrompt, EngineOutput, TokenInfo, TokenScore, TokensPrompt

STOP_STRINGS_SENTENCE = (
    "stop strings are not supported by streaming derender because text already sent cannot be cut. Use non-streaming "
    "derender or output_mode=text on /inference/v1/generate which holds stop strings back."
)
EARLIER_SCORE = TokenScore(0.0, 1, [], [])  # of tokens whose scores have been sent


class GeneratedChunk:
    """A chunk of a generated answer, and the state that came with it.

    ``outputs``: of the earlier chunks, and of this one last; none if this one has no choice.
    """

    def __init__(self, body: Fields, route_name: str, context: RequestContext):
        chunk = body.object("generate_chunk")
        if chunk is None:
            raise body.missing_member("generate_chunk")
        chunk.string("output_mode", "tokens", allowed=("tokens",))
        choices = list(chunk.objects("choices", cap=MAX_CHOICES_PER_PROMPT))
        if len(choices) > 1:
            sentence = f"{route_name} expects at most one choice per chunk (got {len(choices)})."
            raise InvalidValue(sentence, field="generate_chunk")
        state = body.object("stream_state") or Fields({}, "stream_state")
        self.role_sent = state.boolean("role_sent", False)
        self.own_prompt_ids = _read_ids(chunk, "prompt_token_ids")
        self.prompt_ids = _read_ids(body, "prompt_token_ids") or self.own_prompt_ids
        self.answer_id = derender.read_response_id(chunk, context)
        self.metrics = derender.read_response_metrics(chunk)
        self.index = choices[0].integer("index", 0, 0, MAX_CHOICES_PER_PROMPT) if choices else 0
        self._lengths = state.integers("output_chunk_lens", cap=MAX_LISTED_IDS, low=1, high=MAX_LISTED_IDS)
        self._earlier_ids = _read_ids(state, "output_token_ids")
        self._check_lengths(state)
        last = self._read_output(choices[0]) if choices else EngineOutput("", 0)
        self._check_size(context.context_length, len(_read_ids(body, "prompt_token_ids")), len(last.token_ids))
        self.outputs = [*self._earlier_outputs(scored=last.scores is not None), last] if choices else []
        self._usage = _read_usage(chunk, body)

    def _check_lengths(self, state: Fields) -> None:
        total, count = sum(self._lengths), len(self._earlier_ids)
        if total != count:
            sentence = (
                f"output_chunk_lens must sum to len(output_token_ids) (got sum={total}, len(output_token_ids)={count})"
            )
            raise value_error("stream_state", sentence, dict.fromkeys(state.member_names))

    def _check_size(self, limit: int, prompt_length: int, new_count: int) -> None:
        if limit and prompt_length + self.earlier_count + new_count > limit:
            sentence = (
                f"prompt_token_ids length ({prompt_length}) plus output_token_ids length ({self.earlier_count}) plus "
                f"delta ({new_count}) exceeds max_model_len ({limit})."
            )
            raise InvalidValue(sentence, field="stream_state")

    def _earlier_outputs(self, *, scored: bool) -> list[EngineOutput]:
        outputs, start = [], 0
        for length in self._lengths:
            scores = [EARLIER_SCORE] * length if scored else None
            outputs.append(EngineOutput("", 0, self._earlier_ids[start : start + length], scores))
            start += length
        return outputs

    def _read_output(self, choice: Fields) -> EngineOutput:
        token_ids = _read_ids(choice, "token_ids")
        scores = derender.read_choice_scores(choice, self.index, len(token_ids))
        name = choice.string("finish_reason", None, cap=64)
        reason = None if name is None else derender.FINISH_REASONS.get(name, "stop")
        return EngineOutput("", 0, token_ids, scores, reason)

    @property
    def earlier_count(self) -> int:
        """The number of tokens in earlier chunks."""
        return len(self._earlier_ids)

    def new_state(self) -> dict[str, Any]:
        """Return the state that the client sends with the next chunk, with all members of the original's."""
        ids, lengths = list(self._earlier_ids), list(self._lengths)
        if self.outputs and self.outputs[-1].token_ids:
            ids += self.outputs[-1].token_ids
            lengths.append(len(self.outputs[-1].token_ids))
        return {
            "prev_tokens": [],
            "prefix_offset": 0,
            "read_offset": 0,
            "role_sent": self.role_sent or bool(self.outputs),
            "logprob_context_token_ids": [],
            "logprob_text_offset": 0,
            "output_token_ids": ids,
            "output_chunk_lens": lengths,
            "tools_streamed": False,
            "last_tool_call_ids": [],
        }

    def encode_answer(self, envelope: dict[str, Any]) -> bytes:
        """Return the answer to the client. ``envelope``: the chunk, as far as it depends on the API."""
        chunk = envelope | {"usage": self._usage, "metrics": self.metrics}
        return encode_json({"chunk": chunk, "stream_state": self.new_state()})


class ChatChunkDerendering(VllmChatReply, ChunkRenderer):
    """A chunk of an answer to a conversation, answered as a chunk of ``/v1/chat/completions``."""

    field_names: ClassVar[Mapping[str, str]] = {
        **VllmChatReply.field_names, "kv_transfer_params.prompt_token_ids": "prompt_token_ids"
    }  # fmt: skip

    def __init__(self, body: Fields, context: RequestContext):
        self._chunk = chunk = GeneratedChunk(body, "derender_chat_stream", context)
        self.outputs = chunk.outputs
        top = derender.listed_alternatives(chunk.outputs[-1:])
        members = {"n": 1, "stream": True, "logprobs": top is not None, "top_logprobs": top}
        super().__init__(derender.original_request(body, "chat_request", derender.NO_CONVERSATION, members), context)
        _refuse_stop_strings(self.request.stop_conditions.strings)
        if not body.has_value("chat_request"):
            self.request.prompts = [TokensPrompt(chunk.prompt_ids or derender.NO_PROMPT)]
            self.request.output_options = msgspec.structs.replace(self.request.output_options, unparsed=True)
        elif chunk.prompt_ids:
            self.request.prompts = [
                msgspec.structs.replace(prompt, rendered_ids=chunk.prompt_ids)
                for prompt in self.request.prompts
                if isinstance(prompt, ChatPrompt)
            ]
        derender.mark_stop_tokens(chunk.outputs, self.request)

    @property
    def answer_name(self) -> str:
        """The id of the generated answer."""
        return self._chunk.answer_id

    def render_answer(self, frames: bytes, tokens: list[TokenInfo]) -> bytes:
        """Return the chunk for the frames that a stream would have, and the new state."""
        chunk = self._chunk
        choices = [_merge_deltas(_read_choices(frames)) | {"index": chunk.index}] if chunk.outputs else []
        for choice in choices:
            if not chunk.role_sent:
                choice["delta"] = {"role": "assistant"} | choice["delta"]
            choice["logprobs"] = self._logprobs_member(tokens[chunk.earlier_count :])
            choice["token_ids"] = chunk.outputs[-1].token_ids if self._wants_ids else None
        prompt_ids = chunk.own_prompt_ids or None if self._wants_ids else None
        return chunk.encode_answer(self._chunk_envelope(choices) | {"prompt_token_ids": prompt_ids})


class CompletionChunkDerendering(VllmCompletionReply, ChunkRenderer):
    """A chunk of an answer to a plain prompt, answered as a chunk of ``/v1/completions``."""

    def __init__(self, body: Fields, context: RequestContext):
        self._chunk = chunk = GeneratedChunk(body, "derender_completion_stream", context)
        self.outputs = chunk.outputs
        members = {
            "prompt": chunk.prompt_ids or derender.NO_PROMPT,
            "n": 1,
            "stream": True,
            "logprobs": derender.listed_alternatives(chunk.outputs[-1:]),
        }
        super().__init__(derender.original_request(body, "completion_request", {}, members), context)
        _refuse_stop_strings(self.request.stop_conditions.strings)
        derender.mark_stop_tokens(chunk.outputs, self.request)
        self._logprob_lists, self._choices[0].logprobs = self._choices[0].logprobs, None

    @property
    def answer_name(self) -> str:
        """The id of the generated answer."""
        return self._chunk.answer_id

    def render_answer(self, frames: bytes, tokens: list[TokenInfo]) -> bytes:
        """Return the chunk for the frames that a stream would have, and the new state."""
        chunk = self._chunk
        choices = [_merge_texts(_read_choices(frames)) | {"index": chunk.index}] if chunk.outputs else []
        for choice in choices:
            choice["logprobs"] = self._chunk_logprobs(tokens)
            choice["prompt_token_ids"] = chunk.own_prompt_ids or None if self._wants_ids else None
            choice["token_ids"] = chunk.outputs[-1].token_ids if self._wants_ids else None
        return chunk.encode_answer(self._chunk_envelope(choices))

    def _chunk_logprobs(self, tokens: list[TokenInfo]) -> dict[str, Any] | None:
        """Return the lists of this chunk's tokens, whose offsets depend on all tokens before them."""
        lists = self._logprob_lists
        if lists is None:
            return None
        lists.add_output(tokens[: self._chunk.earlier_count])
        lists.clear_lists()
        lists.add_output(tokens[self._chunk.earlier_count :])
        return ordered_lists(lists.take_lists())


def _read_ids(fields: Fields, name: str) -> list[int]:
    return fields.integers(name, cap=MAX_LISTED_IDS, low=0, high=MAX_TOKEN_ID)


def _read_usage(chunk: Fields, body: Fields) -> dict[str, Any] | None:
    usage = chunk.object("usage")
    if usage is None:
        return None
    prompt = body.integer("prompt_tokens", usage.integer("prompt_tokens", 0, 0, MAX_TOKENS), 0, MAX_TOKENS)
    completion = usage.integer("completion_tokens", 0, 0, MAX_TOKENS)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def _refuse_stop_strings(strings: Sequence[str]) -> None:
    if strings:
        raise InvalidValue(STOP_STRINGS_SENTENCE)


def _read_choices(frames: bytes) -> list[dict[str, Any]]:
    events, _ = split_events(frames)
    return [choice for event in events for choice in msgspec.json.decode(read_event_data(event))["choices"]]


def _merge_deltas(choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one choice for the frames of a conversation's choice."""
    merged: dict[str, Any] = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None, "stop_reason": None}
    for choice in choices:
        for name, value in choice["delta"].items():
            merged["delta"][name] = _join_member(name, merged["delta"].get(name), value)
        merged |= {name: choice[name] for name in ("finish_reason", "stop_reason") if choice.get(name) is not None}
    return merged


def _join_member(name: str, earlier: Any, value: Any) -> Any:
    """Return a delta's member, given that of the delta before. Calls stay apart: each has its index."""
    if earlier is None:
        return value
    return earlier + value if name == "tool_calls" or isinstance(value, str) else value


def _merge_texts(choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one choice with the texts of a plain prompt's frames. Only the last frames may have a finish reason."""
    merged: dict[str, Any] = {"index": 0, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
    for choice in choices:
        merged["text"] += choice["text"]
        merged |= {name: choice[name] for name in ("finish_reason", "stop_reason") if choice.get(name) is not None}
    return merged
