"""Two KV peers in one process, and a check that they leave no tasks, threads or files open."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.kv_pages import Pages

from parley.disagg.kv.peer import Peer
from parley.disagg.kv.receiver import Taker
from parley.disagg.kv.sender import Giver

WAYS = ("shared", "tcp")


def left() -> tuple[int, set[str], int]:
    """Counts tasks, link threads and open files; ignores /dev/null, which uvloop keeps open."""
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("parley-kv")}
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    files = [link for link in links if link.is_symlink() and str(link.readlink()) != "/dev/null"]
    return len(asyncio.all_tasks()), threads, len(files)


@asynccontextmanager
async def pair(
    way: str, source: Pages, target: Pages, **options: Any
) -> AsyncIterator[tuple[Peer, Peer, asyncio.Queue[Taker]]]:
    """Yields a sender's peer, a receiver's peer and the receivers of offered handovers; checks for leaks at the end."""
    before = left()
    takers: asyncio.Queue[Taker] = asyncio.Queue()

    async def accept(taker: Taker) -> None:
        takers.put_nowait(taker)
        await asyncio.Event().wait()

    p, d = (Peer(secret=b"secret", shared=way == "shared", **options) for _ in range(2))
    try:
        p.add("demo", source.arena)
        d.add("demo", target.arena)
        await d.listen("127.0.0.1", 0, accept)
        yield p, d, takers
    finally:
        await p.close()
        await d.close()
    await asyncio.sleep(0)
    after = left()
    assert after[:2] == before[:2]
    assert after[2] <= before[2]  # fewer is fine: files of an earlier test's engine may be collected meanwhile


async def begun(p: Peer, d: Peer, takers: asyncio.Queue[Taker], parts: int = 1) -> tuple[Giver, Taker, Any]:
    """Starts a handover; returns the sender, the receiver and the task that waits for the receiver's answer."""
    giver = await p.connect(f"127.0.0.1:{d.port}", "demo")
    question = asyncio.create_task(giver.begin(b"body", parts))
    return giver, await takers.get(), question
