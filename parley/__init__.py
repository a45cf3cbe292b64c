"""parley: one LLM inference server that every client already speaks to.

The public names are ``LLM`` for scripts and notebooks, the neutral model of ``parley.types``, and the errors of
``parley.errors``. Importing parley imports nothing heavy; each name is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from parley.version import __version__

if TYPE_CHECKING:
    from parley.errors import ParleyError
    from parley.llm import LLM, Answer, Completion
    from parley.types import (
        Chat,
        Event,
        Grammar,
        Message,
        OutputOptions,
        Request,
        Sampling,
        Settings,
        StopConditions,
        Text,
        Tokens,
    )

_NAME_MODULES = {
    "parley.llm": ("LLM", "Answer", "Completion"),
    "parley.errors": ("ParleyError",),
    "parley.types": (
        "Chat", "Event", "Grammar", "Message", "OutputOptions", "Request", "Sampling", "Settings", "StopConditions",
        "Text", "Tokens",
    ),
}  # fmt: skip

__all__ = [
    "LLM", "Answer", "Chat", "Completion", "Event", "Grammar", "Message", "OutputOptions", "ParleyError", "Request",
    "Sampling", "Settings", "StopConditions", "Text", "Tokens", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for home, names in _NAME_MODULES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'parley' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
