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
from support.kv_links import TRANSPORTS, open_resources
from support.kv_pages import PageMemory

from parley.disagg.kv.peer import KVPeer
from parley.disagg.kv.receiver import KVReceiver
from parley.disagg.kv.transport import LinkError, LinkLost

PROCESS_SCRIPT = Path(__file__).parents[1] / "support" / "kv_process.py"
TRANSPORTS_AND_SIGNALS = [("shared", signal.SIGSTOP), ("tcp", signal.SIGKILL)]
if os.environ.get("PARLEY_NIGHTLY"):
    TRANSPORTS_AND_SIGNALS += [("shared", signal.SIGKILL), ("tcp", signal.SIGSTOP)]
LEASE = 1.0  # seconds; a stopped process counts as dead after it


@asynccontextmanager
async def handover_process(role: str, way: str, stage: str, *port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    path = os.pathsep.join([str(PROCESS_SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")])
    process = await asyncio.create_subprocess_exec(
        sys.executable, PROCESS_SCRIPT, role, way, stage, *map(str, port),
        stdout=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def read_line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    return (await process.stdout.readline()).strip()


@pytest.mark.parametrize("way", TRANSPORTS)
async def test_handover_between_two_processes(way: str) -> None:
    async with handover_process("take", way, "end") as receiver:
        port = int(await read_line(receiver))
        async with handover_process("give", way, "end", port) as sender:
            sender_line, receiver_line = await read_line(sender), await read_line(receiver)
            assert sender_line == receiver_line and sender_line.startswith(
                b"done %d " % (kv_process.PAGES * sum(kv_process.SIZES))
            )
            assert await sender.wait() == await receiver.wait() == 0


@pytest.mark.parametrize(("way", "how"), TRANSPORTS_AND_SIGNALS)
@pytest.mark.parametrize("stage", ["offered", "accepted", "given"])
async def test_sender_ends_when_the_receiver_process_dies(way: str, stage: str, how: signal.Signals) -> None:
    """The receiver dies before it accepts, while pages are in transit, or after the outputs but before the end."""
    before = open_resources()
    peer = KVPeer(secret=kv_process.SECRET, shared=way == "shared", lease=LEASE)
    with PageMemory(kv_process.PAGES, kv_process.SIZES, seed=7) as pages:
        peer.add_arena("demo", pages.arena)
        async with handover_process("take", way, stage) as process:
            sender = await peer.open_handover(f"127.0.0.1:{int(await read_line(process))}", "demo")
            acceptance = asyncio.create_task(sender.begin_handover(b"", 1))
            if stage == "offered":
                assert await read_line(process) == b"there"
                process.send_signal(how)
                with pytest.raises(LinkError):
                    await acceptance
            else:
                await acceptance
                sender.add_computed_pages(0, list(range(kv_process.PAGES)))
                if stage == "given":
                    await sender.send_outputs(b"")
                assert await read_line(process) == b"there"
                process.send_signal(how)
            await sender.finish_handover()
            with pytest.raises(LinkError):
                await sender.send_outputs(b"")
            await peer.close_peer()
    await asyncio.sleep(0)
    assert open_resources()[:2] == before[:2]


@pytest.mark.parametrize(("way", "how"), TRANSPORTS_AND_SIGNALS)
@pytest.mark.parametrize("stage", ["linked", "begun", "half", "given"])
async def test_receiver_ends_when_the_sender_process_dies(way: str, stage: str, how: signal.Signals) -> None:
    """The sender dies before it asks, before any page, between pages, or after all pages and outputs were sent."""
    before = open_resources()
    peer = KVPeer(secret=kv_process.SECRET, shared=way == "shared", lease=LEASE)
    receivers: asyncio.Queue[KVReceiver] = asyncio.Queue()
    received_counts = []

    async def accept(receiver: KVReceiver) -> None:
        await receiver.accept_handover(
            [(0, list(range(kv_process.PAGES)))], lambda part, count: received_counts.append(count)
        )
        receivers.put_nowait(receiver)

    with (
        PageMemory(kv_process.PAGES, kv_process.SIZES) as target,
        PageMemory(kv_process.PAGES, kv_process.SIZES, seed=7) as expected,
    ):
        peer.add_arena("demo", target.arena)
        await peer.listen("127.0.0.1", 0, accept)
        async with handover_process("give", way, stage, peer.port) as process:
            receiver = None if stage == "linked" else await receivers.get()
            assert await read_line(process) == b"there"
            process.send_signal(how)
            if receiver is not None:
                await receiver.wait_settled()
                if stage == "given":
                    assert await receiver.wait_outputs() == b"given"
                else:
                    with pytest.raises(LinkLost):
                        await receiver.wait_outputs()
            while peer.links:
                await asyncio.sleep(0.01)
            count = received_counts[-1] if received_counts else 0
            assert all(
                target.read_page(page) == expected.read_page(kv_process.PAGES - 1 - page) for page in range(0, count, 7)
            )
            await peer.close_peer()
    await asyncio.sleep(0)
    assert open_resources()[:2] == before[:2]


async def test_resumed_receiver_discards_pages_read_after_its_lease() -> None:
    """The sender has released the pages by then, so they may hold another request's KV cache."""
    peer = KVPeer(secret=kv_process.SECRET, lease=LEASE)
    with PageMemory(kv_process.PAGES, kv_process.SIZES, seed=7) as pages:
        peer.add_arena("demo", pages.arena)
        async with handover_process("take", "shared", "end") as process:
            sender = await peer.open_handover(f"127.0.0.1:{int(await read_line(process))}", "demo")
            await sender.begin_handover(b"", 1)
            await sender.send_outputs(b"")
            process.send_signal(signal.SIGSTOP)
            sender.add_computed_pages(0, list(range(kv_process.PAGES)))
            await sender.finish_handover()
            process.send_signal(signal.SIGCONT)
            assert (await read_line(process)).startswith(b"done 0 ")
        await peer.close_peer()
