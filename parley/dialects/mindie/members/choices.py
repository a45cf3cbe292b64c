"""The number of answers to a request: ``n`` and ``best_of``, and the combinations that are refused.

With ``use_beam_search`` there are as many beams as answers, and ``best_of`` is ignored. Each interface words its
refusals in its own way.
"""

from __future__ import annotations

from parley.dialects.fields import Fields
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.members.parameters import ParameterTable, ParameterValues
from parley.dialects.sampling_members import ChoiceCounts
from parley.types import BeamOptions

BEST_OF_BELOW_N = {
    "vllm": "best_of should greater than or equal to n, but best_of is {}, n is {}.",
    "chat": "best_of must be greater than or equal to n, but best_of is {}, n is {}.",
    "completions": "Best_of must be greater than or equal to n, but best_of is {} and n is {}.",
}
BEST_OF_NOT_N = {
    "chat": "best_of must be equal to n in stream mode, but best_of is {}, n is {}.",
    "completions": "best_of must be equal to n, but best_of is {} and n is {}.",
}
SEVERAL_GREEDY = {
    "vllm": "Best_of/N can not greater than 1 when temperature is 0 or not set, but best_of is {}, n is {}.",
    "chat": "best_of/n can not greater than 1 without using beam search when temperature is 0 or not set, but best_of "
            "is {}, n is {}.",
    "completions": "Best_of and n shouldn't be greater than 1 when sampling is disabled, but best_of is {} and n is "
                   "{}.",
}  # fmt: skip


def count_choices(body: Fields, values: ParameterValues, interface: ParameterTable, rules: MindieRules) -> ChoiceCounts:
    """Return how many answers are given, and out of how many the best are chosen. Raises BadRequest."""
    n, best_of, stream = values["n"], values["best_of"], bool(values["stream"])
    if n is not None:
        _check_n(body, n, rules)
    if values.get("use_beam_search"):
        if (values.get("max_tokens") or 0) > 128 and rules.strict:
            message = "Please set the max_tokens to be not larger than 128 when the use_beam_search is on."
            raise body.member_error("max_tokens", message)
        return ChoiceCounts(n or 1, None, BeamOptions(n or 1))
    if rules.strict and stream and interface.error_style != "vllm" and best_of not in (None, n):
        raise body.member_error(
            "best_of",
            BEST_OF_NOT_N[interface.error_style if n is not None else "chat"].format(best_of, _number_or_none(n)),
        )
    if best_of is not None and n is not None and best_of < n:
        raise body.member_error("best_of", BEST_OF_BELOW_N[interface.error_style].format(best_of, n))
    if not values["temperature"] and max(n or 1, best_of or 1) > 1 and rules.strict:
        none = "null" if interface.error_style == "completions" else "None"
        raise body.member_error(
            "n", SEVERAL_GREEDY[interface.error_style].format(_number_or_none(best_of, none), _number_or_none(n, none))
        )
    generated = max(n or 1, best_of or 1)
    return ChoiceCounts(n or generated, generated if generated > (n or generated) else None)


def _check_n(body: Fields, n: int, rules: MindieRules) -> None:
    bounds = {
        "max_batch_size": rules.max_batch_size,
        "maxPrefillBatchSize": None if rules.old else rules.max_prefill_batch_size,  # the manual has no such limit
        "maxN": rules.max_n,
    }
    for name, bound in bounds.items():
        if bound is not None and n > bound:
            message = f"The n parameter ({n}) exceeds '{name}' ({bound}). Please reduce n or increase {name}."
            raise body.member_error("n", message)


def _number_or_none(value: int | None, none: str = "None") -> str:
    return none if value is None else str(value)
