"""The input ``embedding_request``: asks for the embedding of a text or of token ids instead of generated text.

Its value is JSON text, ``{"input": …, "pooling_params": {"dimensions": [n]}}``. The original reserves it for its own
OpenAI frontend; clients that know it send it with an empty ``text_input``. The vector is returned as the text of a JSON
array, in the output ``text_output``.
"""

from __future__ import annotations

from parley.dialects.fields import Fields
from parley.dialects.request_context import RequestContext
from parley.dialects.sampling_members import MAX_TOKEN_ID, read_truncation
from parley.types import PoolingOptions, Prompt, Request, TextPrompt, TokensPrompt

EMBEDDING_INPUT = "embedding_request"
MAX_SIZE = 2**31  # characters or ids; the limit of a body is lower


def read_triton_embedding(body: Fields, context: RequestContext) -> Request | None:
    """Return the request for an embedding, or None if the body has none. Raises BadRequest."""
    if not body.string(EMBEDDING_INPUT, "", cap=MAX_SIZE):
        return None
    embedding_body = body.with_parsed_text(EMBEDDING_INPUT, cap=MAX_SIZE).object(EMBEDDING_INPUT) or Fields(
        {}, EMBEDDING_INPUT
    )
    return Request(
        id=context.unique_id,
        model=context.path_parts["model"],
        prompts=[_read_embedding_prompt(embedding_body)],
        pooling=_read_pooling(embedding_body),
        max_prompt_tokens=read_truncation(body, context.context_length),
        kept_side="head",
    )


def _read_embedding_prompt(embedding_body: Fields) -> Prompt:
    value = embedding_body.raw_value("input")
    if isinstance(value, list):
        ids = embedding_body.integers("input", cap=MAX_SIZE, low=0, high=MAX_TOKEN_ID)
        if not ids:
            raise embedding_body.empty_member("input", "array")
        return TokensPrompt(ids)
    if value is None:
        raise embedding_body.missing_member("input")
    if not isinstance(value, str):
        raise embedding_body.mistyped_member("input", "a string, or token ids")
    if not value:
        raise embedding_body.empty_member("input", "string")
    return TextPrompt(value)


def _read_pooling(embedding_body: Fields) -> PoolingOptions:
    """Read ``pooling_params``. The original uses the first of an array of dimensions; a number is accepted as well."""
    pooling_params = embedding_body.object("pooling_params")
    if pooling_params is None:
        return PoolingOptions()
    if isinstance(pooling_params.raw_value("dimensions"), list):
        dimensions = pooling_params.integers("dimensions", cap=1, low=1, high=MAX_TOKEN_ID)
        return PoolingOptions(dimensions[0] if dimensions else None)
    return PoolingOptions(pooling_params.integer("dimensions", None, 1, MAX_TOKEN_ID))
