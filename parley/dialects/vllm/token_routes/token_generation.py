"""``POST /inference/v1/generate``: vLLM's route for servers in front of an engine: tokens in, tokens out.

The form is that of ``vllm/entrypoints/scale_out/token_in_token_out/protocol.py``. ``output_mode`` "text" adds the text,
and log-probabilities then name tokens by their texts rather than by ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from parley.dialects.admin_requests import AbortList
from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai import vllm_members
from parley.dialects.openai.common_members import unsupported_member_error
from parley.dialects.openai.token_objects import FINISH_REASONS, finite_logprob, prompt_logprob_maps
from parley.dialects.reply import Answer, Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.sampling_members import MAX_CHOICES_PER_PROMPT, MAX_LISTED_IDS, MAX_TOKEN_ID, read_bad_words
from parley.dialects.sse import STREAM_DONE, data_event
from parley.dialects.vllm import requests
from parley.dialects.vllm.answer_parts import attach_done
from parley.dialects.vllm.error_answers import vllm_failure_events
from parley.dialects.vllm.token_routes import sampling_params
from parley.dialects.vllm.token_usage import vllm_final_usage, vllm_usage
from parley.errors import MalformedBody, ParleyError
from parley.types import (
    ChoiceDelta,
    ChoiceDone,
    Event,
    PromptAccepted,
    PromptScored,
    Request,
    TokenInfo,
    TokensPrompt,
    Usage,
)

OUTPUT_MODES = ("tokens", "text")
ID_PREFIX = "generate-tokens-"
MAX_ABORTED = 65_536  # ids in one request to abort
UNSUPPORTED_MEMBERS = {
    "features": "Media that another server has processed are",
    "content_parts": "Media beside a prompt of tokens are",
}


def read_token_request(body: bytes, context: RequestContext) -> TokenReply | Answer:
    """Read a request to continue tokens. Raises BadRequest."""
    requests.check_content_type(context)
    return TokenReply(requests.decode_vllm_body(body), context)


@dataclass
class TokenChoice:
    """The output of one choice so far."""

    tokens: list[TokenInfo] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    sent_tokens: int = 0
    done: ChoiceDone | None = None


class TokenReply(Reply):
    """A request to continue tokens, and its answer."""

    field_names: ClassVar[Mapping[str, str]] = {"prompt": "token_ids", "stop_ids": "stop_token_ids"}

    def __init__(self, body: Fields, context: RequestContext):
        token_ids = _read_token_ids(body)
        params = body.object("sampling_params")
        if params is None:
            raise body.missing_member("sampling_params")
        sampling_params.check_sampling_params(params)
        _refuse_unsupported(body)
        stream = body.boolean("stream", False)
        self._text_mode = body.string("output_mode", "tokens", allowed=OUTPUT_MODES) == "text"
        if self._text_mode and not params.boolean("detokenize", True):
            raise body.member_error("output_mode", "'text' requires sampling_params.detokenize to be true")
        options = sampling_params.read_output_options(params, context, stream)
        at_end, self._usage_per_chunk = _read_usage_options(body, stream)
        options = msgspec.structs.replace(options, usage=at_end)
        answer_id = requests.choose_answer_id(context, vllm_members.read_request_id(body) or context.unique_id)
        self._answer_id = ID_PREFIX + answer_id
        self.request = Request(
            id=context.unique_id,
            model=body.string("model", "", cap=256),
            prompts=[TokensPrompt(token_ids, body.boolean("reasoning_ended", None))],
            sampling=sampling_params.read_engine_sampling(params),
            stop_conditions=sampling_params.read_token_stop_conditions(params, context),
            output_options=options,
            thinking_budget=sampling_params.read_thinking_budget(params),
            n=params.integer("n", 1, 1, MAX_CHOICES_PER_PROMPT),
            stream=stream,
            banned_words=read_bad_words(params),
            grammar=requests.read_vllm_grammar(params),
            cancel_ids=(self._answer_id, answer_id),
            cache_salt=vllm_members.read_salt(body, context.headers),
            priority=vllm_members.read_priority(body, context.headers),
        )
        self._wants_prompt_ids = body.boolean("return_token_ids", False)
        self._ids_for_texts = context.api_options.return_tokens_as_token_ids
        self._context = context
        self._choices = [TokenChoice() for _ in range(self.request.n)]
        self._prompt_ids: list[int] = []
        self._prompt_scores: list[TokenInfo] | None = None
        self._sent_prompt_ids = not self._wants_prompt_ids

    # -- a stream

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return a chunk for the new tokens of each choice; that of its last tokens has the finish reason."""
        pieces: list[tuple[ChoiceDelta | None, ChoiceDone | None]] = []
        for event in events:
            match event:
                case PromptAccepted():
                    self._prompt_ids = event.token_ids
                case ChoiceDelta():
                    pieces.append((event, None))
                case ChoiceDone():
                    attach_done(pieces, event)
        return b"".join(self._token_chunk(delta, done) for delta, done in pieces)

    def _token_chunk(self, delta: ChoiceDelta | None, done: ChoiceDone | None) -> bytes:
        tokens, text = (delta.tokens, delta.text) if delta is not None else ([], "")
        if not tokens and done is None and not (text and self._text_mode):
            return b""
        index = delta.index if delta is not None else done.index if done is not None else 0
        choice = self._choices[index]
        choice.sent_tokens += len(tokens)
        usage = None
        if self._usage_per_chunk:
            usage = _running_usage(len(self._prompt_ids), choice.sent_tokens)
        chunk: dict[str, Any] = {"request_id": self._answer_id, "usage": usage}
        if not self._sent_prompt_ids:
            self._sent_prompt_ids = True
            chunk["prompt_token_ids"] = self._prompt_ids
        choices = [self._choice_object(index, tokens, text, done)]
        return data_event(chunk | {"output_mode": self._output_mode, "choices": choices})

    def finish_stream(self, usage: Usage) -> bytes:
        """Return the usage chunk, if requested, and the ``[DONE]`` mark."""
        if not self.request.output_options.usage:
            return STREAM_DONE
        last = {"request_id": self._answer_id, "usage": vllm_final_usage(usage)}
        return data_event(last | {"output_mode": self._output_mode, "choices": []}) + STREAM_DONE

    def fail_stream(self, error: ParleyError) -> bytes:
        """Return vLLM's error event and the ``[DONE]`` mark."""
        return vllm_failure_events(error)

    # -- one answer

    def add_events(self, events: Sequence[Event]) -> None:
        """Collect the tokens and texts of these events."""
        for event in events:
            match event:
                case PromptAccepted():
                    self._prompt_ids = event.token_ids
                case PromptScored():
                    self._prompt_scores = event.tokens
                case ChoiceDelta():
                    self._choices[event.index].tokens += event.tokens
                    self._choices[event.index].text.append(event.text)
                case ChoiceDone():
                    self._choices[event.index].done = event

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        top = self.request.output_options.prompt_logprobs
        scores = self._prompt_scores
        return encode_json(
            {
                "request_id": self._answer_id,
                "model": self.request.model,
                "created": self._context.created,
                "usage": vllm_usage(usage),
                "prompt_logprobs": None if scores is None or top is None else prompt_logprob_maps(scores, top),
                "prompt_token_id_logprobs": None,
                "prompt_token_ids": self._prompt_ids if self._wants_prompt_ids else None,
                "mm_placeholders": None,
                "metrics": None,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "output_mode": self._output_mode,
                "choices": [
                    self._choice_object(index, choice.tokens, "".join(choice.text), choice.done)
                    for index, choice in enumerate(self._choices)
                ],
            }
        )

    # -- both

    @property
    def _output_mode(self) -> str:
        return "text" if self._text_mode else "tokens"

    def _choice_object(self, index: int, tokens: list[TokenInfo], text: str, done: ChoiceDone | None) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": None if done is None else FINISH_REASONS[done.reason],
            "stop_reason": None if done is None else done.stop,
            "token_ids": [token.id for token in tokens],
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None,
        }
        if self._text_mode:
            choice["text"] = text
        choice["logprobs"] = self._logprobs_member(tokens)
        return choice

    def _logprobs_member(self, tokens: list[TokenInfo]) -> dict[str, Any] | None:
        if self.request.output_options.logprobs is None:
            return None
        score = self._scored_text if self._text_mode else _scored_id
        content = [score(token) | {"top_logprobs": list(map(score, self._candidates(token)))} for token in tokens]
        return {"content": content}

    def _candidates(self, token: TokenInfo) -> list[TokenInfo]:
        """Return the listed tokens of a position: the drawn one, then the most likely others, together ``logprobs``."""
        listed = [token, *(other for other in token.top_tokens if other.id != token.id)]
        count = self.request.output_options.logprobs
        return listed if count is None or count < 0 else listed[: max(count, 1)]

    def _scored_text(self, token: TokenInfo) -> dict[str, Any]:
        logprob = finite_logprob(token.logprob)
        if self._ids_for_texts:
            return {"token": f"token_id:{token.id}", "logprob": logprob, "bytes": None}
        return {"token": token.text, "logprob": logprob, "bytes": list(token.raw_bytes)}


