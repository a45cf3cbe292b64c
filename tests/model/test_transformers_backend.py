"""Models that run through Transformers: the same bits in every schedule, the same numbers, clear errors."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from support import tiny_models
from support.multimodal_models import multimodal_folder
from support.run_model import load_test_runner, serve_requests
from transformers import AutoModelForCausalLM

from parley.model.checkpoint.files import LoadError
from parley.model.load.numeric_check.decoder_check import DECODER_TOLERANCE
from parley.model.load.numeric_check.transformers_check import transformers_deviation
from parley.model.load.transformers import load_transformers, one_line
from parley.model.load.transformers_network import TransformersNetwork
from parley.model.networks.network import PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.native.layout import RowSpan
from parley.text.media_family import read_media_family
from parley.types import EngineRequest, SamplingOptions

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
ROUTING = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OTHER_ARCHITECTURES = {
    "gpt_oss": {**EXPERTS, "head_dim": 16, "sliding_window": 24},  # sinks
    "deepseek_v3": {**LATENT, **ROUTING, "num_key_value_heads": 4, "first_k_dense_replace": 1},  # value_dim < dim
    "phimoe": {**EXPERTS, "sliding_window": 24},  # the window exists only in the mask
    "cohere2": {"head_dim": 16, "sliding_window": 24, "logit_scale": 0.3},  # layers without positions, scaled logits
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},  # learned positions; the head calls an inner part of its body
    "gpt_neox": {},  # partial rotary embedding, parallel residual
    "olmo2": {},  # norms after each block
}


def write_architecture(tmp_path, monkeypatch, kind: str, **fields):
    """Write a model of a type that ``models.ARCHITECTURES`` does not list."""
    monkeypatch.setitem(tiny_models.ARCHITECTURES, kind, (kind, tiny_models.BASE_CONFIG | fields))
    return tiny_models.write_model(tmp_path / kind, kind, dtype="float32")


def load_network(folder, dtype=torch.float32, max_len=512) -> TransformersNetwork:
    return load_transformers(folder, dtype, torch.device("cpu"), lambda fraction: None, max_len)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, tiny_models.VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def paged_logits(network: TransformersNetwork, tokens: list[int]) -> torch.Tensor:
    """Logits at all positions, computed over KV pages in one step."""
    count = -(-len(tokens) // 16)
    pages = PagedKV(network.kv_layers, count, network.model.dtype)
    pages.clear_pages(list(range(count)))
    places = torch.arange(len(tokens))
    batch = PackedBatch(
        torch.tensor(tokens), places, places, [RowSpan(0, len(tokens), len(tokens), list(range(count)))]
    )
    return network.compute_logits(network.compute_hidden(batch, pages))


@torch.inference_mode()
def transformers_logits(folder, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_transformers_backend_is_schedule_invariant(architecture):
    """bfloat16 tokens and scores: all at once, one after another, and in small chunks with too few pages."""
    runner, info = load_test_runner(tiny_models.model_folder(architecture), lowering=False)
    assert not info.fused
    requests = [
        EngineRequest(
            str(i),
            random_prompt(length, i),
            12,
            SamplingOptions(temperature=0.9, top_p=0.95, presence_penalty=0.3),
            seed=i,
            n=1 + i % 2,
            logprobs=2,
            prompt_logprobs=1,
        )
        for i, length in enumerate([1, 5, 16, 33, 64, 100, 190])
    ]
    expected = {}
    for request in requests:
        expected |= serve_requests(runner, [request], step=4096, cache=False)[0]
    assert serve_requests(runner, requests, step=4096, cache=False)[0] == expected
    answers, stats = serve_requests(runner, requests, batch=5, step=35, blocks=18)
    assert answers == expected and stats.preemptions > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
@torch.inference_mode()
def test_experts_and_routers_give_a_row_the_same_bits_in_any_batch(kind, dtype):
    """Guards against torch's products: the number of their rows, which an expert shares, decides the order of sums."""
    network = load_network(tiny_models.model_folder(kind), dtype)
    mixture = network.model.model.layers[0].mlp
    rows = torch.randn(400, network.model.config.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = mixture(rows[None])[0]
    for count in (1, 2, 5, 17, 40, 90):
        assert torch.equal(mixture(rows[None, :count])[0], expected[:count])


@pytest.mark.parametrize("kind", OTHER_ARCHITECTURES)
def test_other_architectures_match_transformers_logits(kind, tmp_path, monkeypatch):
    folder = write_architecture(tmp_path, monkeypatch, kind, **OTHER_ARCHITECTURES[kind])
    network, tokens = load_network(folder), random_prompt(90)
    expected = transformers_logits(folder, tokens).log_softmax(-1)
    assert (paged_logits(network, tokens).log_softmax(-1) - expected).abs().max() < 1e-4
    assert network.vocab_size == expected.shape[1]
    load_network(folder, torch.bfloat16)


def test_dynamic_rope_scaling_does_not_depend_on_the_batch(tmp_path, monkeypatch):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    folder = write_architecture(tmp_path, monkeypatch, "llama", rope_parameters=rope, max_position_embeddings=128)
    network, tokens = load_network(folder, max_len=128), random_prompt(90)
    first_logits = paged_logits(network, tokens)
    assert (first_logits - transformers_logits(folder, tokens)).abs().max() < 1e-3
    paged_logits(network, random_prompt(128))
    paged_logits(network, random_prompt(3))
    assert torch.equal(paged_logits(network, tokens), first_logits)


def test_numeric_check_detects_broken_attention(monkeypatch):
    """Ignored positions, an ignored window or lost keys each exceed the tolerance by far."""
    network = load_network(tiny_models.model_folder("mistral"))
    assert transformers_deviation(network, network.model) < DECODER_TOLERANCE[torch.float32] / 100
    compute_hidden = TransformersNetwork.compute_hidden

    def drop_positions(self, batch, pages):
        batch.positions = torch.zeros_like(batch.positions)
        return compute_hidden(self, batch, pages)

    def forget_earlier_steps(self, batch, pages):
        pages.clear_pages([0, 1, 2, 3])
        return compute_hidden(self, batch, pages)

    class OverridingPages:
        def __init__(self, pages, **overrides):
            self.write_kv, self._pages, self._overrides = pages.write_kv, pages, overrides

        def attend_pages(self, layer, queries, batch, **options):
            return self._pages.attend_pages(layer, queries, batch, **(options | self._overrides))

    class ClearingPages(OverridingPages):
        def attend_pages(self, layer, queries, batch, **options):
            self._pages.clear_pages([0])
            return self._pages.attend_pages(layer, queries, batch, **options)

    for broken in (
        drop_positions,
        forget_earlier_steps,
        lambda self, batch, pages: compute_hidden(self, batch, OverridingPages(pages, window=None)),
        lambda self, batch, pages: compute_hidden(self, batch, OverridingPages(pages, scale=0.3)),
        lambda self, batch, pages: compute_hidden(self, batch, ClearingPages(pages)),
    ):
        monkeypatch.setattr(TransformersNetwork, "compute_hidden", broken)
        assert transformers_deviation(network, network.model) > 3 * DECODER_TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("qwen3_vl_moe", "media"),
        ("qwen3_vl_moe", "rope_positions"),
        ("qwen3_vl_moe", "deep"),
        ("gemma3", "visible_ends"),
        ("hunyuan_vl", "rope_positions"),
        ("granite4_vision", "deep"),
        ("ernie4_5_vl_moe", "placeholders"),
    ],
)
def test_numeric_check_detects_lost_media(family, field, monkeypatch):
    network = load_network(multimodal_folder(family))
    facts = read_media_family(network.model.config.to_dict())
    assert transformers_deviation(network, network.model, facts) < DECODER_TOLERANCE[torch.float32] / 100
    compute_hidden = TransformersNetwork.compute_hidden

    def lose_field(self, batch, pages):
        if field == "placeholders":  # which say what goes to ERNIE's experts for images
            if batch.media is not None:
                batch = replace(batch, token_ids=batch.token_ids.index_fill(0, batch.media.tokens, 0))
        elif field != "deep":
            batch = replace(batch, **{field: None})
        elif batch.media is not None:
            batch = replace(batch, media=batch.media._replace(deepstack=()))
        return compute_hidden(self, batch, pages)

    monkeypatch.setattr(TransformersNetwork, "compute_hidden", lose_field)
    assert transformers_deviation(network, network.model, facts) > DECODER_TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("jamba", {}, "layers of kind"),
        ("bloom", {"n_head": 4}, "cannot be replaced"),
        ("bert", {}, "reads in both directions"),
        ("moshi", {}, "different results over pages"),
        ("diffllama", {}, "attends twice"),
    ],
)
def test_load_rejects_models_that_cannot_use_kv_pages(kind, fields, message, tmp_path, monkeypatch):
    folder = write_architecture(tmp_path, monkeypatch, kind, **fields)
    with pytest.raises(LoadError, match=message):
        load_network(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "vit"}, "no vit model that generates text"),
        ({"model_type": "albert"}, "only such models and encoders of these types can be served: bert, camembert, "),
        ({"model_type": "no_such_thing"}, "does not know the model type no_such_thing"),
        ({"num_hidden_layers": 3}, "has no tensor model.layers.2"),
        ({"hidden_size": 128}, "cannot load this mixtral model"),
        ({"num_attention_heads": "many"}, "num_attention_heads"),
    ],
    ids=repr,
)
def test_transformers_backend_rejects_wrong_config(change, message, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_models.model_folder("mixtral"), folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(LoadError, match=message):
        load_network(folder)


def test_load_never_runs_code_of_a_model_folder(tmp_path):
    """Guards against remote code execution by a downloaded checkpoint."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_models.model_folder("mixtral"), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(LoadError, match="code of its own"):
        load_network(folder)
    assert not (tmp_path / "ran").exists()


def test_load_never_reads_pickled_weights(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_models.model_folder("mixtral"), folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match="safetensors"):
        load_network(folder)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (
            "needs\n the timm library. " + "You can install it. " * 20,
            "needs the timm library. " + "You can install it. " * 8,
        ),
        ("no attribute 'rope_theta'", "no attribute 'rope_theta'."),
        ("word " * 60, "word " * 40 + "(shortened)"),
        ("x" * 300, "x" * 200 + " (shortened)"),
        ("", "ValueError."),
    ],
)
def test_errors_of_transformers_end_with_a_full_stop(message, line):
    assert one_line(ValueError(message)) == line.strip()


def test_refuses_a_model_that_numbers_the_rows_of_a_batch(tmp_path, monkeypatch):
    """Bart's decoder takes positions from the shape of its input: only the first sequence of a batch would be right."""
    folder = write_architecture(tmp_path, monkeypatch, "bart")
    with pytest.raises(LoadError, match=r"^A bart model counts the positions of its tokens itself, which is not"):
        load_network(folder)
