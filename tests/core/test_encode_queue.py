"""Media items in prompts: encoded once, in slices beside the steps, and only for tokens that must be computed."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest
from support.invariant_ledger import VOCAB, LedgerEmbeddings, LoopHarness, run_alone
from support.placed_items import make_item

from parley import heartbeat
from parley.core.engine_loop import EngineLoop
from parley.core.media.embedding_cache import EmbeddingCache
from parley.core.media.encode_queue import FEATURES_ELSEWHERE
from parley.core.media.encoder_thread import EncoderThread
from parley.engine.messages import Shutdown, SubmitRequest
from parley.types import EmbeddingRun, EngineOutput, EngineRequest, EngineStats, MediaItem, ParleySettings
from parley.worker import messages_loop
from parley.worker.messages_loop import EngineInbox, serve_messages

PROMPT = [(5 * i + 1) % VOCAB for i in range(200)]


def request_with(request_id: str, *items: MediaItem, length: int = 60, max_tokens: int = 3, **options) -> EngineRequest:
    return EngineRequest(request_id, PROMPT[:length], max_tokens, media=list(items), **options)


def step_until_encoding(bench: LoopHarness) -> None:
    while not bench.encoder.encoded_digests:
        bench.loop.step()
        time.sleep(0.001)


def test_later_sequences_overtake_a_sequence_waiting_for_the_encoder() -> None:
    """Each step encodes one block and computes all other rows as well."""
    bench = LoopHarness(step_ms=0)
    bench.encoder.blocks = 30
    bench.loop.add_request(request_with("image", make_item("cat", 3, 20)))
    bench.loop.add_request(EngineRequest("text", [1, 2, 3], max_tokens=20))
    bench.drain()
    assert [rows[0][0] for rows in bench.runner.steps] == ["text"] * 20 + ["image"] * 3
    assert bench.merged_output("image") == run_alone(request_with("image", make_item("cat", 3, 20)))


def test_decodes_have_a_row_in_every_step_while_items_are_encoded() -> None:
    bench = LoopHarness(step_ms=0)
    bench.encoder.blocks = 10
    bench.loop.add_request(EngineRequest("text", [1, 2, 3], max_tokens=60))
    bench.step()
    for number in range(3):
        bench.loop.add_request(request_with(f"image {number}", make_item(f"{number}", 3, 20)))
    blocks_by_step = []
    while not bench.outputs.get(("text", 0), [])[-1].finish_reason:
        before = bench.encoder.block_count
        bench.step()
        blocks_by_step.append(bench.encoder.block_count - before)
        assert ("text", 0) in bench.step_log[-1][0]
    assert bench.encoder.block_count == 30 and max(blocks_by_step) == 1


def test_encoder_waits_while_the_prefill_share_is_used_up() -> None:
    bench = LoopHarness(step_ms=0, prefill_share=0.0)
    bench.loop.add_request(EngineRequest("text", [1, 2, 3], max_tokens=20))
    bench.step()
    bench.loop.add_request(request_with("image", make_item("cat", 3, 20)))
    while not bench.outputs["text", 0][-1].finish_reason:
        bench.step()
        assert not bench.encoder.block_count
    bench.drain()
    assert bench.merged_output("image").finish_reason == "length"


def test_prefill_share_does_not_hold_back_a_preempted_answer() -> None:
    bench = LoopHarness(step_ms=0, prefill_share=0.0, media_cache=0, prefix_cache=False, slots=2)
    bench.loop.add_request(EngineRequest("text", [1, 2, 3], max_tokens=100))
    bench.loop.add_request(request_with("image", make_item("cat", 3, 20), max_tokens=20))
    bench.prefill_share.set_share(1.0)
    while ("image", 0) not in bench.outputs:
        bench.step()
    bench.prefill_share.set_share(0.0)
    bench.loop.scheduler.preempt_last()
    while not bench.outputs["text", 0][-1].finish_reason:
        bench.step()
    assert bench.outputs["image", 0][-1].finish_reason == "length" and len(bench.encoder.encoded_digests) == 2
    bench.drain()


def test_requests_with_the_same_image_share_one_encoding() -> None:
    bench = LoopHarness(slots=8, media_cache=0)
    for number in range(8):  # the tokens before it differ, so they share no page
        tokens = [number, *PROMPT[:40]]
        bench.loop.add_request(EngineRequest(f"{number}", tokens, 1, media=[make_item("cat", 10, 20)]))
    bench.drain()
    assert len(bench.encoder.encoded_digests) == 1
    assert (bench.stats.media_cache_queries, bench.stats.media_cache_hits) == (8, 7)


def test_items_in_cached_pages_are_not_encoded() -> None:
    bench = LoopHarness(media_cache=0)
    for request_id in ("first", "second"):
        bench.loop.add_request(request_with(request_id, make_item("cat", 3, 40)))
        bench.drain()
    assert bench.merged_output("second").cached_tokens == 48
    assert len(bench.encoder.encoded_digests) == 1 and bench.stats.media_cache_queries == 1


def test_item_that_ends_after_the_cached_pages_is_encoded_again() -> None:
    bench = LoopHarness(media_cache=0)
    for request_id in ("first", "second"):
        bench.loop.add_request(request_with(request_id, make_item("cat", 3, 50)))
        bench.drain()
    assert bench.merged_output("second").cached_tokens == 48 and len(bench.encoder.encoded_digests) == 2
    assert bench.merged_output("second").token_ids == bench.merged_output("first").token_ids


def test_pages_of_another_image_are_not_found() -> None:
    bench = LoopHarness()
    for number, (name, start) in enumerate([("cat", 20), ("dog", 20), ("cat", 21), ("cat", 20)]):
        bench.loop.add_request(request_with(f"{number}", make_item(name, start, 20)))
        bench.drain()
    assert [bench.merged_output(f"{number}").cached_tokens for number in range(4)] == [0, 16, 16, 48]


def test_next_turn_finds_answer_pages_only_after_the_same_image() -> None:
    """The page that the answer completes begins with the image."""
    bench = LoopHarness()
    bench.loop.add_request(request_with("turn 1", make_item("cat", 18, 10), length=30, max_tokens=30))
    bench.drain()
    history = PROMPT[:30] + bench.merged_output("turn 1").token_ids
    for name, cached_tokens in (("dog", 16), ("cat", 48)):
        bench.loop.add_request(EngineRequest(name, [*history, 1], 1, media=[make_item(name, 18, 10)]))
        bench.drain()
        assert bench.merged_output(name).cached_tokens == cached_tokens


def test_embeddings_are_kept_until_room_is_needed() -> None:
    bench = LoopHarness(media_cache=400, prefix_cache=False)  # two items of 20 embeddings
    for number, name in enumerate(["cat", "dog", "cat", "cow", "cat", "dog"]):
        bench.loop.add_request(request_with(f"{number}", make_item(name, 5, 20)))
        bench.drain()
    names = Counter(bench.encoder.encoded_digests)
    assert [names[make_item(name, 0, 1).digest] for name in ("cat", "dog", "cow")] == [1, 2, 1]
    assert (bench.stats.media_cache_queries, bench.stats.media_cache_hits) == (6, 2)


@pytest.mark.parametrize("media_cache", [0, 100, 1 << 20])
def test_one_request_may_need_more_embeddings_than_the_cache_holds(media_cache: int) -> None:
    bench = LoopHarness(media_cache=media_cache, budgets=(16,))
    items = [make_item(f"{number}", 20 * number, 20) for number in range(4)]
    bench.loop.add_request(request_with("many", *items, length=100))
    bench.loop.add_request(request_with("other", make_item("other", 5, 20)))
    bench.drain()
    assert bench.merged_output("many").finish_reason == bench.merged_output("other").finish_reason == "length"
    assert len(bench.encoder.encoded_digests) == 5


def test_new_requests_wait_for_room_in_the_cache() -> None:
    bench = LoopHarness(slots=1, media_cache=250, prefix_cache=False)
    bench.loop.add_request(EngineRequest("text", [1, 2, 3], max_tokens=100))
    bench.step()
    for number in range(6):
        bench.loop.add_request(request_with(f"{number}", make_item(f"{number}", 5, 20)))
    while bench.step():
        assert bench.loop.encode_queue is not None and bench.loop.encode_queue.cache.held_bytes <= 400
    bench.drain()
    assert len(bench.encoder.encoded_digests) == 6


def test_same_image_twice_in_a_prompt_is_held_until_its_second_place() -> None:
    bench = LoopHarness(budgets=(16,), media_cache=0)
    request = request_with("twice", make_item("cat", 3, 20), make_item("cat", 60, 20), length=100)
    bench.loop.add_request(request)
    bench.drain()
    assert len(bench.encoder.encoded_digests) == 1
    assert bench.merged_output("twice") == run_alone(request)


def test_preempted_sequence_uses_pages_then_cache_then_encodes_again() -> None:
    for media_cache, forgets_pages, encodings in ((0, False, 1), (1000, True, 1), (0, True, 2)):
        bench = LoopHarness(media_cache=media_cache)
        request = request_with("work", make_item("cat", 3, 20), max_tokens=20)
        bench.loop.add_request(request)
        while bench.stats.generated_tokens < 5:
            bench.step()
        bench.loop.scheduler.preempt_last()
        if forgets_pages:
            assert bench.loop.reset_prefix_cache()
        bench.drain()
        assert len(bench.encoder.encoded_digests) == encodings
        assert bench.merged_output("work").token_ids == run_alone(request).token_ids


def test_sequence_returns_from_the_encoder_to_its_position() -> None:
    bench = LoopHarness(slots=1, step_ms=0)
    bench.loop.add_request(EngineRequest("running", [1, 2, 3], max_tokens=10))
    bench.step()
    bench.loop.add_request(request_with("image", make_item("cat", 3, 20), max_tokens=1))
    bench.loop.add_request(EngineRequest("later", [1, 2, 3], max_tokens=1))
    bench.drain()
    assert list(dict.fromkeys(rows[0][0] for rows in bench.runner.steps)) == ["running", "image", "later"]


def test_items_are_encoded_in_order_of_priority_and_arrival() -> None:
    bench = LoopHarness(step_ms=0)
    for name, priority in (("a", 0), ("b", 0), ("c", -1), ("d", 0)):
        bench.loop.add_request(request_with(name, make_item(name, 3, 20), priority=priority))
    bench.drain()
    names = {make_item(name, 0, 1).digest: name for name in "abcd"}
    assert [names[digest] for digest in bench.encoder.encoded_digests] == ["c", "a", "b", "d"]


def test_tenants_get_equal_shares_of_the_encoder() -> None:
    bench = LoopHarness(step_ms=0)
    for tenant, numbers in (("one", "1234"), ("two", "567")):
        for number in numbers:
            bench.loop.add_request(request_with(number, make_item(number, 3, 20), tenant=tenant))
    bench.drain()
    names = {make_item(name, 0, 1).digest: name for name in "1234567"}
    assert "".join(names[digest] for digest in bench.encoder.encoded_digests) == "1526374"


def test_cancel_stops_the_encoder() -> None:
    bench = LoopHarness()
    bench.encoder.blocks, bench.encoder.before_block = 1 << 30, lambda: time.sleep(0.001)
    bench.loop.add_request(request_with("endless", make_item("cat", 3, 20), n=2))
    step_until_encoding(bench)
    bench.loop.cancel_request("endless", 0)
    bench.check()
    bench.loop.cancel_request("endless")
    bench.check()
    bench.encoder.before_block = lambda: None
    bench.drain()
    assert not bench.outputs


def test_cancelled_request_does_not_drop_a_shared_image() -> None:
    bench = LoopHarness()
    bench.encoder.before_block = lambda: time.sleep(0.001)
    for request_id in ("first", "second"):
        bench.loop.add_request(request_with(request_id, make_item("cat", 3, 20)))
    step_until_encoding(bench)
    bench.loop.cancel_request("first")
    bench.drain()
    assert bench.merged_output("second").finish_reason == "length"
    assert len(bench.encoder.encoded_digests) == 1


def test_image_is_encoded_again_if_the_first_request_closed_its_features() -> None:
    bench = LoopHarness()
    bench.encoder.before_block = lambda: time.sleep(0.001)
    bench.encoder.failing = {make_item("cat", 0, 1).digest}
    for request_id in ("first", "second"):
        bench.loop.add_request(request_with(request_id, make_item("cat", 3, 20)))
    step_until_encoding(bench)
    bench.loop.cancel_request("first")
    bench.posted.get(timeout=60)()
    bench.encoder.failing = set()
    bench.drain()
    assert bench.merged_output("second").finish_reason == "length"
    assert len(bench.encoder.encoded_digests) == 2


def test_failing_item_ends_only_the_requests_that_need_it() -> None:
    bench = LoopHarness()
    bench.encoder.failing = {make_item("broken", 0, 1).digest}
    bench.loop.add_request(request_with("bad", make_item("cat", 3, 20), make_item("broken", 30, 9), n=2))
    bench.loop.add_request(request_with("also bad", make_item("broken", 30, 9)))
    bench.loop.add_request(request_with("good", make_item("cat", 3, 20)))
    bench.drain()
    for choice in (("bad", 0), ("bad", 1), ("also bad", 0)):
        assert bench.merged_output(*choice).error == "The image cannot be encoded."
    assert bench.merged_output("good").finish_reason == "length"


def test_request_whose_features_are_elsewhere_fails_only_without_its_pages() -> None:
    bench = LoopHarness(media_cache=0)
    handed_over = request_with("handed over", make_item("cat", 3, 40, features=None))
    for before in ((request_with("computed", make_item("cat", 3, 40)),), ()):
        for request in (*before, handed_over):
            bench.loop.add_request(request)
            bench.drain()
        output = bench.merged_output("handed over")
        if before:
            assert output.finish_reason == "length"
        else:
            assert output.error == FEATURES_ELSEWHERE
        bench.outputs.clear()
        assert bench.loop.reset_prefix_cache()


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        (1, [*((start, 1) for start in range(10)), (10, 30), *((start, 1) for start in range(40, 50))]),
        (16, [(0, 10), (10, 30), (40, 10)]),
        (48, [(0, 48), (48, 2)]),
        (1000, [(0, 50)]),
    ],
)
def test_chunks_do_not_end_within_an_item_that_sees_both_ways(budget: int, steps: list[tuple[int, int]]) -> None:
    bench = LoopHarness(budgets=(budget,), prefix_cache=False)
    item = make_item("cat", 10, 30, sees_both_ways=True)
    bench.loop.add_request(request_with("work", item, length=50, max_tokens=1))
    bench.drain()
    assert [(start, count) for rows in bench.runner.steps for _, _, start, count in rows] == steps


def test_prompt_with_full_attention_is_one_chunk_and_shares_pages_with_equal_prompts_only() -> None:
    """Its keys and values depend on all of it: only the same prompt finds its pages."""
    bench = LoopHarness(budgets=(16,))
    item = make_item("cat", 10, 30, prompt_sees_both_ways=True)
    for request_id, length in (("first", 64), ("longer", 80), ("again", 64)):
        bench.loop.add_request(request_with(request_id, item, length=length, max_tokens=2))
        bench.drain()
    chunks = [(start, count) for rows in bench.runner.steps for _, _, start, count in rows]
    assert chunks == [(0, 64), (64, 1), (0, 80), (80, 1), (48, 16), (64, 1)]


def test_chunk_begins_within_an_item_that_sees_both_ways_after_cached_pages() -> None:
    bench = LoopHarness(budgets=(16,))
    item = make_item("cat", 10, 30, sees_both_ways=True)
    for request_id, length in (("first", 40), ("second", 70)):
        bench.loop.add_request(request_with(request_id, item, length=length, max_tokens=1))
        bench.drain()
    chunks = [(start, count) for rows in bench.runner.steps for _, _, start, count in rows]
    assert chunks == [(0, 10), (10, 30), (32, 16), (48, 16), (64, 6)]


@pytest.mark.parametrize(
    ("media", "sentence"),
    [
        ([make_item("a", 50, 11)], "not within the prompt"),
        ([make_item("a", -1, 5)], "not within the prompt"),
        ([make_item("a", 5, 0)], "not within the prompt"),
        ([make_item("a", 5, 5), make_item("b", 9, 5)], "overlaps another item"),
        ([make_item("a", 20, 5), make_item("b", 5, 5)], "overlaps another item"),
        ([msgspec.structs.replace(make_item("a", 5, 4), runs=[EmbeddingRun(0, 5)])], "not within it"),
        ([msgspec.structs.replace(make_item("a", 5, 4), runs=[])], "not within it"),
        ([msgspec.structs.replace(make_item("a", 5, 4), runs=[EmbeddingRun(1, 0)])], "not within it"),
        ([msgspec.structs.replace(make_item("a", 5, 4), runs=[EmbeddingRun(0, 2), EmbeddingRun(1, 2)])], "overlap"),
        (
            [msgspec.structs.replace(make_item("a", 5, 4), runs=[EmbeddingRun(0, 4, (4, 1, 1), 1e6)])],
            "reaches position 3000005",
        ),
    ],
)
def test_misplaced_items_fail_every_choice_with_reason(media: list[MediaItem], sentence: str) -> None:
    bench = LoopHarness()
    bench.loop.add_request(request_with("wrong", *media, n=2))
    bench.loop.add_request(request_with("right", make_item("a", 50, 10)))
    bench.drain()
    for index in range(2):
        assert sentence in (bench.merged_output("wrong", index).error or "")
    assert bench.merged_output("right").finish_reason == "length"


def test_model_without_an_encoder_rejects_media() -> None:
    bench = LoopHarness()
    bench.runner.media_encoder = None
    bench.loop.add_request(request_with("image", make_item("cat", 3, 20)))
    bench.drain()
    assert bench.merged_output("image").error == "The model reads text only."


def test_placeholders_may_lie_outside_of_the_vocabulary_where_embeddings_replace_them() -> None:
    bench = LoopHarness()
    item = make_item("cat", 3, 4)
    tokens = [1, 2, 3, *[VOCAB] * 4, 5]
    bench.loop.add_request(EngineRequest("good", tokens, 3, media=[item]))
    bench.loop.add_request(EngineRequest("bad", [*tokens, VOCAB], 3, media=[item]))
    bench.drain()
    assert bench.merged_output("good").finish_reason == "length"
    assert "outside the vocabulary" in (bench.merged_output("bad").error or "")


def test_cache_accepts_all_embeddings_and_drops_only_unused_ones() -> None:
    cache = EmbeddingCache(100)
    for name in (b"a", b"b"):
        cache.add_item(name, LedgerEmbeddings(name, 60))
        assert cache.hold_item(name) is not None
    assert (cache.used_bytes, cache.held_bytes) == (120, 120)
    cache.release_item(b"a")
    assert b"a" not in cache and cache.hold_item(b"a") is None
    cache.release_item(b"b")
    assert b"b" in cache and (cache.used_bytes, cache.held_bytes) == (60, 0)
    cache.check_invariants(Counter())


class StuckEncoder:
    """An encoder whose first block never ends."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def encode_item(self, item: MediaItem, between_blocks) -> LedgerEmbeddings:
        between_blocks()
        self.end.wait()
        return LedgerEmbeddings(item.digest, 1)


