"""The stage of a separated request that runs on this instance: its prefill, or the decode that follows it.

Such a request runs as any other does, except where it calls one of these hooks. This file knows neither the kinds of
stages nor how instances talk to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from parley.dialects.dialect import Answer, Headers
from parley.engine.stream import Stream
from parley.errors import ParleyError
from parley.serving.served_model import Model
from parley.types import Batch, Output, Request, Work


class RunningRequest(Protocol):
    """A running request, as its stage sees it."""

    @property
    def model(self) -> Model: ...

    def abort(self, error: ParleyError) -> None:
        """End it with an error."""


class Leg:
    """Hooks of a stage, called in the order below; by default they do nothing.

    ``prior_outputs``: outputs that other instances produced, whose bytes the client already has; None if the request
    begins here. ``finishes_here``: the request finishes here; otherwise another instance continues it, which has all
    that it needs once ``handed_over`` is True. ``cancel_id``: an id to cancel the request by. ``elapsed``: seconds that
    it took on other instances.
    """

    label = ""
    past: Sequence[Batch] | None = None
    ends = True
    left = False
    spent = 0.0

    async def prepare(self, running: RunningRequest, request: Request, works: list[Work]) -> None:
        """Called before the engine requests are submitted; it may change them. Raises ParleyError."""

    def submitted(self, streams: list[Stream]) -> None:
        """Called in the same turn of the event loop, right after the engine requests were submitted."""

    def took(self, number: int, outputs: list[Output]) -> None:
        """Called with new outputs of prompt ``prompt_number`` before they are rendered; it may change them."""

    def moved(self) -> None:
        """Called when an answer in one piece has new events and more will follow."""

    async def leave(self) -> None:
        """Hand the request over: all outputs of this stage have arrived. Raises ParleyError."""

    def drop(self) -> None:
        """Cancel the request as if its client had disconnected: its result is no longer wanted."""

    def lose(self) -> None:
        """Tell the coordinator that this server ends, so that another continues the request. Here it fails next."""

    def close(self) -> None:
        """Release everything that is held for the request. May be called twice."""

    def refusal(self, error: ParleyError) -> Answer | None:
        """Return the answer to an error that concerns the coordinator and not the client's API, else None."""
        return None

    def remarks(self, error: ParleyError) -> Headers:
        """Return headers of an error answer for the coordinator that sent the command."""
        return ()
