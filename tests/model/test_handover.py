"""A prompt computed by one engine and continued by another gives, bit for bit, the output of one engine alone.

Pages are copied here as a link's shared memory does, from one engine's memory into the other's, by page number.
"""

from __future__ import annotations

import asyncio
import os
from functools import cache
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace
from support import tiny_models
from support.lora_adapters import write_adapter
from support.run_model import load_test_runner, serve_requests

from parley.disagg.kv.arena import MappedArena
from parley.disagg.kv.file_passing import FileSender
from parley.disagg.kv.layout import layout_difference
from parley.disagg.kv.mapped_files import MappedFiles
from parley.disagg.kv.shared_memory import SharedMemoryTransport
from parley.engine.output_stream import OutputStream
from parley.engine.protocol import Engine
from parley.text.text_pipeline import TextPipeline
from parley.types import (
    EngineOutput,
    EngineRequest,
    Grammar,
    KVPrefix,
    ModelInfo,
    ParleySettings,
    ReasoningLimit,
    SamplingOptions,
)
from parley.worker.thread_engine import ThreadEngine

EXACT = SamplingOptions(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return Random(seed).choices(range(3, tiny_models.VOCAB), k=length)


@cache
def runner_and_language():
    folder = tiny_models.model_folder("qwen3")
    return load_test_runner(folder, kv_memory=16 << 20, threads=1)[0], TextPipeline.from_folder(folder)


def compiled_regex() -> str:
    return runner_and_language()[1].grammar_compiler.compile_grammar(
        Grammar("regex", "[a-z ]{3,40}(, [0-9]{1,5}){2,6}")
    )


FEATURES = {
    "plain": {},
    "choices": {"n": 3},
    "penalties": {"sampling": replace(EXACT, logit_bias={9: 3.0}, no_repeat_ngram=3, watermark=True)},
    "window": {"sampling": replace(EXACT, penalty_window=20)},
    "banned": {
        "sampling": SamplingOptions(top_k=20, top_p=0.9, banned=[[5, 6], [7]]),
        "min_tokens": 12,
        "stop_ids": [8, 9],
    },
    "greedy": {"sampling": SamplingOptions(temperature=0.0), "logprobs": 3},
    "grammar": {"n": 2, "stop_ids": [2]},
    "thinking": {"reasoning_limit": ReasoningLimit("<think>", "</think>", True, 9, [40, 41, 42])},
    "scores": {"prompt_logprobs": 2, "logprobs": 0},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("speculate", [False, True])
def test_resumed_request_continues_bit_for_bit(feature, speculate):
    request = EngineRequest(
        "w", random_prompt(45), 40, seed=7, **({"sampling": EXACT, "logprobs": 1} | FEATURES[feature])
    )
    if feature == "grammar":
        request.grammar = compiled_regex()
    if speculate:
        request.prediction = random_prompt(40, 3)
    full_answers, _ = serve_requests(runner_and_language()[0], [request], blocks=200)
    assert all(len(answer.token_ids) > 5 for answer in full_answers.values())
    random = Random(feature)
    for round_number in range(3):
        cuts = [random.randrange(len(full_answers["w", k].token_ids)) for k in range(request.n)]
        prior_tokens = [full_answers["w", k].token_ids[:cut] for k, cut in enumerate(cuts)]
        other_requests = [EngineRequest(f"other{i}", random_prompt(9 + i, i), 45, seed=i) for i in range(6)] * (
            round_number > 0
        )
        blocks = 10 if round_number == 2 else 200  # fewer than all requests need
        resumed_answers, stats = serve_requests(
            runner_and_language()[0],
            [replace(request, prior_tokens=prior_tokens), *other_requests],
            step=24,
            blocks=blocks,
        )
        assert (stats.preemptions > 0) == (round_number == 2)
        for k, cut in enumerate(cuts):
            actual, expected = resumed_answers["w", k], full_answers["w", k]
            assert actual.token_ids == expected.token_ids[cut:]
            assert actual.scores == expected.scores[cut:]
            assert actual.finish == expected.finish
            assert actual.prompt_scores == ([] if k == 0 and cut else expected.prompt_scores)


async def read_outputs(stream: OutputStream, outputs_per_choice: int = 1 << 20) -> list[EngineOutput]:
    """Read outputs until the stream ends or each choice has ``most`` of them."""
    outputs: list[EngineOutput] = []
    count = len(stream.open_choices)
    while new_outputs := await stream.next_outputs():
        outputs += new_outputs
        if all(sum(output.index == k for output in outputs) >= outputs_per_choice for k in range(count)):
            break
    return outputs


def join_choice(outputs: list[EngineOutput], index: int) -> tuple[list[int], list, list]:
    choice_outputs = [output for output in outputs if output.index == index]
    tokens = [token for output in choice_outputs for token in output.token_ids]
    return (
        tokens,
        [score for output in choice_outputs for score in output.scores or []],
        [output.finish_reason for output in choice_outputs][-1:],
    )


def copy_pages(source: ModelInfo, target: ModelInfo, pages: list[int], target_pages: list[int]) -> None:
    """Raises Unreachable where the memory of an engine does not match its description."""
    assert source.arena is not None and target.arena is not None and source.arena.layout == target.arena.layout
    source_memory, target_memory, files, maps = (
        MappedArena(source.arena),
        MappedArena(target.arena),
        FileSender(),
        MappedFiles(),
    )
    receiver = SharedMemoryTransport(target_memory, files, maps)
    try:
        receiver.use_offer(SharedMemoryTransport(source_memory, files, maps).make_offer())
        receiver.fetch_pages(pages, target_pages)
    finally:
        receiver.close_transport()
        maps.finish_unmapping()
        files.close_sender()
        source_memory.close_arena()
        target_memory.close_arena()


async def start_engines(
    folder: Path, staging: tuple[int | None, int | None] = (None, None), **settings
) -> list[Engine]:
    engines: list[Engine] = []
    for memory, staging_bytes in zip((8 << 20, 6 << 20), staging, strict=True):
        options = ParleySettings(
            model=str(folder), kv_memory=memory, shared=True, staging=staging_bytes, threads=1, max_batch=8, **settings
        )
        engines.append(ThreadEngine(options))
        await engines[-1].start()
        await engines[-1].wait_until_ready()
    return engines


async def wait_until_free(engine: Engine) -> None:
    """Wait until no pages are pinned, reserved or in use."""
    async with asyncio.timeout(20):
        while engine.stats.pinned_pages or engine.stats.reserved_pages or engine.stats.used_pages:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("architecture", "kv", "adapted", "staging"),
    [
        ("mistral", "auto", False, (None, None)),
        ("gemma3", "int8", False, (None, None)),
        ("llama", "auto", True, (None, None)),
        ("beam", "auto", False, (None, None)),
        ("deepseek_v2_lite", "auto", False, (None, None)),
        ("deepseek_v32", "auto", False, (None, None)),
        ("minimax_m3", "auto", False, (None, None)),
        ("gemma4 with inputs of layers", "auto", False, (None, None)),
        ("gemma3n", "auto", False, (None, None)),
        ("lfm2", "auto", False, (None, None)),
        ("qwen3_5", "int8", False, (None, None)),
        ("mamba2", "auto", False, (None, None)),
        ("jamba", "auto", False, (None, None)),
        ("mistral", "auto", False, (1 << 20, None)),
        ("gemma3", "int8", False, (1 << 20, 1 << 20)),
        ("llama", "auto", True, (1 << 20, 1 << 20)),
        ("beam", "auto", False, (None, 1 << 20)),
    ],
)
async def test_kv_pages_of_one_engine_serve_another(architecture, kv, adapted, staging, tmp_path):
    folder, length = tiny_models.model_folder(architecture), 91
    adapters = {"a": str(write_adapter(tmp_path, folder, 5))} if adapted else {}
    sender, receiver = await start_engines(folder, staging, kv_dtype=kv, adapters=adapters)
    adapter = "a" if adapted else ""
    try:
        request = EngineRequest(
            "alone", random_prompt(length), 24, EXACT, seed=3, n=2, logprobs=1, cache_salt="s", adapter=adapter
        )
        outputs_alone = await read_outputs(receiver.submit_request(request))
        assert await receiver.reset_prefix_cache()

        digest_answer = await sender.reserve_pages("digest", KVPrefix([], adapter=adapter))
        assert digest_answer.error == "" and bool(digest_answer.digest) == adapted
        reservation = await receiver.reserve_pages(
            "key", KVPrefix(request.token_ids, "s", adapter, digest_answer.digest)
        )
        assert sender.info is not None and receiver.info is not None and sender.info.arena is not None
        page_count = length // 16 + bool(sender.info.arena.states)  # the state at their end follows the KV pages
        assert (reservation.error, reservation.skip, len(reservation.pages)) == ("", 0, page_count)
        if adapted:
            wrong_digest = await receiver.reserve_pages("other", KVPrefix(request.token_ids, "s", adapter, "0" * 64))
            assert wrong_digest.error and not wrong_digest.pages
        computed_pages: list[int] = []
        sender.observe_pages("first", computed_pages.extend)
        # It asks for fewer tokens, so that some are left even if this process sees all of them at once.
        stream = sender.submit_request(replace(request, id="first", lease=True, max_tokens=8))
        first_outputs = await read_outputs(stream, 1)
        assert len(computed_pages) == page_count  # announced before the first outputs
        stream.cancel_choice()
        copy_pages(sender.info, receiver.info, computed_pages[:2], reservation.pages[:2])
        receiver.publish_received("key", 2)
        copy_pages(sender.info, receiver.info, computed_pages[2:], reservation.pages[2:])
        receiver.publish_received("key", len(reservation.pages))
        for request_id, engine in (("first", sender), ("digest", sender)):
            engine.release_lease(request_id)
            engine.free_reservation(request_id)
        await wait_until_free(sender)

        prior_tokens = [join_choice(first_outputs, k)[0] for k in range(2)]
        assert all(prior_tokens)
        hits_before = receiver.stats.prefix_hits
        remaining_outputs = await read_outputs(
            receiver.submit_request(replace(request, id="rest", prior_tokens=prior_tokens))
        )
        receiver.free_reservation("key")
        assert receiver.stats.prefix_hits - hits_before >= 2 * (length // 16) * 16
        assert all(output.cached_tokens == length // 16 * 16 for output in remaining_outputs)
        for k in range(2):
            tokens, scores, finish = join_choice(outputs_alone, k)
            assert join_choice(remaining_outputs, k) == (
                tokens[len(prior_tokens[k]) :],
                scores[len(prior_tokens[k]) :],
                finish,
            )
        await wait_until_free(receiver)
    finally:
        await sender.close()
        await receiver.close()


async def test_no_kv_pages_are_reserved_or_held_without_prefix_cache():
    """Guards against pages that stay pinned although no lookup can ever find them."""
    sender, receiver = await start_engines(tiny_models.model_folder("llama"), prefix_cache=False)
    try:
        assert "no prefixes" in (await receiver.reserve_pages("key", KVPrefix(random_prompt(40)))).error
        sender.observe_pages("w", lambda pages: pytest.fail("pages announced without a prefix cache"))
        stream = sender.submit_request(EngineRequest("w", random_prompt(40), 3, lease=True))
        assert [output.finish_reason for output in await read_outputs(stream)][-1] == "length"
        await wait_until_free(sender)
    finally:
        await sender.close()
        await receiver.close()


async def test_kv_layout_is_known_without_a_writable_cache_folder(monkeypatch, tmp_path):
    """In a container with a read-only file system, and for a user without a home directory."""
    layouts = set()
    for cache_home in (str(tmp_path), "/dev/null/none", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", cache_home)
        if not cache_home:
            monkeypatch.delenv("HOME")
            monkeypatch.setattr(os, "getuid", lambda: 3_000_000_000)  # a user id without a passwd entry
        engine = ThreadEngine(
            ParleySettings(model=str(tiny_models.model_folder("llama")), kv_memory=1 << 20, shared=True, threads=1)
        )
        await engine.start()
        layouts.add((await engine.wait_until_ready()).arena.layout)
        await engine.close()
    assert len(layouts) == 1


async def test_instances_that_tokenize_differently_have_different_layouts():
    """Guards against pages of other tokens: the decode instance makes the prompt's tokens itself."""
    layouts = []
    for trust_marks in (False, True):
        folder = tiny_models.model_folder("llama")
        settings = ParleySettings(model=str(folder), kv_memory=1 << 20, shared=True, threads=1, trust_marks=trust_marks)
        engine = ThreadEngine(settings)
        await engine.start()
        layouts.append((await engine.wait_until_ready()).arena.layout)
        await engine.close()
    assert layout_difference(*layouts) == "trust-marks off and on"
