"""An engine in a thread of this process, for notebooks, scripts and tests. Servers use ``engine.remote_engine``."""

from __future__ import annotations

import asyncio
import queue
import threading

from parley.engine.messages import (
    EngineFatal,
    EngineReady,
    FromEngine,
    Shutdown,
    ToEngine,
)
from parley.engine.page_transfer import MessagePageTransfer
from parley.types import ParleySettings
from parley.worker.messages_loop import EngineInbox


class ThreadEngine(MessagePageTransfer):
    """Runs the model in a thread. Torch is imported at the start, and the interpreter's lock is shared."""

    def __init__(self, settings: ParleySettings):
        super().__init__()
        self.settings = settings
        self._inbox: EngineInbox = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Start the thread, which loads the model and then serves."""
        from parley.worker.process import run_engine

        loop = asyncio.get_running_loop()
        self._begin_loading()

        def post_message(message: FromEngine) -> None:
            try:
                loop.call_soon_threadsafe(self._handle_message, message)
            except RuntimeError:  # the event loop is closed, so messages have no reader any more
                self._inbox.put(Shutdown())

        self._thread = threading.Thread(
            target=run_engine, args=(self.settings, self._inbox, post_message), name="parley-engine", daemon=True
        )
        self._thread.start()

    async def close(self) -> None:
        """Stop the thread and wait for it; open streams end with an error."""
        if self.state == "closed":
            return
        self.state = "closed"
        self._inbox.put(Shutdown())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._release_waiters("The engine was closed.")

    def _send_to_engine(self, message: ToEngine) -> None:
        self._inbox.put(message)

    def _handle_message(self, message: FromEngine) -> None:
        if self.state == "closed":
            return
        match message:
            case EngineReady(info):
                self._become_ready(info)
            case EngineFatal(reason):
                self._fail_for_good(reason)
            case _:
                super()._handle_message(message)
