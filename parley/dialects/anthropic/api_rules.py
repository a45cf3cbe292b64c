"""The two rule sets of Anthropic's API: strict ones like the original's, and lenient ones."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ANTHROPIC_BODY = 32 << 20  # bytes of a body that the original accepts


@dataclass(frozen=True, slots=True)
class AnthropicRules:
    """``strict``: unknown members, turns out of order, sampling beyond the original's and the like are refused."""

    strict: bool


LENIENT_ANTHROPIC_RULES, STRICT_ANTHROPIC_RULES = AnthropicRules(strict=False), AnthropicRules(strict=True)
