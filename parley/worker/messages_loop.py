"""Applies the messages for an engine to its loop, between the steps.

This module maps each message to a call of the loop; the transport of messages is elsewhere.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from parley.engine.messages import (
    Cancel,
    Changed,
    Conclude,
    Divide,
    Free,
    FromEngine,
    Landed,
    LoadAdapter,
    Release,
    Reserve,
    Reserved,
    Reset,
    Shutdown,
    Submit,
    ToEngine,
    UnloadAdapter,
    Wiped,
)

if TYPE_CHECKING:
    from parley.core.loop import Loop
    from parley.core.shared_pages.pinned import Holds
    from parley.core.shared_pages.reservations import Taken
    from parley.core.shared_pages.staging import Transit

Inbox = queue.SimpleQueue[ToEngine | Callable[[], None]]
Send = Callable[[FromEngine], None]


def serve(loop: Loop, holds: Holds | Transit, inbox: Inbox, send: Send) -> None:
    """Apply messages and run steps until Shutdown. ``page_holder``: the loop's pinned pages or their staging."""
    while True:
        # Requests and cancels are handled before scheduling; only an idle loop waits for messages.
        idle = loop.idle
        while idle or not inbox.empty():
            message = inbox.get()
            if isinstance(message, Submit):
                loop.add(message.work)
            elif isinstance(message, Cancel):
                loop.cancel(message.id, message.index)
            elif isinstance(message, Conclude):
                loop.conclude(message.id, message.reason)
            elif isinstance(message, Reset):
                send(Wiped(message.id, loop.reset(running=message.running)))
            elif isinstance(message, LoadAdapter):
                loop.shelf.put(message.name, message.folder, partial(_tell, send, message.id))
            elif isinstance(message, UnloadAdapter):
                known = loop.shelf.remove(message.name)
                send(Changed(message.id, "" if known else "There is no adapter of this name."))
            elif isinstance(message, Reserve):
                answer = partial(_reserved, send, message.id)
                holds.reserve(message.key, message.token_ids, message.salt, message.adapter, message.digest, answer)
            elif isinstance(message, Landed):
                holds.land(message.key, message.count)
            elif isinstance(message, Free):
                holds.free(message.key)
            elif isinstance(message, Release):
                holds.release(message.id)
            elif isinstance(message, Divide):
                loop.quota.divide(message.percent / 100)
            elif callable(message):
                message()
            elif isinstance(message, Shutdown):
                return
            idle = False
        loop.step()


def _tell(send: Send, id: int, error: str) -> None:
    send(Changed(id, error))


def _reserved(send: Send, id: int, taken: Taken) -> None:
    send(Reserved(id, taken.skip, list(taken.pages), taken.error, taken.digest))
