"""Part of ``make bench``: the speed of KV page transfer between processes, compared with the machine's limits.

It transfers pages of the 0.5B shape (24 layers, 8 KiB of keys and values per page and layer). A whole handover is timed
from the receiver's accept to its last confirmed page, over shared memory and over TCP on this host, with pages in order
and in random order on both sides. In alternation with them run one memcpy of as many bytes, and a plain socket that
sends them from one buffer to another. Results are medians; ratios mean more than rates. The table goes to
``.peers/kv.md`` for ``performance_page.py``.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict

from install_peers import ROOT

from parley.disagg.kv.peer import KVPeer
from parley.disagg.kv.receiver import KVReceiver
from parley.disagg.kv.shared_memory import FINAL_SIZE
from parley.types import Arena, LayerRegion

LAYERS, SIZE = 24, 8192
PAGES = 1024  # 192 MiB
TURNS = 7
NAMES = {"order": "pages in order", "random": "pages in random order"}


def make_arena() -> tuple[Arena, mmap.mmap]:
    """Return an arena laid out as an engine's: all pages of one layer, then those of the next."""
    fd = os.memfd_create("pages", os.MFD_ALLOW_SEALING)
    size = LAYERS * PAGES * SIZE
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, FINAL_SIZE)
    view = mmap.mmap(fd, size)
    for at in range(0, size, mmap.PAGESIZE):
        view[at] = 1  # allocates real memory
    return Arena(os.getpid(), fd, PAGES, [LayerRegion(i * PAGES * SIZE, SIZE, SIZE) for i in range(LAYERS)], ""), view


def page_order(order: str, seed: int) -> list[int]:
    """Return all page numbers in this order."""
    numbers = list(range(PAGES))
    if order == "random":
        random.Random(seed).shuffle(numbers)
    return numbers


async def run_sender(port: int, plain: int) -> None:
    """Run the sending process: each line of its input names a transfer."""
    own, view = make_arena()
    peers = {way: KVPeer(shared=way == "shared") for way in ("shared", "tcp")}
    for peer in peers.values():
        peer.add_arena("model", own)
    for line in sys.stdin:
        way, order = line.split()
        if way == "socket":
            with socket.create_connection(("127.0.0.1", plain)) as raw:
                raw.sendall(view)
            continue
        sender = await peers[way].open_handover(f"127.0.0.1:{port}", "model")
        await sender.begin_handover(b"", 1)
        sender.add_computed_pages(0, page_order(order, 1))
        await sender.finish_handover()


def receive_all(connection: socket.socket, target: memoryview) -> None:
    """Receive all bytes of a connection into ``target``."""
    with connection:
        at = 0
        while count := connection.recv_into(target[at:]):
            at += count


async def main() -> int:
    """Run all transfers and write the table."""
    own, view = make_arena()
    offered: asyncio.Queue[KVReceiver] = asyncio.Queue()

    async def accept(receiver: KVReceiver) -> None:
        await offered.put(receiver)
        await receiver.wait_settled()

    peer = KVPeer()
    peer.add_arena("model", own)
    await peer.listen("127.0.0.1", 0, accept)
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = [sys.executable, __file__, str(peer.port), str(server.getsockname()[1])]
        other = subprocess.Popen(arguments, stdin=subprocess.PIPE, text=True)
        assert other.stdin is not None
        source, target = mmap.mmap(-1, len(view)), memoryview(view)
        source[:] = view[:]
        times: dict[tuple[str, str], list[float]] = defaultdict(list)
        for turn in range(TURNS + 1):  # the first one warms up
            for way in ("memcpy", "socket", "shared", "tcp"):
                for order in NAMES if way in ("shared", "tcp") else [""]:
                    if way != "memcpy":
                        print(way, order or "-", file=other.stdin, flush=True)
                    if way == "socket":
                        connection, _ = await asyncio.to_thread(server.accept)  # links keep running meanwhile
                    elif way != "memcpy":
                        handover = await offered.get()
                    began = time.perf_counter()
                    if way == "memcpy":
                        target[:] = memoryview(source)
                    elif way == "socket":
                        await asyncio.to_thread(receive_all, connection, target)
                    else:
                        await handover.accept_handover([(0, page_order(order, 2))])
                        await handover.wait_settled()
                        assert handover.received_bytes == len(view)
                    if turn:
                        times[way, order].append(time.perf_counter() - began)
        other.stdin.close()
        other.wait()
    target.release()
    await peer.close_peer()
    rate = {key: len(view) / statistics.median(bandwidth) for key, bandwidth in times.items()}
    copy, plain = rate["memcpy", ""], rate["socket", ""]
    lines = [f"{len(view) >> 20} MiB; memcpy {copy / 1e9:.1f} GB/s, a plain socket {plain / 1e9:.1f} GB/s.", ""]
    lines += ["| | GB/s | of memcpy | of a plain socket |", "| --- | --- | --- | --- |"]
    for (way, order), bandwidth in rate.items():
        if order:
            name = {"shared": "shared memory", "tcp": "TCP"}[way]
            lines.append(
                f"| {name}, {NAMES[order]} | {bandwidth / 1e9:.1f} | {bandwidth / copy:.2f} | {bandwidth / plain:.2f} |"
            )
    text = "\n".join(lines) + "\n"
    print(text)
    ROOT.mkdir(exist_ok=True)
    (ROOT / "kv.md").write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(run_sender(*map(int, sys.argv[1:])) if len(sys.argv) > 1 else main()))
