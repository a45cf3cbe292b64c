"""Checkpoints with 4-bit weights: written here bit by bit, read by the real loader, and compared with Transformers
running the dequantized weights. Also int4 quantization at load.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.run_model import load_test_runner, long_logprobs, serve_requests
from transformers import AutoModelForCausalLM

from parley import native
from parley.model.checkpoint import gptq_awq
from parley.model.load.check import check_model
from parley.model.load.loader import LoadError
from parley.types import EngineRequest, ParleySettings, SamplingOptions

SIZES = {"hidden_size": 192, "intermediate_size": 320}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 64,
    "desc_act": False,
    "sym": False,
    "checkpoint_format": "gptq",
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
PROMPTS = [
    torch.randint(3, tiny_models.VOCAB, (size,), generator=torch.Generator().manual_seed(size)).tolist()
    for size in (1, 20, 70)
]


def pack_word(numbers) -> int:
    """Pack eight numbers into an int32, the first one in the lowest bits."""
    value = sum(int(number) << (4 * i) for i, number in enumerate(numbers))
    return value - (1 << 32) if value >= 1 << 31 else value


def pack_words(rows) -> torch.Tensor:
    return torch.from_numpy(
        np.array([[pack_word(row[i : i + 8]) for i in range(0, len(row), 8)] for row in rows], np.int32)
    )


def quantize_groups(weight: torch.Tensor, group: int):
    """Return values [in, out], scales and zeros [groups, out], and the dequantized weight [out, in]."""
    table = weight.float().T.reshape(-1, group, weight.shape[0])
    low, high = table.amin(1), table.amax(1)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    values = (table / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
    dequantized = ((values - zeros[:, None]) * scales.float()[:, None]).reshape(-1, weight.shape[0]).T
    return values.reshape(-1, weight.shape[0]).int().numpy(), scales, zeros.int().numpy(), dequantized


def to_gptq(weight: torch.Tensor, config: dict, order: torch.Tensor | None):
    group = weight.shape[1] if config["group_size"] == -1 else config["group_size"]
    if order is not None:
        weight = weight[:, order]
    values, scales, zeros, dequantized = quantize_groups(weight, group)
    index = torch.arange(weight.shape[1], dtype=torch.int32) // group
    if order is not None:  # the file keeps the original order of the inputs
        inverse_order = order.argsort()
        values, dequantized, index = values[inverse_order], dequantized[:, inverse_order], index[inverse_order]
    packed = pack_words(zeros.tolist())
    if config["checkpoint_format"] == "gptq":
        packed = packed - 0x11111111
    fields = {"qweight": pack_words(values.T.tolist()).T, "qzeros": packed, "scales": scales, "g_idx": index}
    return fields, dequantized


def to_awq(weight: torch.Tensor, config: dict, order: None):
    values, scales, zeros, dequantized = quantize_groups(weight, config["group_size"])
    awq_order = np.arange(weight.shape[0]).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel()
    return {
        "qweight": pack_words(values[:, awq_order].tolist()),
        "qzeros": pack_words(zeros[:, awq_order].tolist()),
        "scales": scales,
    }, dequantized


def write_quantized(
    folder, config, architecture="llama", *, order_seed=None, keep=lambda name: "proj" not in name, drop=()
):
    """Write a quantized checkpoint to ``folder / "q"``, and its dequantized weights to ``folder / "plain"``.

    ``order_seed``: from a weight's name to the seed of the order of its inputs; None: they keep their order.
    """
    source = tiny_models.model_folder(architecture, **SIZES)
    quantized, plain = folder / "q", folder / "plain"
    convert = to_awq if config["quant_method"] == "awq" else to_gptq
    tensors, dequantized = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        dequantized[name] = tensor.float()
        if tensor.dim() != 2 or not name.endswith(".weight") or keep(name):
            tensors[name] = tensor
            continue
        order = None
        if order_seed is not None:
            order = torch.randperm(tensor.shape[1], generator=torch.Generator().manual_seed(order_seed(name)))
        fields, dequantized[name] = convert(tensor, config, order)
        for part, value in fields.items():
            if part not in drop:
                tensors[name.removesuffix("weight") + part] = value.contiguous()
    for target, content, change in (
        (quantized, tensors, {"quantization_config": config}),
        (plain, {name: tensor.contiguous() for name, tensor in dequantized.items()}, {"dtype": "float32"}),
    ):
        shutil.copytree(source, target)
        save_file(content, target / "model.safetensors", {"format": "pt"})
        fields = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(fields | change))
    return quantized, plain


def answer_prompts(folder, **settings):
    """Greedy tokens, their scores and the prompts' scores, from the loader to the loop."""
    runner, info = load_test_runner(folder, **settings)
    assert info.fused
    requests = [
        EngineRequest(str(i), prompt, 8, SamplingOptions(temperature=0), logprobs=0, prompt_logprobs=0)
        for i, prompt in enumerate(PROMPTS)
    ]
    answers, _ = serve_requests(runner, requests, step=40)
    return [answers[str(i), 0] for i in range(len(PROMPTS))], info


