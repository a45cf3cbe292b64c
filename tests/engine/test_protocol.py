"""The engine contract, tested on the fake engine: every choice ends exactly once, and nothing follows a cancel."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from parley.engine.fake import FakeEngine
from parley.engine.protocol import EngineFailed
from parley.engine.stream import Arrived, Stream, StreamGroup
from parley.types import Output, Work


async def read(stream: Stream) -> list[Output]:
    got = []
    while outputs := await stream.next():
        got += outputs
    return got


async def started(**options) -> FakeEngine:
    engine = FakeEngine(**options)
    await engine.start()
    await engine.ready()
    return engine


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(1, 3)), min_size=1, max_size=8),
    st.integers(1, 4),
)
def test_every_choice_yields_its_tokens_and_ends_exactly_once(shapes, places):
    async def scenario() -> None:
        engine = await started(max_batch=places)
        streams = [
            engine.submit(Work(id=str(i), token_ids=list(range(1, prompt + 1)), max_tokens=limit, n=n))
            for i, (prompt, limit, n) in enumerate(shapes)
        ]
        for stream, (prompt, limit, n) in zip(streams, shapes, strict=True):
            outputs = await read(stream)
            for index in range(n):
                mine = [o for o in outputs if o.index == index]
                assert [o.finish for o in mine if o.finish] == ["length"]
                assert mine[-1].finish == "length"
                assert [t for o in mine for t in o.token_ids] == [i % prompt + 1 for i in range(limit)]
        assert engine.in_flight == 0
        await engine.close()

    asyncio.run(scenario())


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(-1, 2)), max_size=6))
def test_cancelled_choice_yields_no_more_outputs(cancels):
    async def scenario() -> None:
        engine = await started()
        stream = engine.submit(Work(id="a", token_ids=[1], max_tokens=8, n=3))
        gone: set[int] = set()
        seen = []
        for turn in range(16):
            for when, index in cancels:
                if when == turn:
                    stream.cancel(index)
                    gone |= set(range(3)) if index < 0 else {index}
            if stream.open:
                fresh = await stream.next()
                assert not {o.index for o in fresh} & (gone - {o.index for o in seen if o.finish})
                seen += fresh
        assert not stream.open and engine.in_flight == 0
        assert await stream.next() == []
        await asyncio.sleep(0.001)
        assert engine.stats.running == 0 and engine.stats.blocks_used == 0
        await engine.close()

    asyncio.run(scenario())


async def test_engine_crash_ends_every_open_choice_with_the_reason():
    engine = await started()
    engine.gate.clear()
    streams = [engine.submit(Work(id=str(i), token_ids=[1], max_tokens=4, n=2)) for i in range(3)]
    engine.crash("The engine process was killed by SIGKILL.")
    streams.append(engine.submit(Work(id="late", token_ids=[1], max_tokens=4)))
    for stream in streams:
        outputs = await read(stream)
        assert {o.finish for o in outputs} == {"error"}
        assert all("SIGKILL" in (o.error or "") for o in outputs)
    await engine.close()


async def test_requests_before_ready_and_failed_starts_raise_errors():
    engine = FakeEngine(load=0.01, failure="There is no model here.")
    await engine.start()
    early = await read(engine.submit(Work(id="a", token_ids=[1], max_tokens=1)))
    assert early[-1].finish == "error"
    try:
        await engine.ready()
        raise AssertionError("a failed start must not look ready")
    except EngineFailed as error:
        assert str(error) == "There is no model here."
    await engine.close()
    await engine.close()


@given(
    st.integers(1, 3), st.integers(1, 6), st.lists(st.sampled_from(["more", "enough", "next", "cancel"]), max_size=12)
)
def test_feed_and_next_deliver_each_token_once_in_order(n, limit, wishes):
    async def scenario() -> None:
        engine = await started()
        stream = engine.submit(Work(id="a", token_ids=[1, 2, 3], max_tokens=limit, n=n))
        group = StreamGroup([stream])
        got: dict[int, list[int]] = {index: [] for index in range(n)}
        gone: set[int] = set()
        script = iter(wishes)

        def take(outputs: list[Output]) -> bool:
            assert outputs
            for output in outputs:
                assert output.index not in gone
                got[output.index] += output.token_ids
            wish = next(script, "more")
            if wish == "cancel":
                index = len(gone) % n
                gone.add(index)
                stream.cancel(index)
            return wish in ("more", "cancel")

        while not stream.ended:
            await group.feed(lambda arrived: take(arrived[0][1]))
            if not stream.ended and next(script, "more") == "next":
                take(await stream.next() or [Output("a", 0)])
        await group.feed(lambda arrived: take(arrived[0][1]))  # the stream has ended: returns at once
        assert group.ended
        for index, ids in got.items():
            whole = [k % 3 + 1 for k in range(limit)]
            assert ids == whole if index not in gone else ids == whole[: len(ids)]
        assert engine.in_flight == 0
        await engine.close()

    asyncio.run(scenario())


async def test_failing_reader_does_not_disturb_other_streams():
    engine = await started()

    def fail(arrived: Arrived) -> bool:
        raise RuntimeError("This reader is broken.")

    broken, whole = (engine.submit(Work(id=id, token_ids=[1], max_tokens=4)) for id in "ab")
    seen: list[int] = []
    results = await asyncio.gather(
        StreamGroup([broken]).feed(fail),
        StreamGroup([whole]).feed(lambda arrived: seen.append(len(arrived[0][1])) is None),
        return_exceptions=True,
    )
    assert isinstance(results[0], RuntimeError) and results[1] is True
    assert sum(seen) == 4 and whole.ended
    broken.cancel()
    assert engine.in_flight == 0
    await engine.close()


async def test_the_streams_of_a_group_are_fed_once_for_each_step():
    engine = await started()
    lengths = (2, 4, 3)
    works = [Work(id=str(number), token_ids=[1], max_tokens=length) for number, length in enumerate(lengths)]
    group = StreamGroup([engine.submit(work) for work in works])
    steps: list[list[tuple[int, int]]] = []

    def take(arrived: Arrived) -> bool:
        steps.append([(number, len(outputs)) for number, outputs in arrived])
        return len(steps) != 2

    assert not await group.feed(take) and not group.ended  # it has had enough for now
    assert await group.feed(take) and group.ended
    open_after = [[number for number, length in enumerate(lengths) if length > step] for step in range(4)]
    assert steps == [[(number, 1) for number in numbers] for numbers in open_after]
    assert await group.feed(take) and len(steps) == 4  # returns at once
    await engine.close()


async def test_cancelling_every_stream_of_a_group_ends_feeding():
    engine = await started(tick=0.001)
    streams = [engine.submit(Work(id=id, token_ids=[1], max_tokens=4000, n=2)) for id in "ab"]
    group = StreamGroup(streams)
    feeding = asyncio.create_task(group.feed(lambda arrived: True))
    await asyncio.sleep(0.01)
    streams[0].cancel()
    streams[1].cancel(0)
    await asyncio.sleep(0.01)
    assert not feeding.done() and not group.ended
    streams[1].cancel(1)
    assert await feeding and group.ended
    assert engine.in_flight == 0
    await engine.close()


async def test_engine_crash_or_reader_cancellation_ends_feed():
    engine = await started(tick=0.001)
    outputs: list[Output] = []
    stream, other = (engine.submit(Work(id=id, token_ids=[1], max_tokens=4000)) for id in "ab")
    feeding = [
        asyncio.create_task(StreamGroup([each]).feed(lambda arrived: outputs.extend(arrived[0][1]) is None))
        for each in (stream, other)
    ]
    await asyncio.sleep(0.01)
    feeding[1].cancel()
    await asyncio.gather(feeding[1], return_exceptions=True)
    outputs.clear()
    assert (await other.next())[0].id == "b"  # outputs without a feeding reader are kept for next()
    engine.crash("The engine process was killed.")
    await feeding[0]
    assert outputs[-1].finish == "error" and {output.id for output in outputs} == {"a"}
    await engine.close()


async def test_leased_prompt_announces_its_pages_before_its_first_output():
    engine = await started()
    work = Work(id="a", token_ids=list(range(40)), max_tokens=6, n=2, lease=True)
    told: list[int | Output] = []
    stream = engine.submit(work)
    stream.filled = told.extend
    while len([each for each in told if isinstance(each, Output)]) < 2:
        told += await stream.next()
    stream.cancel()
    assert [type(each) for each in told[:3]] == [int, int, Output]
    assert engine.stats.pinned == 2

    reserved = await engine.reserve("key", work.token_ids)
    assert not reserved.error and len(reserved.pages) + reserved.skip == 2
    assert (await engine.reserve("key", work.token_ids)).error
    assert (await engine.reserve("large", list(range(10**5)))).error
    engine.landed("key", 2)
    rest = await read(engine.submit(Work(id="b", token_ids=work.token_ids, max_tokens=6, n=2, given=[[0], [0, 1]])))
    for index, count in ((0, 1), (1, 2)):
        assert [token for each in rest if each.index == index for token in each.token_ids] == list(range(count, 6))

    for end in (engine.release, engine.free):
        end("a"), end("key"), end("unknown")
    while engine.stats.pinned or engine.stats.reserved or engine.stats.blocks_used:
        await asyncio.sleep(0.001)
    await engine.close()
    assert (await engine.reserve("key", work.token_ids)).error
    engine.landed("key", 1)
    engine.free("key")


async def test_prefill_share_applies_also_when_set_before_loading():
    """With prefill share 0 a prompt waits for the running answer's end; with 100 it does not wait."""

    async def beside(percent: int) -> int:
        engine.divide(percent)
        stream = engine.submit(Work(id="a", token_ids=[1], max_tokens=50))
        answer = await stream.next()
        prompt = engine.submit(Work(id="b", token_ids=[1] * 100, max_tokens=1))
        await read(prompt)
        answer += [] if stream.ended else await stream.next()
        stream.cancel()
        return len(answer)

    engine = FakeEngine()
    engine.divide(0)
    await engine.start()
    await engine.ready()
    assert await beside(0) == 50
    assert await beside(100) < 10
    assert await beside(0) == 50
    await engine.close()
