"""Finish reasons, and log-probabilities of tokens, as JSON has them."""

from __future__ import annotations

from typing import Any

from parley.types import FinishReason, TokenInfo

FINISH_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "tool": "tool_calls",
    "repetition": "repetition",
    "cancel": "abort",
    "error": "error",
}


def finite_logprob(logprob: float | None) -> float:
    """Return a log-probability in a form that JSON can represent: -9999 for impossible tokens and NaN."""
    return logprob if logprob is not None and logprob > -9999.0 else -9999.0


def prompt_logprob_maps(tokens: list[TokenInfo], top: int) -> list[dict[str, Any] | None]:
    """Return the ``prompt_logprobs`` extra: a map from token id to score for each token, null for the first.

    Each map has the token's own id first, then at most ``top`` alternatives; -1: all there are.
    """
    return [
        None
        if token.logprob is None
        else {
            str(scored.id): {
                "logprob": finite_logprob(scored.logprob),
                "rank": scored.rank,
                "decoded_token": scored.text,
            }
            for scored in [token, *token.top_tokens[: None if top < 0 else top]]
        }
        for token in tokens
    ]
