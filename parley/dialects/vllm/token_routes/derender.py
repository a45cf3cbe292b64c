"""``/v1/chat/completions/derender`` and ``/v1/completions/derender``: the answer that generated tokens mean.

They take the answer of ``/inference/v1/generate``, and the request that was rendered for it, whose tools, stop strings
and options decide how the tokens are read (``vllm/entrypoints/scale_out/derender/serving.py``). Without that request
the tokens become plain text. ``derender_chunk.py`` reads streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from parley.dialects.fields import Fields, is_shallow
from parley.dialects.openai.common_members import MAX_TOKENS
from parley.dialects.render_reply import AnswerRenderer
from parley.dialects.request_context import RequestContext
from parley.dialects.sampling_members import MAX_CHOICES_PER_PROMPT, MAX_LISTED_IDS, MAX_TOKEN_ID
from parley.dialects.vllm.chat import VllmChatReply
from parley.dialects.vllm.completions import VllmCompletionReply
from parley.dialects.vllm.token_usage import embedding_usage
from parley.errors import InvalidValue
from parley.types import EngineFinishReason, EngineOutput, Request, TokenScore, TokensPrompt, Usage

MAX_RESPONSES = 1024
MAX_ALTERNATIVES = 20  # listed for one token
METRIC_NAMES = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")
MAX_TOKEN_RANK = 2**31 - 1
NO_PROMPT = [0]  # stands for a prompt that the client does not send
NO_CONVERSATION = {"messages": [{"role": "user", "content": "-"}]}  # likewise
FINISH_REASONS: dict[str, EngineFinishReason] = {"length": "length", "abort": "cancel"}  # others mean "stop"
# Members of a request that were for the engine, or that its whole answer does not have.
LEFT_OUT = {"stream_options", "best_of", "use_beam_search", "max_tokens", "max_completion_tokens", "echo",
            "prompt_logprobs", "logprob_token_ids"}  # fmt: skip


class ChatDerendering(VllmChatReply, AnswerRenderer):
    """The tokens of an answer to a conversation, answered as ``/v1/chat/completions`` is."""

    def __init__(self, body: Fields, context: RequestContext):
        response = body.object("generate_response")
        if response is None:
            raise body.missing_member("generate_response")
        outputs = _read_outputs(response, context)
        is_plain = not body.has_value("chat_request")
        top, prompt_ids = listed_alternatives(outputs), _read_prompt(body, response)
        members = {"n": len(outputs), "logprobs": top is not None, "top_logprobs": top}
        super().__init__(original_request(body, "chat_request", NO_CONVERSATION, members), context)
        if is_plain:
            self.request.prompts = [TokensPrompt(prompt_ids)]
            self.request.output_options = msgspec.structs.replace(self.request.output_options, unparsed=True)
        self.outputs, self.prompt_tokens = outputs, body.integer("prompt_tokens", 0, 0, MAX_TOKENS)
        mark_stop_tokens(outputs, self.request)
        self._response_id = read_response_id(response, context)
        self._passed_members = {
            "prompt_logprobs": _read_prompt_logprobs(response),
            "kv_transfer_params": _read_transfer(response),
            "metrics": read_response_metrics(response),
        }

    def passed_members(self) -> dict[str, Any]:
        """Return the members that the generated answer has for the whole one."""
        return self._passed_members

    @property
    def answer_name(self) -> str:
        """The id of the generated answer."""
        return self._response_id

    def usage_members(self, usage: Usage) -> dict[str, Any]:
        """Return the usage, without details that only the engine knows."""
        return _plain_usage(usage)


class CompletionDerendering(VllmCompletionReply, AnswerRenderer):
    """The tokens of answers to plain prompts, answered as ``/v1/completions`` is."""

    def __init__(self, body: Fields, context: RequestContext):
        responses = list(body.objects("generate_responses", cap=MAX_RESPONSES))
        if not responses:
            raise InvalidValue("generate_responses must not be empty", field="generate_responses")
        outputs = [_read_outputs(response, context) for response in responses]
        if len({len(choices) for choices in outputs}) > 1:
            raise InvalidValue(
                "All generate_responses must have the same number of choices.", field="generate_responses"
            )
        self.outputs = [output for choices in outputs for output in choices]
        members = {
            "prompt": [NO_PROMPT] * len(responses),
            "n": len(outputs[0]),
            "logprobs": listed_alternatives(self.outputs),
        }
        super().__init__(original_request(body, "completion_request", {}, members), context)
        self.request.prompts = [TokensPrompt(ids) for ids in _read_prompts(body, responses)]
        mark_stop_tokens(self.outputs, self.request)
        counts = body.integers("prompt_tokens", cap=MAX_RESPONSES, low=0, high=MAX_TOKENS)
        if body.has_value("prompt_tokens") and len(counts) != len(responses):
            raise InvalidValue(
                f"prompt_tokens length ({len(counts)}) must equal generate_responses length ({len(responses)})",
                field="prompt_tokens",
            )
        self.prompt_tokens = sum(counts)
        self._response_id = read_response_id(responses[0], context)
        transfers, metrics = list(map(_read_transfer, responses)), list(map(read_response_metrics, responses))
        self._passed_members = {
            "kv_transfer_params": transfers[0] if all(transfer == transfers[0] for transfer in transfers) else None,
            "metrics": metrics[0] if len(metrics) == 1 else None,
        }

    def passed_members(self) -> dict[str, Any]:
        """Return the members that the generated answers have for the whole one: those of all, metrics of one only."""
        return self._passed_members

    @property
    def answer_name(self) -> str:
        """The id of the first generated answer."""
        return self._response_id

    def usage_members(self, usage: Usage) -> dict[str, Any]:
        """Return the usage, without details that only the engine knows."""
        return _plain_usage(usage)


def original_request(body: Fields, name: str, default: dict[str, Any], members: dict[str, Any]) -> Fields:
    """Return the request that was rendered, with ``members`` in place of its own. Raises BadRequest."""
    original = body.object(name)
    if original is None:
        original = body.with_members({name: default}).object(name)
        assert original is not None
    model = body.string("model", "", cap=256)
    return original.without_members(LEFT_OUT).with_members({"model": model, "stream": False} | members)


def mark_stop_tokens(outputs: Sequence[EngineOutput], request: Request) -> None:
    """Set the stop token of the outputs that end with one: the answer names it and does not show it."""
    for output in outputs:
        if output.finish_reason == "stop" and output.token_ids and output.token_ids[-1] in request.stop_conditions.ids:
            output.stop_id = output.token_ids[-1]


def read_response_id(response: Fields, context: RequestContext) -> str:
    """Return the id of the generated answer."""
    return response.string("request_id", "", cap=256) or context.unique_id[:16]


def _read_transfer(response: Fields) -> dict[str, Any] | None:
    """Return the data that another server needs to fetch the pages of the prompt, unchanged."""
    return response.free_object("kv_transfer_params") if response.has_value("kv_transfer_params") else None


def read_response_metrics(response: Fields) -> dict[str, Any] | None:
    """Return where the time of a generated answer went, in the form of ``--enable-per-request-metrics``."""
    metrics = response.object("metrics")
    if metrics is None:
        return None
    times = {name: metrics.number(name, None) for name in METRIC_NAMES}
    return times | {"speculative_decoding": metrics.free_object("speculative_decoding") or None}


def _read_prompt_logprobs(response: Fields) -> list[Any] | None:
    """Return, for each token of the prompt, log-probabilities by the ids of tokens. Raises BadRequest."""
    entries = response.array("prompt_logprobs", cap=MAX_LISTED_IDS)
    for place, entry in enumerate(entries):
        if entry is None or (isinstance(entry, dict) and all(map(_is_scored, entry.values()))):
            continue
        reason = f"element {place} must be null or an object of tokens with their log-probabilities."
        raise response.member_error("prompt_logprobs", reason)
    return entries if response.has_value("prompt_logprobs") else None


def _is_scored(entry: Any) -> bool:
    return isinstance(entry, dict) and type(entry.get("logprob")) in (int, float) and is_shallow(entry, 1)


def _read_prompt(body: Fields, response: Fields) -> list[int]:
    """Return the prompt's tokens: the text of the first generated token depends on them."""
    holder = body if body.has_value("prompt_token_ids") else response
    return holder.integers("prompt_token_ids", cap=MAX_LISTED_IDS, low=0, high=MAX_TOKEN_ID) or NO_PROMPT


