"""The vocabulary in a GGUF file's metadata: tokens, their kinds and their scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from parley.gguf.header import GgufError

# Kinds of tokens in ``tokenizer.ggml.token_type``
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
BLANK = "▁"


class Vocabulary(NamedTuple):
    """Tokens, their kinds and their scores, by id. ``read_field`` returns a value of the tokenizer's metadata."""

    tokens: list[str]
    kinds: list[int]
    scores: list[float]
    read_field: Callable[[str], Any]

    @property
    def ids(self) -> dict[str, int]:
        """The id of each token; rows that only fill up the embedding have none."""
        return {
            token: number
            for number, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind != UNUSED or not token.startswith("[PAD")
        }

    def special_id(self, name: str) -> int | None:
        """Return the id in a metadata field such as ``bos_token_id``; None if there is no such token."""
        value = self.read_field(name)
        return value if type(value) is int and 0 <= value < len(self.tokens) else None


def read_vocabulary(metadata: dict[str, Any], name: str) -> Vocabulary:
    """Return the vocabulary. ``name``: of the GGUF file. Raises GgufError if there is none."""

    def read_field(key: str) -> Any:
        return metadata.get("tokenizer.ggml." + key)

    tokens = read_field("tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise GgufError(f"{name} has no tokenizer: there is no list of texts tokenizer.ggml.tokens")
    lists: dict[str, list[Any]] = {}
    for key, default in (("token_type", NORMAL), ("scores", 0.0)):
        values = read_field(key) or [default] * len(tokens)
        if not isinstance(values, list) or len(values) != len(tokens):
            raise GgufError(f"{name} is damaged: tokenizer.ggml.{key} does not have one value for each token")
        lists[key] = values
    # As in llama.cpp: a token without text stays a token
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]
    if len(set(tokens)) < len(tokens):
        raise GgufError(f"{name} is damaged: tokenizer.ggml.tokens has the same token twice")
    return Vocabulary(tokens, lists["token_type"], lists["scores"], read_field)
