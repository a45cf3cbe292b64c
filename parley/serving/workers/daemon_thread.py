"""Work that blocks for minutes, in a thread that does not keep the process from exiting."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakSet

T = TypeVar("T")

_threads: WeakSet[threading.Thread] = WeakSet()


async def run_in_daemon_thread(work: Callable[[], T], name: str) -> T:
    """Return the result of ``work``, or raise its exception. If the task is cancelled, the work continues unseen."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: Exception | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]  # there is a value if there is no error

    def call_work() -> None:
        value, failure = None, None
        try:
            value = work()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed and has no waiter left
            loop.call_soon_threadsafe(settle, value, failure)

    thread = threading.Thread(target=call_work, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return await result


def exit_process(code: int) -> int:
    """Return the exit code of a command, or end the process with it at once if work still runs in a daemon thread.

    Such work may have started threads that Python waits for at its exit, as downloads do.
    """
    if any(thread.is_alive() for thread in _threads):
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    return code