def _read_prompts(body: Fields, responses: Sequence[Fields]) -> list[list[int]]:
    """Return the tokens of each prompt, from ``body`` if it has them, otherwise from the answer. Raises BadRequest."""
    lists = body.array("prompt_token_ids", cap=MAX_RESPONSES)
    if not body.has_value("prompt_token_ids"):
        return [_read_prompt(response, response) for response in responses]
    if len(lists) != len(responses):
        sentence = f"prompt_token_ids length ({len(lists)}) must equal generate_responses length ({len(responses)})"
        raise InvalidValue(sentence, field="prompt_token_ids")
    completed = [
        response if ids is None else response.with_members({"prompt_token_ids": ids})
        for ids, response in zip(lists, responses, strict=True)
    ]
    return [_read_prompt(response, response) for response in completed]


def _read_outputs(response: Fields, context: RequestContext) -> list[EngineOutput]:
    """Return the output of each choice, by their indices. Raises BadRequest."""
    response.string("output_mode", "tokens", allowed=("tokens",))
    choices = list(response.objects("choices", cap=MAX_CHOICES_PER_PROMPT))
    if not choices:
        raise response.empty_member("choices", "array")
    outputs = [_read_output(choice, context.context_length) for choice in choices]
    outputs.sort(key=lambda output: output.index)
    if [output.index for output in outputs] != list(range(len(outputs))):
        raise InvalidValue(f"The indices of choices must be 0 to {len(outputs) - 1}.", field="generate_response")
    return outputs


