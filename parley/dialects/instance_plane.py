"""What a coordinator and an instance of a cluster say to each other in an API's own form: data, and who reads and
writes it.

The table of surfaces names the one API whose form instances speak. Knows no form itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from parley.dialects.dialect import Answer, Route
from parley.errors import OrderRefused
from parley.types import Batch

IDENTITY = re.compile(r"[0-9a-f]{32}")  # of a request, the same for all attempts


class Origin(msgspec.Struct):
    """A request as it came, and what was answered: outputs of the engine, as rendered. ``unique``: 32 hexadecimal
    digits, from which all comes that is drawn for it. ``created``: the time that its answer shows. ``prompt``: as in
    ResumedBody."""

    body: bytes
    past: list[Batch]
    unique: str
    created: int
    prompt: list[int] | None = None


class ResumedBody(NamedTuple):
    """``body``: as its interface reads it. ``prompt``: the ids that it stands for; None: the body says it. ``past``:
    the engine's outputs so far. ``unique``, ``created``: as in Origin, if they are known."""

    body: bytes
    prompt: list[int] | None
    past: list[Batch]
    unique: str = ""
    created: int | None = None


@dataclass(frozen=True, slots=True)
class InstancePlane:
    """``routes``: the paths at which instances answer coordinators. ``refusal`` words what an instance does not do.

    ``read_resumed`` reads the body, which came to a path, of a request that another instance began; it raises
    OrderRefused. ``write_resumed`` writes such a body for a path: of the request, with the token ids of its first
    prompt and the seed of its first choice.
    """

    routes: Sequence[Route]
    refusal: Callable[[OrderRefused], Answer]
    read_resumed: Callable[[str, bytes], ResumedBody]
    write_resumed: Callable[[str, Origin, Sequence[int], int], bytes]
