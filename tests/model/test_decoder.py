"""The fused decoder computes the same as Transformers, and a model that cannot be loaded gives a one-sentence error."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import replace

import pytest
import torch
from support import tiny_models
from torch.utils._python_dispatch import TorchDispatchMode

from parley import native
from parley.core.sequence import PAGE_SIZE, Sequence, Step, StepRow
from parley.model.checkpoint import quantization
from parley.model.checkpoint.files import Checkpoint, LoadError, read_config
from parley.model.load import fuse, memory, plan, weight_size
from parley.model.load.decoder_weights import DecoderWeights
from parley.model.load.linear_parts import LayerLinearParts
from parley.model.load.loader import load_runner
from parley.model.load.numeric_check import decoder_check
from parley.model.load.tensor_names import check_tensor_names
from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.network import PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.model.networks.rope import RopeConfig, Unfusable
from parley.native.layout import RowSpan
from parley.types import EngineRequest, ParleySettings, SamplingOptions

LINEAR_SCALING = {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}}
FUSED_SHAPES = [
    ("llama", {}),
    ("llama3", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    ("llama", LINEAR_SCALING),
    ("llama", {"head_dim": 48, "num_key_value_heads": 4}),
    ("mistral", {}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
    ("phi3", {}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
]


PLAIN_WEIGHTS = quantization.read_quantization({}, "none")


def fuse_checkpoint(checkpoint, shape, dtype):
    device = torch.device("cpu")
    weights = DecoderWeights(checkpoint, shape, PLAIN_WEIGHTS, dtype, device)
    check_tensor_names(weights)
    return fuse.fuse_decoder(weights, 64, lambda fraction: None)


def load_float32_runner(folder, **settings):
    settings = {"dtype": "float32", "kv_memory": 4 << 20, "max_batch": 8} | settings
    return load_runner(ParleySettings(model=str(folder), **settings), lambda stage, fraction: None)


def generate_greedy(runner, prompts: list[list[int]], count: int) -> list[list[tuple[int, float]]]:
    """Greedy (token, logprob) pairs of each prompt; all run in one batch, with each prompt in one chunk."""
    sequences = []
    for i, prompt in enumerate(prompts):
        request = EngineRequest(str(i), prompt, count, SamplingOptions(temperature=0.0), logprobs=0)
        sequence = Sequence(str(i), 0, request, list(prompt), len(prompt), 0, i)
        sequence.slot = i
        block_count = -(-(len(prompt) + count) // PAGE_SIZE)
        first_block = sum(len(row_sequence.block_table) for row_sequence in sequences)
        sequence.block_table = list(range(first_block, first_block + block_count))
        sequences.append(sequence)
        runner.admit_sequence(sequence)
    results = [[] for _ in prompts]
    fresh_blocks = [block for sequence in sequences for block in sequence.block_table]
    for _ in range(count):
        rows = [
            StepRow(row_sequence, row_sequence.computed, len(row_sequence) - row_sequence.computed, True)
            for row_sequence in sequences
        ]
        for sequence, sampled, result in zip(
            sequences, runner.run_step(Step(rows, fresh_pages=fresh_blocks)), results, strict=True
        ):
            assert sampled.error is None
            sequence.computed = len(sequence)
            sequence.tokens += sampled.tokens
            result.append((*sampled.tokens, sampled.scores[0].logprob))
        fresh_blocks = []
    for sequence in sequences:
        runner.release_slot(sequence)
    return results


def transformers_greedy(folder, prompt: list[int], count: int) -> list[tuple[int, float]]:
    """The same from Transformers, with one forward pass over all tokens for each new token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids, result = list(prompt), []
    with torch.inference_mode():
        for _ in range(count):
            scores = model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
            ids.append(int(scores.argmax()))
            result.append((ids[-1], float(scores.max())))
    return result


@pytest.mark.parametrize(("architecture", "overrides"), FUSED_SHAPES)
def test_fused_decoder_matches_transformers(architecture, overrides, tmp_path):
    folder = tiny_models.write_model(tmp_path, architecture, **overrides)
    runner, info = load_float32_runner(folder)
    assert info.fused
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, tiny_models.VOCAB, (size,), generator=generator).tolist() for size in (1, 7, 70, 190)]
    for prompt, actual in zip(prompts, generate_greedy(runner, prompts, 6), strict=True):
        expected_tokens = transformers_greedy(folder, prompt, 6)
        assert [token for token, _ in actual] == [token for token, _ in expected_tokens]
        assert max(abs(a - b) for (_, a), (_, b) in zip(actual, expected_tokens, strict=True)) < 1e-4


