"""The number of answers to a request: ``n`` and ``best_of``, and the combinations that are refused.

With ``use_beam_search`` there are as many beams as answers, and ``best_of`` is ignored. Each interface words its
refusals in its own way.
"""

from __future__ import annotations

from parley.dialects.fields import Fields
from parley.dialects.mindie.parameters import Interface, Values
from parley.dialects.mindie.rules import Rules
from parley.dialects.parameters import Choices
from parley.types import Beam

FEWER = {
    "vllm": "best_of should greater than or equal to n, but best_of is {}, n is {}.",
    "chat": "best_of must be greater than or equal to n, but best_of is {}, n is {}.",
    "completions": "Best_of must be greater than or equal to n, but best_of is {} and n is {}.",
}
UNEVEN = {
    "chat": "best_of must be equal to n in stream mode, but best_of is {}, n is {}.",
    "completions": "best_of must be equal to n, but best_of is {} and n is {}.",
}
SURE = {
    "vllm": "Best_of/N can not greater than 1 when temperature is 0 or not set, but best_of is {}, n is {}.",
    "chat": "best_of/n can not greater than 1 without using beam search when temperature is 0 or not set, but best_of "
            "is {}, n is {}.",
    "completions": "Best_of and n shouldn't be greater than 1 when sampling is disabled, but best_of is {} and n is "
                   "{}.",
}  # fmt: skip


def count(given: Fields, values: Values, interface: Interface, rules: Rules) -> Choices:
    """Return how many answers are given, and out of how many the best are chosen. Raises BadRequest."""
    n, best_of, stream = values["n"], values["best_of"], bool(values["stream"])
    if n is not None:
        _bound(given, n, rules)
    if values.get("use_beam_search"):
        if (values.get("max_tokens") or 0) > 128 and rules.strict:
            told = "Please set the max_tokens to be not larger than 128 when the use_beam_search is on."
            raise given.fail("max_tokens", told)
        return Choices(n or 1, None, Beam(n or 1))
    if rules.strict and stream and interface.voice != "vllm" and best_of not in (None, n):
        raise given.fail("best_of", UNEVEN[interface.voice if n is not None else "chat"].format(best_of, _none(n)))
    if best_of is not None and n is not None and best_of < n:
        raise given.fail("best_of", FEWER[interface.voice].format(best_of, n))
    if not values["temperature"] and max(n or 1, best_of or 1) > 1 and rules.strict:
        none = "null" if interface.voice == "completions" else "None"
        raise given.fail("n", SURE[interface.voice].format(_none(best_of, none), _none(n, none)))
    made = max(n or 1, best_of or 1)
    return Choices(n or made, made if made > (n or made) else None)


def _bound(given: Fields, n: int, rules: Rules) -> None:
    bounds = {
        "max_batch_size": rules.max_batch_size,
        "maxPrefillBatchSize": rules.max_prefill_batch_size,
        "maxN": rules.max_n,
    }
    for name, bound in bounds.items():
        if bound is not None and n > bound:
            told = f"The n parameter ({n}) exceeds '{name}' ({bound}). Please reduce n or increase {name}."
            raise given.fail("n", told)


def _none(value: int | None, none: str = "None") -> str:
    return none if value is None else str(value)
