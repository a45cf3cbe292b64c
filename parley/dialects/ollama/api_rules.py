"""The two rule sets of Ollama's API: strict ones like the original's, and lenient ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OllamaRules:
    """The differences between the original and the lenient form of its API.

    ``strict``: a call's arguments must be an object, ``stop`` is a list, a duration in text has a unit, and an option
    of a wrong type is an error of the server (500).
    """

    strict: bool = False


LENIENT_OLLAMA_RULES = OllamaRules()
STRICT_OLLAMA_RULES = OllamaRules(strict=True)
