"""Handles SIGHUP: the process reads its configuration again, or ends if it has lost its terminal."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import TypeVar

from parley.early_hang_up import EarlyHangUp, has_terminal
from parley.settings.options import ConfigError
from parley.settings.reload import ReloadedNames
from parley.web.tls.files import TlsFileError

log = logging.getLogger("parley.server")


Options = TypeVar("Options")


def install_hang_up_handler(
    read_options: Callable[[], Options], use_options: Callable[[Options], ReloadedNames], stop: Callable[[], None]
) -> None:
    """Handle the signal in the running loop from now on, and once if it has come while the process was starting.

    ``read_options`` runs in a thread, because files may be slow. Both raise ConfigError or TlsFileError before they
    change anything. A terminal that closes sends the same signal. Then the process ends, because no terminal is left to
    end it from, unless it was started to ignore the signal (``nohup``).
    """
    earlier_handler = signal.getsignal(signal.SIGHUP)
    early = earlier_handler if isinstance(earlier_handler, EarlyHangUp) else EarlyHangUp()
    loop, lock = asyncio.get_running_loop(), asyncio.Lock()
    tasks: set[asyncio.Task[None]] = set()

    def handle_hang_up() -> None:
        if early.follows_terminal and not has_terminal():
            stop()
            return
        task = loop.create_task(reload())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def reload() -> None:
        try:
            async with lock:  # the last signal decides
                outcome = use_options(await asyncio.to_thread(read_options))
        except (ConfigError, TlsFileError) as error:
            log.error("The configuration was not reloaded, and the old one stays: %s", error)
        except Exception:
            log.exception("The configuration could not be reloaded completely: some new values may be in use.")
        else:
            log.info("The configuration and all certificates were reloaded; %s.", outcome.describe())

    loop.add_signal_handler(signal.SIGHUP, handle_hang_up)
    if early.has_come:
        handle_hang_up()
