"""Common parts of Ollama's routes: its rules and wording, Go's JSON, names with tags, times, and error objects."""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from parley.dialects.dialect import Answer, RequestContext
from parley.dialects.error_wording import ErrorWording
from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.ollama.go_json import go_kind, syntax_sentence, type_sentence
from parley.errors import (
    BadRequest,
    ContextLength,
    Incapable,
    Invalid,
    Malformed,
    Missing,
    NotAllowed,
    NotFound,
    Overloaded,
    ParleyError,
    UnknownModel,
    WrongType,
)

# Origins that may call it without being configured: pages of this machine, and programs that show their own pages.
WEB_ORIGINS = r"https?://(localhost|127\.0\.0\.1|0\.0\.0\.0)(:\d+)?|(app|file|tauri|vscode-webview|vscode-file)://.*"
DEFAULT_TAG = ":latest"
NAME_PREFIXES = ("library/", "registry.ollama.ai/library/", "hf.co/", "huggingface.co/")  # where models come from
NAME = re.compile(r"[A-Za-z0-9._:/@-]*")
MAX_NAME_CHARACTERS = 256
JSON_TYPE = b"application/json; charset=utf-8"
PLAIN_TYPE = b"text/plain"
QUEUE_FULL = "server busy, please try again.  maximum pending requests exceeded"
INPUT_TOO_LONG = "the input length exceeds the context length"
NO_ROOM = "input after truncation exceeds maximum context length"
NO_MEMORY_BODY = b'{"error":"Memory limit exceeded"}'  # the coordinator's refusal when it has no memory for a body
GO_ESCAPED = re.compile(rb"[<>&]|\xe2\x80[\xa8\xa9]")  # Go's encoder escapes these, for HTML and JavaScript


@dataclass(frozen=True, slots=True)
class OllamaRules:
    """The differences between the original and the lenient form of its API.

    ``strict``: a call's arguments must be an object, ``stop`` is a list, a duration in text has a unit, and an option
    of a wrong type is an error of the server (500).
    """

    strict: bool = False


LENIENT = OllamaRules()
STRICT_RULES = OllamaRules(strict=True)


class OllamaWording(ErrorWording):
    """The usual sentences, and Go's where a body cannot be read or a member has a wrong type.

    ``struct`` is the original's name for the body's type.
    """

    def __init__(self, struct: str):
        self._struct = struct

    def unreadable_error(self, body: bytes, reason: str) -> BadRequest:
        """Return the error for a body that is not JSON."""
        return Malformed((syntax_sentence(body, reason) or reason) if body else "missing request body")

    def type_error(self, path: str, expected: str, value: Any) -> BadRequest:
        """Return the error for a value of a wrong type."""
        return WrongType(type_sentence(self._struct, path, expected, value), field=path)

    def not_object_error(self, value: Any) -> BadRequest:
        """Return the error for a body that is JSON, but not an object."""
        return Malformed(f"json: cannot unmarshal {go_kind(value)} into Go value of type api.{self._struct}")


class OptionWording(ErrorWording):
    """The sentences about the members of ``options``, whose types the original names as Go does."""

    GO_TYPES = {  # noqa: RUF012  # never changed
        "an integer": "of type integer",
        "a number": "of type float32",
        "a boolean": "of type boolean",
        "a string": "of an array of strings",  # the only texts are those of a list
        "a string or an array of strings": "of type array",
    }

    def __init__(self, rules: OllamaRules):
        self._rules = rules

    def type_error(self, path: str, expected: str, value: Any) -> BadRequest:
        """Return the error for an option of a wrong type."""
        name = path.removeprefix("options.").partition("[")[0]
        expected = self.GO_TYPES.get(expected, expected)
        error = WrongType(f'option "{name}" must be {expected}', field=path)
        if self._rules.strict:
            error.status = 500
        return error


def encode_go(value: Any) -> bytes:
    """Return a value in JSON, with the escapes of Go's encoder."""
    return GO_ESCAPED.sub(_escape_for_go, encode_json(value))


def _escape_for_go(match: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(match[0].decode())


def go_answer(value: Any, status: int = 200) -> Answer:
    """Return a value as a whole answer."""
    return Answer(status, encode_go(value), JSON_TYPE)


def go_time(seconds: float) -> str:
    """Return a time in whole seconds since the epoch, as Go writes it.

    Clients such as OllamaKit demand a fraction, which times of the original practically always have, and Go leaves out
    zeros at the end: so it is a nanosecond.
    """
    return time.strftime("%Y-%m-%dT%H:%M:%S.000000001Z", time.gmtime(seconds))


def nanoseconds(seconds: float | None) -> int:
    """Return a duration as the API has it; at least 1, because clients divide by it."""
    return max(1, round((seconds or 0.0) * 1e9))


# -- names


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


def read_model_name(body: Fields, member: str = "model") -> str:
    """Return the name in a body. Raises Missing if there is none."""
    name = body.string(member, "", cap=MAX_NAME_CHARACTERS)
    if not name:
        raise Missing("model is required", field=member)
    return name


def check_served(name: str, context: RequestContext) -> None:
    """Check that the server has a model of this name, for requests that it answers at once. Raises UnknownModel."""
    known_names = [*context.model_names, *context.adapters]
    if match_known_name(name, known_names) is None:
        raise UnknownModel(f"model '{name}' not found", name=name, served=known_names, field="model")


# -- errors


def error_text(error: ParleyError) -> str:
    """Return an error's sentence."""
    match error:
        case UnknownModel():
            return f"model '{error.name}' not found"
        case Overloaded():
            return QUEUE_FULL
        case ContextLength():
            return f"{INPUT_TOO_LONG}: {error.message}"
        case _:
            return error.message


def ollama_error(error: ParleyError) -> Answer:
    """Return an error as a complete answer: an object, or plain text for a path or method that does not exist."""
    if type(error) is NotFound:
        return Answer(404, b"404 page not found", PLAIN_TYPE)
    if isinstance(error, UnknownModel) and not NAME.fullmatch(error.name):
        return go_answer({"error": "invalid model name"}, 400)
    if isinstance(error, NotAllowed):
        return Answer(405, b"405 method not allowed", PLAIN_TYPE)
    return go_answer({"error": error_text(error)}, 503 if isinstance(error, Overloaded) else error.status)


def failed_line(error: ParleyError) -> bytes:
    """Return the line that ends a stream which an error cuts short."""
    return encode_go({"error": error_text(error)}) + b"\n"


def incapable_model(name: str, ability: str) -> Incapable:
    """Return the error for a model that lacks an ability that a request needs."""
    return Incapable(f'"{name}" does not support {ability}', field="model")


def invalid_member(field: str, message: str) -> Invalid:
    """Return an error with the original's sentence about a member."""
    return Invalid(message, field=field)
