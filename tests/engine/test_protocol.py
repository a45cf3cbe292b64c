"""The engine contract, tested on the scripted engine: every choice ends exactly once, and nothing follows a cancel."""

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parley.engine.messages import ToEngine
from parley.engine.output_stream import OutputStream, StepArrivals, StreamGroup, split_steps
from parley.engine.page_transfer import find_page_transfer
from parley.engine.protocol import Engine, EngineFailed
from parley.engine.scripted_engine import SCRIPTED_MODEL, ScriptedEngine
from parley.types import EngineOutput, EngineRequest, KVPrefix


async def read_outputs(stream: OutputStream) -> list[EngineOutput]:
    collected = []
    while outputs := await stream.next_outputs():
        collected += outputs
    return collected


async def start_engine(**options) -> ScriptedEngine:
    engine = ScriptedEngine(**options)
    await engine.start()
    await engine.wait_until_ready()
    return engine


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(1, 3)), min_size=1, max_size=8),
    st.integers(1, 4),
)
def test_every_choice_yields_its_tokens_and_ends_exactly_once(shapes, places):
    async def scenario() -> None:
        engine = await start_engine(max_batch=places)
        streams = [
            engine.submit_request(EngineRequest(id=str(i), token_ids=list(range(1, prompt + 1)), max_tokens=limit, n=n))
            for i, (prompt, limit, n) in enumerate(shapes)
        ]
        for stream, (prompt, limit, n) in zip(streams, shapes, strict=True):
            outputs = await read_outputs(stream)
            for index in range(n):
                choice_outputs = [o for o in outputs if o.index == index]
                assert [o.finish_reason for o in choice_outputs if o.finish_reason] == ["length"]
                assert choice_outputs[-1].finish_reason == "length"
                assert [t for o in choice_outputs for t in o.token_ids] == [i % prompt + 1 for i in range(limit)]
        assert engine.open_stream_count == 0
        await engine.close()

    asyncio.run(scenario())


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(-1, 2)), max_size=6))
def test_cancelled_choice_yields_no_more_outputs(cancels):
    async def scenario() -> None:
        engine = await start_engine()
        stream = engine.submit_request(EngineRequest(id="a", token_ids=[1], max_tokens=8, n=3))
        cancelled: set[int] = set()
        seen = []
        for turn in range(16):
            for when, index in cancels:
                if when == turn:
                    stream.cancel_choice(index)
                    cancelled |= set(range(3)) if index < 0 else {index}
            if stream.open_choices:
                fresh = await stream.next_outputs()
                assert not {o.index for o in fresh} & (cancelled - {o.index for o in seen if o.finish_reason})
                seen += fresh
        assert not stream.open_choices and engine.open_stream_count == 0
        assert await stream.next_outputs() == []
        for _ in range(100):  # the figures are those of the next step
            if engine.stats.running == 0 and engine.stats.used_pages == 0:
                break
            await asyncio.sleep(0)
        assert engine.stats.running == 0 and engine.stats.used_pages == 0
        await engine.close()

    asyncio.run(scenario())


def test_outputs_that_piled_up_are_divided_by_steps():
    first, second, other = (EngineOutput("a", index, [token]) for index, token in ((0, 1), (0, 2), (1, 3)))
    alone = EngineOutput("b", 0, [4])
    assert split_steps({0: [first], 1: [alone]}) == [{0: [first], 1: [alone]}]
    assert split_steps({0: [first, other]}) == [{0: [first, other]}]
    assert split_steps({0: [first, other, second], 1: [alone]}) == [{0: [first, other], 1: [alone]}, {0: [second]}]


async def test_engine_crash_ends_every_open_choice_with_the_reason():
    engine = await start_engine()
    engine.step_gate.clear()
    streams = [engine.submit_request(EngineRequest(id=str(i), token_ids=[1], max_tokens=4, n=2)) for i in range(3)]
    engine.crash_engine("The engine process was killed by SIGKILL.")
    streams.append(engine.submit_request(EngineRequest(id="late", token_ids=[1], max_tokens=4)))
    for stream in streams:
        outputs = await read_outputs(stream)
        assert {o.finish_reason for o in outputs} == {"error"}
        assert all("SIGKILL" in (o.error or "") for o in outputs)
    await engine.close()


async def test_requests_before_ready_and_failed_starts_raise_errors():
    engine = ScriptedEngine(load_seconds=0.01, load_failure="There is no model here.")
    await engine.start()
    early = await read_outputs(engine.submit_request(EngineRequest(id="a", token_ids=[1], max_tokens=1)))
    assert early[-1].finish_reason == "error"
    try:
        await engine.wait_until_ready()
        raise AssertionError("a failed start must not look ready")
    except EngineFailed as error:
        assert str(error) == "There is no model here."
    await engine.close()
    await engine.close()


