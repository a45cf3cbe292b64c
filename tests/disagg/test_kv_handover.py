"""Handovers between two peers: every page arrives at its target page, byte for byte, over both transports."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kv_links import TRANSPORTS, connected_peers, start_handover
from support.kv_pages import PageMemory

from parley.disagg.kv.arena import MappedArena, consecutive_runs
from parley.disagg.kv.frames import EndFrame
from parley.disagg.kv.link import KVLink
from parley.disagg.kv.peer import split_address
from parley.disagg.kv.sender import HandoverRefused, KVSender
from parley.disagg.kv.transport import LinkError, LinkLost


@st.composite
def handovers(draw: st.DrawFn) -> list[tuple[list[int], int, int, list[int]]]:
    """For each part: the sender's pages, how many the receiver skips and wants, and the sizes of each announcement.
    The last page of a part may be a state."""
    pages = draw(st.permutations(range(40)))
    parts, i = [], 0
    for _ in range(draw(st.integers(0, 4))):
        count = draw(st.integers(0, 14))
        sender_pages = pages[i : i + count] if draw(st.booleans()) else sorted(pages[i : i + count])
        i += count
        if draw(st.booleans()):
            sender_pages = [*sender_pages, 40 + len(parts)]
        skip = draw(st.integers(0, len(sender_pages)))
        want = draw(st.integers(0, len(sender_pages) - skip))
        parts.append((sender_pages, skip, want, draw(st.lists(st.integers(1, 5), max_size=6))))
    return parts


REGION_SIZES = st.lists(st.one_of(st.integers(1, 300), st.just(64)), min_size=1, max_size=7).map(tuple)


@pytest.mark.parametrize("way", TRANSPORTS)
@settings(max_examples=25, deadline=None)
@given(
    offered=st.lists(handovers(), min_size=1, max_size=3),
    sizes=REGION_SIZES,
    state_sizes=st.lists(st.integers(1, 900), max_size=3).map(tuple),
    gaps=st.tuples(st.sampled_from((0, 24)), st.sampled_from((0, 8))),
    checksum=st.booleans(),
    seed=st.integers(1, 1 << 20),
)
def test_every_requested_page_arrives_unchanged(
    way: str, offered: Any, sizes: Any, state_sizes: Any, gaps: Any, checksum: bool, seed: int
) -> None:
    """Random pages and states, cuts, parts and shapes; several handovers on one link; no other page is written."""

    random = Random(seed)

    async def run(source: PageMemory, target: PageMemory) -> None:
        async with connected_peers(way, source, target, checksum=checksum) as (p, d, receivers):
            for parts in offered:
                before = {page: target.read_page(page) for page in range(65)}
                free, free_states = random.sample(range(60), 60), random.sample(range(60, 65), 5)
                wants = [
                    (skip, [(free_states if page >= 40 else free).pop() for page in pages[skip : skip + want]])
                    for pages, skip, want, _ in parts
                ]
                sender, receiver, acceptance = await start_handover(p, d, receivers, len(parts))
                seen: list[tuple[int, int]] = []
                if random.random() < 0.5:
                    announce_pages(sender, parts)
                    await receiver.accept_handover(wants, lambda part, count, seen=seen: seen.append((part, count)))
                    await acceptance
                else:
                    await receiver.accept_handover(wants, lambda part, count, seen=seen: seen.append((part, count)))
                    await acceptance
                    announce_pages(sender, parts)
                await sender.send_outputs(b"outputs")
                assert await receiver.wait_outputs() == b"outputs"
                await sender.finish_handover()
                await receiver.wait_settled()
                for (sender_pages, skip, _, _), (_, own) in zip(parts, wants, strict=True):
                    for number, page in enumerate(own):
                        assert before.pop(page) is not None
                        assert target.read_page(page) == source.read_page(sender_pages[skip + number])
                assert all(target.read_page(page) == content for page, content in before.items())
                for part, (_, own) in enumerate(wants):
                    counts = [count for number, count in seen if number == part]
                    assert counts == sorted(counts) and counts[-1:] == ([len(own)] if own else [])
                assert receiver.transport_name == sender.transport_name == way
                own_pages = [page for _, own in wants for page in own]
                moved_bytes = sum(sum(state_sizes if page >= 60 else sizes) for page in own_pages)
                assert sender.sent_bytes == receiver.received_bytes == moved_bytes
                receiver.close_handover()
                sender.close_handover()

    states = {"state_count": 5, "state_sizes": state_sizes}
    with (
        PageMemory(40, sizes, gaps[0], seed=seed, **states) as source,
        PageMemory(60, sizes, gaps[1], seed=seed + 1, **states) as target,
    ):
        asyncio.run(run(source, target))


def announce_pages(sender: KVSender, parts: Any) -> None:
    """Announces the computed pages of all parts in pieces."""
    for part, (sender_pages, _, _, cuts) in enumerate(parts):
        at = 0
        for cut in [*cuts, len(sender_pages)]:
            sender.add_computed_pages(part, sender_pages[at : at + cut])
            at += cut


async def test_hands_over_pages_without_bytes() -> None:
    """The scripted engine's pages have no bytes; a handover must work nonetheless."""
    with PageMemory(8, ()) as source, PageMemory(8, ()) as target:
        async with connected_peers("shared", source, target) as (p, d, receivers):
            sender, receiver, acceptance = await start_handover(p, d, receivers)
            received_parts: list[tuple[int, int]] = []
            await receiver.accept_handover([(1, [0, 1])], lambda part, count: received_parts.append((part, count)))
            await acceptance
            sender.add_computed_pages(0, [5, 6, 7])
            await sender.finish_handover()
            await receiver.wait_settled()
            assert (receiver.transport_name, received_parts) == ("none", [(0, 2)])
            with pytest.raises(LinkLost, match="gave nothing"):
                await receiver.wait_outputs()


