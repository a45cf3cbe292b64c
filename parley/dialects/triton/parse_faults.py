"""Describes why a body is not JSON, in the words of RapidJSON, which the original reads bodies with.

Python's own parser finds the place; RapidJSON names it by its byte, and has a sentence for most kinds of faults.
"""

from __future__ import annotations

import json
import math
import re

from parley.dialects.json_body import check_json_size

VALUE_FAULT = "Invalid value."
ENCODING_FAULT = "Invalid encoding in string."
UNCLOSED_STRING_FAULT = "Missing a closing quotation mark in string."
SURROGATE_FAULT = "The surrogate pair in string is invalid."
NUMBER_FAULT = "Number too big to be stored in double."
MEMBER_FAULT = "Missing a comma or } after an object member."
ELEMENT_FAULT = "Missing a comma or ] after an array element."
FAULTS_BY_MESSAGE = {  # the beginnings of Python's messages
    "Expecting property name": "Missing a name for object member.",
    "Expecting ':' delimiter": "Missing a colon after a name of object member.",
    "Extra data": "The document root must not be followed by other values.",
    "Unterminated string": UNCLOSED_STRING_FAULT,
    "Invalid control character": ENCODING_FAULT,
    "Invalid \\uXXXX escape": "Incorrect hex digit after \\u escape in string.",
    "Invalid \\escape": "Invalid escape character in string.",
}
FRACTION_FAULT = "Miss fraction part in number."
EXPONENT_FAULT = "Miss exponent in number."
# Python reads the number before the point or the exponent, and finds fault with what follows.
CUT_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:(?:\.\d+)?(?P<exponent>[eE][+-]?)|\.)")
BYTE_POSITION = re.compile(r"byte (\d+)")
STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)  # without backtracking: bodies have many megabytes
STRING_OR_NUMBER = re.compile(
    rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|(?P<number>-?\d++(?:\.\d++)?(?:[eE][+-]?\d++)?)', re.DOTALL
)
LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*(?P<escape>\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|[c-fC-F][0-9a-fA-F]{2}))"
)


def describe_parse_fault(body: bytes, reason: str) -> str:
    """Return the fault of a body in UTF-8 and its place: "Invalid value. at 5".

    ``reason``: the message of parley's own parser, for faults that only that parser finds.
    """
    match = BYTE_POSITION.search(reason)
    fault, position = VALUE_FAULT, int(match[1]) if match else len(body)
    try:
        check_json_size(body)
        json.loads(body.decode())
        lone = LONE_SURROGATE.search(body)  # Python accepts these, and infinite numbers
        if lone is not None:
            fault, position = SURROGATE_FAULT, lone.start("escape")
        elif (place := _find_infinite_number(body)) is not None:
            fault, position = NUMBER_FAULT, place
    except json.JSONDecodeError as error:
        fault, place = _find_cut_number(error) or (_name_fault(error), error.pos)
        position = len(error.doc[:place].encode())
        if fault == UNCLOSED_STRING_FAULT:
            position = len(body)
        elif "escape" in error.msg:
            position = body.rfind(b"\\", 0, position + 2)
    except (ValueError, RecursionError):
        pass
    return f"{fault} at {position}"


def _find_infinite_number(body: bytes) -> int | None:
    """Return the place of the first number that no double holds, None if there is none."""
    for match in STRING_OR_NUMBER.finditer(body):
        if match["number"] and math.isinf(float(match["number"])):
            return match.start()
    return None


def _find_cut_number(error: json.JSONDecodeError) -> tuple[str, int] | None:
    """Return the fault of a number that ends at its point or exponent, and its place in characters, if it is one."""
    start = len(error.doc[: error.pos].rstrip("0123456789.+-eE"))
    number = CUT_NUMBER.match(error.doc, start)
    if number is None or number.end() <= error.pos:
        return None
    return EXPONENT_FAULT if number["exponent"] else FRACTION_FAULT, number.end()


def _name_fault(error: json.JSONDecodeError) -> str:
    if error.msg.startswith("Expecting ',' delimiter"):
        outside_strings = STRING.sub("", error.doc[: error.pos])
        return MEMBER_FAULT if _is_inside_object(outside_strings) else ELEMENT_FAULT
    return next((fault for start, fault in FAULTS_BY_MESSAGE.items() if error.msg.startswith(start)), VALUE_FAULT)


def _is_inside_object(text: str) -> bool:
    """True if the innermost bracket that is open at the end is that of an object."""
    depth = 0
    for character in reversed(text):
        if character in "}]":
            depth += 1
        elif character in "{[":
            if depth == 0:
                return character == "{"
            depth -= 1
    return False
