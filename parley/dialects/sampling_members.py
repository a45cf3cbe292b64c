"""Sampling parameters under vLLM's names, which several APIs share, and this server's own limits on them.

Members of only one API are read in that API's package.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from parley.dialects.fields import Fields
from parley.types import BeamOptions, SamplingOptions

MAX_CHOICES_PER_PROMPT = 128
MAX_STOPS = 1024
MAX_STOP_CHARACTERS = 16_384  # in all stop strings together
MAX_BIAS = 1024
MAX_ALTERNATIVES = 20  # alternatives per token
MAX_TOKEN_ID = 2**31 - 1
MAX_LISTED_IDS = 1 << 20  # token ids in a list
MAX_BAD_WORDS = 1024
MAX_LENGTH_PENALTY = 10  # of beams; the exponent of their length
MAX_NGRAM = 1024  # length of the n-grams that must not repeat


class ChoiceCounts(NamedTuple):
    """The number of choices per prompt, and how they are selected: these members of ``Request``."""

    n: int = 1
    best_of: int | None = None
    beam: BeamOptions | None = None


def read_choice_counts(body: Fields, *, ranked: bool = True) -> ChoiceCounts:
    """Read ``n``, beam search, and ``best_of`` if ``ranked``. With beam search ``best_of`` is the number of beams.

    Raises BadRequest.
    """
    n = body.integer("n", 1, 1, MAX_CHOICES_PER_PROMPT)
    best_of = body.integer("best_of", n, 1, MAX_CHOICES_PER_PROMPT) if ranked else n
    if best_of < n:
        raise body.member_error("best_of", f"must be at least n, which is {n}, but got {best_of}.")
    beam_search = read_beam_search(body, best_of)
    if body.boolean("use_beam_search", False):
        return ChoiceCounts(n, None, beam_search)
    return ChoiceCounts(n, best_of if best_of > n else None)


def read_beam_search(body: Fields, width: int, field: str = "use_beam_search") -> BeamOptions:
    """Read the parameters of a beam search of this width: ``length_penalty`` and ``early_stopping``."""
    early: bool | Literal["never"] = "never"
    if body.raw_value("early_stopping") != "never":
        early = body.boolean("early_stopping", False)
    return BeamOptions(width, body.number("length_penalty", 1.0, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY), early, field)


def read_sampling(body: Fields, *, max_temperature: float) -> SamplingOptions:
    """Read the members that control how a token is drawn. ``max_temperature`` is the API's maximum temperature."""
    return SamplingOptions(
        temperature=body.number("temperature", 1.0, 0, max_temperature),
        top_p=body.number("top_p", 1.0, 0, 1),
        top_k=max(0, body.integer("top_k", 0, -1, MAX_TOKEN_ID)),
        min_p=body.number("min_p", 0.0, 0, 1),
        typical_p=body.number("typical_p", 1.0, 0, 1, low_excluded=True),
        seed=body.integer("seed", None, -(2**63), 2**64 - 1),
        repetition_penalty=body.number("repetition_penalty", 1.0, 0, 100, low_excluded=True),
        presence_penalty=body.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=body.number("frequency_penalty", 0.0, -2, 2),
        logit_bias=body.token_weights("logit_bias", cap=MAX_BIAS, low=-100, high=100),
        allowed=body.integers("allowed_token_ids", cap=MAX_LISTED_IDS, low=0, high=MAX_TOKEN_ID),
        no_repeat_ngram=body.integer("no_repeat_ngram_size", 0, 0, MAX_NGRAM),
        watermark=body.boolean("watermarking", body.boolean("watermark", False)),  # vLLM's name, and TGI's
    )


def read_bad_words(body: Fields) -> list[str]:
    """Read the words that the output must not contain."""
    return body.strings("bad_words", cap=MAX_BAD_WORDS, total=MAX_STOP_CHARACTERS)


def read_truncation(body: Fields, room: int) -> int | None:
    """Return the maximum number of tokens of a prompt to keep; ``room`` for -1. None: no truncation."""
    count = body.integer("truncate_prompt_tokens", None, -1, MAX_TOKEN_ID)
    if count == 0:
        raise body.member_error("truncate_prompt_tokens", "must be -1 or at least 1, but got 0.")
    return max(1, room) if count == -1 else count