def _read_output(choice: Fields, context_length: int) -> EngineOutput:
    index = choice.integer("index", 0, 0, MAX_CHOICES_PER_PROMPT)
    token_ids = choice.integers("token_ids", cap=MAX_LISTED_IDS, low=0, high=MAX_TOKEN_ID)
    if not token_ids:
        raise InvalidValue(f"choice {index} has empty or null token_ids", field="token_ids")
    if context_length and len(token_ids) > context_length:
        sentence = f"token_ids length ({len(token_ids)}) in choice {index} exceeds max_model_len ({context_length})."
        raise InvalidValue(sentence, field="token_ids")
    reason = FINISH_REASONS.get(choice.string("finish_reason", "stop", cap=64), "stop")
    return EngineOutput("", index, token_ids, read_choice_scores(choice, index, len(token_ids)), reason)


def read_choice_scores(choice: Fields, index: int, count: int) -> list[TokenScore] | None:
    """Return the scores of a choice's tokens; None if it has none. Raises BadRequest."""
    logprobs = choice.object("logprobs")
    if logprobs is None or not logprobs.has_value("content"):
        return None
    entries = list(logprobs.objects("content", cap=MAX_LISTED_IDS))
    if len(entries) != count:
        raise InvalidValue(f"choice {index} has {count} tokens, but logprobs of {len(entries)}.", field="logprobs")
    scores = []
    for entry in entries:
        listed = list(entry.objects("top_logprobs", cap=MAX_LISTED_IDS))
        if len(listed) > MAX_ALTERNATIVES:
            sentence = f"top_logprobs count ({len(listed)}) in choice {index} exceeds maximum ({MAX_ALTERNATIVES})."
            raise InvalidValue(sentence, field="top_logprobs")
        ids = [other.integer("token_id", 0, 0, MAX_TOKEN_ID) for other in listed]
        rank = entry.integer("rank", 1, 0, MAX_TOKEN_RANK)
        scores.append(TokenScore(_read_logprob(entry), rank, ids, list(map(_read_logprob, listed))))
    return scores


def _read_logprob(entry: Fields) -> float:
    logprob = entry.number("logprob", None)
    if logprob is None:
        raise entry.missing_member("logprob")
    return logprob


def listed_alternatives(outputs: Sequence[EngineOutput]) -> int | None:
    """Return the largest number of alternatives that a token has; None if there are no scores."""
    scores = [score for output in outputs for score in output.scores or ()]
    return max(len(score.top_ids) for score in scores) if scores else None


def _plain_usage(usage: Usage) -> dict[str, Any]:
    total = usage.prompt_tokens + usage.completion_tokens
    return embedding_usage(usage) | {"total_tokens": total, "completion_tokens": usage.completion_tokens}
