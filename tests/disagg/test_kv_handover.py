"""Handovers between two peers: every page arrives at its target page, byte for byte, over both transports."""

import asyncio
import os
import threading
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kv_links import WAYS, begun, pair
from support.kv_pages import Pages

from parley.disagg.kv.arena import runs
from parley.disagg.kv.peer import Peer, split
from parley.disagg.kv.sender import Giver, Refused
from parley.disagg.kv.transport import LinkError, Lost


@st.composite
def handovers(draw: st.DrawFn) -> list[tuple[list[int], int, int, list[int]]]:
    """For each part: the sender's pages, how many the receiver skips and wants, and the sizes of each announcement."""
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


shapes = st.lists(st.one_of(st.integers(1, 300), st.just(64)), min_size=1, max_size=7).map(tuple)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=25, deadline=None)
@given(
    offered=st.lists(handovers(), min_size=1, max_size=3),
    sizes=shapes,
    gaps=st.tuples(st.sampled_from((0, 24)), st.sampled_from((0, 8))),
    checksum=st.booleans(),
    seed=st.integers(1, 1 << 20),
)
def test_every_requested_page_arrives_unchanged(
    way: str, offered: Any, sizes: Any, gaps: Any, checksum: bool, seed: int
) -> None:
    """Random pages, cuts, parts and shapes; several handovers on one link; no other page is written."""

    random = Random(seed)

    async def run(source: Pages, target: Pages) -> None:
        async with pair(way, source, target, checksum=checksum) as (p, d, takers):
            for parts in offered:
                before = {page: target.page(page) for page in range(60)}
                free = random.sample(range(60), 60)
                wants = [(skip, [free.pop() for _ in range(want)]) for _, skip, want, _ in parts]
                giver, taker, question = await begun(p, d, takers, len(parts))
                seen: list[tuple[int, int]] = []
                if random.random() < 0.5:
                    tell(giver, parts)
                    await taker.accept(wants, lambda part, count, seen=seen: seen.append((part, count)))
                    await question
                else:
                    await taker.accept(wants, lambda part, count, seen=seen: seen.append((part, count)))
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

    with Pages(40, sizes, gaps[0], seed=seed) as source, Pages(60, sizes, gaps[1], seed=seed + 1) as target:
        asyncio.run(run(source, target))


def tell(giver: Giver, parts: Any) -> None:
    """Announces the computed pages of all parts in pieces."""
    for part, (theirs, _, _, cuts) in enumerate(parts):
        at = 0
        for cut in [*cuts, len(theirs)]:
            giver.filled(part, theirs[at : at + cut])
            at += cut


async def test_hands_over_pages_without_bytes() -> None:
    """The fake engine's pages have no bytes; a handover must work nonetheless."""
    with Pages(8, ()) as source, Pages(8, ()) as target:
        async with pair("shared", source, target) as (p, d, takers):
            giver, taker, question = await begun(p, d, takers)
            landed: list[tuple[int, int]] = []
            await taker.accept([(1, [0, 1])], lambda part, count: landed.append((part, count)))
            await question
            giver.filled(0, [5, 6, 7])
            await giver.done()
            await taker.settled()
            assert (taker.transport, landed) == ("none", [(0, 2)])
            with pytest.raises(Lost, match="gave nothing"):
                await taker.given()


@pytest.mark.parametrize("way", WAYS)
async def test_link_stays_usable_after_refused_handovers(way: str) -> None:
    with Pages() as source, Pages() as target:
        async with pair(way, source, target) as (p, d, takers):
            for reason in ("no capacity", ""):
                giver, taker, question = await begun(p, d, takers)
                await taker.refuse(reason)
                await taker.refuse("again")
                with pytest.raises(Refused) as refused:
                    await question
                assert str(refused.value) == reason
                await giver.done()
                await taker.settled()
                with pytest.raises(Lost):
                    await taker.given()
                with pytest.raises(Lost):
                    await taker.accept([(0, [])])
            giver, taker, question = await begun(p, d, takers)
            taker.close()
            with pytest.raises(Refused):
                await question
            assert len(p._links) == len(d._links) == 1


