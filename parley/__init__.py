"""parley: one LLM inference server that every client already speaks to.

The public names are ``LLM`` for scripts and notebooks, the neutral model of ``parley.types``, and the errors of
``parley.errors``. Each name is loaded on first use. This file imports nothing but the version: with ``python -m
parley`` the working directory is on the path until ``__main__.py`` has removed it.
"""

from parley.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from parley.errors import ParleyError
    from parley.llm import LLM, Answer, Completion
    from parley.types import (
        ChatPrompt,
        Event,
        Grammar,
        Message,
        OutputOptions,
        ParleySettings,
        Request,
        SamplingOptions,
        StopConditions,
        TextPrompt,
        TokensPrompt,
    )

_NAME_MODULES = {
    "parley.llm": ("LLM", "Answer", "Completion"),
    "parley.errors": ("ParleyError",),
    "parley.types": (
        "ChatPrompt", "Event", "Grammar", "Message", "OutputOptions", "ParleySettings", "Request", "SamplingOptions",
        "StopConditions", "TextPrompt", "TokensPrompt",
    ),
}  # fmt: skip

__all__ = [
    "LLM", "Answer", "ChatPrompt", "Completion", "Event", "Grammar", "Message", "OutputOptions", "ParleyError",
    "ParleySettings", "Request", "SamplingOptions", "StopConditions", "TextPrompt", "TokensPrompt", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    for home, names in _NAME_MODULES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'parley' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
