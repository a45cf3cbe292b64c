"""Reading texts and token ids: one or several prompts, or the input of an embedding request."""

from __future__ import annotations

from parley.dialects.fields import Fields
from parley.dialects.sampling_members import MAX_TOKEN_ID
from parley.types import Prompt, TextPrompt, TokensPrompt

MAX_PROMPT_SIZE = 2**31  # characters or ids; more than the limit on a body's size allows


def read_prompts(body: Fields, member: str, *, cap: int) -> list[Prompt]:
    """Return at most ``cap`` prompts, none empty. Raises BadRequest."""
    special = body.boolean("add_special_tokens", True)
    value = body.raw_value(member)
    if value is None:
        raise body.missing_member(member)
    if isinstance(value, str):
        if not value:
            raise body.empty_member(member, "string")
        return [TextPrompt(value, special)]
    if not isinstance(value, list):
        raise body.mistyped_member(member, "a string, an array of strings, or token ids")
    if not value:
        raise body.empty_member(member, "array")
    if isinstance(value[0], str):
        return [TextPrompt(text, special) for text in body.strings(member, cap=cap, total=MAX_PROMPT_SIZE)]
    if not isinstance(value[0], list):
        return [TokensPrompt(body.integers(member, cap=MAX_PROMPT_SIZE, low=0, high=MAX_TOKEN_ID))]
    prompts: list[Prompt] = []
    for i, ids in enumerate(body.array(member, cap=cap)):
        path = f"{member}[{i}]"
        item = body.with_defaults({path: ids})
        prompts.append(TokensPrompt(item.integers(path, cap=MAX_PROMPT_SIZE, low=0, high=MAX_TOKEN_ID)))
        if not ids:
            raise item.empty_member(path, "array")
    return prompts
