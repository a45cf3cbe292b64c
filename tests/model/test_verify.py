"""Draft tokens that break a model: the NaN they leave in KV pages does not reach any output."""

from __future__ import annotations

import pytest
import torch
from support import tiny_models
from support.run_model import serve, start
from support.unpack_int4 import spoil, unpack

from parley.core.guess.speculation import Speculation
from parley.model.networks.network import Batch
from parley.types import Sampling, Work

BAD = 13


class Stubborn:
    """Proposes the token that breaks the model."""

    def propose(self, asked):
        return [[BAD] * length for _, length in asked]

    def forget(self, sequence):
        pass


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}, {"dtype": "float32"}])
def test_draft_token_with_nan_logits_is_rejected_and_wiped(options, monkeypatch):
    runner, _ = start(tiny_models.model("qwen3"), **options)
    works = [
        Work(str(seed), list(range(20 + seed, 40)), 40, Sampling(logit_bias={BAD: -100.0}), seed, logprobs=1)
        for seed in range(3)
    ]
    want, _ = serve(runner, works)
    hidden = runner.network.hidden

    def breaking(batch, pages):
        result = hidden(batch, pages)
        bad = batch.token_ids == BAD
        part = Batch(batch.token_ids[bad], batch.positions[bad], batch.slots[bad], [])
        for layer, kv in enumerate(pages.layers):
            keys, values = (torch.full((len(part.slots), kv.heads, dim), torch.nan) for dim in (kv.dim, kv.value_dim))
            pages.write(layer, keys.to(pages.dtype), values.to(pages.dtype), part)
        result[bad] = torch.nan
        return result

    monkeypatch.setattr(Speculation, "length", lambda self, sequence: 1 + sequence.generated % 7)
    monkeypatch.setattr("parley.core.guess.speculation.Costs.best", lambda self, rows, chances: len(chances))
    runner.network.hidden = breaking
    runner.proposer = Stubborn()
    got, stats = serve(runner, works)
    if "dtype" in options:  # float32 sums depend on the batch by rounding
        got, want = ({key: each.token_ids for key, each in answers.items()} for answers in (got, want))
    assert got == want and stats.drafts > 100 and not sum(stats.draft_accepted)


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}, {"dtype": "float32"}])
def test_clear_tokens_zeroes_only_the_given_tokens(options):
    pages = start(tiny_models.model("qwen3"), **options)[0].pages
    for layer in range(len(pages.layers)):
        spoil(pages.pool(layer))
    pages.clear([2])
    pages.wipe(torch.tensor([16 + 3, 16 + 15]))
    for layer in range(len(pages.layers)):
        for part in unpack(pages.pool(layer)):
            sound = part.isfinite().flatten(2).all(-1) & (part == 0).flatten(2).all(-1)
            assert sound[1].nonzero()[:, 0].tolist() == [3, 15] and sound[2].all()
