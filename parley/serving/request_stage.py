"""The stage of a separated request that runs on this instance: its prefill, or the decode that follows it.

Such a request runs as any other does, except where it calls one of these hooks. This file knows neither the kinds of
stages nor how instances talk to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from parley.dialects.reply import Answer, HeaderList
from parley.disagg.wire.vouched_client import UsedTokens
from parley.errors import ParleyError
from parley.serving.served_model import ServedModel
from parley.types import EngineOutput, EngineRequest, OutputBatch, ProcessedMedia, Request
from parley.web.exchange import Exchange


class RunningRequest(Protocol):
    """A running request, as its stage sees it."""

    @property
    def model(self) -> ServedModel:
        """The model that serves it."""

    @property
    def used_tokens(self) -> UsedTokens:
        """The tokens that it has used so far."""

    def fail_request(self, error: ParleyError) -> None:
        """End it with an error."""

    def finish_early(self) -> None:
        """Finish it with the output so far, as if its client had cancelled it."""


class RequestStage:
    """Hooks of a stage, called in the order below; by default they do nothing.

    * ``prior_outputs``: outputs that other instances produced, whose bytes the client already has; None if the request
      begins here.
    * ``earlier_outputs``: those of them that all instances of this attempt have from its beginning.
    * ``finishes_here``: the request finishes here; otherwise another instance continues it, which has all that it needs
      once ``handed_over`` is True.
    * ``cancel_id``: an id to cancel the request by.
    * ``elapsed``: seconds that it took on other instances.
    * ``processed_media``: the request's media, by this instance or the one before; None until they are known.
    """

    cancel_id = ""
    prior_outputs: Sequence[OutputBatch] | None = None
    finishes_here = True
    handed_over = False
    elapsed = 0.0
    processed_media: Sequence[ProcessedMedia] | None = None

    @property
    def earlier_outputs(self) -> Sequence[OutputBatch]:
        """The outputs of earlier attempts."""
        return self.prior_outputs or ()

    async def before_submit(
        self, running: RunningRequest, request: Request, engine_requests: list[EngineRequest]
    ) -> None:
        """Called before the engine requests are submitted; it may change them. Raises ParleyError."""

    def after_submit(self) -> None:
        """Called in the same iteration of the event loop, right after the engine requests were submitted."""

    def on_outputs(self, prompt_number: int, outputs: list[EngineOutput]) -> None:
        """Called with new outputs of prompt ``prompt_number`` before they are rendered; it may change them."""

    def on_ping(self) -> None:
        """Called before a ping is written into the stream."""

    def on_progress(self) -> None:
        """Called when an answer in one piece has new events and more will follow."""

    async def hand_over(self) -> None:
        """Hand the request over: all outputs of this stage have arrived. Raises ParleyError."""

    def cancel_stage(self) -> None:
        """Cancel the request as if its client had disconnected: its result is no longer wanted."""

    def fail_over(self) -> None:
        """Tell the coordinator that this server ends, so that another continues the request. Here it fails next."""

    def close_stage(self) -> None:
        """Release everything that is held for the request. May be called twice."""

    def coordinator_answer(self, error: ParleyError) -> Answer | None:
        """Return the answer to an error that concerns the coordinator and not the client's API, else None."""
        return None

    def coordinator_headers(self, error: ParleyError | None) -> HeaderList:
        """Return headers of an error answer for the coordinator that sent the command."""
        return ()


def request_stage(exchange: Exchange) -> RequestStage | None:
    """Return the stage of a separated request that runs here; None if the whole request does."""
    stage = exchange.stage
    assert stage is None or isinstance(stage, RequestStage)
    return stage
