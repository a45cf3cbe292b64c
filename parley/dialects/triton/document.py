"""Bodies as JSON documents, decoded with this API's own refusals."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from parley.dialects.fields import is_shallow
from parley.dialects.json_body import OverfullJson, decode_json, first_bad_byte
from parley.dialects.triton.error_answers import UnreadableInput
from parley.dialects.triton.parse_faults import ENCODING_FAULT, describe_parse_fault
from parley.errors import InvalidValue

MAX_DEPTH = 100

JSON_BLANKS = b" \t\r\n"
PARSE_FAILURE = "failed to parse the request JSON buffer: "


def parse_document(body: bytes) -> dict[str, Any]:
    """Return a body's members. Raises UnreadableInput unless it is a JSON object, InvalidValue if nested too deep."""
    if not body.strip(JSON_BLANKS):
        raise UnreadableInput(f"{PARSE_FAILURE}The document is empty. at {len(body)}")
    try:
        value = decode_json(body)
    except RecursionError:
        raise _too_deep_error() from None
    except OverfullJson as error:
        raise InvalidValue(f"The request JSON is too large to be read: {error}") from None
    except UnicodeDecodeError:
        raise UnreadableInput(f"{PARSE_FAILURE}{ENCODING_FAULT} at {first_bad_byte(body)}") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UnreadableInput(PARSE_FAILURE + describe_parse_fault(body, str(error))) from None
    if not isinstance(value, dict):
        raise UnreadableInput("attempt to access JSON non-object as object")
    if not is_shallow(value, MAX_DEPTH):
        raise _too_deep_error()
    return value


def repeated_names(body: bytes) -> tuple[list[str], list[str]]:
    """Return repeated names in a body that ``parse_document`` accepted: of its members and inside ``parameters``."""
    try:
        document = json.loads(body, object_pairs_hook=_MemberPairs)
    except ValueError:  # a number with too many digits for this reader
        return [], []
    inner = dict(document).get("parameters")
    return _find_repeated(document), _find_repeated(inner) if isinstance(inner, _MemberPairs) else []


class _MemberPairs(list[tuple[str, Any]]):
    """An object's members in order, as a type of its own so that it is not taken for an array."""


def _find_repeated(pairs: _MemberPairs) -> list[str]:
    seen_names: set[str] = set()
    return [name for name, _ in pairs if name in seen_names or seen_names.add(name)]  # type: ignore[func-returns-value]


def _too_deep_error() -> InvalidValue:
    return InvalidValue(f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})")
