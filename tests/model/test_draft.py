"""A small draft model proposes tokens: outputs do not change, and it computes only the tokens it needs."""

from __future__ import annotations

import json
import shutil

import pytest
from support import tiny_models
from support.run_model import serve, start

from parley.core.guess.speculation import Speculation
from parley.core.sequence import Sequence
from parley.model.load.loader import LoadError
from parley.model.networks.paged_kv import PagedKV
from parley.types import Sampling, Work


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Propose as many draft tokens as allowed, regardless of the expected gain."""
    monkeypatch.setattr(Speculation, "length", lambda self, sequence: self.most)
    monkeypatch.setattr("parley.core.guess.speculation.Costs.best", lambda self, rows, chances: len(chances))


def works(sampling: Sampling) -> list[Work]:
    ends = [2, 11]
    return [Work(str(i), list(range(3 + i, 40 + 9 * i)), 30, sampling, i, logprobs=1, stop_ids=ends) for i in range(5)]


def test_model_as_its_own_draft_has_every_token_accepted():
    folder = tiny_models.model("qwen3")
    plain, _ = start(folder)
    drafted, _ = start(folder, speculate=f"draft={folder}")
    asked = works(Sampling(temperature=0.0))
    want, before = serve(plain, asked)
    got, after = serve(drafted, asked)
    assert got == want
    assert after.draft_tokens == sum(after.draft_accepted) > 0 and after.steps < before.steps / 3
    assert drafted.proposer.pool.used == 0


@pytest.mark.parametrize("small", ["qwen3", "gpt2", "gemma3"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0, repetition_penalty=1.3)])
def test_any_draft_model_leaves_outputs_unchanged(small, sampling):
    """Fused or through Transformers, with few pages for both; another draft model is nearly always wrong."""
    want, _ = serve(start(tiny_models.model("qwen3"))[0], works(sampling))
    runner, _ = start(tiny_models.model("qwen3"), speculate=f"draft={tiny_models.model(small)}")
    draft = runner.proposer
    draft.pool.__init__(6)
    draft.kv = PagedKV(draft.kv.layers, 6, draft.kv.dtype)
    got, stats = serve(runner, works(sampling), blocks=14)
    assert got == want
    assert stats.draft_tokens and stats.preemptions and (small != "qwen3" or stats.draft_accepted[1])
    assert draft.pool.used == 0


def test_draft_model_has_its_own_kv_memory_and_context():
    folder, small = tiny_models.model("qwen3"), tiny_models.model("llama", max_position_embeddings=64)
    _, alone = start(folder)
    runner, info = start(folder, speculate=f"draft={small}")
    assert info.kv_blocks == runner.proposer.pool.size < alone.kv_blocks
    assert info.kv_bytes <= 64 << 20 and info.weights_bytes > alone.weights_bytes
    assert runner.proposer.max_model_len == 64 < info.max_model_len
    work = Work("a", list(range(3, 53)), 40, Sampling(temperature=0.0))
    got, stats = serve(runner, [work])
    assert got == serve(start(folder)[0], [work])[0]
    assert 0 < stats.drafts < 20


def test_draft_model_reads_a_long_prompt_in_chunks():
    folder = tiny_models.model("qwen3")
    draft = start(folder, speculate=f"draft={folder}")[0].proposer
    work = Work("a", [3 + i % 600 for i in range(1500)], 40)
    sequence = Sequence("a", 0, work, [*work.token_ids, 7], 1500, 0, 0)
    asked = [draft.propose([(sequence, 4)])[0] for _ in range(4)]
    assert [len(guess) for guess in asked] == [0, 0, 4, 4] and asked[2] == asked[3]
    sequence.tokens += [*asked[3][:2], 9]  # the first two draft tokens are accepted
    (guess,) = draft.propose([(sequence, 4)])
    again = Sequence("b", 0, work, list(sequence.tokens), 1500, 0, 1)
    while not (fresh := draft.propose([(again, 4)])[0]):
        pass
    assert guess == fresh
    for each in (sequence, again, again):
        draft.forget(each)
    assert draft.pool.used == 0


def test_load_rejects_draft_model_with_another_tokenizer(tmp_path):
    """Guards against a draft model whose token ids mean other texts."""
    folder = tiny_models.model("qwen3")
    shutil.copytree(folder, tmp_path / "other")
    data = json.loads((tmp_path / "other" / "tokenizer.json").read_text("utf-8"))
    first, second = list(data["model"]["vocab"])[10:12]
    vocab = data["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(data), "utf-8")
    with pytest.raises(LoadError, match="tokenizer differs"):
        start(folder, speculate=f"draft={tmp_path / 'other'}")
    with pytest.raises(LoadError):
        start(folder, speculate=f"draft={tmp_path / 'missing'}")
