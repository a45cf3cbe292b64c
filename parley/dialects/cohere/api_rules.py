"""The two rule sets of Cohere's API: strict ones like the original's, and lenient ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CohereRules:
    """``strict``: members that the original does not have, and values beyond its ranges, are refused."""

    strict: bool = False


LENIENT_COHERE_RULES, STRICT_COHERE_RULES = CohereRules(), CohereRules(strict=True)
