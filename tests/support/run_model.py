"""Runs requests through the real loader, runner and loop, without processes or sockets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from parley.core.loop import Loop
from parley.core.step_budget import Fixed
from parley.model.load.loader import load
from parley.model.networks.paged_kv import PagedKV
from parley.model.runner import Runner
from parley.types import ModelInfo, Score, Settings, Stats, Work


@dataclass
class Answer:
    """All outputs of one choice, collected."""

    token_ids: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    prompt_scores: list[Score | None] = field(default_factory=list)
    finish: str | None = None
    vector: bytes | None = None


def start(folder: Path, **settings) -> tuple[Runner, ModelInfo]:
    return load(Settings(model=str(folder), **({"kv_memory": 64 << 20} | settings)), lambda stage, fraction: None)


def serve(
    runner: Runner, works: list[Work], *, batch: int = 16, step: int = 96, blocks: int | None = None, cache: bool = True
) -> tuple[dict[tuple[str, int], Answer], Stats]:
    """Run the requests to the end; return the answers by (id, index) and the last stats.

    ``step`` is the token budget of one step. ``blocks`` limits the KV pages; too few of them cause preemption.
    """
    if blocks is not None:
        old = runner.pages
        runner.pages = PagedKV(old.layers, blocks, old.dtype, old.device, int8=old.int8)
        runner.blocks = blocks
    answers: dict[tuple[str, int], Answer] = {}
    last = Stats()

    def emit(outputs, stats):
        nonlocal last
        last = stats
        for output in outputs:
            answer = answers.setdefault((output.id, output.index), Answer())
            assert answer.finish is None and output.error is None, output.error
            answer.token_ids += output.token_ids
            answer.scores += output.scores or []
            answer.prompt_scores += output.prompt_scores or []
            answer.finish = output.finish
            answer.vector = output.vector

    settings = Settings(model="m", max_batch=batch, prefix_cache=cache)
    loop = Loop(runner, settings, emit, Fixed(step))
    for work in works:
        loop.add(work)
    while loop.step():
        pass
    assert last.running == last.waiting == last.blocks_used == 0
    assert len(answers) == sum(work.n for work in works) and all(answer.finish for answer in answers.values())
    return answers, last
