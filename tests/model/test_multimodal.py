"""The language models of multimodal checkpoints give the tokens and log-probabilities of Transformers for text."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.multimodal_models import (
    SAMPLED_FAMILIES,
    load_whole_model,
    multimodal_folder,
    write_multimodal_model,
    write_whole_omni,
)
from support.run_model import load_test_runner, serve_requests
from support.tiny_models import VOCAB
from transformers import AutoConfig, LlavaConfig, MptConfig

from parley.model.checkpoint.files import Checkpoint
from parley.model.load.loader import LoadError
from parley.model.load.logit_scale import scale_forgotten_logits
from parley.model.load.multimodal import language_model_config
from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.families.table import FUSABLE_TYPES
from parley.native.layer_shape import HeadSizes
from parley.types import EngineRequest, SamplingOptions

NEW_TOKENS = 6
THROUGH_TRANSFORMERS = ("aria", "ernie4_5_vl_moe", "granite4_vision")  # decoders without a fused form
LENGTHS = (1, 17, 70)  # prompt tokens
# The prefixes that Transformers 5 writes, and those that it gives the modules and that other writers keep.
OTHER_PREFIXES = {
    "llava": {
        "language_model.lm_head.": "lm_head.",
        "language_model.model.": "model.language_model.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
    "qwen2_vl": {"model.": "model.language_model.", "visual.": "model.visual.", "lm_head.": "lm_head."},
}


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(30, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def check_against_transformers(folder: Path, reference_folder: Path, *, fused: bool) -> None:
    model = load_whole_model(reference_folder)
    runner, info = load_test_runner(folder, dtype="float32")
    assert info.fused == fused
    greedy = SamplingOptions(temperature=0)
    requests = [
        EngineRequest(str(number), prompt, NEW_TOKENS, greedy, logprobs=0)
        for number, prompt in enumerate(make_prompts())
    ]
    answers, _ = serve_requests(runner, requests, step=40, blocks=60)
    for number, prompt in enumerate(make_prompts()):
        answer = answers[str(number), 0]
        with torch.inference_mode():
            ids = torch.tensor([prompt + answer.token_ids])
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer.token_ids
        expected = logits.log_softmax(-1).amax(-1)
        assert torch.allclose(torch.tensor([score.logprob for score in answer.scores]), expected, rtol=0, atol=1e-4)


def copy_json_files(source: Path, target: Path) -> None:
    for path in source.glob("*.json"):
        (target / path.name).write_bytes(path.read_bytes())


@pytest.mark.parametrize("family", SAMPLED_FAMILIES)
def test_text_gives_the_tokens_of_transformers(family: str):
    folder = multimodal_folder(family)
    check_against_transformers(folder, folder, fused=family not in THROUGH_TRANSFORMERS)


@pytest.mark.parametrize("family", OTHER_PREFIXES)
def test_alternative_tensor_names_give_the_same_tokens(tmp_path, family: str):
    tensors = load_file(multimodal_folder(family) / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        prefix = next(prefix for prefix in OTHER_PREFIXES[family] if name.startswith(prefix))
        renamed[OTHER_PREFIXES[family][prefix] + name.removeprefix(prefix)] = tensor
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    copy_json_files(multimodal_folder(family), tmp_path)
    check_against_transformers(tmp_path, multimodal_folder(family), fused=True)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "paddleocr_vl"])
def test_config_without_text_config_gives_the_same_tokens(tmp_path, family: str):
    """As Qwen and Baidu publish it: the language model's fields at the top, and the rotary embedding's old name."""
    config = json.loads((multimodal_folder(family) / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    copy_json_files(multimodal_folder(family), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(text | config))
    (tmp_path / "model.safetensors").write_bytes((multimodal_folder(family) / "model.safetensors").read_bytes())
    check_against_transformers(tmp_path, multimodal_folder(family), fused=True)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("aya_vision", "logit_scale", 0.25),
        ("cohere2_vision", "logit_scale", 0.25),
        ("granite_speech", "logits_scaling", 4.0),
        ("granite_vision", "logits_scaling", 4.0),
    ],
)
def test_logits_have_their_factor_without_the_fused_decoder_as_well(family, field, value, tmp_path: Path):
    """The code of Transformers for the whole model forgets it."""
    text = {field: value}
    if family == "granite_vision":  # which is a LLaVA-NeXT
        family, text = "llava_next", text | {"model_type": "granite"}
    folder = write_multimodal_model(tmp_path, family, text=text)
    hidden = torch.randn(3, 64)
    fused, plain = (
        load_test_runner(folder, dtype="float32", lowering=lowering)[0].network for lowering in (True, False)
    )
    with torch.inference_mode():
        expected = load_whole_model(folder).lm_head(hidden) * 0.25
        for network in (fused, plain):
            assert torch.allclose(network.compute_logits(hidden), expected, atol=1e-5)


def test_logits_of_another_language_model_have_no_factor():
    head = torch.nn.Linear(4, 4)
    model = SimpleNamespace(config=LlavaConfig(text_config=MptConfig()), get_output_embeddings=lambda: head)
    rows = torch.ones(1, 4)
    expected = head(rows)
    scale_forgotten_logits(model)
    assert torch.equal(head(rows), expected)


@pytest.mark.parametrize("thinker", ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"])
def test_of_an_omni_model_only_the_part_that_writes_is_served(tmp_path, thinker: str):
    folder = write_whole_omni(tmp_path / "whole", thinker)
    check_against_transformers(folder, multimodal_folder(thinker), fused=True)
    assert load_test_runner(folder)[1].media_kinds == {"image", "video", "audio"}


def test_sparse_text_config_has_the_defaults_of_its_type(tmp_path):
    """The published config of LLaVA 1.5 has neither sizes nor heads; a model of its shape asks for these tensors."""
    config = json.loads((multimodal_folder("llava") / "config.json").read_text())
    config["text_config"] = {"model_type": "llama", "vocab_size": VOCAB}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((multimodal_folder("llava") / "model.safetensors").read_bytes())
    with pytest.raises(LoadError, match=r"config asks for 32 layers"):
        load_test_runner(tmp_path, dtype="float32")


# Without these, a model of defaults cannot be: GLM-4-MoE would rotate 21 of 42 dimensions.
NEEDED_FIELDS = {
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe_text": {"head_dim": 128},
    "glm4v_text": {"partial_rotary_factor": 0.5},  # its defaults do not fit each other
    "qwen3_omni_moe_text": {"head_dim": 128},  # its defaults do not divide
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},  # it has no defaults for them
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},  # it has experts by default
}
# The width of the MLPs, where configs do not state it: LFM2 uses two thirds of what they state, Gemma 3n lists one for
# each layer, DBRX has it in ``ffn_config``, the others have none.
UNSTATED_WIDTHS = {"lfm2": 8192, "gemma3n_text": 16384, "dbrx": 3584} | dict.fromkeys(
    ("kolibri1", "qwen3_5_moe_text", "solar_open")  # their configs have none
)
WIDTH_NAMES = "dense_intermediate_size", "intermediate_size_mlp", "intermediate_size", "ffn_hidden_size", "ffn_dim"
FIXED_EPS = 1e-5  # of the norms of OLMo 1 and OPT
OTHER_NAMES = {"kimi_k2": "deepseek_v3"}  # Transformers knows the type only by this one


HEADS_OF_LAYERS = {"gemma4_text", "gemma4_unified_text"}  # some layers have heads of other sizes
WITHOUT_ATTENTION = {"falcon_mamba", "mamba", "mamba2"}  # nor MLPs
UNKNOWN_TYPES = {"deepseek", "nemotron-nas", "deci", "smallthinker", "openelm", "plm"}  # to Transformers


@pytest.mark.parametrize("model_type", sorted(FUSABLE_TYPES - WITHOUT_ATTENTION - UNKNOWN_TYPES))
def test_missing_fields_have_the_defaults_of_transformers(model_type: str):
    fields = NEEDED_FIELDS.get(model_type, {})
    config = read_decoder_config({"model_type": model_type} | fields)
    expected = AutoConfig.for_model(OTHER_NAMES.get(model_type, model_type), **fields)
    own_layers = list(expected.per_layer_config) if model_type in HEADS_OF_LAYERS else []
    expected.allow_global_per_layer_attribute_access = True  # where layers differ, this is the value of most
    if model_type not in UNSTATED_WIDTHS:
        stated = [width for name in WIDTH_NAMES if (width := getattr(expected, name, None))]
        assert config.intermediate_size == (stated[0] if stated else 4 * expected.hidden_size)
    elif (width := UNSTATED_WIDTHS[model_type]) is not None:
        assert config.intermediate_size == width
    assert (config.vocab_size, config.hidden_size, config.layer_count, config.heads) == (
        expected.vocab_size,
        expected.hidden_size,
        expected.num_hidden_layers,
        expected.num_attention_heads,
    )
    lengths = getattr(expected, "max_position_embeddings", None) or getattr(expected, "max_seq_len", None)
    assert config.max_len == (lengths or 2048)  # BLOOM states none
    if model_type != "falcon":  # it says with flags how many there are
        assert config.kv_heads == (getattr(expected, "num_key_value_heads", None) or expected.num_attention_heads)
    head_dim = getattr(expected, "head_dim", None) or expected.hidden_size // expected.num_attention_heads
    if config.latent is not None:
        head_dim = expected.qk_nope_head_dim + expected.qk_rope_head_dim
    eps_names = "rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon"
    stated_eps = [eps for name in eps_names if (eps := getattr(expected, name, None)) is not None]
    eps = stated_eps[0] if stated_eps else FIXED_EPS  # Cohere's mixtures may have RMS norms, whose eps is None if not
    assert (config.head_dim, config.eps) == (head_dim, eps)
    for shape, own_layer in zip(config.layers, own_layers, strict=bool(own_layers)):
        sizes = shape.head_sizes or HeadSizes(config.kv_heads, config.head_dim)
        assert (sizes.kv_heads, sizes.dim) == (own_layer.num_key_value_heads, own_layer.head_dim)
    types = getattr(expected, "layer_types", None) or getattr(expected, "attention_layers", None)  # as GPT-Neo says it
    types = types or ["sliding_attention"] * config.layer_count
    parameters = getattr(expected, "rope_parameters", None)  # Nemotron-H has none
    if parameters is None:
        parameters = {"rope_theta": 10000.0}  # what the code of GPT-J and CodeGen has
    for layer, shape in enumerate(config.layers):
        if shape.rope is None:
            continue
        own = parameters[types[layer]] if "full_attention" in parameters else parameters
        if model_type == "deepseek_v4":  # layers with entries have a rotary embedding of their own
            own = parameters["main" if types[layer] == "sliding_attention" else "compress"]
        assert config.ropes[shape.rope].theta == own["rope_theta"]
    window = getattr(expected, "sliding_window", getattr(expected, "window_size", None))
    window_types = set(types) if model_type == "deepseek_v4" else {"sliding_attention", "local"}
    windows = [window if layer_type in window_types else None for layer_type in types]
    assert [shape.window for shape in config.layers] == windows


@pytest.mark.parametrize("model_type", sorted(WITHOUT_ATTENTION))
def test_missing_fields_of_mamba_have_the_defaults_of_transformers(model_type: str):
    config, expected = read_decoder_config({"model_type": model_type}), AutoConfig.for_model(model_type)
    assert (config.vocab_size, config.hidden_size) == (expected.vocab_size, expected.hidden_size)
    assert (config.layer_count, config.eps) == (expected.num_hidden_layers, expected.layer_norm_epsilon)


def test_encoders_take_no_memory():
    _, info = load_test_runner(multimodal_folder("llava"), dtype="float32")
    checkpoint = Checkpoint(multimodal_folder("llava"))
    language = [name for name in checkpoint.tensor_names if name.startswith("language_model.")]
    assert 0 < len(language) < len(checkpoint.tensor_names)
    assert info.parameters == sum(torch.Size(checkpoint.tensor_shape(name)).numel() for name in language)


def test_refuses_two_heads(tmp_path):
    """Older and newer names for the same tensor: either could be the right one."""
    folder = tmp_path / "two"
    shutil.copytree(multimodal_folder("llava"), folder)
    tensors = load_file(folder / "model.safetensors")
    names = [name for name in tensors if name.endswith("lm_head.weight")]
    other = {"lm_head.weight": "language_model.lm_head.weight"}.get(names[0], "lm_head.weight")
    save_file(tensors | {other: tensors[names[0]] * 2}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match="has both"):
        load_test_runner(folder)


@pytest.mark.parametrize("model_type", [[], {}, 5, None])
def test_a_model_type_of_a_wrong_type_has_no_fused_decoder(model_type):
    config = {"model_type": "llava", "text_config": {"model_type": model_type}}
    assert language_model_config(config) == config
