"""Draft tokens that break a model: the NaN they leave in KV pages does not reach any output."""

from __future__ import annotations

import pytest
import torch
from support import tiny_models
from support.run_model import load_test_runner, serve_requests
from support.unpack_int4 import fill_with_nan, unpack_pages

from parley.core.speculative.speculation import Speculation
from parley.model.networks.network import PackedBatch
from parley.types import EngineRequest, SamplingOptions

BAD_TOKEN = 13


class BadTokenProposer:
    """Proposes the token that breaks the model."""

    def propose_drafts(self, draft_limits):
        return [[BAD_TOKEN] * length for _, length in draft_limits]

    def forget_sequence(self, sequence):
        pass


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}, {"dtype": "float32"}])
def test_draft_token_with_nan_logits_is_rejected_and_wiped(options, monkeypatch):
    runner, _ = load_test_runner(tiny_models.model_folder("qwen3"), **options)
    requests = [
        EngineRequest(
            str(seed), list(range(20 + seed, 40)), 40, SamplingOptions(logit_bias={BAD_TOKEN: -100.0}), seed, logprobs=1
        )
        for seed in range(3)
    ]
    expected, _ = serve_requests(runner, requests)
    hidden = runner.network.compute_hidden

    def hidden_with_nan(batch, pages):
        result = hidden(batch, pages)
        bad = batch.token_ids == BAD_TOKEN
        bad_rows = PackedBatch(batch.token_ids[bad], batch.positions[bad], batch.slot_mapping[bad], [])
        for layer, kv in enumerate(pages.kv_layers):
            keys, values = (
                torch.full((len(bad_rows.slot_mapping), kv.heads, dim), torch.nan) for dim in (kv.dim, kv.value_dim)
            )
            pages.write_kv(layer, keys.to(pages.dtype), values.to(pages.dtype), bad_rows)
        result[bad] = torch.nan
        return result

    monkeypatch.setattr(Speculation, "draft_length", lambda self, sequence: 1 + sequence.output_length % 7)
    monkeypatch.setattr(
        "parley.core.speculative.speculation.DecodeCosts.best_draft_count", lambda self, rows, chances: len(chances)
    )
    runner.network.compute_hidden = hidden_with_nan
    runner.proposer = BadTokenProposer()
    actual, stats = serve_requests(runner, requests)
    if "dtype" in options:  # float32 sums depend on the batch by rounding
        actual, expected = (
            {key: answer.token_ids for key, answer in answers.items()} for answers in (actual, expected)
        )
    assert actual == expected and stats.drafts > 100 and not sum(stats.draft_accepted)


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}, {"dtype": "float32"}])
def test_clear_tokens_zeroes_only_the_given_tokens(options):
    pages = load_test_runner(tiny_models.model_folder("qwen3"), **options)[0].pages
    for layer in range(len(pages.kv_layers)):
        fill_with_nan(pages.layer_pool(layer))
    pages.clear_pages([2])
    pages.clear_tokens(torch.tensor([16 + 3, 16 + 15]))
    for layer in range(len(pages.kv_layers)):
        for part in unpack_pages(pages.layer_pool(layer)):
            is_cleared = part.isfinite().flatten(2).all(-1) & (part == 0).flatten(2).all(-1)
            assert is_cleared[1].nonzero()[:, 0].tolist() == [3, 15] and is_cleared[2].all()
