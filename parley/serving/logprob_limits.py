"""How many log-probabilities a request may ask for: of its prompt's tokens and its answer's, with their alternatives.

An answer in one piece holds all of its log-probabilities in memory, so their number is limited; a stream holds only
those of the prompt. The field ``logprobs`` counts the alternatives to each token of the answer, ``prompt_logprobs``
those to each token of the prompt; -1 asks for the whole vocabulary, None for no log-probabilities.
"""

from __future__ import annotations

from parley.errors import InvalidValue
from parley.text.prepared_prompt import PreparedPrompt
from parley.types import ModelInfo, Request

# Log-probabilities in one request for those of the whole vocabulary; they take half a second.
MAX_LISTED_LOGPROBS = 1 << 18
MANY_ALTERNATIVES = 1024  # a request for more of them has the limit of one for the whole vocabulary
MAX_ANSWER_LOGPROBS = 1 << 20  # log-probabilities in one answer, alternatives included; they take 500 MB


def check_answer_logprobs(request: Request, info: ModelInfo, prompts: list[tuple[PreparedPrompt, int]]) -> None:
    """Limit the log-probabilities that an answer holds, of tokens and of their alternatives. Raises InvalidValue.

    A stream holds only those of the prompt.
    """
    prompt_alternatives, listed_alternatives = request.output_options.prompt_logprobs, _listed_alternatives(request)
    if prompt_alternatives is None and listed_alternatives is None:
        return
    vocabulary = info.vocab_size
    tokens_by_field = {
        "logprobs": (
            listed_alternatives,
            request.choices_per_prompt * sum(max_tokens for _, max_tokens in prompts),
        ),
        "prompt_logprobs": (prompt_alternatives, sum(len(prepared.token_ids) for prepared, _ in prompts)),
    }
    for field, (alternatives, tokens) in tokens_by_field.items():
        if alternatives is None:
            continue
        if alternatives == -1 or alternatives > min(MANY_ALTERNATIVES, vocabulary):
            _check_listed_logprobs(alternatives, tokens, vocabulary, field)
        streamed = request.stream and field == "logprobs"
        if alternatives == -1 or streamed:
            continue
        if tokens > (max_tokens := MAX_ANSWER_LOGPROBS // (alternatives + 1)):
            raise InvalidValue(
                f"Log-probabilities with {alternatives} alternatives can be returned for at most {max_tokens} tokens "
                f"in one answer, but they were requested for {tokens}. Ask for fewer tokens"
                f"{', choices or alternatives, or for a stream' if field == 'logprobs' else ' or alternatives'}.",
                field=field,
            )


def _check_listed_logprobs(alternatives: int, tokens: int, vocabulary: int, field: str) -> None:
    """Check a request for the log-probabilities of the whole vocabulary (-1) or much of it. Raises InvalidValue."""
    if alternatives > vocabulary:
        raise InvalidValue(f"The vocabulary has {vocabulary} tokens, but {alternatives} were requested.", field=field)
    count = vocabulary if alternatives == -1 else alternatives
    if tokens > (max_tokens := max(1, MAX_LISTED_LOGPROBS // count)):
        alternatives_text = f"all {vocabulary}" if alternatives == -1 else f"{alternatives} of {vocabulary}"
        raise InvalidValue(
            f"Log-probabilities of {alternatives_text} tokens of the vocabulary can be returned for at most "
            f"{max_tokens} tokens in one request, but they were requested for {tokens}.",
            field=field,
        )


def logprob_output_limit(request: Request) -> int | None:
    """Return how many tokens each choice may have so that the log-probabilities fit an answer in one piece.

    None if that is no limit, or if the request names its own: then it is refused.
    """
    alternatives = _listed_alternatives(request)
    if alternatives is None or alternatives < 0 or request.stream or request.stop_conditions.max_tokens is not None:
        return None
    return max(1, MAX_ANSWER_LOGPROBS // ((alternatives + 1) * request.choices_per_prompt * len(request.prompts)))


def _listed_alternatives(request: Request) -> int | None:
    """Return how many alternatives each token of the answer lists; -1: the whole vocabulary, None: no logprobs."""
    output_options = request.output_options
    return len(output_options.logprob_ids) if output_options.logprob_ids else output_options.logprobs


def engine_alternatives(request: Request, vocabulary: int) -> int:
    """Return the number of alternatives to each output token, as the engine expects it."""
    alternatives = request.output_options.logprobs
    if request.output_options.logprob_ids or (alternatives is None and request.best_of is not None):
        return 0  # chosen ids replace alternatives; the ranking of ``best_of`` needs the drawn tokens' alone
    return engine_alternatives_count(alternatives, vocabulary)


def engine_alternatives_count(alternatives: int | None, vocabulary: int) -> int:
    """Return a number of alternatives as the engine expects it: -1 for no log-probabilities at all."""
    if alternatives is None:
        return -1
    return vocabulary if alternatives < 0 else alternatives
