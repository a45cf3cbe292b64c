"""Kills or stops either side of a handover, as a process, at every stage: the other side must notice and clean up.

``PARLEY_NIGHTLY=1`` tries both signals with both transports.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support import kv_process
from support.kv_links import WAYS, left
from support.kv_pages import Pages

from parley.disagg.kv.peer import Peer
from parley.disagg.kv.receiver import Taker
from parley.disagg.kv.transport import LinkError, Lost

SIDE = Path(__file__).parents[1] / "support" / "kv_process.py"
CASES = [("shared", signal.SIGSTOP), ("tcp", signal.SIGKILL)]
if os.environ.get("PARLEY_NIGHTLY"):
    CASES += [("shared", signal.SIGKILL), ("tcp", signal.SIGSTOP)]
LEASE = 1.0  # seconds; a stopped process counts as dead after it


@asynccontextmanager
async def running(role: str, way: str, stage: str, *port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    path = os.pathsep.join([str(SIDE.parents[2]), os.environ.get("PYTHONPATH", "")])
    process = await asyncio.create_subprocess_exec(
        sys.executable, SIDE, role, way, stage, *map(str, port),
        stdout=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    return (await process.stdout.readline()).strip()


@pytest.mark.parametrize("way", WAYS)
async def test_handover_between_two_processes(way: str) -> None:
    async with running("take", way, "end") as taker:
        port = int(await line(taker))
        async with running("give", way, "end", port) as giver:
            given, taken = await line(giver), await line(taker)
            assert given == taken and given.startswith(b"done %d " % (kv_process.PAGES * sum(kv_process.SIZES)))
            assert await giver.wait() == await taker.wait() == 0


@pytest.mark.parametrize("way, how", CASES)
@pytest.mark.parametrize("stage", ("offered", "accepted", "given"))
async def test_sender_ends_when_the_receiver_process_dies(way: str, stage: str, how: signal.Signals) -> None:
    """The receiver dies before it accepts, while pages are in transit, or after the outputs but before the end."""
    before = left()
    peer = Peer(secret=kv_process.SECRET, shared=way == "shared", lease=LEASE)
    with Pages(kv_process.PAGES, kv_process.SIZES, seed=7) as pages:
        peer.add("demo", pages.arena)
        async with running("take", way, stage) as process:
            giver = await peer.connect(f"127.0.0.1:{int(await line(process))}", "demo")
            begun = asyncio.create_task(giver.begin(b"", 1))
            if stage == "offered":
                assert await line(process) == b"there"
                process.send_signal(how)
                with pytest.raises(LinkError):
                    await begun
            else:
                await begun
                giver.filled(0, list(range(kv_process.PAGES)))
                if stage == "given":
                    await giver.give(b"")
                assert await line(process) == b"there"
                process.send_signal(how)
            await giver.done()
            with pytest.raises(LinkError):
                await giver.give(b"")
            await peer.close()
    await asyncio.sleep(0)
    assert left()[:2] == before[:2]


@pytest.mark.parametrize("way, how", CASES)
@pytest.mark.parametrize("stage", ("linked", "begun", "half", "given"))
async def test_receiver_ends_when_the_sender_process_dies(way: str, stage: str, how: signal.Signals) -> None:
    """The sender dies before it asks, before any page, between pages, or after all pages and outputs were sent."""
    before = left()
    peer = Peer(secret=kv_process.SECRET, shared=way == "shared", lease=LEASE)
    offered: asyncio.Queue[Taker] = asyncio.Queue()
    landed = []

    async def accept(taker: Taker) -> None:
        await taker.accept([(0, list(range(kv_process.PAGES)))], lambda part, count: landed.append(count))
        offered.put_nowait(taker)

    with Pages(kv_process.PAGES, kv_process.SIZES) as own, Pages(kv_process.PAGES, kv_process.SIZES, seed=7) as same:
        peer.add("demo", own.arena)
        await peer.listen("127.0.0.1", 0, accept)
        async with running("give", way, stage, peer.port) as process:
            taker = None if stage == "linked" else await offered.get()
            assert await line(process) == b"there"
            process.send_signal(how)
            if taker is not None:
                await taker.settled()
                if stage == "given":
                    assert await taker.given() == b"given"
                else:
                    with pytest.raises(Lost):
                        await taker.given()
            while peer._links:
                await asyncio.sleep(0.01)
            count = landed[-1] if landed else 0
            assert all(own.page(page) == same.page(kv_process.PAGES - 1 - page) for page in range(0, count, 7))
            await peer.close()
    await asyncio.sleep(0)
    assert left()[:2] == before[:2]


async def test_resumed_receiver_discards_pages_read_after_its_lease() -> None:
    """The sender has released the pages by then, so they may hold another request's KV cache."""
    peer = Peer(secret=kv_process.SECRET, lease=LEASE)
    with Pages(kv_process.PAGES, kv_process.SIZES, seed=7) as pages:
        peer.add("demo", pages.arena)
        async with running("take", "shared", "end") as process:
            giver = await peer.connect(f"127.0.0.1:{int(await line(process))}", "demo")
            await giver.begin(b"", 1)
            await giver.give(b"")
            process.send_signal(signal.SIGSTOP)
            giver.filled(0, list(range(kv_process.PAGES)))
            await giver.done()
            process.send_signal(signal.SIGCONT)
            assert (await line(process)).startswith(b"done 0 ")
        await peer.close()