@torch.inference_mode()
def check_against_transformers(folder, answers, tolerance: float) -> None:
    """Compare answers with Transformers' own forward pass over the same tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt + answer.token_ids])
        scores = model(ids, use_cache=False).logits[0].log_softmax(-1)
        logprobs = torch.tensor([token_score.logprob for token_score in [*answer.prompt_scores[1:], *answer.scores]])
        assert (scores[:-1].gather(1, ids[0, 1:, None])[:, 0] - logprobs).abs().max() < tolerance
        output_scores = scores[len(prompt) - 1 : -1]
        assert (
            output_scores.max(-1).values - output_scores.gather(1, ids[0, len(prompt) :, None])[:, 0] < 2 * tolerance
        ).all()


CHECKPOINTS = {
    "gptq": (GPTQ, {}),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, {}),
    "gptq-32": (GPTQ | {"group_size": 32}, {"architecture": "qwen2"}),
    "gptq-whole": (GPTQ | {"group_size": -1}, {}),
    "gptq-act-order": (GPTQ | {"desc_act": True}, {"order_seed": lambda name: 5}),
    "gptq-own-orders": (GPTQ | {"desc_act": True}, {"order_seed": lambda name: 5 + ("k_proj" in name)}),
    "gptq-merged": (GPTQ, {"architecture": "phi3"}),
    "gptq-head": (GPTQ | {"lm_head": True}, {"keep": lambda name: "embed" in name}),
    "gptq-no-index": (GPTQ, {"drop": ("g_idx",)}),
    "awq": (AWQ, {}),
    "awq-32": (AWQ | {"group_size": 32, "version": "GEMM"}, {"architecture": "qwen2"}),
    "awq-kept": (
        AWQ | {"modules_to_not_convert": ["layers.0.mlp"]},
        {"keep": lambda name: "proj" not in name or "layers.0.mlp" in name},
    ),
    "awq-plain-keys": (
        AWQ | {"modules_to_not_convert": ["k_proj"]},
        {"keep": lambda name: "proj" not in name or "k_proj" in name},
    ),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_gptq_and_awq_checkpoints_match_transformers(kind, tmp_path):
    config, options = CHECKPOINTS[kind]
    quantized, plain = write_quantized(tmp_path, config, **options)
    answers, info = answer_prompts(quantized, dtype="float32")
    check_against_transformers(plain, answers, 2e-4)
    assert info.parameters == load_test_runner(plain)[1].parameters
    answers, info = answer_prompts(quantized)
    check_against_transformers(plain, answers, 0.3)
    assert info.quantization == config["quant_method"]


@torch.inference_mode()
@pytest.mark.parametrize("config", [GPTQ, AWQ], ids=["gptq", "awq"])
def test_check_finds_scales_of_a_wrong_shape(config, tmp_path):
    folder, _ = write_quantized(tmp_path, config)
    assert check_model(ParleySettings(model=str(folder))).load_caveat == ""
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.scales"
    save_file(tensors | {name: tensors[name][:-1].clone()}, folder / "model.safetensors")
    with pytest.raises(LoadError, match=r"down_proj\.scales has shape"):
        check_model(ParleySettings(model=str(folder)))


@pytest.mark.parametrize("config", [GPTQ, AWQ], ids=["gptq", "awq"])
def test_the_int4_kernel_rounds_no_more_than_bf16_does(config, tmp_path):
    """The tolerance that docs/performance.md states: the kernel's error is that of bf16 activations."""
    quantized, plain = write_quantized(tmp_path, config)
    exact = long_logprobs(plain, "float32")

    def relative_error(logprobs: torch.Tensor) -> float:
        return float((logprobs - exact).norm() / exact.norm())

    kernel_error = relative_error(long_logprobs(quantized, "bfloat16"))
    assert 0 < kernel_error < 1.2 * relative_error(long_logprobs(plain, "bfloat16"))
    original = tiny_models.model_folder("llama", **SIZES)
    assert kernel_error < relative_error(long_logprobs(original, "float32")) / 10
    assert relative_error(long_logprobs(quantized, "float32")) < 1e-5


