"""``/tokenize`` and ``/decode``: batches of texts and of token ids."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from parley.dialects.admin_requests import DetokenizeRequest, TokenizeRequest, TokenizeResult
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.request_context import RequestContext
from parley.dialects.sampling_members import MAX_TOKEN_ID
from parley.dialects.tei import inputs
from parley.dialects.tei.api_rules import TeiRules
from parley.dialects.tei.error_answers import EmptyInput
from parley.dialects.tei.inputs import check_batch_size
from parley.errors import WrongType
from parley.types import PoolingOptions, TextPrompt

EMPTY_IDS_SENTENCE = "Input validation error: `input_ids` cannot be empty"


def read_tei_tokenize(rules: TeiRules, body: bytes, context: RequestContext) -> TokenizeRequest:
    """Read one text or a batch of texts. Raises BadRequest."""
    fields = decode_fields(body, rules.wording)
    special = fields.boolean("add_special_tokens", True)
    prompt_name = fields.string("prompt_name", None, cap=inputs.MAX_PROMPT_NAME)
    is_single = isinstance(fields.raw_value("inputs"), str)
    texts = [fields.raw_value("inputs")] if is_single else inputs.read_texts(rules, fields, "inputs")
    if not all(texts):
        raise EmptyInput(inputs.EMPTY_SENTENCE, field="inputs")
    first, *other_texts = (TextPrompt(text, special) for text in texts)
    return TokenizeRequest(
        model=_model_name(rules, fields),
        prompt=first,
        further_prompts=other_texts,
        with_pieces=True,
        with_spans=True,
        pooling=PoolingOptions(prompt=prompt_name),
    )


def write_tei_tokens(result: TokenizeResult) -> bytes:
    """Return the tokens of each text as JSON."""
    return encode_json([_describe_tokens(tokens_result) for tokens_result in (result, *result.further_results)])


def _describe_tokens(result: TokenizeResult) -> list[dict[str, Any]]:
    """Return each token with its text and the byte offsets of that text in UTF-8; added special tokens have none."""
    text, pieces = result.text, result.pieces or []
    offsets = list(accumulate((len(character.encode()) for character in text), initial=0))
    return [
        {"id": token_id, "text": piece, "special": True, "start": None, "stop": None}
        if start == stop
        else {
            "id": token_id,
            "text": text[start:stop],
            "special": False,
            "start": offsets[start],
            "stop": offsets[stop],
        }
        for token_id, piece, (start, stop) in zip(result.token_ids, pieces, result.spans, strict=True)
    ]


def read_decode(rules: TeiRules, body: bytes) -> DetokenizeRequest:
    """Read the ids of one text or of a batch. Raises BadRequest."""
    fields = decode_fields(body, rules.wording)
    value = fields.raw_value("ids")
    if value is None:
        raise fields.missing_member("ids")
    if not isinstance(value, list):
        raise fields.mistyped_member("ids", "an array")
    batch = value if value and isinstance(value[0], list) else [value]
    check_batch_size(rules, len(batch), "ids")
    for ids in batch:
        _check_ids(ids)
    return DetokenizeRequest(
        model=_model_name(rules, fields),
        token_ids=batch[0],
        further_ids=batch[1:],
        ignore_unknown=True,
        skip_special=fields.boolean("skip_special_tokens", True),
    )


def _check_ids(ids: Any) -> None:
    if not isinstance(ids, list) or not all(type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in ids):
        raise WrongType("ids: data did not match any variant of untagged enum InputIds", field="ids")
    if not ids:
        raise EmptyInput(EMPTY_IDS_SENTENCE, field="ids")


def write_texts(text: str, *others: str) -> bytes:
    """Return the decoded texts as JSON."""
    return encode_json([text, *others])


def _model_name(rules: TeiRules, body: Fields) -> str:
    return "" if rules.strict else body.string("model", "", cap=256)
