"""Names of models in Ollama's form: with tags, and with the places where models come from."""

from __future__ import annotations

import re
from collections.abc import Collection

from parley.dialects.fields import Fields
from parley.dialects.request_context import RequestContext
from parley.errors import MissingField, UnknownModel

DEFAULT_TAG = ":latest"
NAME_PREFIXES = ("library/", "registry.ollama.ai/library/", "hf.co/", "huggingface.co/")  # where models come from
NAME_PATTERN = re.compile(r"[A-Za-z0-9._:/@-]*")
MAX_NAME_CHARACTERS = 256


def tagged_name(name: str) -> str:
    """Return a model's name with its tag, as lists show it."""
    return name if ":" in name.rpartition("/")[2] else name + DEFAULT_TAG


def match_known_name(name: str, known_names: Collection[str]) -> str | None:
    """Return the known name that matches ``name`` except for the default tag, a prefix and capital letters; None if no
    known name does.
    """
    if name in known_names:
        return name
    sought_name = _comparable_name(name)
    return next((known_name for known_name in known_names if _comparable_name(known_name) == sought_name), None)


def _comparable_name(name: str) -> str:
    """Return the same text for names that mean the same model."""
    prefix = next((prefix for prefix in NAME_PREFIXES if name.startswith(prefix)), "")
    return tagged_name(name.removeprefix(prefix)).casefold()


def read_ollama_model_name(body: Fields, member: str = "model") -> str:
    """Return the name in a body. Raises MissingField if there is none."""
    name = body.string(member, "", cap=MAX_NAME_CHARACTERS)
    if not name:
        raise MissingField("model is required", field=member)
    return name


def check_served(name: str, context: RequestContext) -> None:
    """Check that the server has a model of this name, for requests that it answers at once. Raises UnknownModel."""
    known_names = [*context.model_names, *context.adapters]
    if match_known_name(name, known_names) is None:
        raise UnknownModel(f"model '{name}' not found", name=name, served=known_names, field="model")
