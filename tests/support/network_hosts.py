"""Hosts that are network namespaces, each with its own address, around a switch that can lose and delay packets.

The switch is a process that holds the other end of each host's Ethernet device (a TAP), so the kernel needs nothing but
namespaces: no netem. The test's own namespace is a host as well, the first. Needs root and `ip`.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import multiprocessing
import os
import random
import select
import shutil
import struct
import subprocess
import time
from multiprocessing.connection import Connection

import pytest

NET = "10.93.0"
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 2, 0x1000
FRAME = 65_536


def can_create_namespaces() -> bool:
    """Whether this process may create network namespaces and devices."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))) or not os.path.exists("/dev/net/tun"):
        return False
    name = f"parley-probe{os.getpid()}"
    succeeded = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return succeeded


needs_namespaces = pytest.mark.skipif(
    not can_create_namespaces(), reason="needs root, network namespaces and /dev/net/tun"
)


def run_checked(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class NetworkHosts:
    """Hosts 1 to ``count``; host 0 is the test's own namespace. Must be closed."""

    def __init__(self, count: int):
        self.addresses = [f"{NET}.{number + 1}" for number in range(count + 1)]
        self._names = [f"parley{os.getpid()}-{number}" for number in range(count + 1)]
        ports = [_open_tap(f"pt{os.getpid()}-{number}") for number in range(count + 1)]
        for number, (name, address) in enumerate(zip(self._names, self.addresses, strict=True)):
            device, place = f"pt{os.getpid()}-{number}", ["ip"]
            if number:
                run_checked("ip", "netns", "add", name)
                run_checked("ip", "link", "set", device, "netns", name)
                place = ["ip", "-n", name]
                run_checked(*place, "link", "set", "lo", "up")
            run_checked(*place, "addr", "add", f"{address}/24", "dev", device)
            run_checked(*place, "link", "set", device, "up")
        self._control, theirs = multiprocessing.Pipe()
        self._switch = multiprocessing.get_context("fork").Process(
            target=_run_switch, args=(ports, theirs), daemon=True
        )
        self._switch.start()
        for port in ports:
            os.close(port)

    def command(self, number: int) -> list[str]:
        """Returns the prefix of a command that runs on this host, where it sees only its own processes."""
        own_processes = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return ["ip", "netns", "exec", self._names[number], *own_processes] if number else []

    def disturb_network(self, *, loss: float = 0.0, delay: float = 0.0) -> None:
        """Loses a share of the packets between any two hosts and delays the others by ``delay`` seconds."""
        self._tell_switch(("disturb", loss, delay))

    def cut_off_host(self, number: int) -> None:
        """Drops all packets from and to a host from now on, silently."""
        self._tell_switch(("cut", number, 0))

    def separate_hosts(self, one: int, other: int) -> None:
        """Drops all packets between two hosts from now on, silently."""
        self._tell_switch(("part", one, other))

    def reconnect_host(self, number: int) -> None:
        """Undoes ``cut_off_host`` and ``separate_hosts`` for a host."""
        self._tell_switch(("mend", number, 0))

    def close(self) -> None:
        self._switch.terminate()
        self._switch.join()
        for name in self._names[1:]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def _tell_switch(self, message: tuple[str, float, float]) -> None:
        self._control.send(message)
        self._control.recv()  # the switch has applied it


def _open_tap(name: str) -> int:
    """Opens a new Ethernet device whose packets the switch reads and writes."""
    port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(port, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return port


def _run_switch(ports: list[int], control: Connection) -> None:
    """Carries packets between the ports forever."""
    port_by_address: dict[bytes, int] = {}  # MAC address → port that last sent from it
    loss = delay = 0.0
    cut: set[frozenset[int]] = set()  # pairs of ports without a connection
    pending: list[tuple[float, int, int, bytes]] = []  # heap of packets: due time, number, port, data
    count = 0
    rng = random.Random(1)
    while True:
        wait = max(0.0, pending[0][0] - time.monotonic()) if pending else None
        ready, _, _ = select.select([*ports, control], [], [], wait)
        if control in ready:
            command, first, second = control.recv()
            if command == "disturb":
                loss, delay = first, second
            elif command == "part":
                cut.add(frozenset((first, second)))
            elif command == "cut":
                cut.update(frozenset((first, other)) for other in range(len(ports)))
            else:
                cut = {pair for pair in cut if first not in pair}
            control.send(None)
        now = time.monotonic()
        for number, port in enumerate(ports):
            for _ in range(64 if port in ready else 0):
                try:
                    packet = os.read(port, FRAME)
                except BlockingIOError:
                    break
                target, source = packet[:6], packet[6:12]
                port_by_address[source] = number
                owner_port = port_by_address.get(target)
                for to in [owner_port] if owner_port is not None and not target[0] & 1 else range(len(ports)):
                    if to == number or {to, number} in cut or rng.random() < loss:
                        continue
                    count += 1
                    heapq.heappush(pending, (now + delay, count, to, packet))
        now = time.monotonic()
        while pending and pending[0][0] <= now:
            _, _, to, packet = heapq.heappop(pending)
            with contextlib.suppress(OSError):  # a full queue or a device that is down loses the packet
                os.write(ports[to], packet)
