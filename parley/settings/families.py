"""Names of model families that the parser options accept.

``families.json`` contains the names of ``CALLS`` and ``THOUGHTS`` in ``parley.text.parsing``, which are slow to import.
``make docs`` writes it.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Literal

FAMILIES_FILE = Path(__file__).with_suffix(".json")
AUTO, NONE = "auto", "none"  # values of the options besides the families


@functools.cache
def option_families(table: Literal["calls", "thoughts"]) -> list[str]:
    """Return every value that the option for a table accepts: auto, none, then each name of each family."""
    return [AUTO, NONE, *json.loads(FAMILIES_FILE.read_text("utf-8"))[table]]


def find_family(name: str, table: Literal["calls", "thoughts"]) -> str | None:
    """Return the table's spelling of a name, ignoring hyphens and case; None for an unknown name."""
    normalized = _normalized_name(name)
    return next(
        (family_name for family_name in option_families(table) if _normalized_name(family_name) == normalized), None
    )


def _normalized_name(name: str) -> str:
    return name.lower().replace("-", "_")
