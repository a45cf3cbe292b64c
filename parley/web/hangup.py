"""Handles SIGHUP: the process reads its configuration again, or ends if it has lost its terminal."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from parley.settings.options import ConfigError
from parley.settings.reload import ReloadedNames
from parley.web.tls.files import TlsFileError

log = logging.getLogger("parley.server")


def hang_up_handler(reload: Callable[[], ReloadedNames], stop: Callable[[], None]) -> Callable[[], None]:
    """Return a handler for the signal. ``reload`` raises ConfigError or TlsFileError before it changes anything.

    A terminal that closes sends the same signal. Then the process ends, because no terminal is left to end it from.
    """
    had_terminal = _has_terminal()

    def handle_hang_up() -> None:
        if had_terminal and not _has_terminal():
            stop()
            return
        try:
            outcome = reload()
        except (ConfigError, TlsFileError) as error:
            log.error("The configuration was not reloaded, and the old one stays: %s", error)
        except Exception:
            log.exception("The configuration could not be reloaded completely: some new values may be in use.")
        else:
            log.info("The configuration and all certificates were reloaded; %s.", outcome.describe())

    return handle_hang_up


def _has_terminal() -> bool:
    """Whether the process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
