"""Words the faults of a body as Go's decoder does: no JSON, or a member of a wrong type.

The sentences are those of ``encoding/json`` in Go 1.24, as clients of Ollama know them. The place of the fault comes
from the message of parley's own decoder; a fault whose message is not known here has no such sentence.
"""

from __future__ import annotations

import re
from typing import Any

BYTE_IN_REASON = re.compile(r"(?:malformed: )(.+) \(byte (\d+)\)")
LITERALS = (b"true", b"false", b"null")  # the decoder reads each whole, and stops after it
OBJECT_KEY = "looking for beginning of object key string"
VALUE = "looking for beginning of value"
CONTEXTS = {  # by our decoder's message: Go's message, and how many bytes after the fault our decoder stops
    "trailing comma in object": (OBJECT_KEY, 0),
    "object keys must be strings": (OBJECT_KEY, 0),
    "trailing comma in array": (VALUE, 0),
    "expected ':'": ("after object key", 0),
    "expected ',' or '}'": ("after object key:value pair", 0),
    "expected ',' or ']'": ("after array element", 0),
    "trailing characters": ("after top-level value", 1),
    "invalid escape character in string": ("in string escape code", 1),
    "invalid character in unicode escape": (r"in \u hexadecimal character escape", 1),
}
GO_TYPES = {  # by the reader's words for an expected type
    "a string": "string",
    "a boolean": "bool",
    "an integer": "int",
    "a number": "float64",
    "an object": "map[string]interface {}",
}
GO_LISTS = {  # types of lists, by the paths of members
    "messages": "[]api.Message",
    "messages.images": "[]api.ImageData",
    "messages.tool_calls": "[]api.ToolCall",
    "images": "[]api.ImageData",
    "context": "[]int",
}


def syntax_sentence(body: bytes, reason: str) -> str | None:
    """Return Go's sentence about a body that is no JSON, or None if ``reason``, the decoder's, has none."""
    if "Input data was truncated" in reason:
        return "unexpected EOF"
    match = BYTE_IN_REASON.search(reason)
    if match is None:
        return None
    words, position = match[1], int(match[2])
    if words == "invalid character":
        return _value_sentence(body, position)
    context, behind = CONTEXTS.get(words, ("", 0))
    return _character_sentence(body, position - behind, context) if context else None


def _value_sentence(body: bytes, position: int) -> str | None:
    """Return the sentence about a wrong character in a value: in a literal, a string or a number, or before them."""
    for word in LITERALS:
        start = position - len(word)
        if start >= 0 and body[start] == word[0] and not _is_in_string(body, start):
            wrong = next((i for i, byte in enumerate(word) if body[start + i] != byte), None)
            if wrong is not None:
                context = f"in literal {word.decode()} (expecting '{chr(word[wrong])}')"
                return _character_sentence(body, start + wrong, context)
    if body[position : position + 1] < b" ":
        return _character_sentence(body, position, "in string literal")
    return _character_sentence(body, position, "in numeric literal" if body[position - 1 : position] == b"-" else VALUE)


def _is_in_string(body: bytes, position: int) -> bool:
    """Whether a place is inside a string, in a body that is JSON up to there."""
    return body[:position].replace(rb"\\", b"").replace(rb"\"", b"").count(b'"') % 2 == 1


def _character_sentence(body: bytes, position: int, context: str) -> str | None:
    if not 0 <= position < len(body):
        return None
    return f"invalid character {_quote_character(chr(body[position]))} {context}"


def _quote_character(character: str) -> str:
    r"""Return a character in Go's single quotes: ``'x'``, ``'\n'``, ``'\x01'``."""
    return "'\"'" if character == '"' else r"'\''" if character == "'" else repr(character)


def type_sentence(struct: str, path: str, expected: str, value: Any) -> str:
    """Return Go's sentence about a member of a wrong type.

    ``struct`` is the name of the body's type, ``path`` a path as ``messages[0].content``, and ``expected`` the type
    with its article.
    """
    member = re.sub(r"\[\d+\]", "", path)
    go_type = GO_LISTS.get(member, "")
    if go_type and path.endswith("]"):
        go_type = go_type.removeprefix("[]")
    elif not go_type:
        go_type = GO_TYPES.get(expected, expected)
    return f"json: cannot unmarshal {go_kind(value)} into Go struct field {struct}.{member} of type {go_type}"


def go_kind(value: Any) -> str:
    """Return Go's word for the kind of a decoded value."""
    match value:
        case None:
            return "null"
        case bool():
            return "bool"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
