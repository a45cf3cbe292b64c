"""Translates requests and answers of ``/inference/v1/generate`` to and from the terms of vLLM's engine.

The form is that of ``vllm/entrypoints/scale_out/token_in_token_out/protocol.py``. An answer becomes a ``ChoiceOutput``,
which has the attributes of vLLM's ``EngineCoreOutput``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from parley.types import EngineRequest
from parley.worker.vllm.output_reader import FINISH_REASONS, LOWEST_LOGPROB, SCHEDULED
from parley.worker.vllm.sampling_fields import scores_prompt, translate_choice

FINISH_NUMBERS = dict(zip(("stop", "length", "abort", "error", "repetition"), FINISH_REASONS, strict=True))


class ListedToken(msgspec.Struct, gc=False):
    """A token and its log-probability, None for an infinite one. ``rank`` is 1 for the most likely token."""

    token_id: int
    logprob: float | None = None
    rank: int | None = None


class ScoredToken(ListedToken, gc=False):
    """A drawn token. ``top_logprobs`` lists it again, and then the alternatives."""

    top_logprobs: list[ListedToken] = []


class PromptToken(msgspec.Struct, gc=False):
    """The log-probability of a token of the prompt, or of an alternative to it."""

    logprob: float | None = None
    rank: int | None = None


class TokenLogprobs(msgspec.Struct):
    """The scores of a choice's new tokens."""

    content: list[ScoredToken] | None = None


class AnsweredChoice(msgspec.Struct):
    """New tokens of a choice, with the stop token that ended it."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None


class ServerError(msgspec.Struct):
    """An error in the server's words."""

    message: str = ""


class TokenAnswer(msgspec.Struct):
    """A whole answer, or a chunk of a stream. ``prompt_logprobs``: for each token of the prompt, itself and then
    alternatives by their ids; None for the first token."""

    choices: list[AnsweredChoice] = []
    prompt_logprobs: list[dict[int, PromptToken] | None] | None = None
    error: ServerError | None = None


class Rows(list[Any]):
    """Rows of numbers, which may differ in length, in place of an array."""

    def tolist(self) -> list[Any]:
        """Return the rows."""
        return self


class ScoreRows(NamedTuple):
    """Scores of tokens, as vLLM's engine has them: column 0 is the token itself, and the alternatives follow."""

    token_ids: Rows
    logprobs: Rows
    ranks: Rows


class PrefillStats(NamedTuple):
    """How much of the prompt was computed, as far as known: the server does not say what it had cached."""

    num_computed_tokens: int
    num_cached_tokens: int = 0


class ChoiceEvent(NamedTuple):
    """Something that happened to a choice at a time of time.monotonic."""

    type: int
    timestamp: float


class ChoiceOutput(msgspec.Struct):
    """New tokens of a choice, with the attributes of vLLM's ``EngineCoreOutput``."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: int | None = None
    new_logprobs: ScoreRows | None = None
    new_prompt_logprobs_tensors: ScoreRows | None = None
    prefill_stats: PrefillStats | None = None
    events: tuple[ChoiceEvent, ...] = ()
    pooling_output: None = None


def write_choice(request: EngineRequest, index: int, *, model: str, max_logprobs: int) -> dict[str, Any]:
    """Return the body of the server's request for one choice. ``max_logprobs``: the most that the server lists."""
    fields = translate_choice(request, index)
    params: dict[str, Any] = fields.sampling | {"detokenize": False}
    if request.logprob_ids:
        # The drawn token takes a place in the list, so one id is named twice.
        params["logprob_token_ids"] = [*request.logprob_ids, request.logprob_ids[0]]
        params["logprobs"] = len(request.logprob_ids) + 1
    elif request.logprobs > 0:
        params["logprobs"] = min(request.logprobs + 1, max_logprobs)
    body: dict[str, Any] = {"model": model, "token_ids": fields.token_ids, "sampling_params": params}
    body["stream"] = not scores_prompt(request, index)  # streams have no scores of the prompt
    if fields.lark:
        params["structured_outputs"] = {"grammar": fields.lark}
        body["reasoning_ended"] = True  # the grammar covers the reasoning
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    if request.priority:
        body["priority"] = request.priority
    return body


def read_answer(choice_id: str, request: EngineRequest, answer: TokenAnswer) -> ChoiceOutput | None:
    """Return the news of an answer to a request for one choice, None if it has none."""
    if not answer.choices:
        return None
    choice = answer.choices[0]
    token_ids = choice.token_ids or []
    finish = None if choice.finish_reason is None else FINISH_NUMBERS.get(choice.finish_reason, FINISH_NUMBERS["error"])
    output = ChoiceOutput(choice_id, token_ids, finish)
    if choice.logprobs is not None and choice.logprobs.content:
        output.new_logprobs = read_scores(choice.logprobs.content, request.logprob_ids)
    if answer.prompt_logprobs is not None:
        output.new_prompt_logprobs_tensors = read_prompt_scores(answer.prompt_logprobs, request.token_ids)
    return output


def note_start(output: ChoiceOutput, request: EngineRequest, sent_at: float) -> None:
    """Add to the first output of a choice what vLLM's engine says there."""
    output.prefill_stats = PrefillStats(len(request.token_ids))
    output.events = (ChoiceEvent(SCHEDULED, sent_at),)


def read_scores(tokens: Iterable[ScoredToken], named_ids: list[int]) -> ScoreRows:
    """Return the scores of drawn tokens. ``named_ids``: the alternatives; if empty, the most likely tokens."""
    scores = ScoreRows(Rows(), Rows(), Rows())
    for token in tokens:
        if named_ids:
            logprobs = {each.token_id: each.logprob for each in token.top_logprobs}
            listed = [ListedToken(token_id, logprobs.get(token_id)) for token_id in named_ids]
        else:
            listed = _by_rank(token.top_logprobs)
        _add_row(scores, token, listed)
    return scores


def read_prompt_scores(positions: Iterable[dict[int, PromptToken] | None], token_ids: list[int]) -> ScoreRows:
    """Return the scores of a prompt's tokens but the first."""
    scores = ScoreRows(Rows(), Rows(), Rows())
    for token_id, position in zip(token_ids, positions, strict=False):
        if position is not None:
            listed = [ListedToken(each_id, each.logprob, each.rank) for each_id, each in position.items()]
            own = next((each for each in listed if each.token_id == token_id), ListedToken(token_id))
            _add_row(scores, own, _by_rank(listed))
    return scores


def _by_rank(listed: list[ListedToken]) -> list[ListedToken]:
    """Return the most likely tokens, best first. A drawn token that is not among them stands before them in the list;
    so at most one token has a rank beyond their number."""
    ranked = sorted(listed, key=lambda each: each.rank or len(listed) + 1)
    return ranked if len(ranked) < 2 or (ranked[-1].rank or 0) <= len(ranked) else ranked[:-1]


def _add_row(scores: ScoreRows, token: ListedToken, listed: list[ListedToken]) -> None:
    entries = [token, *listed]
    scores.token_ids.append([each.token_id for each in entries])
    scores.logprobs.append([LOWEST_LOGPROB if each.logprob is None else each.logprob for each in entries])
    scores.ranks.append(token.rank or 0)
