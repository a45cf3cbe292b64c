"""The input ``embedding_request``: asks for the embedding of a text or of token ids instead of generated text.

Its value is JSON text, ``{"input": …, "pooling_params": {"dimensions": [n]}}``. The original reserves it for its own
OpenAI frontend; clients that know it send it with an empty ``text_input``. The vector is returned as the text of a JSON
array, in the output ``text_output``.
"""

from __future__ import annotations

from parley.dialects.dialect import Head
from parley.dialects.fields import Fields
from parley.dialects.parameters import MAX_ID, truncation
from parley.types import Pooling, Prompt, Request, Text, Tokens

NAME = "embedding_request"
MAX_SIZE = 2**31  # characters or ids; the limit of a body is lower


def read(body: Fields, head: Head) -> Request | None:
    """Return the request for an embedding, or None if the body has none. Raises BadRequest."""
    if not body.string(NAME, "", cap=MAX_SIZE):
        return None
    wish = body.spelled(NAME, cap=MAX_SIZE).object(NAME) or Fields({}, NAME)
    return Request(
        id=head.id,
        model=head.path["model"],
        prompts=[_prompt(wish)],
        pooling=_pooling(wish),
        truncate=truncation(body, head.context),
        keep="head",
    )


def _prompt(wish: Fields) -> Prompt:
    value = wish.raw("input")
    if isinstance(value, list):
        ids = wish.integers("input", cap=MAX_SIZE, low=0, high=MAX_ID)
        if not ids:
            raise wish.empty("input", "array")
        return Tokens(ids)
    if value is None:
        raise wish.missing("input")
    if not isinstance(value, str):
        raise wish.mistyped("input", "a string, or token ids")
    if not value:
        raise wish.empty("input", "string")
    return Text(value)


def _pooling(wish: Fields) -> Pooling:
    """Read ``pooling_params``. The original uses the first of an array of dimensions; a number is accepted as well."""
    given = wish.object("pooling_params")
    if given is None:
        return Pooling()
    if isinstance(given.raw("dimensions"), list):
        listed = given.integers("dimensions", cap=1, low=1, high=MAX_ID)
        return Pooling(listed[0] if listed else None)
    return Pooling(given.integer("dimensions", None, 1, MAX_ID))