def test_encoder_thread_reports_progress_until_a_block_hangs() -> None:
    encoder, posted = StuckEncoder(), queue.SimpleQueue()
    thread = EncoderThread(encoder, posted.put)
    assert thread.has_progress()
    thread.start_item(make_item("cat", 0, 1), lambda result: None)
    thread.lend_processor(float("inf"))
    while thread.has_progress():
        time.sleep(0.001)
    assert not thread.has_progress()
    encoder.end.set()
    posted.get(timeout=60)
    assert thread.has_progress() and thread.encode_seconds > 0
    thread.close()


@pytest.mark.parametrize("progresses", [True, False])
def test_idle_engine_sends_heartbeats_only_while_its_encoder_progresses(progresses: bool, monkeypatch) -> None:
    """Otherwise the watchdog could not detect a hanging encoder."""
    beats: list[int] = []
    inbox: EngineInbox = queue.SimpleQueue()

    def has_progress() -> bool:
        inbox.put(Shutdown())
        return progresses

    monkeypatch.setattr(messages_loop, "beat", lambda: beats.append(1))
    assert messages_loop._wait_for_message(inbox, SimpleNamespace(encoder_has_progress=has_progress)) == Shutdown()
    assert bool(beats) == progresses


def test_request_waits_for_its_image_while_the_idle_loop_sends_heartbeats() -> None:
    """The messages loop has no other work and waits for the encoder's result."""
    bench = LoopHarness()
    inbox: EngineInbox = queue.SimpleQueue()
    outputs: list[EngineOutput] = []

    def emit(new_outputs: list[EngineOutput], stats: EngineStats) -> None:
        outputs.extend(new_outputs)
        if outputs and outputs[-1].finish_reason:
            inbox.put(Shutdown())

    loop = EngineLoop(bench.runner, ParleySettings(model="m", max_batch=4), emit, post=inbox.put)
    beats = []
    heartbeat.send_beats(lambda: beats.append(1))
    inbox.put(SubmitRequest(request_with("work", make_item("cat", 3, 20))))
    serve_messages(loop, loop.pinned_pages, inbox, lambda message: None)
    loop.close()
    assert [output.finish_reason for output in outputs] == [None, None, "length"] and beats


def test_loop_without_inbox_encodes_within_its_step() -> None:
    bench = LoopHarness()
    outputs: list[EngineOutput] = []
    settings = ParleySettings(model="m", max_batch=4)
    loop = EngineLoop(bench.runner, settings, lambda new_outputs, stats: outputs.extend(new_outputs))
    loop.add_request(request_with("work", make_item("cat", 3, 20)))
    while loop.step():
        pass
    assert len(outputs) == 3 and outputs[-1].finish_reason == "length"
