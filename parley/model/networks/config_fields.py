"""Checked numbers of config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from parley.model.networks.rope import wrong_value

MOST_TOKENS = (1 << 31) - 1  # that kernels take
MOST_FLOAT32 = torch.finfo(torch.float32).max


def read_size(fields: Mapping[str, Any], name: str) -> int:
    """Return an integer of at least 1. Raises Unfusable for any other value."""
    value = fields.get(name)
    if type(value) is not int or value < 1:
        raise wrong_value(name, value)
    return value


def read_token_count(fields: Mapping[str, Any], name: str) -> int:
    """Return how many tokens or entries a row sees at most, at least 1. Larger values than kernels take mean the same
    as the largest, because no context is that long. Raises Unfusable for any other value."""
    return min(read_size(fields, name), MOST_TOKENS)


def read_number(fields: Mapping[str, Any], name: str) -> float:
    """Return a number of at least 0 that float32 can hold, or infinity. Raises Unfusable for any other value."""
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise wrong_value(name, value)
    if MOST_FLOAT32 < value < math.inf:
        raise wrong_value(name, value)
    return float(value)


def read_flag(fields: dict[str, Any], flag: bool | str) -> bool:
    """Return a flag of a family: the flag itself, or the value of the config field that it names."""
    return bool(fields[flag]) if isinstance(flag, str) else flag
