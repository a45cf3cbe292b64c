"""Bodies as JSON documents, decoded with this API's own refusals."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from parley.dialects.fields import shallow
from parley.dialects.triton.errors import Internal
from parley.errors import Invalid

MAX_DEPTH = 100

FAILED = "failed to parse the request JSON buffer: "
BYTE = re.compile(r"byte (\d+)")


def parse(body: bytes) -> dict[str, Any]:
    """Return a body's members. Raises UnreadableInput unless it is a JSON object, Invalid if nested too deep."""
    if not body:
        raise Internal(f"{FAILED}The document is empty. at 0")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _deep() from None
    except UnicodeDecodeError as error:
        raise Internal(f"{FAILED}Invalid encoding in string. at {error.start}") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        found = BYTE.search(str(error))
        raise Internal(f"{FAILED}Invalid value. at {found[1] if found else len(body)}") from None
    if not isinstance(value, dict):
        raise Internal("attempt to access JSON non-object as object")
    if not shallow(value, MAX_DEPTH):
        raise _deep()
    return value


def repeated(body: bytes) -> tuple[list[str], list[str]]:
    """Return repeated names in a body that ``parse`` accepted: among its members, and inside ``parameters``."""
    try:
        document = json.loads(body, object_pairs_hook=_Pairs)
    except ValueError:  # a number with too many digits for this reader
        return [], []
    inner = dict(document).get("parameters")
    return _again(document), _again(inner) if isinstance(inner, _Pairs) else []


class _Pairs(list[tuple[str, Any]]):
    """An object's members in order, as a type of its own so that it is not taken for an array."""


def _again(pairs: _Pairs) -> list[str]:
    seen: set[str] = set()
    return [name for name, _ in pairs if name in seen or seen.add(name)]  # type: ignore[func-returns-value]


def _deep() -> Invalid:
    return Invalid(f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})")
