"""Models that run through Transformers: the same bits in every schedule, the same numbers, clear errors."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from support import tiny_models
from support.run_model import serve, start
from transformers import AutoModelForCausalLM

from parley.model.checkpoint.files import LoadError
from parley.model.load.proof import deviation
from parley.model.load.reference import TOLERANCE
from parley.model.load.transformers import Foreign, load_foreign
from parley.model.networks.network import Batch
from parley.model.networks.paged_kv import PagedKV
from parley.native.layout import Span
from parley.types import Sampling, Work

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
ROUTING = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 64,
}
OTHERS = {
    "gpt_oss": {**EXPERTS, "head_dim": 16, "sliding_window": 24},  # sinks
    "deepseek_v3": {**LATENT, **ROUTING, "num_key_value_heads": 4, "first_k_dense_replace": 1},  # value_dim < dim
    "phimoe": {**EXPERTS, "sliding_window": 24},  # the window exists only in the mask
    "cohere2": {"head_dim": 16, "sliding_window": 24, "logit_scale": 0.3},  # layers without positions, scaled logits
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},  # learned positions; the head calls an inner part of its body
    "gpt_neox": {},  # partial rotary embedding, parallel residual
    "olmo2": {},  # norms after each block
}


def write(tmp_path, monkeypatch, kind: str, **fields):
    """Write a model of a type that ``models.ARCHITECTURES`` does not list."""
    monkeypatch.setitem(tiny_models.ARCHITECTURES, kind, (kind, tiny_models.BASE | fields))
    return tiny_models.write_model(tmp_path / kind, kind, dtype="float32")


def load(folder, dtype=torch.float32, max_len=512) -> Foreign:
    return load_foreign(folder, dtype, torch.device("cpu"), lambda fraction: None, max_len)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, tiny_models.VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def logits(network: Foreign, tokens: list[int]) -> torch.Tensor:
    """Logits at all positions, computed over KV pages in one step."""
    count = -(-len(tokens) // 16)
    pages = PagedKV(network.layers, count, network.model.dtype)
    pages.clear(list(range(count)))
    places = torch.arange(len(tokens))
    batch = Batch(torch.tensor(tokens), places, places, [Span(0, len(tokens), len(tokens), list(range(count)))])
    return network.logits(network.hidden(batch, pages))


@torch.inference_mode()
def plain_logits(folder, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_transformers_backend_is_schedule_invariant(architecture):
    """bfloat16 tokens and scores: all at once, one after another, and in small chunks with too few pages."""
    runner, info = start(tiny_models.model(architecture), lowering=False)
    assert not info.lowered
    works = [
        Work(
            str(i),
            prompt(length, i),
            12,
            Sampling(temperature=0.9, top_p=0.95, presence_penalty=0.3),
            seed=i,
            n=1 + i % 2,
            logprobs=2,
            prompt_logprobs=1,
        )
        for i, length in enumerate([1, 5, 16, 33, 64, 100, 190])
    ]
    want = {}
    for work in works:
        want |= serve(runner, [work], step=4096, cache=False)[0]
    assert serve(runner, works, step=4096, cache=False)[0] == want
    answers, stats = serve(runner, works, batch=5, step=35, blocks=18)
    assert answers == want and stats.preemptions > 0


@pytest.mark.parametrize("kind", OTHERS)
def test_other_architectures_match_transformers_logits(kind, tmp_path, monkeypatch):
    folder = write(tmp_path, monkeypatch, kind, **OTHERS[kind])
    network, tokens = load(folder), prompt(90)
    want = plain_logits(folder, tokens).log_softmax(-1)
    assert (logits(network, tokens).log_softmax(-1) - want).abs().max() < 1e-4
    assert network.vocab_size == want.shape[1]
    load(folder, torch.bfloat16)


@pytest.mark.parametrize(("length", "max_len"), [(60, 64), (90, 128)])
def test_rope_scaling_follows_the_context_not_the_batch(length, max_len, tmp_path, monkeypatch):
    """Long-context scaling is chosen once; it matches Transformers for sequences on the same side of the threshold."""
    folder = write(tmp_path, monkeypatch, "phi3", rope_parameters=LONG, sliding_window=None)
    network, tokens = load(folder, max_len=max_len), prompt(length)
    want = plain_logits(folder, tokens)
    first = logits(network, tokens)
    assert (first - want).abs().max() < 1e-3
    logits(network, prompt(128))
    logits(network, prompt(3))
    assert torch.equal(logits(network, tokens), first)


def test_numeric_check_detects_broken_attention(monkeypatch):
    """Ignored positions, an ignored window or lost keys each exceed the tolerance by far."""
    network = load(tiny_models.model("mistral"))
    assert deviation(network, network.model) < TOLERANCE[torch.float32] / 100
    whole = Foreign.hidden

    def lost(self, batch, pages):
        batch.positions = torch.zeros_like(batch.positions)
        return whole(self, batch, pages)

    class Deaf:
        def __init__(self, pages, **how):
            self.write, self._pages, self._how = pages.write, pages, how

        def attend(self, layer, queries, batch, **how):
            return self._pages.attend(layer, queries, batch, **(how | self._how))

    class Forgetful(Deaf):
        def attend(self, layer, queries, batch, **how):
            self._pages.clear([0])
            return self._pages.attend(layer, queries, batch, **how)

    for broken in (
        lost,
        lambda self, batch, pages: whole(self, batch, Deaf(pages, window=None)),
        lambda self, batch, pages: whole(self, batch, Deaf(pages, scale=0.3)),
        lambda self, batch, pages: whole(self, batch, Forgetful(pages)),
    ):
        monkeypatch.setattr(Foreign, "hidden", broken)
        assert deviation(network, network.model) > 3 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("jamba", {}, "layers of kind"),
        ("bloom", {"n_head": 4}, "cannot be replaced"),
        ("bert", {}, "different results over pages"),
        ("diffllama", {}, "attends twice"),
    ],
)
def test_load_rejects_models_that_cannot_use_kv_pages(kind, fields, message, tmp_path, monkeypatch):
    folder = write(tmp_path, monkeypatch, kind, **fields)
    with pytest.raises(LoadError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "vit"}, "no causal language model"),
        ({"model_type": "no_such_thing"}, "does not understand"),
        ({"num_hidden_layers": 3}, "has no tensor model.layers.2"),
        ({"hidden_size": 128}, "cannot load this mixtral model"),
        ({"num_attention_heads": "many"}, "num_attention_heads"),
    ],
    ids=repr,
)
def test_transformers_backend_rejects_wrong_config(change, message, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_models.model("mixtral"), folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(LoadError, match=message):
        load(folder)


def test_load_never_runs_code_of_a_model_folder(tmp_path):
    """Guards against remote code execution by a downloaded checkpoint."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_models.model("mixtral"), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(LoadError, match="code of its own"):
        load(folder)
    assert not (tmp_path / "ran").exists()


def test_load_never_reads_pickled_weights(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_models.model("mixtral"), folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match="safetensors"):
        load(folder)
