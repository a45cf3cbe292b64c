"""Hand-overs between two peers: every page arrives where it is wanted, byte for byte, by both transports."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from arenas import Pages
from hypothesis import given, settings
from hypothesis import strategies as st

from parley.kv.giver import Giver
from parley.kv.peer import Peer
from parley.kv.taker import Taker

WAYS = ("shared", "tcp")


@asynccontextmanager
async def pair(
    way: str, source: Pages, target: Pages, **options: Any
) -> AsyncIterator[tuple[Peer, Peer, asyncio.Queue[Taker]]]:
    """A giver's peer, a taker's and what is offered to it. Nothing of them may be left behind."""
    before = len(asyncio.all_tasks()), threads(), files()
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
    assert (len(asyncio.all_tasks()), threads(), files()) == before


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("parley-kv")}


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def begun(p: Peer, d: Peer, takers: asyncio.Queue[Taker], parts: int = 1) -> tuple[Giver, Taker, Any]:
    """A hand-over that was asked for, and the giver's question."""
    giver = await p.connect(f"127.0.0.1:{d.port}", "demo")
    question = asyncio.create_task(giver.begin(b"body", parts))
    return giver, await takers.get(), question


@st.composite
def handovers(draw: st.DrawFn) -> list[tuple[list[int], int, int, list[int]]]:
    """For each part: the giver's pages, how many the taker skips and wants, and after how many pages news is cut."""
    pages = draw(st.permutations(range(40)))
    parts, i = [], 0
    for _ in range(draw(st.integers(0, 4))):
        count = draw(st.integers(0, 14))
        theirs = pages[i : i + count] if draw(st.booleans()) else sorted(pages[i : i + count])
        i += count
        skip = draw(st.integers(0, len(theirs)))
        want = draw(st.integers(0, len(theirs) - skip))
        parts.append((theirs, skip, want, draw(st.lists(st.integers(1, 5), max_size=6))))
    return parts


shapes = st.lists(st.integers(1, 300), min_size=1, max_size=4).map(tuple)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=25, deadline=None)
@given(
    offered=st.lists(handovers(), min_size=1, max_size=3),
    sizes=shapes,
    gaps=st.tuples(st.sampled_from((0, 24)), st.sampled_from((0, 8))),
    checksum=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_every_wanted_page_arrives(way: str, offered: Any, sizes: Any, gaps: Any, checksum: bool, random: Any) -> None:
    """Random pages on both sides, cuts, parts and shapes; several hand-overs on one link; nothing else is written."""

    async def run() -> None:
        source, target = Pages(40, sizes, gaps[0], seed=random.randint(1, 999)), Pages(60, sizes, gaps[1], seed=4)
        async with pair(way, source, target, checksum=checksum) as (p, d, takers):
            for parts in offered:
                before = {page: target.page(page) for page in range(60)}
                free = random.sample(range(60), 60)
                wants = [(skip, [free.pop() for _ in range(want)]) for _, skip, want, _ in parts]
                giver, taker, question = await begun(p, d, takers, len(parts))
                seen: list[tuple[int, int]] = []
                taker.landed = lambda part, count, seen=seen: seen.append((part, count))  # type: ignore[misc]
                if random.random() < 0.5:
                    tell(giver, parts)
                    await taker.accept(wants)
                    await question
                else:
                    await taker.accept(wants)
                    await question
                    tell(giver, parts)
                await giver.give(b"outputs")
                assert await taker.given() == b"outputs"
                await giver.done()
                await taker.settled()
                for (theirs, skip, _, _), (_, own) in zip(parts, wants, strict=True):
                    for number, page in enumerate(own):
                        assert before.pop(page) is not None
                        assert target.page(page) == source.page(theirs[skip + number])
                assert all(target.page(page) == content for page, content in before.items())
                for part, (_, own) in enumerate(wants):
                    counts = [count for number, count in seen if number == part]
                    assert counts == sorted(counts) and counts[-1:] == ([len(own)] if own else [])
                assert taker.transport == giver.transport == way
                assert giver.bytes == taker.bytes == sum(len(own) for _, own in wants) * sum(sizes)
                taker.close()
                giver.close()
        source.close()
        target.close()

    asyncio.run(run())


def tell(giver: Giver, parts: Any) -> None:
    """News of all parts' pages, in pieces."""
    for part, (theirs, _, _, cuts) in enumerate(parts):
        at = 0
        for cut in [*cuts, len(theirs)]:
            giver.filled(part, theirs[at : at + cut])
            at += cut
