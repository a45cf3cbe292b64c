"""One instance's part of a request whose life several share: prefilled here and decoded there, or gone on with here.

Such a request lives as any other does; where it does not, its leg is asked. What legs there are is not known here, nor
how instances talk to each other.
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
    """The request as its leg sees it."""

    @property
    def model(self) -> Model: ...

    def abort(self, error: ParleyError) -> None:
        """End it with an error."""


class Leg:
    """``past``: what the engine's outputs were so far, elsewhere; None: the request begins here. Its bytes have been
    sent. ``ends``: what there is to do is done here; else others go on, and have what they need when it has ``left``.

    ``label``: who holds it can drop the request. ``spent``: seconds that it took elsewhere.
    """

    label = ""
    past: Sequence[Batch] | None = None
    ends = True
    left = False
    spent = 0.0

    async def prepare(self, running: RunningRequest, request: Request, works: list[Work]) -> None:
        """Comes first: the works are about to be submitted, and may be changed before. Raises ParleyError."""

    def submitted(self, streams: list[Stream]) -> None:
        """They were, in this turn of the event loop."""

    def took(self, number: int, outputs: list[Output]) -> None:
        """These have come for a prompt, and may be changed before they are rendered."""

    def moved(self) -> None:
        """An answer in one piece has got on, and more is to come."""

    async def leave(self) -> None:
        """All outputs of this leg have come, and the request has not ended. Raises ParleyError."""

    def drop(self) -> None:
        """Nobody wants the rest: end it as if the client had left."""

    def lose(self) -> None:
        """The server ends before the request does, which may go on elsewhere; here it gets an error next."""

    def close(self) -> None:
        """The generation is closed: give back whatever is held. May be called twice."""

    def refusal(self, error: ParleyError) -> Answer | None:
        """The answer to an error that is no dialect's affair."""
        return None

    def remarks(self, error: ParleyError) -> Headers:
        """Headers of the answer to an error, for who gave the order."""
        return ()
