"""Applies the messages for an engine to its loop, between steps.

This module maps each message to a call of the loop, and knows nothing of how messages are transported.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from parley.engine.messages import (
    AdapterResult,
    CancelRequest,
    FinishBeamSearch,
    FreeReservation,
    FromEngine,
    LoadAdapter,
    PagesReceived,
    ReleaseLease,
    ReservePages,
    ReserveResponse,
    ResetDone,
    ResetPrefixCache,
    SetPrefillShare,
    Shutdown,
    SubmitRequest,
    ToEngine,
    UnloadAdapter,
)
from parley.heartbeat import BEAT_SECONDS, beat

if TYPE_CHECKING:
    from parley.core.engine_loop import EngineLoop
    from parley.core.shared_pages.pinned import PinnedPages
    from parley.core.shared_pages.reservations import ReserveResult
    from parley.core.shared_pages.staging import PageStaging

EngineInbox = queue.SimpleQueue[ToEngine | Callable[[], None]]
SendMessage = Callable[[FromEngine], None]


def serve_messages(
    loop: EngineLoop, page_holder: PinnedPages | PageStaging, inbox: EngineInbox, send: SendMessage
) -> None:
    """Apply messages and run steps until Shutdown. ``page_holder``: the loop's pinned pages or their staging."""
    while True:
        # Requests and cancels are handled before scheduling; only an idle loop waits for messages.
        idle = loop.is_idle
        while idle or not inbox.empty():
            message = _wait_for_message(inbox, loop)
            if isinstance(message, SubmitRequest):
                loop.add_request(message.request)
            elif isinstance(message, CancelRequest):
                loop.cancel_request(message.id, message.index)
            elif isinstance(message, FinishBeamSearch):
                loop.finish_beam_search(message.id, message.reason)
            elif isinstance(message, ResetPrefixCache):
                send(ResetDone(message.id, loop.reset_prefix_cache(running=message.running)))
            elif isinstance(message, LoadAdapter):
                loop.adapter_cache.register_adapter(
                    message.name, message.folder, partial(_send_adapter_result, send, message.id)
                )
            elif isinstance(message, UnloadAdapter):
                was_registered = loop.adapter_cache.unregister_adapter(message.name)
                send(AdapterResult(message.id, "" if was_registered else "There is no adapter of this name."))
            elif isinstance(message, ReservePages):
                answer = partial(_send_reserve_response, send, message.id)
                page_holder.reserve_pages(message.key, message.prefix, answer)
            elif isinstance(message, PagesReceived):
                page_holder.mark_received(message.key, message.count)
            elif isinstance(message, FreeReservation):
                page_holder.free_reservation(message.key)
            elif isinstance(message, ReleaseLease):
                page_holder.release_lease(message.id)
            elif isinstance(message, SetPrefillShare):
                loop.prefill_share.set_share(message.percent / 100)
            elif callable(message):
                message()
            elif isinstance(message, Shutdown):
                return
            idle = False
        loop.step()


def _wait_for_message(inbox: EngineInbox, loop: EngineLoop) -> ToEngine | Callable[[], None]:
    """Return the next message. While there is none, report that the process lives, unless the loop's encoder is
    stuck."""
    while True:
        if loop.encoder_has_progress():
            beat()
        try:
            return inbox.get(timeout=BEAT_SECONDS)
        except queue.Empty:
            continue


def _send_adapter_result(send: SendMessage, question_id: int, error: str) -> None:
    send(AdapterResult(question_id, error))


def _send_reserve_response(send: SendMessage, question_id: int, reserve_result: ReserveResult) -> None:
    send(
        ReserveResponse(
            question_id, reserve_result.skip, list(reserve_result.pages), reserve_result.error, reserve_result.digest
        )
    )
