"""Messages between the API process and its engine, encoded as MessagePack frames.

Questions have a number, ``id``, and are answered by a message with the same one. Requests and outputs are defined in
``types``; the transport of the frames is not this module's concern.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from parley.types import EngineOutput, EngineRequest, EngineStats, KVPrefix, ModelInfo


class SubmitRequest(msgspec.Struct, tag="submit", array_like=True):
    """Start a request. Every choice gets exactly one output with ``finish_reason``, unless it is cancelled."""

    request: EngineRequest


class CancelRequest(msgspec.Struct, tag="cancel", array_like=True):
    """Cancel a request (``index`` -1) or one of its choices. No output of it follows; unknown ids are ignored."""

    id: str
    index: int = -1


class FinishBeamSearch(msgspec.Struct, tag="finish_beam_search", array_like=True):
    """Finish a beam search with its best results so far: its beams end at their current token, with ``reason``.

    A search that has not started returns outputs without tokens. Requests without beam search that have started, and
    unknown ids, are ignored.
    """

    id: str
    reason: Literal["length", "cancel"] = "length"


class SetPrefillShare(msgspec.Struct, tag="set_prefill_share", array_like=True):
    """Set the prefill share: the percentage of time for prefill while requests decode. 100: no limit."""

    percent: int


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True):
    """End the engine."""


class ResetPrefixCache(msgspec.Struct, tag="reset", array_like=True):
    """Clear the prefix cache. Answered by ResetDone with the same ``id``.

    Running requests hold cached pages: with ``running`` they are preempted, queued again and recomputed, else nothing
    is done. Nothing is done either while pages are held for other instances.
    """

    id: int
    running: bool = False


class LoadAdapter(msgspec.Struct, tag="load", array_like=True):
    """Load an adapter from a folder under a name, in place of the adapter that has that name.

    Answered by AdapterResult with the same ``id``.
    """

    id: int
    name: str
    folder: str


class UnloadAdapter(msgspec.Struct, tag="unload", array_like=True):
    """Unload an adapter. Requests that use it keep it until they finish.

    Answered by AdapterResult with the same ``id``.
    """

    id: int
    name: str


class ReservePages(msgspec.Struct, tag="reserve", array_like=True):
    """Allocate pages for the full pages of a prefix that the prefix cache lacks, to be filled by another instance.

    ``key`` identifies the reservation from now on. Without tokens, the answer only has the adapter's digest. Answered
    by ReserveResponse with the same ``id``.
    """

    id: int
    key: str
    prefix: KVPrefix


class PagesReceived(msgspec.Struct, tag="pages_received", array_like=True):
    """The first ``count`` pages reserved under ``key`` have their content: the prefix cache has them from now on."""

    key: str
    count: int


class FreeReservation(msgspec.Struct, tag="free", array_like=True):
    """Free a reservation; no other instance writes into its pages any more. Received pages stay in the prefix cache.

    Unknown keys are ignored.
    """

    key: str


class ReleaseLease(msgspec.Struct, tag="release", array_like=True):
    """Release the lease of request ``id``: its pages have been read, or never will be. Unknown ids are ignored."""

    id: str


PageMessage = ReservePages | PagesReceived | FreeReservation | ReleaseLease  # only for engines that exchange pages
ToEngine = (
    SubmitRequest
    | CancelRequest
    | FinishBeamSearch
    | ResetPrefixCache
    | LoadAdapter
    | UnloadAdapter
    | SetPrefillShare
    | Shutdown
    | PageMessage
)


class LoadProgress(msgspec.Struct, tag="progress", array_like=True):
    """The progress of loading. ``fraction``: 0..1 over the whole start."""

    stage: str
    fraction: float


class EngineReady(msgspec.Struct, tag="ready", array_like=True):
    """The model has been loaded."""

    info: ModelInfo


class StepOutputs(msgspec.Struct, tag="outputs", array_like=True):
    """The outputs of one step, and the engine's counters after it."""

    outputs: list[EngineOutput]
    stats: EngineStats


class ResetDone(msgspec.Struct, tag="reset_done", array_like=True):
    """The answer to ResetPrefixCache. ``done``: the prefix cache was cleared."""

    id: int
    done: bool


class AdapterResult(msgspec.Struct, tag="adapter_result", array_like=True):
    """The answer to LoadAdapter and UnloadAdapter. ``error``: a sentence; empty if it succeeded."""

    id: int
    error: str = ""


class ReserveResponse(msgspec.Struct, tag="reserved", array_like=True):
    """The answer to ReservePages. The first ``skip`` pages are cached already and pinned; ``pages`` have to be filled.

    ``error``: a sentence if nothing was reserved, else empty. ``digest``: of the adapter's content.
    """

    id: int
    skip: int = 0
    pages: list[int] = []
    error: str = ""
    digest: str = ""


class PagesComputed(msgspec.Struct, tag="pages_computed", array_like=True):
    """More full pages of a request with a lease have been computed: their numbers, in order, after the earlier ones.

    Sent before the outputs of the same step.
    """

    id: str
    pages: list[int]


class EngineFatal(msgspec.Struct, tag="fatal", array_like=True):
    """The engine cannot start or continue. ``message``: one sentence for a person, with a hint."""

    message: str


class Heartbeat(msgspec.Struct, tag="heartbeat", array_like=True):
    """The engine's loop is alive. Sent each second while it waits, and between the layers of a long step."""


FromEngine = (
    LoadProgress
    | EngineReady
    | StepOutputs
    | PagesComputed
    | ResetDone
    | AdapterResult
    | ReserveResponse
    | Heartbeat
    | EngineFatal
)