@pytest.mark.parametrize("wants", ([], [(0, [1, 1])], [(0, [16])], [(0, [-1])], [(0, [1]), (0, [2])]))
async def test_accept_raises_on_invalid_target_pages(wants: Any) -> None:
    with Pages() as source, Pages() as target:
        async with pair("tcp", source, target) as (p, d, takers):
            giver, taker, question = await begun(p, d, takers)
            with pytest.raises(ValueError):
                await taker.accept(wants)
            await taker.accept([(0, [1])])
            await question
            giver.close()


async def test_handover_settles_with_fewer_pages_than_requested() -> None:
    with Pages(seed=2) as source, Pages() as target:
        async with pair("tcp", source, target) as (p, d, takers):
            giver, taker, question = await begun(p, d, takers)
            counts: list[int] = []
            await taker.accept([(0, [3, 4, 5])], lambda part, count: counts.append(count))
            await question
            giver.filled(0, [8, 9])
            await giver.give(b"")
            await giver.done()
            await taker.settled()
            assert counts == [2] and await taker.given() == b""
            assert [target.page(3), target.page(4)] == [source.page(8), source.page(9)]


@pytest.mark.parametrize("checksum", (False, True))
async def test_receiver_does_not_count_pages_the_sender_released(checksum: bool) -> None:
    """The sender closes between the read and its confirmation, so the bytes read may belong to another request."""
    with Pages(seed=2) as source, Pages() as target:
        async with pair("shared", source, target, checksum=checksum) as (p, d, takers):
            giver, taker, question = await begun(p, d, takers)
            counts: list[int] = []
            await taker.accept([(0, [3, 4, 5])], lambda part, count: counts.append(count))
            await question
            giver.take = lambda frame: giver.close()  # type: ignore[method-assign]  # when the Read frame arrives
            giver.filled(0, [8, 9, 10])
            await taker.settled()
            assert counts == []
            with pytest.raises(Lost):
                await taker.given()


async def test_handover_may_end_before_the_fetch_thread_stops() -> None:
    with Pages(seed=2) as source, Pages() as target:
        async with pair("shared", source, target) as (p, d, takers):
            giver, taker, question = await begun(p, d, takers)
            fetch, stop = taker._fetch, threading.Event()

            def late(loop: asyncio.AbstractEventLoop) -> None:
                fetch(loop)
                stop.wait()

            taker._fetch = late  # type: ignore[method-assign]
            await taker.accept([(0, [3])])
            await question
            giver.filled(0, [8])
            await giver.give(b"")
            done = asyncio.create_task(giver.done())
            while taker._state != "ending":
                await asyncio.sleep(0)
            stop.set()
            await done
            await taker.settled()
            assert len(p._links) == 1 and target.page(3) == source.page(8)


@pytest.mark.parametrize("way", WAYS)
async def test_checksum_detects_pages_changed_in_transit(way: str) -> None:
    with Pages(seed=2) as source, Pages() as target:
        async with pair(way, source, target, checksum=True) as (p, d, takers):
            giver, taker, question = await begun(p, d, takers)
            await taker.accept([(0, [3])])
            await question
            fetch = taker._link.carrier.fetch

            def wrong(theirs: Any, ours: Any) -> None:
                fetch(theirs, ours)
                target.bytes[target.regions[0].offset + 3 * target.regions[0].stride] ^= 1

            taker._link.carrier.fetch = wrong  # type: ignore[method-assign]
            giver.filled(0, [8])
            with pytest.raises(Lost):
                await taker.given()
            await taker.settled()
            with pytest.raises(LinkError, match="checksum"):
                await giver.give(b"")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("who", ("giver", "taker"))
