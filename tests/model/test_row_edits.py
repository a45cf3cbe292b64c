"""Edits of one choice for engines that have other samplers, against those of parley's own engine."""

from __future__ import annotations

import pytest
import torch
from test_sampler import make_sequence

from parley.model.sampling.draw import draw_typical
from parley.model.sampling.extra_options import ExtraOptions
from parley.model.sampling.logit_edits import LogitsProcessor
from parley.model.sampling.row_edits import RowEdits, typical_tokens
from parley.types import ReasoningLimit, SamplingOptions

VOCAB = 60
PROMPT, OUTPUT = [1, 2, 3, 1, 2], [4, 1, 2, 3, 4, 1]


def no_bytes(token: int) -> bytes:
    return b""


def random_logits(seed: int, size: int = VOCAB) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("size", [0, 1, 2, 3])
@pytest.mark.parametrize("watermark", [False, True])
def test_edits_equal_those_of_parleys_engine_step_by_step(size, watermark):
    sampling = SamplingOptions(no_repeat_ngram=size, watermark=watermark)
    edits = RowEdits(ExtraOptions(no_repeat_ngram=size, watermark=watermark), list(PROMPT), no_bytes)
    for count in range(len(OUTPUT) + 1):
        edits.add_tokens(OUTPUT[edits.output_count : count])
        own, edited = random_logits(count), random_logits(count)
        sequence = make_sequence(PROMPT + OUTPUT[:count], len(PROMPT), sampling=sampling)
        LogitsProcessor(sequence, VOCAB).edit_logits(own, count)
        edits.edit_logits(edited)
        assert torch.equal(own, edited)


@pytest.mark.parametrize("window", [1, 3, 7, 2**31 - 1])
def test_penalties_with_a_window_equal_those_of_parleys_engine_step_by_step(window):
    penalties = SamplingOptions(
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, penalty_window=window
    )
    edits = RowEdits(ExtraOptions(penalties=penalties), list(PROMPT), no_bytes)
    for count in range(len(OUTPUT) + 1):
        edits.add_tokens(OUTPUT[edits.output_count : count])
        own, edited = random_logits(count), random_logits(count)
        sequence = make_sequence(PROMPT + OUTPUT[:count], len(PROMPT), sampling=penalties)
        LogitsProcessor(sequence, VOCAB).edit_logits(own, count)
        edits.edit_logits(edited)
        assert torch.equal(own, edited) and not torch.equal(own, random_logits(count))


def test_row_keeps_a_token_if_all_would_repeat():
    edits = RowEdits(ExtraOptions(no_repeat_ngram=1), [0, 1, 2], no_bytes)
    row = torch.ones(3)
    edits.edit_logits(row)
    assert row.tolist() == [1, 1, 1]


@pytest.mark.parametrize("typical_p", [0.05, 0.3, 0.7, 0.95])
@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"), [(0.0, 0, 1.0), (0.0, 25, 1.0), (0.0, 0, 0.8), (0.02, 25, 0.9), (0.0, 1, 1.0)]
)
def test_typical_tokens_equal_those_of_parleys_engine(typical_p, min_p, top_k, top_p):
    """Draw in the middle of each kept token's share of u: if all are hit, no other token has a share."""
    logits, temperature = random_logits(5, 400), 0.8
    options = ExtraOptions(typical_p=typical_p, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    kept = typical_tokens(logits / temperature, options)
    shares = (logits / temperature).masked_fill(~kept, float("-inf")).double().softmax(-1)
    wide_ids = (shares > 1e-4).nonzero()[:, 0]
    rows = len(wide_ids)

    def full_rows(value: float) -> torch.Tensor:
        return torch.full((rows,), value, dtype=torch.float64)

    drawn = draw_typical(
        logits.expand(rows, -1), full_rows(temperature).float(), full_rows(min_p), torch.full((rows,), top_k),
        full_rows(top_p), full_rows(typical_p), (shares.cumsum(-1) - shares / 2)[wide_ids],
    )  # fmt: skip
    assert drawn.tolist() == wide_ids.tolist()


def test_cut_divides_by_the_temperature_and_leaves_greedy_rows():
    logits = random_logits(1)
    options = ExtraOptions(typical_p=0.3, temperature=0.5)
    before, behind = logits.clone(), logits / 0.5
    RowEdits(options, [], no_bytes).cut_logits(before, 0.5)
    RowEdits(options, [], no_bytes).cut_logits(behind, 1.0)
    assert torch.equal(before.isneginf(), behind.isneginf()) and 0 < before.isneginf().sum() < VOCAB
    RowEdits(options, [], no_bytes).cut_logits(logits, 0.0)
    assert not logits.isneginf().any()


def test_output_begins_with_forced_tokens_whatever_else_is_excluded():
    options = ExtraOptions(forced=[7, 8], typical_p=0.5, no_repeat_ngram=1)
    edits = RowEdits(options, [7, 8], no_bytes)
    for token in (7, 8):
        row = torch.full((VOCAB,), float("-inf"))
        edits.edit_logits(row)
        edits.cut_logits(row, 0.5)
        assert int(row.argmax()) == token and row.isneginf().sum() == VOCAB - 1
        edits.add_tokens([token])
    row = random_logits(1)
    edits.edit_logits(row)
    assert row[7].isneginf() and row.isneginf().sum() == 2


def test_budget_forces_the_closing_tokens_also_after_a_restart():
    limit = ReasoningLimit("<think>", "</think>", True, 2, [7, 8])
    edits = RowEdits(ExtraOptions(reasoning_limit=limit), [1], lambda token: b"abcdefghi"[token : token + 1])
    forced = []
    for token in [3, 3, 7, 8, 3]:
        row = random_logits(token)
        edits.edit_logits(row)
        forced.append(int(row.argmax()) if row.isneginf().sum() == VOCAB - 1 else None)
        edits.add_tokens([token])
    assert forced == [None, None, 7, 8, None]
    restarted = RowEdits(ExtraOptions(reasoning_limit=limit), [1], lambda token: b"abcdefghi"[token : token + 1])
    restarted.add_tokens([3, 3, 7])
    row = random_logits(1)
    restarted.edit_logits(row)
    assert int(row.argmax()) == 8
    masked = torch.full((VOCAB,), float("-inf"))
    masked[5] = 1.0  # a grammar forbids the closing token
    restarted.edit_logits(masked)
    assert int(masked.argmax()) == 5
