"""What the API process and its engine say to each other: frames of msgpack, one for each message.

Questions have a number, ``id``, and are answered by a message with the same one. What works and outputs are is in
``types``; this file must not know how messages travel.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from parley.types import ModelInfo, Output, Stats, Work


class Submit(msgspec.Struct, tag="submit", array_like=True):
    work: Work


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    """Stop a request (``index`` -1) or one of its choices. No output of it follows; unknown ids are ignored."""

    id: str
    index: int = -1


class Conclude(msgspec.Struct, tag="conclude", array_like=True):
    """A search is to give the best of what it has found by now: its beams end where they are, with ``reason``.

    One that has not begun gives outputs without tokens. Others that have begun, and unknown ids, are ignored.
    """

    id: str
    reason: Literal["length", "cancel"] = "length"


class Divide(msgspec.Struct, tag="divide", array_like=True):
    """Prompts may have so many percent of the time in which answers go on, from now on. 100: all that they can use."""

    percent: int


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True):
    pass


class Reset(msgspec.Struct, tag="reset", array_like=True):
    """Forget all cached prefixes. Answered by Wiped with the same ``id``.

    Works that run hold pages of them: with ``running`` they are put back in the queue and computed again, else
    nothing is done. Nor is it while pages are held for other instances.
    """

    id: int
    running: bool = False


class LoadAdapter(msgspec.Struct, tag="load", array_like=True):
    """Read an adapter from a folder and know it by a name from now on, in place of one that was known by it.

    Answered by Changed with the same ``id``.
    """

    id: int
    name: str
    folder: str


class UnloadAdapter(msgspec.Struct, tag="unload", array_like=True):
    """Know an adapter no longer; works that have it keep it to their end. Answered by Changed with the same ``id``."""

    id: int
    name: str


class Reserve(msgspec.Struct, tag="reserve", array_like=True):
    """Take pages for the whole pages of these tokens that the prefix cache lacks, to be filled from outside.

    ``key`` names what was reserved from now on. ``adapter``: the name of the one that its keys and values are computed
    with; ``digest``: what its content has to be (hexadecimal), empty if that does not matter. Without tokens it tells
    what an adapter's digest is. Answered by Reserved with the same ``id``.
    """

    id: int
    key: str
    token_ids: list[int]
    salt: str = ""
    adapter: str = ""
    digest: str = ""


class Landed(msgspec.Struct, tag="landed", array_like=True):
    """The first ``count`` of the pages reserved under ``key`` have their content: they are found from now on."""

    key: str
    count: int


class Free(msgspec.Struct, tag="free", array_like=True):
    """Hold nothing for ``key`` any more; nobody writes into its pages. What has landed stays in the prefix cache.

    Unknown keys are ignored.
    """

    key: str


class Release(msgspec.Struct, tag="release", array_like=True):
    """The pages that the lease of work ``id`` holds have been read, or never will be. Unknown ids are ignored."""

    id: str


ToEngine = (
    Submit
    | Cancel
    | Conclude
    | Reset
    | LoadAdapter
    | UnloadAdapter
    | Reserve
    | Landed
    | Free
    | Release
    | Divide
    | Shutdown
)


class Progress(msgspec.Struct, tag="progress", array_like=True):
    """How far loading has come. ``fraction`` 0..1 over the whole start."""

    stage: str
    fraction: float


class Ready(msgspec.Struct, tag="ready", array_like=True):
    info: ModelInfo


class Outputs(msgspec.Struct, tag="outputs", array_like=True):
    outputs: list[Output]
    stats: Stats


class Wiped(msgspec.Struct, tag="wiped", array_like=True):
    """The answer to Reset: was it done?"""

    id: int
    done: bool


class Changed(msgspec.Struct, tag="changed", array_like=True):
    """The answer to LoadAdapter and UnloadAdapter: why it was not done, in a sentence; empty if it was."""

    id: int
    error: str = ""


class Reserved(msgspec.Struct, tag="reserved", array_like=True):
    """The answer to Reserve. The first ``skip`` pages are in the prefix cache, and held; ``pages`` are to be filled.

    ``error``: why nothing was reserved, in a sentence; empty if it was. ``digest``: of the adapter's content.
    """

    id: int
    skip: int = 0
    pages: list[int] = []
    error: str = ""
    digest: str = ""


class Filled(msgspec.Struct, tag="filled", array_like=True):
    """More whole pages of a work with a lease are computed: their numbers, in order, behind those told before.

    Comes before the outputs of its step.
    """

    id: str
    pages: list[int]


class Fatal(msgspec.Struct, tag="fatal", array_like=True):
    """The engine cannot start or go on; one sentence for a person, with a hint."""

    message: str


FromEngine = Progress | Ready | Outputs | Filled | Wiped | Changed | Reserved | Fatal
