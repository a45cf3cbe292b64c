"""A small draft model proposes tokens: outputs do not change, and it computes only the tokens it needs."""

from __future__ import annotations

import json
import shutil

import pytest
from support import tiny_models
from support.run_model import load_test_runner, serve_requests

from parley.core.sequence import Sequence
from parley.core.speculative.speculation import Speculation
from parley.model.load.loader import LoadError
from parley.model.networks.paged_kv import PagedKV
from parley.types import EngineRequest, SamplingOptions


@pytest.fixture(autouse=True)
def always_draft(monkeypatch):
    """Propose as many draft tokens as allowed, regardless of the expected gain."""
    monkeypatch.setattr(Speculation, "draft_length", lambda self, sequence: self.max_drafts)
    monkeypatch.setattr(
        "parley.core.speculative.speculation.DecodeCosts.best_draft_count", lambda self, rows, chances: len(chances)
    )


def make_requests(sampling: SamplingOptions) -> list[EngineRequest]:
    ends = [2, 11]
    return [
        EngineRequest(str(i), list(range(3 + i, 40 + 9 * i)), 30, sampling, i, logprobs=1, stop_ids=ends)
        for i in range(5)
    ]


def test_model_as_its_own_draft_has_every_token_accepted():
    folder = tiny_models.model_folder("qwen3")
    plain_runner, _ = load_test_runner(folder)
    drafting_runner, _ = load_test_runner(folder, speculate=f"draft={folder}")
    requests = make_requests(SamplingOptions(temperature=0.0))
    expected, plain_stats = serve_requests(plain_runner, requests)
    actual, drafting_stats = serve_requests(drafting_runner, requests)
    assert actual == expected
    assert (
        drafting_stats.draft_tokens == sum(drafting_stats.draft_accepted) > 0
        and drafting_stats.steps < plain_stats.steps / 3
    )
    assert drafting_runner.proposer.pool.used_count == 0


@pytest.mark.parametrize("small", ["qwen3", "beam", "gemma3"])
@pytest.mark.parametrize(
    "sampling", [SamplingOptions(top_k=4), SamplingOptions(temperature=0.0, repetition_penalty=1.3)]
)
def test_any_draft_model_leaves_outputs_unchanged(small, sampling):
    """Fused or through Transformers, with few pages for both; another draft model is nearly always wrong."""
    expected, _ = serve_requests(load_test_runner(tiny_models.model_folder("qwen3"))[0], make_requests(sampling))
    runner, _ = load_test_runner(
        tiny_models.model_folder("qwen3"), speculate=f"draft={tiny_models.model_folder(small)}"
    )
    draft = runner.proposer
    draft.pool.__init__(6)
    draft.kv = PagedKV(draft.kv.kv_layers, 6, draft.kv.dtype)
    actual, stats = serve_requests(runner, make_requests(sampling), blocks=14, draft_tokens=7)
    assert actual == expected
    assert stats.draft_tokens and stats.preemptions and (small != "qwen3" or stats.draft_accepted[1])
    assert draft.pool.used_count == 0


def test_draft_model_has_its_own_kv_memory_and_context():
    folder, draft_folder = (
        tiny_models.model_folder("qwen3"),
        tiny_models.model_folder("llama", max_position_embeddings=64),
    )
    _, info_without_draft = load_test_runner(folder)
    runner, info = load_test_runner(folder, speculate=f"draft={draft_folder}")
    assert info.kv_pages == runner.proposer.pool.page_count < info_without_draft.kv_pages
    assert info.kv_bytes <= 64 << 20 and info.weights_bytes > info_without_draft.weights_bytes
    assert runner.proposer.max_model_len == 64 < info.max_model_len
    request = EngineRequest("a", list(range(3, 53)), 40, SamplingOptions(temperature=0.0))
    actual, stats = serve_requests(runner, [request])
    assert actual == serve_requests(load_test_runner(folder)[0], [request])[0]
    assert 0 < stats.drafts < 20


def test_draft_model_reads_a_long_prompt_in_chunks():
    folder = tiny_models.model_folder("qwen3")
    draft = load_test_runner(folder, speculate=f"draft={folder}")[0].proposer
    request = EngineRequest("a", [3 + i % 600 for i in range(1500)], 40)
    sequence = Sequence("a", 0, request, [*request.token_ids, 7], 1500, 0, 0)
    proposals = [draft.propose_drafts([(sequence, 4)])[0] for _ in range(4)]
    assert [len(continued_drafts) for continued_drafts in proposals] == [0, 0, 4, 4] and proposals[2] == proposals[3]
    sequence.tokens += [*proposals[3][:2], 9]  # the first two draft tokens are accepted
    (continued_drafts,) = draft.propose_drafts([(sequence, 4)])
    fresh_sequence = Sequence("b", 0, request, list(sequence.tokens), 1500, 0, 1)
    while not (fresh_drafts := draft.propose_drafts([(fresh_sequence, 4)])[0]):
        pass
    assert continued_drafts == fresh_drafts
    for drafted_sequence in (sequence, fresh_sequence, fresh_sequence):
        draft.forget_sequence(drafted_sequence)
    assert draft.pool.used_count == 0


def test_load_rejects_draft_model_with_another_tokenizer(tmp_path):
    """Guards against a draft model whose token ids mean other texts."""
    folder = tiny_models.model_folder("qwen3")
    shutil.copytree(folder, tmp_path / "other")
    data = json.loads((tmp_path / "other" / "tokenizer.json").read_text("utf-8"))
    first_token, second_token = list(data["model"]["vocab"])[10:12]
    vocab = data["model"]["vocab"]
    vocab[first_token], vocab[second_token] = vocab[second_token], vocab[first_token]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(data), "utf-8")
    with pytest.raises(LoadError, match="tokenizer differs"):
        load_test_runner(folder, speculate=f"draft={tmp_path / 'other'}")
    with pytest.raises(LoadError):
        load_test_runner(folder, speculate=f"draft={tmp_path / 'missing'}")