def _running_usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def _scored_id(token: TokenInfo) -> dict[str, Any]:
    return {"token_id": token.id, "logprob": finite_logprob(token.logprob), "rank": token.rank}


def _read_token_ids(body: Fields) -> list[int]:
    token_ids = body.integers("token_ids", cap=MAX_LISTED_IDS, low=0, high=MAX_TOKEN_ID)
    if not token_ids:
        raise (
            body.empty_member("token_ids", "array") if body.has_value("token_ids") else body.missing_member("token_ids")
        )
    return token_ids


def _refuse_unsupported(body: Fields) -> None:
    """Refuse members about media, and check those that have no effect. Raises BadRequest."""
    if body.free_object("features"):
        raise unsupported_member_error(body, "features", UNSUPPORTED_MEMBERS["features"])
    for name in vllm_members.TRANSFER_MEMBERS:
        body.free_object(name)
    if body.array("content_parts", cap=MAX_LISTED_IDS):
        raise unsupported_member_error(body, "content_parts", UNSUPPORTED_MEMBERS["content_parts"])
    body.free_object("reasoning_parser_kwargs")  # of a parser that decides where an answer's form begins
    body.array("token_offsets", cap=MAX_LISTED_IDS)  # which a rendered prompt may have


def _read_usage_options(body: Fields, stream: bool) -> tuple[bool, bool]:
    """Return whether usage is requested at the end of the stream, and in each chunk. Without a stream, neither."""
    stream_options = body.object("stream_options")
    if stream_options is None or not stream:
        return False, False
    at_end = stream_options.boolean("include_usage", False)
    return at_end, at_end and stream_options.boolean("continuous_usage_stats", False)


def read_abort_requests(body: bytes, context: RequestContext) -> AbortList:
    """Read the ids of requests to abort, as answers and ``X-Request-Id`` have them. Raises BadRequest."""
    fields = requests.decode_vllm_body(body)
    if not fields.has_value("request_ids"):
        raise MalformedBody("Missing 'request_ids' in request body")
    labels = fields.strings("request_ids", cap=MAX_ABORTED, total=MAX_ABORTED * vllm_members.MAX_NAME_CHARACTERS)
    return AbortList(frozenset(labels), Answer(body=b"", content_type=b""))