@pytest.mark.parametrize("way", TRANSPORTS)
async def test_link_stays_usable_after_refused_handovers(way: str) -> None:
    with PageMemory() as source, PageMemory() as target:
        async with connected_peers(way, source, target) as (p, d, receivers):
            for reason in ("no capacity", ""):
                sender, receiver, acceptance = await start_handover(p, d, receivers)
                await receiver.refuse_handover(reason)
                await receiver.refuse_handover("again")
                with pytest.raises(HandoverRefused) as refused:
                    await acceptance
                assert str(refused.value) == reason
                await sender.finish_handover()
                await receiver.wait_settled()
                with pytest.raises(LinkLost):
                    await receiver.wait_outputs()
                with pytest.raises(LinkLost):
                    await receiver.accept_handover([(0, [])])
            sender, receiver, acceptance = await start_handover(p, d, receivers)
            receiver.close_handover()
            with pytest.raises(HandoverRefused):
                await acceptance
            assert len(p.links) == len(d.links) == 1


@pytest.mark.parametrize("wants", [[], [(0, [1, 1])], [(0, [16])], [(0, [-1])], [(0, [1]), (0, [2])]])
async def test_accept_raises_on_invalid_target_pages(wants: Any) -> None:
    with PageMemory() as source, PageMemory() as target:
        async with connected_peers("tcp", source, target) as (p, d, receivers):
            sender, receiver, acceptance = await start_handover(p, d, receivers)
            with pytest.raises(ValueError):
                await receiver.accept_handover(wants)
            await receiver.accept_handover([(0, [1])])
            await acceptance
            sender.close_handover()


async def test_handover_settles_with_fewer_pages_than_requested() -> None:
    with PageMemory(seed=2) as source, PageMemory() as target:
        async with connected_peers("tcp", source, target) as (p, d, receivers):
            sender, receiver, acceptance = await start_handover(p, d, receivers)
            counts: list[int] = []
            await receiver.accept_handover([(0, [3, 4, 5])], lambda part, count: counts.append(count))
            await acceptance
            sender.add_computed_pages(0, [8, 9])
            await sender.send_outputs(b"")
            await sender.finish_handover()
            await receiver.wait_settled()
            assert counts == [2] and await receiver.wait_outputs() == b""
            assert [target.read_page(3), target.read_page(4)] == [source.read_page(8), source.read_page(9)]