@pytest.mark.parametrize("when", range(6))
async def test_closing_at_any_moment_ends_both_sides_of_a_handover(way: str, who: str, when: int) -> None:
    """Large pages, so that threads are in the middle of a copy; nothing leaks, and the next handover works."""
    with Pages(200, (64 << 10,), seed=3) as source, Pages(200, (64 << 10,)) as target:
        async with pair(way, source, target) as (p, d, takers):
            giver, taker, question = await begun(p, d, takers)

            def end() -> None:
                for _ in range(2):
                    (giver if who == "giver" else taker).close()

            if when == 0:
                end()
                with pytest.raises(LinkError if who == "giver" else Refused):
                    await question
            else:
                await taker.accept([(0, list(range(200)))])
                if when == 1:
                    end()
                    with suppress(LinkError):  # if the acceptance did not arrive
                        await question
                else:
                    await question
                    giver.filled(0, list(range(0, 200, 2)))
                    for _ in range(when * when):
                        await asyncio.sleep(0)
                    if when == 5:
                        await giver.give(b"first")
                    end()
            await taker.settled()
            if when < 5:
                with pytest.raises(Lost):
                    await taker.given()
            else:
                assert await taker.given() == b"first"
            await giver.done()
            with pytest.raises(LinkError):
                await giver.give(b"")
            target.bytes[:] = bytes(len(target.bytes))  # nothing may write these pages from now on
            giver, taker, question = await begun(p, d, takers)
            await taker.accept([(0, [7])])
            await question
            giver.filled(0, [1])
            await giver.done()
            assert target.page(7) == source.page(1)
            assert not any(target.page(page).strip(b"\0") for page in range(200) if page != 7)


async def test_replaces_an_ended_link_from_the_pool() -> None:
    with Pages(seed=2) as source, Pages() as target:
        async with pair("tcp", source, target) as (p, d, takers):
            giver, taker, question = await begun(p, d, takers)
            await taker.accept([(0, [])])
            await question
            await giver.done()
            giver = await p.connect(f"127.0.0.1:{d.port}", "demo")  # from the pool
            next(iter(d._links)).fail("ended meanwhile")
            question = asyncio.create_task(giver.begin(b"again", 0))
            taker = await takers.get()
            assert taker.body == b"again"
            await taker.accept([])
            await question
            await giver.done()


@pytest.mark.parametrize("side", ("send", "fetch", "checksum"))
async def test_transport_exception_ends_the_handover(side: str) -> None:
    """Neither side may wait for pages that never arrive."""
    with Pages(seed=2) as source, Pages() as target:
        async with pair("tcp", source, target, checksum=True) as (p, d, takers):
            giver, taker, question = await begun(p, d, takers)
            await taker.accept([(0, [3])])
            await question

            def fail(*arguments: Any) -> None:
                raise RuntimeError("a defect")

            of = {"send": giver._link.carrier, "fetch": taker._link.carrier, "checksum": giver._memory}
            setattr(of[side], side, fail)
            giver.filled(0, [8])
            await taker.settled()
            await giver.done()
            assert taker.bytes == 0
            with pytest.raises(Lost):
                await taker.given()


async def test_links_to_one_sender_share_its_mapping() -> None:
    """The arena is mapped once for any number of links, and unmapped when the last one ends."""
    with Pages(seed=2) as source, Pages() as target:
        inode = os.fstat(source.fd).st_ino

        def maps() -> int:
            lines = Path("/proc/self/maps").read_text().splitlines()
            return sum(line.split()[4] == str(inode) for line in lines)

        before = maps()
        async with pair("shared", source, target) as (p, d, takers):
            own = maps() - before  # the sender's own mapping
            for _ in range(2):
                givers = []
                for number in range(5):
                    giver, taker, question = await begun(p, d, takers)
                    await taker.accept([(0, [number])])
                    await question
                    givers.append(giver)
                assert maps() - before - own == 1
                for number, giver in enumerate(givers):
                    giver.filled(0, [number])
                    await giver.done()
                assert [target.page(number) for number in range(5)] == [source.page(number) for number in range(5)]
                for link in list(d._links):
                    link.fail("not needed")
                while maps() - before > own:
                    await asyncio.sleep(0.01)
                target.bytes[:] = bytes(len(target.bytes))
        assert maps() == before


