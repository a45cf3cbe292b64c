"""Tells systemd that the server is ready, that it stops, and at intervals that its event loop runs.

The protocol is one datagram per message to the socket that NOTIFY_SOCKET names: sd_notify(3), sd_watchdog_enabled(3).
Without that variable nothing is sent. A lost message is no failure: systemd has timeouts of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping


class ServiceManager:
    """The program that started this process, if it takes reports of the process's state."""

    def __init__(self, environment: Mapping[str, str] = os.environ):
        address = environment.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the null byte of Linux's abstract socket names.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._pause = self._watchdog_pause(environment)

    @staticmethod
    def _watchdog_pause(environment: Mapping[str, str]) -> float:
        """Return the seconds between two signs of life: half of the time that is allowed; 0 if none are wanted."""
        allowed, process = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
        if not allowed.isdigit() or (process and process != str(os.getpid())):
            return 0.0
        return int(allowed) / 2_000_000

    def notify(self, *assignments: str) -> None:
        """Send a message of assignments such as READY=1."""
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto("\n".join(assignments).encode(), self._address)

    async def send_signs_of_life(self) -> None:
        """Send a sign of life at intervals until cancelled, if they are wanted."""
        while self._pause:
            self.notify("WATCHDOG=1")
            await asyncio.sleep(self._pause)
