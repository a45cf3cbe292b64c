"""Reads JSON files in the folder of a model. Imports no tokenizer, so that the engine's process can use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class BadTokenizer(Exception):
    """The folder's tokenizer cannot be used. The message is one sentence for the user."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if there is no such file. Raises BadTokenizer."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise BadTokenizer(f"{path.name} of the model cannot be read: {str(error).rstrip('.')}.") from error
    if not isinstance(value, dict):
        raise BadTokenizer(f"{path.name} of the model does not hold a JSON object.")
    return value
