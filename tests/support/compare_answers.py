"""Compares two answers, ignoring timings and the grouping of decode steps into events."""

from __future__ import annotations

import json
import re
from typing import Any

from parley.dialects.triton.rpc import infer
from parley.dialects.triton.rpc.frames import Failure, Reader

TIMES = re.compile(rb'("[a-z_]*(?:time|cost|time_arr|batch_size)": ?)([0-9.e+-]+|\[[^\]]*\])')
EVENT = re.compile(rb"(?<=\n\n)|(?<=\0)")
PIECES = {"text", "content", "arguments", "reasoning", "reasoning_content", "text_output", "name"}


def same(one: bytes, other: bytes) -> bool:
    """Whether two answers have the same content.

    Steps that arrive together share one event, and choices alternate freely. So if the bytes differ and the answer has
    several events, the joined content of each choice is compared.
    """
    one, other = TIMES.sub(rb"\1_", one), TIMES.sub(rb"\1_", other)
    if one == other:
        return True
    if one[:1] == other[:1] == b"\0":
        return called(one) == called(other)
    if one.startswith(b'{"text"'):  # each event repeats the whole text so far
        return re.split(rb"[\n\0]+", one)[-2:] == re.split(rb"[\n\0]+", other)[-2:]
    return one.count(b"data:") > 1 and folded(one) == folded(other)


def called(stream: bytes) -> tuple[bytes, list[Failure], Any]:
    """Join a gRPC stream: its text, its failures, and its last answer without the text."""
    answers = Reader().feed(stream)
    made = [infer.STREAMED.FromString(each).infer_response for each in answers if isinstance(each, bytes)]
    text = b"".join(each.raw_output_contents.pop(0)[4:] for each in made)
    return text, [each for each in answers if isinstance(each, Failure)], made[-1]


def folded(stream: bytes) -> dict[Any, Any]:
    """Join the events of a stream by choice."""
    found: dict[Any, Any] = {}
    for event in filter(None, EVENT.split(stream)):
        text = event.strip(b"\0\n ").removeprefix(b"data:").strip().replace(b":_", b":0").replace(b": _", b":0")
        try:
            told = json.loads(text)
        except ValueError:
            found[text] = found.get(text, 0) + 1
            continue
        choices = told.get("choices") if isinstance(told, dict) else None
        if choices:
            told.pop("usage", None)  # a running total over all choices
        key = choices[0].get("index") if choices else told.get("index") if isinstance(told, dict) else None
        found[key] = fold(found[key], told) if key in found else told
    return found


def fold(one: Any, other: Any, name: str = "") -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return one | {key: fold(one.get(key), value, key) for key, value in other.items()}
    if isinstance(one, list) and isinstance(other, list):
        if len(one) == len(other) == 1 and isinstance(one[0], dict) and name in ("choices", "tool_calls"):
            return [fold(one[0], other[0])]
        return one + other
    if isinstance(one, str) and isinstance(other, str) and name in PIECES:
        return one + other
    return one if other is None else other
