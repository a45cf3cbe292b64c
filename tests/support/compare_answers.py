"""Compares two answers, ignoring timings and the grouping of decode steps into events."""

from __future__ import annotations

import json
import re
from functools import reduce
from typing import Any

from parley.dialects.triton.rpc import infer
from parley.dialects.triton.rpc.frames import FrameSplitter, StreamFailure

TIMINGS = re.compile(rb'("[a-z_]*(?:time|cost|time_arr|batch_size|_duration|completed_at)": ?)([0-9.e+-]+|\[[^\]]*\])')
EVENT_NAME = re.compile(rb"^event: [a-z_.]+\n")
EVENT_BOUNDARY = re.compile(rb"(?<=\n\n)|(?<=\0)")
TEXT_MEMBERS = {
    "text",
    "content",
    "arguments",
    "reasoning",
    "reasoning_content",
    "text_output",
    "name",
    "response",
    "thinking",
    "partial_json",
}


def same_answer(one: bytes, other: bytes) -> bool:
    """Whether two answers have the same content.

    Steps that arrive together share one event, and choices alternate freely. So if the bytes differ and one of the
    answers has several events, the joined content of each choice is compared.
    """
    one, other = TIMINGS.sub(rb"\1_", one), TIMINGS.sub(rb"\1_", other)
    if one == other:
        return True
    if one[:1] == other[:1] == b"\0":
        return join_grpc_stream(one) == join_grpc_stream(other)
    if one.startswith(b'{"text"'):  # each event repeats the whole text so far
        return re.split(rb"[\n\0]+", one)[-2:] == re.split(rb"[\n\0]+", other)[-2:]
    if one.startswith(b'{"model"'):  # Ollama's lines
        return join_lines(one) == join_lines(other)
    # On a busy machine all steps of an answer may arrive together, so one of the two streams may have a single event.
    return one.count(b"data:") + other.count(b"data:") > 2 and join_events(one) == join_events(other)


def join_lines(stream: bytes) -> Any:
    """Join the lines of a stream."""
    lines = [json.loads(line.replace(b":_", b":0")) for line in stream.splitlines()]
    return reduce(merge_event, lines)


def join_grpc_stream(stream: bytes) -> tuple[bytes, list[StreamFailure], Any]:
    """Join a gRPC stream: its text, its failures, and its last answer without the text."""
    answers = FrameSplitter().split_frames(stream)
    responses = [
        infer.STREAM_RESPONSE.FromString(answer).infer_response for answer in answers if isinstance(answer, bytes)
    ]
    text = b"".join(response.raw_output_contents.pop(0)[4:] for response in responses)
    return text, [answer for answer in answers if isinstance(answer, StreamFailure)], responses[-1]


def join_events(stream: bytes) -> dict[Any, Any]:
    """Join the events of a stream by choice."""
    joined: dict[Any, Any] = {}
    for event in filter(None, EVENT_BOUNDARY.split(stream)):
        text = (
            EVENT_NAME.sub(b"", event.strip(b"\0\n "))
            .removeprefix(b"data:")
            .strip()
            .replace(b":_", b":0")
            .replace(b": _", b":0")
        )
        try:
            decoded = json.loads(text)
        except ValueError:
            joined[text] = joined.get(text, 0) + 1
            continue
        choices = decoded.get("choices") if isinstance(decoded, dict) else None
        if choices:
            decoded.pop("usage", None)  # a running total over all choices
        key = choices[0].get("index") if choices else decoded.get("index") if isinstance(decoded, dict) else None
        joined[key] = merge_event(joined[key], decoded) if key in joined else decoded
    return joined


def merge_event(one: Any, other: Any, name: str = "") -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return one | {key: merge_event(one.get(key), value, key) for key, value in other.items()}
    if isinstance(one, list) and isinstance(other, list):
        if len(one) == len(other) == 1 and isinstance(one[0], dict) and name in ("choices", "tool_calls"):
            return [merge_event(one[0], other[0])]
        return one + other
    if isinstance(one, str) and isinstance(other, str) and name in TEXT_MEMBERS:
        return one + other
    return one if other is None else other
