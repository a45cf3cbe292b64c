"""The built-in model: a very small Qwen3 that answers questions about a closed world.

The server needs only `model_folder()`. The other modules generate the training text, and train, evaluate and export
the model. README.md in this folder describes the model's knowledge.
"""

from __future__ import annotations

from pathlib import Path


def model_folder() -> Path:
    """Return the folder of the built-in model, in plain Hugging Face format."""
    return Path(__file__).parent / "model"
