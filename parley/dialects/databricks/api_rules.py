"""The two rule sets of Databricks' API: strict ones like the original's, and lenient ones."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DATABRICKS_BODY = 4 << 20  # bytes of a body that the original accepts


@dataclass(frozen=True, slots=True)
class DatabricksRules:
    """The differences between strict and lenient rules.

    ``strict``: undocumented members are refused, turns must be in order, and content and the choices' indexes are as
    documented. ``max_functions``: per request. ``max_keys``: of a function's parameters; None: no limit.
    """

    strict: bool
    max_functions: int
    max_keys: int | None


STRICT_DATABRICKS_RULES = DatabricksRules(strict=True, max_functions=32, max_keys=15)
LENIENT_DATABRICKS_RULES = DatabricksRules(strict=False, max_functions=128, max_keys=None)
