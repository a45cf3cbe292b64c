"""Requests with images give the same bits alone and in any company: encoded late or again, cached, preempted."""

from __future__ import annotations

import functools
import queue
import random
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from support.media_requests import build_media_prompt, random_image
from support.multimodal_models import multimodal_folder
from support.run_model import load_test_runner

from parley.core.engine_loop import EngineLoop
from parley.core.step_budget import FixedBudget
from parley.model.networks.paged_kv import PagedKV
from parley.model.runner import DecoderRunner
from parley.types import EngineOutput, EngineRequest, ParleySettings, SamplingOptions

FEATURE_FILES = ExitStack()  # they live as long as the tests

Result = tuple[list[int], list[float], str | None]


@functools.cache
def loaded_runner(family: str) -> DecoderRunner:
    return load_test_runner(multimodal_folder(family, "bfloat16"), dtype="bfloat16")[0]


@functools.cache
def image_request(family: str, request_id: str, before: str, number: int, after: str, n: int = 1) -> EngineRequest:
    prompt = build_media_prompt(family, [before, random_image(number, 200, 160), after])
    media = FEATURE_FILES.enter_context(prompt.open_media())
    return EngineRequest(request_id, prompt.token_ids, 12, SamplingOptions(), 7, n=n, logprobs=0, media=media)


def image_requests(family: str) -> list[EngineRequest]:
    """Requests that share images and beginnings."""
    return [
        image_request(family, "0", "what is ", 1, " this"),
        image_request(family, "1", "what is ", 1, " this", n=2),
        image_request(family, "2", "what is ", 2, " this"),
        image_request(family, "3", "what is ", 1, " that, and where is it"),
        image_request(family, "4", "and what is ", 1, " this"),
    ]


class MediaLoop:
    """A loop over ``blocks`` pages that collects results by request and choice."""

    def __init__(self, family: str, budget: FixedBudget, *, blocks: int, prefix_cache: bool, media_cache: int):
        runner = loaded_runner(family)
        runner.pages, runner.page_count = PagedKV(runner.pages.kv_layers, blocks, runner.pages.dtype), blocks
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.outputs: dict[tuple[str, int], list[EngineOutput]] = {}
        settings = ParleySettings(
            model="m", max_batch=4, step_ms=1, prefix_cache=prefix_cache, media_cache=media_cache, dtype="bfloat16"
        )
        self.loop = EngineLoop(runner, settings, self._collect, budget, post=self.posted.put)

    def _collect(self, outputs: list[EngineOutput], stats) -> None:
        for output in outputs:
            self.outputs.setdefault((output.id, output.index), []).append(output)

    def step(self) -> bool:
        """Run a step, after waiting for the encoder if there is nothing else to do. False: all requests have ended."""
        while (self.loop.is_idle and self.loop.encode_queue.is_encoding) or not self.posted.empty():
            self.posted.get(timeout=60)()
        is_working = not self.loop.is_idle
        self.loop.step()
        self.loop.check_invariants()
        return is_working

    def results(self) -> dict[tuple[str, int], Result]:
        while self.step():
            pass
        self.loop.close()
        return {choice: _merge_outputs(outputs) for choice, outputs in self.outputs.items()}


def _merge_outputs(outputs: list[EngineOutput]) -> Result:
    assert outputs[-1].error is None
    tokens = [token for output in outputs for token in output.token_ids]
    return tokens, [score.logprob for output in outputs for score in output.scores or []], outputs[-1].finish_reason


@functools.cache
def results_alone(family: str) -> dict[tuple[str, int], Result]:
    results: dict[tuple[str, int], Result] = {}
    for request in image_requests(family):
        loop = MediaLoop(family, FixedBudget(1000), blocks=64, prefix_cache=False, media_cache=0)
        loop.loop.add_request(request)
        results |= loop.results()
    return results


class RandomBudget(FixedBudget):
    """A step budget of up to ``most`` tokens."""

    def __init__(self, choose: random.Random, most: int):
        super().__init__(most)
        self.choose = choose

    def begin_step(self, decodes: int) -> None:
        self.remaining = self.choose.randint(1, self.max_tokens)


# One with M-RoPE and embeddings for several layers, one whose images see both ways, one where some layers do so.
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "gemma4_31b"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_schedule_does_not_change_the_bits_of_answers_to_images(family: str, seed: int) -> None:
    choose = random.Random(seed)
    requests = image_requests(family)
    longest = max(-(-(len(request.token_ids) + request.max_tokens) // 16) for request in requests)
    media_loop = MediaLoop(
        family,
        RandomBudget(choose, choose.choice([5, 20, 60])),
        blocks=longest + choose.choice([1, 3]),
        prefix_cache=True,
        media_cache=choose.choice([0, 10_000]),
    )
    preemptions = 0
    for request in choose.sample(requests, len(requests)):
        media_loop.loop.add_request(request)
        for _ in range(choose.randint(0, 6)):
            media_loop.step()
        if media_loop.loop.scheduler.running and choose.random() < 0.7:
            media_loop.loop.scheduler.preempt_last()
            preemptions += 1
        if choose.random() < 0.4:
            media_loop.loop.reset_prefix_cache(running=True)
    assert media_loop.results() == results_alone(family) and preemptions


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "gemma4_31b"])
def test_answer_is_the_same_after_cached_pages_that_end_within_an_image(family: str) -> None:
    media_loop = MediaLoop(family, FixedBudget(1000), blocks=64, prefix_cache=True, media_cache=0)
    before, request = image_requests(family)[0], image_requests(family)[3]
    for media_request in (before, request):
        media_loop.loop.add_request(media_request)
        results = media_loop.results()
    (item,) = request.media
    assert item.start < media_loop.outputs["3", 0][-1].cached_tokens < item.end
    assert results["3", 0] == results_alone(family)["3", 0]