@given(
    st.integers(1, 3), st.integers(1, 6), st.lists(st.sampled_from(["more", "enough", "next", "cancel"]), max_size=12)
)
def test_feed_and_next_deliver_each_token_once_in_order(n, limit, actions):
    async def scenario() -> None:
        engine = await start_engine()
        group = StreamGroup()
        stream = engine.submit_request(EngineRequest(id="a", token_ids=[1, 2, 3], max_tokens=limit, n=n), group)
        token_ids: dict[int, list[int]] = {index: [] for index in range(n)}
        cancelled: set[int] = set()
        script = iter(actions)

        def on_outputs(outputs: list[EngineOutput]) -> bool:
            assert outputs
            for output in outputs:
                assert output.index not in cancelled
                token_ids[output.index] += output.token_ids
            action = next(script, "more")
            if action == "cancel":
                index = len(cancelled) % n
                cancelled.add(index)
                stream.cancel_choice(index)
            return action in ("more", "cancel")

        while not group.all_read:
            await group.feed_outputs(lambda arrived: on_outputs(arrived[0]))
            if not group.all_read and next(script, "more") == "next":
                on_outputs(await stream.next_outputs() or [EngineOutput("a", 0)])
        await group.feed_outputs(lambda arrived: on_outputs(arrived[0]))  # the stream has ended: returns at once
        assert group.all_read
        for index, ids in token_ids.items():
            whole = [k % 3 + 1 for k in range(limit)]
            assert ids == whole if index not in cancelled else ids == whole[: len(ids)]
        assert engine.open_stream_count == 0
        await engine.close()

    asyncio.run(scenario())


async def test_failing_reader_does_not_disturb_other_streams():
    engine = await start_engine()

    def fail(arrived: StepArrivals) -> bool:
        raise RuntimeError("This reader is broken.")

    broken, whole = (engine.submit_request(EngineRequest(id=name, token_ids=[1], max_tokens=4)) for name in "ab")
    seen: list[int] = []
    results = await asyncio.gather(
        broken.group.feed_outputs(fail),
        whole.group.feed_outputs(lambda arrived: seen.append(len(arrived[0])) is None),
        return_exceptions=True,
    )
    assert isinstance(results[0], RuntimeError) and results[1] is True
    assert sum(seen) == 4 and whole.group.all_read
    broken.cancel_choice()
    assert engine.open_stream_count == 0
    await engine.close()


async def test_streams_of_a_group_are_fed_once_per_step():
    engine = await start_engine()
    lengths = (2, 4, 3)
    requests = [
        EngineRequest(id=str(number), token_ids=[1], max_tokens=length) for number, length in enumerate(lengths)
    ]
    group = StreamGroup()
    for request in requests:
        engine.submit_request(request, group)
    steps: list[list[tuple[int, int]]] = []

    def take(arrived: StepArrivals) -> bool:
        steps.append([(number, len(outputs)) for number, outputs in arrived.items()])
        return len(steps) != 2

    assert not await group.feed_outputs(take) and not group.all_read  # it has had enough for now
    assert await group.feed_outputs(take) and group.all_read
    open_after = [[number for number, length in enumerate(lengths) if length > step] for step in range(4)]
    assert steps == [[(number, 1) for number in numbers] for numbers in open_after]
    assert await group.feed_outputs(take) and len(steps) == 4  # returns at once
    await engine.close()


@pytest.mark.parametrize("index", [0, -1])
async def test_no_output_of_a_cancelled_choice_is_delivered_even_if_it_has_ended(index: int):
    engine = await start_engine()
    stream = engine.submit_request(EngineRequest(id="a", token_ids=[1], max_tokens=2, n=2))
    while stream.open_choices:
        await asyncio.sleep(0)
    stream.cancel_choice(index)
    outputs = await stream.next_outputs()
    assert {output.index for output in outputs} == ({1} if index == 0 else set())
    assert await stream.next_outputs() == [] and stream.group.all_read
    await engine.close()


async def test_cancelling_every_stream_of_a_group_ends_feeding():
    engine = await start_engine(step_seconds=0.001)
    group = StreamGroup()
    streams = [
        engine.submit_request(EngineRequest(id=request_id, token_ids=[1], max_tokens=4000, n=2), group)
        for request_id in "ab"
    ]
    feeding = asyncio.create_task(group.feed_outputs(lambda arrived: True))
    await asyncio.sleep(0.01)
    streams[0].cancel_choice()
    streams[1].cancel_choice(0)
    await asyncio.sleep(0.01)
    assert not feeding.done() and not group.all_read
    streams[1].cancel_choice(1)
    assert await feeding and group.all_read
    assert engine.open_stream_count == 0
    await engine.close()


