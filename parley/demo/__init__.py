"""The built-in model: a very small Qwen3 that answers questions about a closed world.

`folder()` is all that the server needs; the other modules generate the training text and train, evaluate and
export the model again. See README.md in this folder for what the model knows.
"""

from __future__ import annotations

from pathlib import Path


def folder() -> Path:
    """The folder of the built-in model, in plain Hugging Face format."""
    return Path(__file__).parent / "model"