@pytest.mark.parametrize("checksum", [False, True])
async def test_receiver_does_not_count_pages_the_sender_released(checksum: bool) -> None:
    """The sender closes between the read and its confirmation, so the bytes read may belong to another request."""
    with PageMemory(seed=2) as source, PageMemory() as target:
        async with connected_peers("shared", source, target, checksum=checksum) as (p, d, receivers):
            sender, receiver, acceptance = await start_handover(p, d, receivers)
            counts: list[int] = []
            await receiver.accept_handover([(0, [3, 4, 5])], lambda part, count: counts.append(count))
            await acceptance
            sender.handle_frame = lambda frame: sender.close_handover()  # type: ignore[method-assign]  # when the Read frame arrives
            sender.add_computed_pages(0, [8, 9, 10])
            await receiver.wait_settled()
            assert counts == []
            with pytest.raises(LinkLost):
                await receiver.wait_outputs()


async def test_handover_may_end_before_the_fetch_thread_stops() -> None:
    with PageMemory(seed=2) as source, PageMemory() as target:
        async with connected_peers("shared", source, target) as (p, d, receivers):
            sender, receiver, acceptance = await start_handover(p, d, receivers)
            (link,) = d.links
            run_blocking, handle_frame = link.run_blocking, receiver.handle_frame
            may_stop, ended = asyncio.Event(), asyncio.Event()

            async def stop_late(*action: Any) -> None:
                await run_blocking(*action)
                await may_stop.wait()

            def note_end(frame: Any) -> None:
                handle_frame(frame)
                if isinstance(frame, EndFrame):
                    ended.set()

            link.run_blocking = stop_late  # type: ignore[method-assign, assignment]
            receiver.handle_frame = note_end  # type: ignore[method-assign]
            await receiver.accept_handover([(0, [3])])
            await acceptance
            sender.add_computed_pages(0, [8])
            await sender.send_outputs(b"")
            done = asyncio.create_task(sender.finish_handover())
            await ended.wait()
            may_stop.set()
            await done
            await receiver.wait_settled()
            assert len(p.links) == 1 and target.read_page(3) == source.read_page(8)


@pytest.mark.parametrize("way", TRANSPORTS)
async def test_checksum_detects_pages_changed_in_transit(way: str) -> None:
    with PageMemory(seed=2) as source, PageMemory() as target:
        async with connected_peers(way, source, target, checksum=True) as (p, d, receivers):
            sender, receiver, acceptance = await start_handover(p, d, receivers)
            await receiver.accept_handover([(0, [3])])
            await acceptance
            transport = d.links[0].chosen_transport
            fetch = transport.fetch_pages

            def wrong(theirs: Any, ours: Any) -> None:
                fetch(theirs, ours)
                target.buffer[target.regions[0].offset + 3 * target.regions[0].stride] ^= 1

            transport.fetch_pages = wrong  # type: ignore[method-assign]
            sender.add_computed_pages(0, [8])
            with pytest.raises(LinkLost):
                await receiver.wait_outputs()
            await receiver.wait_settled()
            with pytest.raises(LinkError, match="checksum"):
                await sender.send_outputs(b"")


