"""Logits processors against those of Transformers on random logits and histories, alone and combined."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampler import make_sequence
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from parley.model.sampling.logit_edits import LogitsProcessor
from parley.types import SamplingOptions

VOCAB = 60
ids = st.integers(0, 9)
histories = st.lists(ids, min_size=1, max_size=25)
# Only words of one token: Transformers matches longer ones across the end of the prompt, parley in the output only.
words = st.lists(st.lists(ids, min_size=1, max_size=1), max_size=4)


def random_logits(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


@given(
    history=histories,
    before=st.integers(1, 25),
    seed=st.integers(0, 2**31),
    penalty=st.sampled_from([1.0, 0.5, 1.1, 2.0]),
    size=st.sampled_from([0, 0, 1, 2, 3]),
    banned=words,
    least=st.sampled_from([0, 0, 5]),
    bias=st.dictionaries(ids, st.floats(-20, 20, width=32).filter(bool), max_size=3),
)
@settings(max_examples=250, deadline=None)
def test_logits_processors_match_transformers(history, before, seed, penalty, size, banned, least, bias):
    before = min(before, len(history))
    ends = [58, 59]
    processors = LogitsProcessorList()
    if bias:
        processors.append(SequenceBiasLogitsProcessor([[[token_id], value] for token_id, value in bias.items()]))
    if size:
        processors.append(NoRepeatNGramLogitsProcessor(size))
    if banned:
        processors.append(NoBadWordsLogitsProcessor(banned, eos_token_id=torch.tensor(ends)))
    if least:
        processors.append(MinNewTokensLengthLogitsProcessor(before, least, torch.tensor(ends), device="cpu"))
    if penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty))
    expected = processors(torch.tensor([history]), random_logits(seed)[None].clone())[0]

    options = SamplingOptions(repetition_penalty=penalty, no_repeat_ngram=size, banned=banned, logit_bias=bias)
    row = make_sequence(history, before, sampling=options, min_tokens=least, stop_ids=ends)
    actual = random_logits(seed)
    if LogitsProcessor.needs_processor(row.request):
        edit = LogitsProcessor(row, VOCAB)
        if edit.changes_logits(row.output_length):
            edit.edit_logits(actual, row.output_length)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@given(histories, histories, st.lists(st.lists(ids, min_size=1, max_size=4), min_size=1, max_size=6))
@settings(max_examples=150, deadline=None)
def test_multi_token_bad_words_match_transformers(prompt, output, banned):
    """Histories of the output alone: Transformers would also match words that begin in the prompt."""
    processor = NoBadWordsLogitsProcessor(banned, eos_token_id=torch.tensor([VOCAB - 1]))
    expected = processor(torch.tensor([output]), torch.zeros(1, VOCAB))[0]
    actual = torch.zeros(VOCAB)
    LogitsProcessor(
        make_sequence(prompt + output, len(prompt), sampling=SamplingOptions(banned=banned)), VOCAB
    ).edit_logits(actual, len(output))
    assert torch.equal(torch.isneginf(actual), torch.isneginf(expected))
