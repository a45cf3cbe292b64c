"""Translates outputs of ``AsyncLLM.generate`` and ``encode`` into those of vLLM's engine core.

This module reads attributes of vLLM's objects and does not import vLLM, so that it can be tested with stand-ins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parley.types import EngineRequest
from parley.worker.vllm.outputs.choice_output import (
    ChoiceOutput,
    ListedToken,
    collect_prompt_scores,
    collect_scores,
    finish_number,
)


def read_generated(choice_id: str, request: EngineRequest, output: Any) -> ChoiceOutput:
    """Return the output in a ``RequestOutput`` with one choice, whose tokens are those since the last output."""
    completion = output.outputs[0]
    token_ids = list(completion.token_ids)
    choice_output = ChoiceOutput(choice_id, token_ids, finish_number(completion.finish_reason))
    if completion.logprobs:
        positions = [_list_tokens(position) for position in completion.logprobs]
        scored = [
            (_find_token(token_id, listed), listed) for token_id, listed in zip(token_ids, positions, strict=False)
        ]
        choice_output.new_logprobs = collect_scores(scored, request.logprob_ids)
    choice_output.kv_transfer_params = output.kv_transfer_params
    return choice_output


def read_prompt_scores(request: EngineRequest, output: Any) -> Any:
    """Return the scores of the prompt in a ``RequestOutput``, None if it has none."""
    if not output.prompt_logprobs:
        return None
    positions = [None if position is None else _list_tokens(position) for position in output.prompt_logprobs]
    return collect_prompt_scores(positions, request.token_ids)


def _list_tokens(position: Mapping[int, Any]) -> list[ListedToken]:
    return [ListedToken(token_id, logprob.logprob, logprob.rank) for token_id, logprob in position.items()]


def _find_token(token_id: int, listed: list[ListedToken]) -> ListedToken:
    return next((entry for entry in listed if entry.token_id == token_id), ListedToken(token_id))
