"""The input of a batch: a request in each line, as JSON."""

from __future__ import annotations

from io import BytesIO
from typing import NamedTuple

import msgspec

from parley.dialects.batch_job import BatchRequest

MAX_REQUESTS = 50_000
MAX_CUSTOM_ID = 512  # characters
MAX_SHOWN_FAULTS = 20
# The endpoints that a batch may be for.
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


class InputFault(NamedTuple):
    """A fault of an input file. ``line``: counted from 1; None: the whole file is at fault."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchInputLine(msgspec.Struct):
    """One line."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _BodyMembers(msgspec.Struct):
    """The members of a body that decide whether its request can be a part of a batch."""

    stream: bool | None = None
    background: bool | None = None


class BatchInput(NamedTuple):
    """With ``faults`` there are no requests."""

    requests: list[BatchRequest]
    faults: list[InputFault]


def read_batch_input(content: bytes, endpoint: str) -> BatchInput:
    """Read the lines of an input. Empty ones are passed over."""
    custom_ids: set[str] = set()
    requests: list[BatchRequest] = []
    faults: list[InputFault] = []
    for number, line in enumerate(BytesIO(content), 1):  # a list of the lines may be much larger than the content
        if not line.strip():
            continue
        if len(requests) == MAX_REQUESTS:
            return _refused_input(
                [InputFault("too_many_tasks", f"A batch has at most {MAX_REQUESTS} requests.", number)]
            )
        line_result = _read_line(line, number, endpoint)
        if isinstance(line_result, BatchInputLine) and line_result.custom_id in custom_ids:
            message = f"The custom_id {line_result.custom_id!r} is that of an earlier line."
            line_result = InputFault("duplicate_custom_id", message, number, "custom_id")
        if isinstance(line_result, InputFault):
            faults.append(line_result)
            if len(faults) == MAX_SHOWN_FAULTS:
                return _refused_input(faults)
            continue
        custom_ids.add(line_result.custom_id)
        requests.append(BatchRequest(endpoint, bytes(line_result.body), line_result.custom_id))
    if faults:
        return _refused_input(faults)
    if not requests:
        return _refused_input([InputFault("empty_file", "The input file has no requests.")])
    return BatchInput(requests, [])


def _refused_input(faults: list[InputFault]) -> BatchInput:
    return BatchInput([], faults)


def _read_line(line: bytes, number: int, endpoint: str) -> BatchInputLine | InputFault:
    try:
        input_line = msgspec.json.decode(line, type=BatchInputLine)
        members = msgspec.json.decode(input_line.body, type=_BodyMembers)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return InputFault("invalid_json_line", f"This line is not a request of a batch: {error}.", number)
    if not 0 < len(input_line.custom_id) <= MAX_CUSTOM_ID:
        message = f"'custom_id' must have 1 to {MAX_CUSTOM_ID} characters, but has {len(input_line.custom_id)}."
        return InputFault("invalid_custom_id", message, number, "custom_id")
    if input_line.method != "POST":
        return InputFault("invalid_method", "'method' must be POST.", number, "method")
    if input_line.url != endpoint:
        message = f"'url' must be the endpoint of the batch, {endpoint}."
        return InputFault("mismatched_endpoint", message, number, "url")
    if members.stream or members.background:
        name = "stream" if members.stream else "background"
        return InputFault("invalid_request", f"'{name}' cannot be true in a batch.", number, f"body.{name}")
    return input_line
