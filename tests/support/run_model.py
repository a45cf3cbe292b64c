"""Runs requests through the real loader, runner and loop, without processes or sockets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from parley.core.engine_loop import EngineLoop
from parley.core.sequence import PAGE_SIZE, DraftProposer
from parley.core.step_budget import FixedBudget
from parley.model.decode_starter import start_on_gpu
from parley.model.load.loader import load_runner
from parley.model.networks.network import PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.model.runner import DecoderRunner
from parley.types import EngineRequest, EngineStats, ModelInfo, ParleySettings, TokenScore


@dataclass
class Answer:
    """All outputs of one choice, collected."""

    token_ids: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore | None] = field(default_factory=list)
    finish: str | None = None
    vector: bytes | None = None


def load_test_runner(folder: Path, **settings) -> tuple[DecoderRunner, ModelInfo]:
    return load_runner(
        ParleySettings(model=str(folder), **({"kv_memory": 64 << 20} | settings)), lambda stage, fraction: None
    )


@torch.inference_mode()
def long_logprobs(folder: Path, dtype: str, **settings) -> torch.Tensor:
    """Log-probabilities of all tokens at 200 positions of one sequence."""
    runner, _ = load_test_runner(folder, dtype=dtype, **settings)
    tokens = torch.randint(3, runner.vocab_size, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    table = list(range(-(-len(tokens) // PAGE_SIZE)))
    runner.pages.clear_pages(table)
    batch = PackedBatch.pack_parts([(tokens, 0, table)], runner.device)
    return runner.network.compute_logits(runner.network.compute_hidden(batch, runner.pages)).log_softmax(-1)


def serve_requests(
    runner: DecoderRunner,
    requests: list[EngineRequest],
    *,
    batch: int = 16,
    step: int = 96,
    blocks: int | None = None,
    cache: bool = True,
    proposer: DraftProposer | None = None,
    draft_tokens: int = 15,
    adapters: dict[str, str] | None = None,
) -> tuple[dict[tuple[str, int], Answer], EngineStats]:
    """Run the requests to the end; return the answers by (id, index) and the last stats.

    ``step`` is the token budget of one step. ``blocks`` limits the KV pages; too few of them cause preemption.
    ``proposer`` drafts in every step, whether that pays or not; at most ``draft_tokens`` tokens at a time.
    ``adapters``: folders by name.
    """
    if blocks is not None:
        old_pages = runner.pages
        runner.pages = PagedKV(old_pages.kv_layers, blocks, old_pages.dtype, old_pages.device, int8=old_pages.int8)
        runner.page_count = blocks
        if runner.graphs is not None:  # they read and write the old pages
            start_on_gpu(runner)
    answers: dict[tuple[str, int], Answer] = {}
    last_stats = EngineStats()

    def collect_outputs(outputs, stats):
        nonlocal last_stats
        last_stats = stats
        for output in outputs:
            answer = answers.setdefault((output.id, output.index), Answer())
            assert answer.finish is None and output.error is None, output.error
            answer.token_ids += output.token_ids
            answer.scores += output.scores or []
            answer.prompt_scores += output.prompt_scores or []
            answer.finish = output.finish_reason
            answer.vector = output.vector

    settings = ParleySettings(
        model="m", max_batch=batch, prefix_cache=cache, speculate_tokens=draft_tokens, adapters=adapters or {}
    )
    if proposer is not None:
        runner.proposer = proposer
    loop = EngineLoop(runner, settings, collect_outputs, FixedBudget(step))
    if proposer is not None and loop.speculation is not None:
        loop.speculation.draft_length = lambda sequence: settings.speculate_tokens  # type: ignore[method-assign]
        loop.speculation.costs.best_draft_count = lambda rows, chances: len(chances)  # type: ignore[method-assign]
    for request in requests:
        loop.add_request(request)
    while loop.step():
        pass
    assert last_stats.running == last_stats.waiting == last_stats.used_pages == 0
    assert len(answers) == sum(request.n for request in requests) and all(answer.finish for answer in answers.values())
    return answers, last_stats