@pytest.mark.parametrize("way", TRANSPORTS)
@pytest.mark.parametrize("who", ["sender", "receiver"])
@pytest.mark.parametrize("when", range(6))
async def test_closing_at_any_moment_ends_both_sides_of_a_handover(way: str, who: str, when: int) -> None:
    """Large pages, so that threads are in the middle of a copy; nothing leaks, and the next handover works."""
    with PageMemory(200, (64 << 10,), seed=3) as source, PageMemory(200, (64 << 10,)) as target:
        async with connected_peers(way, source, target) as (p, d, receivers):
            sender, receiver, acceptance = await start_handover(p, d, receivers)

            def end() -> None:
                for _ in range(2):
                    (sender if who == "sender" else receiver).close_handover()

            if when == 0:
                end()
                with pytest.raises(LinkError if who == "sender" else HandoverRefused):
                    await acceptance
            else:
                await receiver.accept_handover([(0, list(range(200)))])
                if when == 1:
                    end()
                    with suppress(LinkError):  # if the acceptance did not arrive
                        await acceptance
                else:
                    await acceptance
                    sender.add_computed_pages(0, list(range(0, 200, 2)))
                    for _ in range(when * when):
                        await asyncio.sleep(0)
                    if when == 5:
                        await sender.send_outputs(b"first")
                    end()
            await receiver.wait_settled()
            if when < 5:
                with pytest.raises(LinkLost):
                    await receiver.wait_outputs()
            else:
                assert await receiver.wait_outputs() == b"first"
            await sender.finish_handover()
            with pytest.raises(LinkError):
                await sender.send_outputs(b"")
            target.buffer[:] = bytes(len(target.buffer))  # nothing may write these pages from now on
            sender, receiver, acceptance = await start_handover(p, d, receivers)
            await receiver.accept_handover([(0, [7])])
            await acceptance
            sender.add_computed_pages(0, [1])
            await sender.finish_handover()
            assert target.read_page(7) == source.read_page(1)
            assert not any(target.read_page(page).strip(b"\0") for page in range(200) if page != 7)


async def test_replaces_an_ended_link_from_the_pool() -> None:
    with PageMemory(seed=2) as source, PageMemory() as target:
        async with connected_peers("tcp", source, target) as (p, d, receivers):
            sender, receiver, acceptance = await start_handover(p, d, receivers)
            await receiver.accept_handover([(0, [])])
            await acceptance
            await sender.finish_handover()
            sender = await p.open_handover(f"127.0.0.1:{d.port}", "demo")  # from the pool
            d.links[0].fail_link("ended meanwhile")
            acceptance = asyncio.create_task(sender.begin_handover(b"again", 0))
            receiver = await receivers.get()
            assert receiver.body == b"again"
            await receiver.accept_handover([])
            await acceptance
            await sender.finish_handover()