@pytest.mark.parametrize("architecture", ["llama3", "mistral", "qwen2", "qwen3", "phi3"])
def test_fused_decoder_matches_the_unfused_model(architecture):
    folder = tiny_models.model_folder(architecture)
    prompts = [list(range(5, 5 + length)) for length in (3, 61, 100)]
    fused, plain = load_float32_runner(folder), load_float32_runner(folder, lowering=False)
    assert fused[1].fused and not plain[1].fused
    assert fused[1].parameters == plain[1].parameters
    for actual, expected_tokens in zip(
        generate_greedy(fused[0], prompts, 8), generate_greedy(plain[0], prompts, 8), strict=True
    ):
        assert [token for token, _ in actual] == [token for token, _ in expected_tokens]
        assert max(abs(a - b) for (_, a), (_, b) in zip(actual, expected_tokens, strict=True)) < 1e-4


def test_sharded_checkpoint_loads_like_a_single_file(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tiny_models.model_folder("qwen3")
    prompts = [[5, 6, 7, 8, 9]]
    single_file_tokens = generate_greedy(load_float32_runner(folder)[0], prompts, 5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    runner, info = load_float32_runner(tmp_path)
    assert info.fused
    assert generate_greedy(runner, prompts, 5) == single_file_tokens


class OperatorCounter(TorchDispatchMode):
    """Counts operators that compute or copy; views are not counted."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, list | tuple) else result
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        inplace = function._schema.is_mutable
        if inplace or source is None or first.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
            self.names.append(function.__name__.split(".")[0])
        return result


@pytest.mark.parametrize(("architecture", "most"), [("llama", 28), ("qwen2", 28), ("qwen3", 30)])
def test_fused_layer_runs_few_torch_operators(architecture, most):
    def count_operators(layers: int) -> list[str]:
        runner, info = load_float32_runner(
            tiny_models.model_folder(architecture, num_hidden_layers=layers), dtype="bfloat16"
        )
        assert info.fused
        positions = torch.arange(3)
        spans = [RowSpan(i, 1, 1, [i]) for i in range(3)]
        batch = PackedBatch(positions, torch.zeros(3, dtype=torch.int64), positions * PAGE_SIZE, spans)
        with torch.inference_mode(), OperatorCounter() as counter:
            runner.network.compute_hidden(batch, runner.pages)
        return counter.names

    two_layers, five_layers = count_operators(2), count_operators(5)
    if native.packed_layout_id() is not None:
        most = 0  # all layers run in one call
    assert len(five_layers) - len(two_layers) <= 3 * most, five_layers[len(two_layers) // 2 :]


def test_load_rejects_fused_decoder_with_wrong_results(monkeypatch, caplog):
    """Guards against serving wrong answers from a checkpoint that only looks like a known architecture."""
    folder = tiny_models.model_folder("qwen3")
    parts = LayerLinearParts.linear_parts

    def swap_gate_and_up(self, layer):
        layer_parts = parts(self, layer)
        if self._weights.dtype == torch.bfloat16:  # the reference reads in float32 and stays correct
            layer_parts["gate_up"] = layer_parts["gate_up"][::-1]
        return layer_parts

    checkpoint = Checkpoint(folder)
    shape = read_decoder_config(read_config(folder))

    def error():
        decoder = fuse_checkpoint(checkpoint, shape, torch.bfloat16)
        return decoder_check.decoder_deviation(decoder, checkpoint, PLAIN_WEIGHTS)

    assert error() < decoder_check.DECODER_TOLERANCE[torch.bfloat16] / 2
    monkeypatch.setattr(LayerLinearParts, "linear_parts", swap_gate_and_up)
    assert error() > decoder_check.DECODER_TOLERANCE[torch.bfloat16] * 2
    with caplog.at_level("INFO"):
        assert not load_float32_runner(folder, dtype="bfloat16")[1].fused
    assert "not used" in caplog.text


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_decoder_check_reads_positions_on_three_axes(monkeypatch, is_interleaved):
    folder = tiny_models.model_folder("qwen3")
    checkpoint, shape = Checkpoint(folder), read_decoder_config(read_config(folder))
    pairs = shape.rope.rotary // 2
    section = (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3)
    rope = replace(shape.rope, mrope_section=section, mrope_interleaved=is_interleaved)
    decoder = fuse_checkpoint(checkpoint, replace(shape, ropes=(rope,)), torch.float32)
    assert decoder_check.decoder_deviation(decoder, checkpoint, PLAIN_WEIGHTS) < 1e-5
    tables = decoder.position_tables
    monkeypatch.setattr(tables, "frequency_axes", tables.frequency_axes.flip(0))
    monkeypatch.setattr(decoder, "select_layers", lambda layers, config: decoder)
    assert decoder_check.decoder_deviation(decoder, checkpoint, PLAIN_WEIGHTS) > 1e-3


def test_nan_weights_fail_the_decoder_check(tmp_path):
    """Comparisons with NaN are false, so the check must not accept a NaN deviation."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_models.model_folder("llama"), tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    checkpoint, shape = Checkpoint(folder), read_decoder_config(read_config(folder))
    decoder = fuse_checkpoint(checkpoint, shape, torch.float32)
    assert (
        not decoder_check.decoder_deviation(decoder, checkpoint, PLAIN_WEIGHTS)
        <= decoder_check.DECODER_TOLERANCE[torch.float32]
    )


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "beam"},
        {"hidden_act": "xielu"},
        {"hidden_size": None},
        {"num_attention_heads": "4"},
        {"num_key_value_heads": 3},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "yarn"}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}},
        {"rope_parameters": {"rope_type": "linear"}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "chunked", "x"]},
    ],
)
def test_unknown_config_is_not_fused(change):
    config = read_config(tiny_models.model_folder("qwen3")) | change
    with pytest.raises(Unfusable):
        read_decoder_config(config)


