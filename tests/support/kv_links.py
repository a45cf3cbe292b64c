"""Two KV peers in one process, and a check that they leave no tasks, threads or files open."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.kv_pages import PageMemory

from parley.disagg.kv.peer import KVPeer
from parley.disagg.kv.receiver import KVReceiver
from parley.disagg.kv.sender import KVSender

TRANSPORTS = ("shared", "tcp")


def open_resources() -> tuple[int, set[str], int]:
    """Counts tasks, link threads and open files; ignores /dev/null, which uvloop keeps open."""
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("parley-kv")}
    fd_links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    open_files = [link for link in fd_links if link.is_symlink() and str(link.readlink()) != "/dev/null"]
    return len(asyncio.all_tasks()), threads, len(open_files)


@asynccontextmanager
async def connected_peers(
    transport: str, source: PageMemory, target: PageMemory, **options: Any
) -> AsyncIterator[tuple[KVPeer, KVPeer, asyncio.Queue[KVReceiver]]]:
    """Yields a sender's peer, a receiver's peer and the receivers of offered handovers; checks for leaks at the end."""
    before = open_resources()
    receivers: asyncio.Queue[KVReceiver] = asyncio.Queue()

    async def accept(receiver: KVReceiver) -> None:
        receivers.put_nowait(receiver)
        await asyncio.Event().wait()

    p, d = (KVPeer(secret=b"secret", shared=transport == "shared", **options) for _ in range(2))
    try:
        p.add_arena("demo", source.arena)
        d.add_arena("demo", target.arena)
        await d.listen("127.0.0.1", 0, accept)
        yield p, d, receivers
    finally:
        await p.close_peer()
        await d.close_peer()
    await asyncio.sleep(0)
    after = open_resources()
    assert after[:2] == before[:2]
    assert after[2] <= before[2]  # fewer is fine: files of an earlier test's engine may be collected meanwhile


async def start_handover(
    p: KVPeer, d: KVPeer, receivers: asyncio.Queue[KVReceiver], parts: int = 1
) -> tuple[KVSender, KVReceiver, Any]:
    """Starts a handover; returns the sender, the receiver and the task that waits for the receiver's answer."""
    sender = await p.open_handover(f"127.0.0.1:{d.port}", "demo")
    acceptance = asyncio.create_task(sender.begin_handover(b"body", parts))
    return sender, await receivers.get(), acceptance