async def test_receiver_loses_handovers_when_its_engine_ends() -> None:
    with Pages(seed=2) as source, Pages() as target, Pages() as later:
        async with pair("tcp", source, target) as (p, d, takers):
            giver, taker, question = await begun(p, d, takers)
            await taker.accept([(0, [1, 2])])
            await question
            d.add("demo", later.arena)
            await taker.settled()
            await giver.done()
            giver, taker, question = await begun(p, d, takers)
            await taker.accept([(0, [1])])
            await question
            giver.filled(0, [5])
            await giver.done()
            assert later.page(1) == source.page(5)
            p.remove("demo")
            with pytest.raises(LinkError, match="no pages of a model"):
                await p.connect(f"127.0.0.1:{d.port}", "demo")


@pytest.mark.parametrize("side", ("giver", "taker"))
async def test_connect_fails_when_the_engine_is_replaced_meanwhile(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = Peer._choose
    with Pages(seed=2) as source, Pages() as target, Pages(seed=3) as later:
        async with pair("shared", source, target) as (p, d, takers):

            async def late(peer: Peer, *given: Any) -> Any:
                chosen = await choose(peer, *given)
                (p if side == "giver" else d).add("demo", later.arena)
                return chosen

            monkeypatch.setattr(Peer, "_choose", late)
            with pytest.raises(LinkError):
                await p.connect(f"127.0.0.1:{d.port}", "demo")
            monkeypatch.undo()
            giver, taker, question = await begun(p, d, takers)
            await taker.accept([(0, [1])])
            await question
            giver.filled(0, [5])
            await giver.done()
            source, target = (later, target) if side == "giver" else (source, later)
            assert target.page(1) == source.page(5)


@pytest.mark.parametrize(
    "target, sentence",
    [
        (Pages(layout="model=demo;dtype=float32"), "dtype bfloat16 and float32"),
        (Pages(layout="digest"), "model demo and unknown"),
        (Pages(sizes=(64, 48)), "32 and 48 bytes in region 1"),
        (Pages(sizes=(64,)), "2 and 1 regions"),
    ],
)
async def test_refuses_incompatible_page_layouts_with_the_difference(target: Pages, sentence: str) -> None:
    with Pages() as source:
        async with pair("shared", source, target) as (p, d, _):
            with pytest.raises(LinkError, match=sentence):
                await p.connect(f"127.0.0.1:{d.port}", "demo")
            p.add("other", source.arena)
            with pytest.raises(LinkError, match="no pages of a model other"):
                await p.connect(f"127.0.0.1:{d.port}", "other")


@pytest.mark.parametrize(
    "address, found",
    [
        ("10.0.0.1;1121", ("10.0.0.1", 1121)),
        ("[::1]:80", ("::1", 80)),
        ("fe80::1;80", ("fe80::1", 80)),
        ("host:65535", ("host", 65535)),
    ],
)
def test_splits_kv_addresses(address: str, found: tuple[str, int]) -> None:
    assert split(address) == found


@pytest.mark.parametrize("address", ("", "host", "host:", ":80", "host:0", "host:65536", "host:-1", "host:٣", "host;x"))
def test_rejects_invalid_kv_addresses(address: str) -> None:
    with pytest.raises(LinkError):
        split(address)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=40))
def test_consecutive_runs_cover_each_page_once_in_order(pages: list[tuple[int, int]]) -> None:
    theirs, ours = ([pair[side] for pair in pages] for side in range(2))
    found = list(runs(theirs, ours))
    assert [(first + i, own + i) for (first, own), count in found for i in range(count)] == pages
    ends = [(first + count, own + count) for (first, own), count in found]
    assert all(end != start for end, (start, _) in zip(ends, found[1:], strict=False))  # no run could be longer
