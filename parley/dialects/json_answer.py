"""Writes JSON answers; every dialect writes the same compact JSON, with the members in their order."""

from __future__ import annotations

from typing import Any

import msgspec

from parley.dialects.reply import Answer

encode_json = msgspec.json.Encoder().encode


def json_answer(value: Any) -> Answer:
    """Return a value as the JSON body of an answer with status 200."""
    return Answer(200, encode_json(value))
