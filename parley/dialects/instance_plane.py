"""The protocol between a coordinator and the instances of a cluster, in an API's own form: data, readers and writers.

``dialects/mounts.py`` names the one API whose form instances speak. Knows no form itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from parley.dialects.reply import Answer
from parley.dialects.route import Route
from parley.errors import CommandRefused
from parley.types import OutputBatch

REQUEST_UUID = re.compile(r"[0-9a-f]{32}")  # the id of a request, the same for all attempts


class OriginalRequest(msgspec.Struct):
    """A request as it arrived, and the engine outputs that were rendered for it so far.

    * ``prior_outputs``: those outputs.
    * ``request_uuid``: 32 hexadecimal digits, the source of everything random about the request.
    * ``created``: the time shown in its answer.
    * ``prompt_ids``: as in ResumedBody.
    """

    body: bytes
    prior_outputs: list[OutputBatch] = msgspec.field(name="past")
    request_uuid: str = msgspec.field(name="unique")
    created: int
    prompt_ids: list[int] | None = msgspec.field(default=None, name="prompt")


class ResumedBody(NamedTuple):
    """A request that another instance began. ``body`` is in the form of its interface.

    ``prompt_ids``: the token ids of the body's prompt; None: the body contains them. ``prior_outputs``: the engine's
    outputs so far. ``request_uuid``, ``created``: as in the original request, if known.
    """

    body: bytes
    prompt_ids: list[int] | None
    prior_outputs: list[OutputBatch]
    request_uuid: str = ""
    created: int | None = None


@dataclass(frozen=True, slots=True)
class InstancePlane:
    """``routes``: the paths where instances answer coordinators. ``render_command_refusal`` returns the answer to a
    command that an instance refuses. ``stopping_answer``: the status of an instance that is about to stop.

    ``read_resumed`` reads the body of a request that another instance began and that arrived at a path; it raises
    CommandRefused. ``write_resumed`` writes such a body for a path, given the original request, the token ids of its
    first prompt and the seed of its first choice.
    """

    routes: Sequence[Route]
    render_command_refusal: Callable[[CommandRefused], Answer]
    stopping_answer: Answer
    read_resumed: Callable[[str, bytes], ResumedBody]
    write_resumed: Callable[[str, OriginalRequest, Sequence[int], int], bytes]


@dataclass(frozen=True, slots=True)
class CoordinatorTexts:
    """The texts of the coordinator's own errors. ``connection_limit`` has a place for the limit."""

    cluster_not_ready: str
    too_many_requests: str
    memory_exceeded: str
    duplicate_id: str
    unknown_request: str
    prefill_connect_failed: str
    send_failed: str
    prefill_send_failed: str
    prefill_receive_failed: str
    prefill_failed: str
    decode_failed: str
    retry_failed: str
    schedule_timeout: str
    schedule_failed: str
    first_token_timeout: str
    inference_timeout: str
    tokenizer_timeout: str
    connection_limit: str
