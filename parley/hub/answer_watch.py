"""Watches the clock while an answer of a hub arrives, and disconnects from a hub that is too slow.

The HTTP client only limits the time between two bytes, and its caller sees only complete heads and chunks. A hub that
sends a head byte by byte, or interim answers without end, is noticed here, by a timer in another thread than the
reader.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any

HEAD_SECONDS = 60.0  # until the head of an answer is complete, interim answers before it included


class OpenSockets:
    """The sockets of one client, as long as it has them."""

    def __init__(self) -> None:
        self._streams: weakref.WeakSet[Any] = weakref.WeakSet()

    def add_stream(self, stream: Any) -> None:
        """Note a connection that the client has opened."""
        self._streams.add(stream)

    def disconnect(self) -> None:
        """End all connections: a thread that reads from one of them reads its end."""
        for stream in list(self._streams):
            opened = stream.get_extra_info("socket")
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)


class AnswerWatch:
    """Watches one answer, with its redirects. ``reason``: why it was given up, as a sentence; "" before."""

    def __init__(self, sockets: OpenSockets):
        self.reason = ""
        self._sockets = sockets
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()  # a check in the timer's thread must not outlast the answer

    def trace(self, event: str, info: dict[str, Any]) -> None:
        """Follow the HTTP client: its extension "trace" calls this with the name of each step."""
        step, _, state = event.rpartition(".")
        if step.endswith((".connect_tcp", ".start_tls")) and state == "complete":
            self._sockets.add_stream(info["return_value"])
        elif step.endswith(".receive_response_headers"):
            if state == "started":
                self.start_timer(HEAD_SECONDS, f"the head of an answer takes over {HEAD_SECONDS:g} seconds")
            else:
                self.stop_timer()

    def start_timer(self, seconds: float, fault: str) -> None:
        """Give the hub up after ``seconds``. ``fault``: the end of a sentence."""
        self.start_checks(seconds, lambda: fault)

    def start_checks(self, seconds: float, find_fault: Callable[[], str]) -> None:
        """Ask for a fault every ``seconds``, and give the hub up if there is one. "" is none."""
        self.stop_timer()
        with self._lock:
            self._schedule_check(seconds, find_fault)

    def stop_timer(self) -> None:
        """End the time limit, or the checks."""
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _schedule_check(self, seconds: float, find_fault: Callable[[], str]) -> None:
        self._timer = threading.Timer(seconds, self._check_progress, [seconds, find_fault])
        self._timer.daemon = True
        self._timer.start()

    def _check_progress(self, seconds: float, find_fault: Callable[[], str]) -> None:
        fault = find_fault()
        with self._lock:
            if threading.current_thread() is not self._timer:  # it was stopped meanwhile
                return
            if not fault:
                self._schedule_check(seconds, find_fault)
                return
            self.reason = f"The hub cannot be used: {fault}."
        self._sockets.disconnect()
