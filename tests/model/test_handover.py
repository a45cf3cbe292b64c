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
from support.run_model import serve, start

from parley.disagg.kv.arena import Memory
from parley.disagg.kv.mapped_files import Maps
from parley.disagg.kv.shared_memory import Proof, Shared
from parley.engine.protocol import Engine
from parley.engine.stream import Stream
from parley.text import Language
from parley.types import Grammar, ModelInfo, Output, Sampling, Settings, Thinking, Work
from parley.worker.thread import LocalEngine

EXACT = Sampling(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1)


def prompt(length: int, seed: int = 0) -> list[int]:
    return Random(seed).choices(range(3, tiny_models.VOCAB), k=length)


@cache
def runner():
    folder = tiny_models.model("qwen3")
    return start(folder, kv_memory=16 << 20, threads=1)[0], Language.load(folder)


def grammar() -> str:
    return runner()[1].grammars.compile(Grammar("regex", "[a-z ]{3,40}(, [0-9]{1,5}){2,6}"))


FEATURES = {
    "plain": {},
    "choices": {"n": 3},
    "penalties": {"sampling": replace(EXACT, logit_bias={9: 3.0}, no_repeat_ngram=3, watermark=True)},
    "banned": {"sampling": Sampling(top_k=20, top_p=0.9, banned=[[5, 6], [7]]), "min_tokens": 12, "stop_ids": [8, 9]},
    "greedy": {"sampling": Sampling(temperature=0.0), "logprobs": 3},
    "grammar": {"n": 2, "stop_ids": [2]},
    "thinking": {"thinking": Thinking("<think>", "</think>", True, 9, [40, 41, 42])},
    "scores": {"prompt_logprobs": 2, "logprobs": 0},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("speculate", [False, True])
def test_resumed_request_continues_bit_for_bit(feature, speculate):
    work = Work("w", prompt(45), 40, seed=7, **({"sampling": EXACT, "logprobs": 1} | FEATURES[feature]))
    if feature == "grammar":
        work.grammar = grammar()
    if speculate:
        work.prediction = prompt(40, 3)
    whole, _ = serve(runner()[0], [work], blocks=200)
    assert all(len(answer.token_ids) > 5 for answer in whole.values())
    random = Random(feature)
    for number in range(3):
        cuts = [random.randrange(len(whole["w", k].token_ids)) for k in range(work.n)]
        given = [whole["w", k].token_ids[:cut] for k, cut in enumerate(cuts)]
        crowd = [Work(f"other{i}", prompt(9 + i, i), 45, seed=i) for i in range(6)] * (number > 0)
        blocks = 10 if number == 2 else 200  # fewer than all requests need
        rest, stats = serve(runner()[0], [replace(work, given=given), *crowd], step=24, blocks=blocks)
        assert (stats.preemptions > 0) == (number == 2)
        for k, cut in enumerate(cuts):
            got, expected = rest["w", k], whole["w", k]
            assert got.token_ids == expected.token_ids[cut:]
            assert got.scores == expected.scores[cut:]
            assert got.finish == expected.finish
            assert got.prompt_scores == ([] if k == 0 and cut else expected.prompt_scores)


async def read(stream: Stream, most: int = 1 << 20) -> list[Output]:
    """Read outputs until the stream ends or each choice has ``most`` of them."""
    outputs: list[Output] = []
    count = len(stream.open)
    while new := await stream.next():
        outputs += new
        if all(sum(each.index == k for each in outputs) >= most for k in range(count)):
            break
    return outputs


def joined(outputs: list[Output], index: int) -> tuple[list[int], list, list]:
    mine = [output for output in outputs if output.index == index]
    tokens = [token for output in mine for token in output.token_ids]
    return tokens, [score for output in mine for score in output.scores or []], [output.finish for output in mine][-1:]


def copy(source: ModelInfo, target: ModelInfo, pages: list[int], into: list[int]) -> None:
    """Raises Unreachable where the memory of an engine does not match its description."""
    assert source.arena is not None and target.arena is not None and source.arena.layout == target.arena.layout
    ours, theirs, proof, maps = Memory(source.arena), Memory(target.arena), Proof(), Maps()
    taker = Shared(theirs, proof, maps)
    try:
        taker.reach(Shared(ours, proof, maps).offer())
        taker.fetch(pages, into)
    finally:
        for each in (taker, maps, proof, ours, theirs):
            each.close()


async def pair(folder: Path, staging: tuple[int | None, int | None] = (None, None), **settings) -> list[Engine]:
    engines: list[Engine] = []
    for memory, apart in zip((4 << 20, 3 << 20), staging, strict=True):
        options = Settings(
            model=str(folder), kv_memory=memory, shared=True, staging=apart, threads=1, max_batch=8, **settings
        )
        engines.append(LocalEngine(options))
        await engines[-1].start()
        await engines[-1].ready()
    return engines


async def settled(engine: Engine) -> None:
    """Wait until no pages are pinned, reserved or in use."""
    async with asyncio.timeout(20):
        while engine.stats.pinned or engine.stats.reserved or engine.stats.blocks_used:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("architecture", "kv", "adapted", "staging"),
    [
        ("mistral", "auto", False, (None, None)),
        ("gemma3", "int8", False, (None, None)),
        ("llama", "auto", True, (None, None)),
        ("gpt2", "auto", False, (None, None)),
        ("mistral", "auto", False, (1 << 20, None)),
        ("gemma3", "int8", False, (1 << 20, 1 << 20)),
        ("llama", "auto", True, (1 << 20, 1 << 20)),
        ("gpt2", "auto", False, (None, 1 << 20)),
    ],
)
async def test_kv_pages_of_one_engine_serve_another(architecture, kv, adapted, staging, tmp_path):
    folder, length = tiny_models.model(architecture), 91
    adapters = {"a": str(write_adapter(tmp_path, folder, 5))} if adapted else {}
    first, second = await pair(folder, staging, kv_dtype=kv, adapters=adapters)
    adapter = "a" if adapted else ""
    try:
        work = Work("alone", prompt(length), 24, EXACT, seed=3, n=2, logprobs=1, salt="s", adapter=adapter)
        alone = await read(second.submit(work))
        assert await second.reset()

        known = await first.reserve("digest", [], adapter=adapter)
        assert known.error == "" and bool(known.digest) == adapted
        hand = await second.reserve("key", work.token_ids, "s", adapter, known.digest)
        assert (hand.error, hand.skip, len(hand.pages)) == ("", 0, length // 16)
        if adapted:
            other = await second.reserve("other", work.token_ids, "s", adapter, "0" * 64)
            assert other.error and not other.pages
        filled: list[int] = []
        stream = first.submit(replace(work, id="first", lease=True))
        stream.filled = filled.extend
        begun = await read(stream, 1)
        assert len(filled) == length // 16  # announced before the first outputs
        stream.cancel()
        assert first.info is not None and second.info is not None
        copy(first.info, second.info, filled[:2], hand.pages[:2])
        second.landed("key", 2)
        copy(first.info, second.info, filled[2:], hand.pages[2:])
        second.landed("key", len(hand.pages))
        for id, engine in (("first", first), ("digest", first)):
            engine.release(id)
            engine.free(id)
        await settled(first)

        given = [joined(begun, k)[0] for k in range(2)]
        assert all(given)
        hits = second.stats.prefix_hits
        rest = await read(second.submit(replace(work, id="rest", given=given)))
        second.free("key")
        assert second.stats.prefix_hits - hits >= 2 * (length // 16) * 16
        assert all(output.cached_tokens == length // 16 * 16 for output in rest)
        for k in range(2):
            tokens, scores, finish = joined(alone, k)
            assert joined(rest, k) == (tokens[len(given[k]) :], scores[len(given[k]) :], finish)
        await settled(second)
    finally:
        await first.close()
        await second.close()


async def test_no_kv_pages_are_reserved_or_held_without_prefix_cache():
    """Guards against pages that stay pinned although no lookup can ever find them."""
    first, second = await pair(tiny_models.model("llama"), prefix_cache=False)
    try:
        assert "no prefixes" in (await second.reserve("key", prompt(40))).error
        stream = first.submit(Work("w", prompt(40), 3, lease=True))
        stream.filled = lambda pages: pytest.fail("pages announced without a prefix cache")
        assert [each.finish for each in await read(stream)][-1] == "length"
        await settled(first)
    finally:
        await first.close()
        await second.close()


async def test_kv_layout_is_known_without_a_writable_cache_folder(monkeypatch, tmp_path):
    """In a container with a read-only file system, and for a user without a home directory."""
    layouts = set()
    for kept in (str(tmp_path), "/dev/null/none", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", kept)
        if not kept:
            monkeypatch.delenv("HOME")
            monkeypatch.setattr(os, "getuid", lambda: 3_000_000_000)  # a user id without a passwd entry
        engine = LocalEngine(Settings(model=str(tiny_models.model("llama")), kv_memory=1 << 20, shared=True, threads=1))
        await engine.start()
        layouts.add((await engine.ready()).arena.layout)
        await engine.close()
    assert len(layouts) == 1