@pytest.mark.parametrize(
    "fields",
    [
        {"factor": 32.0, "truncate": False, "original_max_position_embeddings": 512},
        {"factor": 4.0, "beta_fast": 20, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.3},
        {"factor": 40, "attention_factor": 1.1, "original_max_position_embeddings": 64},
        {"factor": 2.0, "rope_theta": 2.0, "original_max_position_embeddings": 16},  # the ramp has no width
    ],
)
def test_yarn_equals_that_of_transformers(fields):
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "yarn", "rope_theta": 10000.0} | fields
    config = read_config(tiny_models.model_folder("qwen3")) | {"rope_parameters": parameters}
    rope = read_decoder_config(config).rope
    expected, scale = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.for_model(**config))
    assert torch.allclose(rope.inverse_frequencies(), expected, rtol=1e-6, atol=0) and rope.scale == pytest.approx(
        scale
    )
    assert not torch.equal(rope.inverse_frequencies(), RopeConfig(rope.theta, rope.rotary).inverse_frequencies())


def test_unused_tensor_prevents_fusing(tmp_path):
    """A tensor that the fused decoder ignores means that the model computes something else."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_models.model_folder("llama"), tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}, folder / "model.safetensors")
    shape = read_decoder_config(read_config(folder))
    with pytest.raises(Unfusable, match="q_norm"):
        fuse_checkpoint(Checkpoint(folder), shape, torch.float32)


def test_load_reports_progress_and_model_info():
    fractions = []
    folder = tiny_models.model_folder("qwen3")
    settings = ParleySettings(model=str(folder), dtype="float32", kv_memory=1 << 20)
    runner, info = load_runner(settings, lambda stage, fraction: fractions.append(fraction))
    assert fractions == sorted(fractions) and fractions[0] == 0.0 and fractions[-1] == 1.0 and len(fractions) > 5
    assert (info.architecture, info.dtype, info.device, info.fused) == ("Qwen3ForCausalLM", "float32", "cpu", True)
    assert info.kv_pages == runner.page_count == runner.pages.page_count
    assert info.kv_bytes <= 1 << 20
    assert 0 <= info.weights_bytes - 4 * info.parameters < 4000  # the fused decoder repeats head norm weights
    assert info.vocab_size == tiny_models.VOCAB


def test_context_length_is_limited_by_the_kv_cache(caplog):
    folder = tiny_models.model_folder("llama")
    with caplog.at_level("INFO"):
        runner, info = load_float32_runner(folder, kv_memory=100_000)
    assert info.max_model_len == runner.page_count * PAGE_SIZE < 2048
    assert "reduced" in caplog.text
    for length in (1, 2, 16, 17, 50):
        assert load_float32_runner(folder, max_model_len=length)[1].max_model_len == length


@pytest.mark.parametrize("inner", ["max_position_embeddings", "n_positions"])
def test_context_length_is_read_from_the_text_config(inner):
    assert plan.read_context_length({"model_type": "gemma3", "text_config": {inner: 131072}}, None) == 131072
    assert plan.read_context_length({"max_position_embeddings": 64, "text_config": None}, 32) == 32


def test_kv_cache_is_no_larger_than_the_batch_needs():
    runner, _ = load_float32_runner(
        tiny_models.model_folder("llama"), kv_memory=1 << 40, max_batch=2, max_model_len=100
    )
    assert runner.page_count == 2 * 7


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("lowering", [True, False])
def test_int8_kv_cache_is_smaller_and_close_to_plain(dtype, lowering):
    folder = tiny_models.model_folder("qwen3")
    plain_runner, info = load_float32_runner(folder, kv_memory=100_000, max_batch=64, dtype=dtype, lowering=lowering)
    int8_runner, int8_info = load_float32_runner(
        folder, kv_memory=100_000, max_batch=64, dtype=dtype, lowering=lowering, kv_dtype="int8"
    )
    assert int8_info.kv_bytes <= 100_000 and int8_info.kv_pages >= 1.5 * info.kv_pages and int8_info.kv_dtype == "int8"
    page_bytes = sum(int8_runner.pages.layer_pool(i).data[0].nbytes for i in range(len(int8_runner.pages.kv_layers)))
    assert int8_info.kv_bytes == int8_info.kv_pages * page_bytes
    prompts = [list(range(5, 25)), [7]]
    for plain_tokens, int8_tokens in zip(
        generate_greedy(plain_runner, prompts, 4), generate_greedy(int8_runner, prompts, 4), strict=True
    ):
        assert plain_tokens[0][0] == int8_tokens[0][0] and abs(plain_tokens[0][1] - int8_tokens[0][1]) < 0.3


def copy_model_folder(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "model")


def pack_tensors(data: bytes, **offsets: list[int]) -> bytes:
    """Return a safetensors file with ``data`` and tensors of one float each."""
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": place} for name, place in offsets.items()}
    packed = json.dumps(header).encode()
    return struct.pack("<Q", len(packed)) + packed + data


def test_load_errors_are_single_sentences(tmp_path):
    folder = copy_model_folder(tiny_models.model_folder("llama"), tmp_path)
    weights, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    intact_bytes = weights.read_bytes()

    def assert_load_fails(match, **settings):
        with pytest.raises(LoadError, match=match) as failure:
            load_float32_runner(settings.pop("folder", folder), **settings)
        assert str(failure.value).endswith(".") and "\n" not in str(failure.value)

    def write_config(**change):
        (folder / "config.json").write_text(json.dumps(config | change))

    assert_load_fails("no model folder", folder=tmp_path / "nowhere")
    assert_load_fails("no config.json", folder=tmp_path)
    assert_load_fails("dtype int3 is unknown", dtype="int3")
    assert_load_fails("device tpu", device="tpu")
    assert_load_fails("at least 1", max_model_len=0)
    assert_load_fails("at most 2048", max_model_len=4096)
    assert_load_fails("int7 is unknown", kv_dtype="int7")
    assert_load_fails("one page", kv_memory=10)
    no_room = r"not enough memory for a KV cache of [\d,]+ tokens\. .* a lower --kv-memory or --max-batch\."
    assert_load_fails(no_room, kv_memory=1 << 58, max_batch=1 << 50)

    (folder / "config.json").write_text("{")
    assert_load_fails("not valid JSON")
    write_config(model_type=None)
    assert_load_fails("model_type")
    write_config(quantization_config={"quant_method": "aqlm"})
    assert_load_fails("aqlm")
    write_config(quantization_config="x")
    assert_load_fails("quantized")
    write_config(intermediate_size=161)
    assert_load_fails("Tensor model.layers.0.mlp.gate_proj.weight has shape")
    write_config(intermediate_size=10**300)
    assert_load_fails(r"the config asks for \[10{17}\.\.\.0{19}, 64\]")
    write_config(num_hidden_layers=3)
    assert_load_fails("no tensor model.layers.2")
    write_config(num_hidden_layers=50_000)
    assert_load_fails("no tensor model.layers.49999")
    write_config(num_hidden_layers=1_000_000)
    assert_load_fails("config.json gives num_hidden_layers as 1000000; at most 65536 are possible")
    write_config(hidden_act="mish", intermediate_size=161)  # Transformers runs it
    assert_load_fails("cannot load this llama model: its tensors do not have the sizes that config.json gives")
    write_config(num_hidden_layers=-1)
    assert_load_fails("config.json gives num_hidden_layers as -1; it is a number of layers")
    write_config(text_config={"n_experts": 65537})
    assert_load_fails("config.json gives n_experts as 65537")
    write_config(**{"n_" * 1_000_000: 65537})  # would be searched for hours
    assert read_config(folder)["num_hidden_layers"] == 2
    write_config()

    for content, match in [
        (intact_bytes[:5], "too short"),
        (intact_bytes[:200], "cut off"),
        (intact_bytes[:-10], "cut off"),
        (struct.pack("<Q", 1 << 60) + intact_bytes[8:], "not a safetensors file"),
        (struct.pack("<Q", 4) + b"[1]x", "not valid JSON"),
        (struct.pack("<Q", 3) + b"[1]", "not an object"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "describes tensor a wrongly"),
        (
            struct.pack("<Q", 62) + b'{"a": {"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}     ' + b"1234",
            "describes tensor a wrongly",
        ),
        (
            struct.pack("<Q", 62) + b'{"a": {"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}     ',
            "describes tensor a",
        ),
        (
            struct.pack("<Q", 62) + b'{"a": {"dtype":"F32","shape":[3],"data_offsets":[0,4]}}       ' + b"1234",
            "wrong size",
        ),
        (pack_tensors(b"12345678", a=[4, 8], b=[8, 12]), "tensor b in model.safetensors is cut off"),
        (pack_tensors(b"12345678", a=[1 << 70, (1 << 70) + 4]), "tensor a in model.safetensors is cut off"),
        (
            pack_tensors(b"12345678", b=[3, 7], a=[0, 4]),
            "tensors a and b in model.safetensors overlap; the file is damaged",
        ),
    ]:
        weights.write_bytes(content)
        assert_load_fails(match)
    weights.unlink()
    assert_load_fails("neither model.safetensors nor")
    (folder / "pytorch_model.bin").touch()
    assert_load_fails("pickle")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    assert_load_fails("not a safetensors file of the same folder")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    assert_load_fails("missing")
    (folder / "model.safetensors.index.json").write_text("[]")
    assert_load_fails("JSON object")


def test_load_rejects_weights_larger_than_free_memory(monkeypatch):
    """Guards against running out of memory halfway through the weights."""
    for module in (memory, weight_size):
        monkeypatch.setattr(module, "free_device_memory", lambda device: 100_000)
    with pytest.raises(LoadError, match="only 0 MiB of memory are free"):
        load_float32_runner(tiny_models.model_folder("llama"))


def test_kv_cache_memory_is_allocated_on_first_use():
    """Guards against a large KV cache that fills the memory before any request uses it."""
    pages = PagedKV(one_large_layer(), 1 << 15, torch.bfloat16)  # 1 GiB

    def resident_bytes() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    bytes_before = resident_bytes()
    pages.clear_pages([1, 2, 3])
    assert resident_bytes() - bytes_before < 64 << 20


def one_large_layer():
    from parley.native.layout import LayerKV

    return [LayerKV(8, 64, 64)] * 1


def test_auto_dtype_follows_the_config():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert plan.resolve_dtype("auto", {"torch_dtype": "float32"}, cpu) is torch.float32
    assert plan.resolve_dtype("auto", {"dtype": "float16"}, cpu) is torch.bfloat16
    assert plan.resolve_dtype("auto", {}, cpu) is torch.bfloat16
    assert plan.resolve_dtype("float16", {"dtype": "float32"}, cpu) is torch.bfloat16
    assert plan.resolve_dtype("float16", {"dtype": "bfloat16"}, gpu) is torch.float16
    assert plan.resolve_dtype("auto", {"dtype": "float16"}, gpu) is torch.float16
    assert plan.resolve_dtype("auto", {}, gpu) is torch.bfloat16


def test_nan_logits_fail_only_their_own_row():
    """Guards against one sequence with NaN logits that fails the whole batch."""
    runner, _ = load_float32_runner(tiny_models.model_folder("qwen3"))
    logits = runner.network.compute_logits

    def break_second_row(hidden):
        result = logits(hidden)
        result[1, 7] = float("nan")
        return result

    healthy_results = [prompt[0] for prompt in generate_greedy(runner, [[5, 6], [7, 8], [9]], 1)]
    runner.network.compute_logits = break_second_row
    sequences = []
    for i, prompt in enumerate([[5, 6], [7, 8], [9]]):
        request = EngineRequest(str(i), prompt, 1, SamplingOptions(temperature=0.0), logprobs=0)
        sequences.append(Sequence(str(i), 0, request, list(prompt), len(prompt), 0, i, block_table=[i], slot=i))
        runner.admit_sequence(sequences[-1])
    first, second, third = runner.run_step(
        Step([StepRow(sequence, 0, len(sequence), True) for sequence in sequences], [0, 1, 2])
    )
    assert not second.tokens and "not numbers" in second.error
    assert [(*result.tokens, result.scores[0].logprob) for result in (first, third)] == [
        healthy_results[0],
        healthy_results[2],
    ]


def test_prompt_logprobs_do_not_depend_on_chunks():
    runner, _ = load_float32_runner(tiny_models.model_folder("qwen3"))
    prompt = torch.randint(3, tiny_models.VOCAB, (150,), generator=torch.Generator().manual_seed(2)).tolist()
    request = EngineRequest("a", prompt, 1, prompt_logprobs=2)

    def score_in_chunks(chunks):
        sequence = Sequence("a", 0, request, list(prompt), len(prompt), 0, 0, block_table=list(range(10)), slot=0)
        runner.admit_sequence(sequence)
        prompt_scores, computed = [], 0
        for count in chunks:
            (sampled,) = runner.run_step(
                Step(
                    [StepRow(sequence, computed, count, False, score_from=len(prompt_scores) + 1)],
                    list(range(10)) * (computed == 0),
                )
            )
            prompt_scores += sampled.prompt_scores
            computed += count
        return prompt_scores

    one_chunk_scores = score_in_chunks([150])
    assert len(one_chunk_scores) == 149  # the first token has no score, and the last one predicts no prompt token
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_models.model_folder("qwen3"), dtype=torch.float32)
    with torch.inference_mode():
        expected_logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for i, prompt_score in enumerate(one_chunk_scores):
        assert abs(prompt_score.logprob - float(expected_logprobs[i, prompt[i + 1]])) < 1e-4
        assert prompt_score.top_ids == expected_logprobs[i].topk(2).indices.tolist()
    for chunked_score, expected_score in zip(score_in_chunks([1, 99, 50]), one_chunk_scores, strict=True):
        assert abs(chunked_score.logprob - expected_score.logprob) < 1e-4


MINISTRAL3_ROPE = {"rope_type": "default", "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("model_type", "named", "members"),
    [
        *(("llama4_text", "floor_scale", {"floor_scale": value}) for value in ("x", None, 0)),
        ("llama4_text", "attn_scale", {"attn_scale": "x"}),
        ("llama4_text", "moe_layers", {"moe_layers": 1}),
        *(("phimoe", "router_jitter_noise", {"router_jitter_noise": value}) for value in (None, -0.01)),
        ("mpt", "attn_config", {"attn_config": "x"}),
        ("mpt", "alibi_bias_max", {"attn_config": {"alibi_bias_max": "x"}}),
        ("ministral3", "llama_4_scaling_beta", {"rope_parameters": MINISTRAL3_ROPE | {"llama_4_scaling_beta": "x"}}),
    ],
)
def test_malformed_member_of_a_family_is_named(model_type, named, members):
    with pytest.raises(Unfusable, match=named):
        read_decoder_config({"model_type": model_type} | members)