async def test_engine_crash_or_reader_cancellation_ends_feed():
    engine = await start_engine(step_seconds=0.001)
    outputs: list[EngineOutput] = []
    stream, other = (engine.submit_request(EngineRequest(id=name, token_ids=[1], max_tokens=4000)) for name in "ab")
    feeding = [
        asyncio.create_task(waiting_stream.group.feed_outputs(lambda arrived: outputs.extend(arrived[0]) is None))
        for waiting_stream in (stream, other)
    ]
    await asyncio.sleep(0.01)
    feeding[1].cancel()
    await asyncio.gather(feeding[1], return_exceptions=True)
    outputs.clear()
    assert (await other.next_outputs())[0].id == "b"  # outputs without a feeding reader are kept for next()
    engine.crash_engine("The engine process was killed.")
    await feeding[0]
    assert outputs[-1].finish_reason == "error" and {output.id for output in outputs} == {"a"}
    await engine.close()


async def test_leased_prompt_announces_its_pages_before_its_first_output():
    engine = await start_engine()
    request = EngineRequest(id="a", token_ids=list(range(40)), max_tokens=6, n=2, lease=True)
    events: list[int | EngineOutput] = []
    engine.observe_pages("a", events.extend)
    stream = engine.submit_request(request)
    while len([event for event in events if isinstance(event, EngineOutput)]) < 2:
        events += await stream.next_outputs()
    stream.cancel_choice()
    assert [type(event) for event in events[:3]] == [int, int, EngineOutput]
    assert engine.stats.pinned_pages == 2

    reserved = await engine.reserve_pages("key", KVPrefix(request.token_ids))
    assert not reserved.error and len(reserved.pages) + reserved.skip == 2
    assert (await engine.reserve_pages("key", KVPrefix(request.token_ids))).error
    assert (await engine.reserve_pages("large", KVPrefix(list(range(10**5))))).error
    engine.publish_received("key", 2)
    resumed_outputs = await read_outputs(
        engine.submit_request(
            EngineRequest(id="b", token_ids=request.token_ids, max_tokens=6, n=2, prior_tokens=[[0], [0, 1]])
        )
    )
    for index, count in ((0, 1), (1, 2)):
        assert [token for output in resumed_outputs if output.index == index for token in output.token_ids] == list(
            range(count, 6)
        )

    for end in (engine.release_lease, engine.free_reservation):
        end("a"), end("key"), end("unknown")
    while engine.stats.pinned_pages or engine.stats.reserved_pages or engine.stats.used_pages:
        await asyncio.sleep(0.001)
    await engine.close()
    assert (await engine.reserve_pages("key", KVPrefix(request.token_ids))).error
    engine.publish_received("key", 1)
    engine.free_reservation("key")


async def test_prefill_share_applies_also_when_set_before_loading():
    """With prefill share 0 a prompt waits for the running answer's end; with 100 it does not wait."""

    async def outputs_before_prompt(percent: int) -> int:
        engine.set_prefill_share(percent)
        stream = engine.submit_request(EngineRequest(id="a", token_ids=[1], max_tokens=50))
        answer_outputs = await stream.next_outputs()
        prompt = engine.submit_request(EngineRequest(id="b", token_ids=[1] * 100, max_tokens=1))
        await read_outputs(prompt)
        answer_outputs += [] if stream.group.all_read else await stream.next_outputs()
        stream.cancel_choice()
        return len(answer_outputs)

    engine = ScriptedEngine()
    engine.set_prefill_share(0)
    await engine.start()
    await engine.wait_until_ready()
    assert await outputs_before_prompt(0) == 50
    assert await outputs_before_prompt(100) < 10
    assert await outputs_before_prompt(0) == 50
    await engine.close()


async def test_engine_without_page_transfer_is_not_taken_for_one_with_it():
    engine = await start_engine()
    assert find_page_transfer(engine) is engine
    await engine.close()
    lacking = await start_engine(info=msgspec.structs.replace(SCRIPTED_MODEL, features=frozenset({"grammar"})))
    assert find_page_transfer(lacking) is None
    await lacking.close()
    assert find_page_transfer(ScriptedEngine()) is None  # not loaded yet

    class PlainEngine(Engine):
        """An engine without any optional method."""

        async def start(self) -> None: ...
        async def close(self) -> None: ...
        def _send_to_engine(self, message: ToEngine) -> None: ...

    plain = PlainEngine()
    plain.info = SCRIPTED_MODEL
    assert find_page_transfer(plain) is None