def test_gptq_zero_points_may_borrow_from_their_neighbors(tmp_path):
    """GPTQ stores a zero point minus one: 0 becomes 15 and borrows one from the number above it."""
    quantized, plain = write_quantized(tmp_path, GPTQ)
    tensors = load_file(quantized / "model.safetensors")
    stored_zeros = torch.stack([(tensors["model.layers.0.mlp.up_proj.qzeros"] >> 4 * i) & 15 for i in range(8)])
    assert not (stored_zeros == 15).any()
    name = "model.layers.0.mlp.up_proj."
    tensors[name + "qzeros"] = pack_words([[0] * tensors[name + "scales"].shape[1]] * 3) - 0x11111111
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    values = torch.stack([(tensors[name + "qweight"] >> 4 * i) & 15 for i in range(8)], 1).flatten(0, 1).float()
    plain_tensors = load_file(plain / "model.safetensors")
    plain_tensors[name + "weight"] = (values * tensors[name + "scales"].float().repeat_interleave(64, 0)).T.contiguous()
    save_file(plain_tensors, plain / "model.safetensors", {"format": "pt"})
    answers, _ = answer_prompts(quantized, dtype="float32")
    check_against_transformers(plain, answers, 5e-4)


def test_gptq_ignores_zero_biases_and_zero_group_indices(tmp_path):
    quantized, plain = write_quantized(tmp_path, GPTQ)
    tensors = load_file(quantized / "model.safetensors")
    for name in list(tensors):
        if name.endswith("g_idx"):
            tensors[name] = torch.zeros_like(tensors[name])
            tensors[name.removesuffix("g_idx") + "bias"] = torch.zeros(
                tensors[name.removesuffix("g_idx") + "scales"].shape[1]
            )
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    answers, _ = answer_prompts(quantized, dtype="float32")
    check_against_transformers(plain, answers, 2e-4)
    tensors["model.layers.1.mlp.down_proj.bias"][3] = 0.5
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match=r"down_proj\.bias"):
        load_test_runner(quantized)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (GPTQ | {"bits": 5}, "bits is 5; only 2 or 3 or 4 or 8"),
        (GPTQ | {"bits": "4"}, "bits is 4"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is marlin; only gptq or gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
        (GPTQ | {"pack_dtype": "int64"}, "pack_dtype"),
        (GPTQ | {"group_size": 20}, "group_size is 20"),
        (GPTQ | {"group_size": 0}, "group_size is 0"),
        (GPTQ | {"group_size": None}, "group_size is None"),
        (GPTQ | {"dynamic": {".*up_proj": {"bits": 5}}}, "bits is 5"),
        (GPTQ | {"dynamic": {".*up_proj": 8}}, "dynamic is 8"),
        (GPTQ | {"dynamic": {"-:(": {}}}, "dynamic"),
        (GPTQ | {"dynamic": {"-:a{99999999999}": {}}}, "only a pattern"),
        (GPTQ | {"modules_in_block_to_quantize": 3}, "modules_in_block_to_quantize is 3"),
        (GPTQ | {"group_size": 32}, "shape"),
        (GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"]]}, "no tensor"),
        (AWQ | {"w_bit": 4, "bits": 3}, "bits is 3"),
        (AWQ | {"version": "gemv_fast"}, "version is gemv_fast; only gemm or gemv"),
        (AWQ | {"version": "marlin"}, "marlin"),
        (AWQ | {"zero_point": False}, "AWQ weights without zero points .*zero_point is false"),
        (AWQ | {"modules_to_not_convert": {"a": 1}}, "modules_to_not_convert"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "only nf4 and fp4"),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_storage": "bfloat16"}, "only uint8"),
    ],
)
def test_load_rejects_unsupported_gptq_and_awq_options(config, match, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "refused"
    if not folder.exists():
        write_quantized(folder, GPTQ)
    fields = json.loads((folder / "q" / "config.json").read_text())
    (folder / "q" / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    with pytest.raises(LoadError, match=match):
        load_test_runner(folder / "q")


def test_load_rejects_uneven_gptq_group_indices(tmp_path):
    quantized, _ = write_quantized(tmp_path, GPTQ)
    tensors = load_file(quantized / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.g_idx"
    tensors[name] = tensors[name].clamp(max=1)
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match="g_idx does not put 64"):
        load_test_runner(quantized)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int4_quantization_at_load_matches_rounded_weights(dtype, tmp_path):
    source, plain = tiny_models.model_folder("qwen2", **SIZES), tmp_path / "plain"
    shutil.copytree(source, plain)
    tensors = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    for name in tensors:
        if name.endswith("proj.weight"):
            tensors[name] = native.dequantize_grouped(native.round_int4(tensors[name], 128)).contiguous()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    answers, info = answer_prompts(source, quantization="int4", dtype=dtype)
    assert info.quantization == "int4"
    check_against_transformers(plain, answers, 0.3)  # the head is quantized to int8


def test_int4_setting_stores_head_of_quantized_checkpoint_as_int8(tmp_path):
    quantized, _ = write_quantized(tmp_path, AWQ)
    bf16_head_answers, bf16_head_info = answer_prompts(quantized)
    int8_head_answers, int8_head_info = answer_prompts(quantized, quantization="int4")
    assert bf16_head_info.weights_bytes - int8_head_info.weights_bytes > tiny_models.VOCAB * 192 * 0.9
    differences = [
        abs(a.logprob - b.logprob)
        for one, two in zip(int8_head_answers, bf16_head_answers, strict=True)
        for a, b in zip(one.prompt_scores[1:], two.prompt_scores[1:], strict=True)
    ]
    assert 0 < max(differences) < 0.3


def test_rules_of_gptq_give_layers_their_own_bits_and_groups():
    rules = {"+:.*down_proj": {"bits": 8, "group_size": 32}, r"-:.*layers\.0\.": {}, ".*v_proj": {"group_size": -1}}
    find = gptq_awq.read_gptq_config(GPTQ | {"dynamic": rules})
    formats = [find(f"model.layers.{name}") for name in ("1.mlp.down_proj", "0.mlp.up_proj", "1.self_attn.v_proj")]
    assert formats == [gptq_awq.GptqFormat(8, 32, True), None, gptq_awq.GptqFormat(4, None, True)]
    assert find("model.layers.1.mlp.up_proj") == gptq_awq.GptqFormat(4, 64, True)


def test_auto_round_names_layers_with_bits_of_their_own_or_patterns_of_them():
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "data_type": "int"}
    extra = {"model.layers.1.mlp.up_proj": {"bits": 16, "data_type": "float"}, r".*\.o_proj": {"bits": 8}}
    find = gptq_awq.read_auto_round_config(config | {"extra_config": extra})
    names = ("layers.1.mlp.up_proj", "layers.0.mlp.up_proj", "layers.0.self_attn.o_proj")
    assert [find(f"model.{name}") for name in names] == [
        None, gptq_awq.GptqFormat(4, 64, True), gptq_awq.GptqFormat(8, 64, True)
    ]  # fmt: skip
    assert find("lm_head") == gptq_awq.GptqFormat(4, 64, True)  # unless the file has it as plain numbers
    for wrong in ({"a": {"bits": 5}}, {"a(": {"bits": 8}}, ["a"]):
        with pytest.raises(LoadError, match=r"quantization_config\.(bits|extra_config) is"):
            gptq_awq.read_auto_round_config(config | {"extra_config": wrong})