@pytest.mark.parametrize("side", ["send_pages", "fetch_pages", "page_checksum"])
async def test_transport_exception_ends_the_handover(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither side may wait for pages that never arrive."""
    with PageMemory(seed=2) as source, PageMemory() as target:
        async with connected_peers("tcp", source, target, checksum=True) as (p, d, receivers):
            sender, receiver, acceptance = await start_handover(p, d, receivers)
            await receiver.accept_handover([(0, [3])])
            await acceptance

            def fail(*arguments: Any) -> Any:
                raise RuntimeError("a defect")

            def fail_for_sender(arena: MappedArena, pages: Any) -> int:
                return fail() if arena.arena == source.arena else page_checksum(arena, pages)

            page_checksum = MappedArena.page_checksum
            if side == "page_checksum":
                monkeypatch.setattr(MappedArena, side, fail_for_sender)
            else:
                monkeypatch.setattr((p if side == "send_pages" else d).links[0].chosen_transport, side, fail)
            sender.add_computed_pages(0, [8])
            await receiver.wait_settled()
            await sender.finish_handover()
            assert receiver.received_bytes == 0
            with pytest.raises(LinkLost):
                await receiver.wait_outputs()


async def test_links_to_one_sender_share_its_mapping() -> None:
    """The arena is mapped once for any number of links, and unmapped when the last one ends."""
    with PageMemory(seed=2) as source, PageMemory() as target:
        inode = os.fstat(source.fd).st_ino

        def maps() -> int:
            lines = Path("/proc/self/maps").read_text().splitlines()
            return sum(line.split()[4] == str(inode) for line in lines)

        before = maps()
        async with connected_peers("shared", source, target) as (p, d, receivers):
            own = maps() - before  # the sender's own mapping
            for _ in range(2):
                senders = []
                for number in range(5):
                    sender, receiver, acceptance = await start_handover(p, d, receivers)
                    await receiver.accept_handover([(0, [number])])
                    await acceptance
                    senders.append(sender)
                assert maps() - before - own == 1
                for number, sender in enumerate(senders):
                    sender.add_computed_pages(0, [number])
                    await sender.finish_handover()
                assert [target.read_page(number) for number in range(5)] == [
                    source.read_page(number) for number in range(5)
                ]
                for link in d.links:
                    link.fail_link("not needed")
                while maps() - before > own:
                    await asyncio.sleep(0.01)
                target.buffer[:] = bytes(len(target.buffer))
        assert maps() == before


async def test_receiver_loses_handovers_when_its_engine_ends() -> None:
    with PageMemory(seed=2) as source, PageMemory() as target, PageMemory() as later:
        async with connected_peers("tcp", source, target) as (p, d, receivers):
            sender, receiver, acceptance = await start_handover(p, d, receivers)
            await receiver.accept_handover([(0, [1, 2])])
            await acceptance
            d.add_arena("demo", later.arena)
            await receiver.wait_settled()
            await sender.finish_handover()
            sender, receiver, acceptance = await start_handover(p, d, receivers)
            await receiver.accept_handover([(0, [1])])
            await acceptance
            sender.add_computed_pages(0, [5])
            await sender.finish_handover()
            assert later.read_page(1) == source.read_page(5)
            p.remove_arena("demo")
            with pytest.raises(LinkError, match="no KV pages of a model"):
                await p.open_handover(f"127.0.0.1:{d.port}", "demo")


@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_connect_fails_when_the_engine_is_replaced_meanwhile(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_blocking = KVLink.run_blocking
    with PageMemory(seed=2) as source, PageMemory() as target, PageMemory(seed=3) as later:
        async with connected_peers("shared", source, target) as (p, d, receivers):

            async def replace_arena_after(link: KVLink, *use_offer: Any) -> Any:
                await run_blocking(link, *use_offer)
                (p if side == "sender" else d).add_arena("demo", later.arena)

            monkeypatch.setattr(KVLink, "run_blocking", replace_arena_after)
            with pytest.raises(LinkError):
                await p.open_handover(f"127.0.0.1:{d.port}", "demo")
            monkeypatch.undo()
            sender, receiver, acceptance = await start_handover(p, d, receivers)
            await receiver.accept_handover([(0, [1])])
            await acceptance
            sender.add_computed_pages(0, [5])
            await sender.finish_handover()
            source, target = (later, target) if side == "sender" else (source, later)
            assert target.read_page(1) == source.read_page(5)


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (PageMemory(layout="model=demo;dtype=float32"), "dtype bfloat16 and float32"),
        (PageMemory(layout="digest"), "model demo and unknown"),
        (PageMemory(sizes=(64, 48)), "32 and 48 bytes in region 1"),
        (PageMemory(sizes=(64,)), "2 and 1 regions"),
    ],
)
async def test_refuses_incompatible_page_layouts_with_the_difference(target: PageMemory, sentence: str) -> None:
    with PageMemory() as source:
        async with connected_peers("shared", source, target) as (p, d, _):
            with pytest.raises(LinkError, match=sentence):
                await p.open_handover(f"127.0.0.1:{d.port}", "demo")
            p.add_arena("other", source.arena)
            with pytest.raises(LinkError, match="no pages of a model other"):
                await p.open_handover(f"127.0.0.1:{d.port}", "other")


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("10.0.0.1;1121", ("10.0.0.1", 1121)),
        ("[::1]:80", ("::1", 80)),
        ("fe80::1;80", ("fe80::1", 80)),
        ("host:65535", ("host", 65535)),
    ],
)
def test_splits_kv_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:0", "host:65536", "host:-1", "host:٣", "host;x"])
def test_rejects_invalid_kv_addresses(address: str) -> None:
    with pytest.raises(LinkError):
        split_address(address)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=40))
def test_consecutive_runs_cover_each_page_once_in_order(pages: list[tuple[int, int]]) -> None:
    theirs, ours = ([pair[side] for pair in pages] for side in range(2))
    found_runs = list(consecutive_runs(theirs, ours))
    assert [(first + i, own + i) for (first, own), count in found_runs for i in range(count)] == pages
    ends = [(first + count, own + count) for (first, own), count in found_runs]
    assert all(end != start for end, (start, _) in zip(ends, found_runs[1:], strict=False))  # no run could be longer
