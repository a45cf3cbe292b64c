"""GGUF files: every type of block against the gguf package, models against the folders that they were made from."""

from __future__ import annotations

import json
import re
import shutil
import struct

import gguf
import numpy as np
import pytest
import torch
from support.gguf_files import close_writer, write_folder, write_gguf
from support.grouped_products import largest_product_error

from parley import hub, native
from parley.gguf.folder import choose_gguf, unpack_gguf
from parley.gguf.header import BLOCK_TYPES, GgufError, read_model
from parley.model.checkpoint.files import Checkpoint, LoadError, read_config
from parley.model.checkpoint.gguf_blocks import decode_blocks, grouped_bits
from parley.model.checkpoint.quantization import read_plain_weight
from parley.model.checkpoint.weights import GgufBlockWeight
from parley.model.load.check import check_model
from parley.model.load.loader import load_runner
from parley.model.networks.config_reader import read_decoder_config
from parley.types import ParleySettings

LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


CPU = torch.device("cpu")
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# The gguf package does not decode Prism ML's types. Kernels read these types in more bits than files have:
PRISM_KINDS = ("Q1_0", "Q2_0")
WIDER_KINDS = (*PRISM_KINDS, "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "NVFP4")


@pytest.mark.parametrize(
    "number",
    [number for number, blocks in BLOCK_TYPES.items() if blocks.numbers > 1 and blocks.name not in PRISM_KINDS],
)
def test_decodes_random_blocks_to_the_bits_of_the_gguf_package(number):
    blocks, kind = BLOCK_TYPES[number], gguf.GGMLQuantizationType(number)
    assert (blocks.numbers, blocks.size) == gguf.GGML_QUANT_SIZES[kind] and kind.name == blocks.name
    raw = np.random.default_rng(number).integers(0, 256, (40, blocks.size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, kind)
    decoded = decode_blocks(torch.from_numpy(raw), blocks.name).numpy()
    assert np.array_equal(decoded, expected, equal_nan=True)


@pytest.mark.parametrize(("kind", "width", "count"), [("Q1_0", 1, 128), ("Q2_0", 2, 64), ("Q2_0", 2, 128)])
def test_decodes_blocks_of_one_and_two_bits(kind, width, count):
    source = np.random.default_rng(width)
    scales, bits = source.standard_normal(7).astype(np.float16), source.integers(0, 1 << width, (7, count))
    raw = np.zeros((7, 2 + count * width // 8), dtype=np.uint8)
    raw[:, :2] = scales[:, None].view(np.uint8)
    for number in range(count):
        raw[:, 2 + number * width // 8] |= (bits[:, number] << number * width % 8).astype(np.uint8)
    units = 2 * bits - 1 if width == 1 else bits - 1
    expected = scales[:, None].astype(np.float32) * units
    assert np.array_equal(decode_blocks(torch.from_numpy(raw), kind).numpy(), expected)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": LLAMA_3_ROPE, "rope_theta": 500000.0, "hidden_size": 256}),
        ("mistral", {"head_dim": 32}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
        ("phi3", {"sliding_window": 53}),
        ("gemma", {"head_dim": 32, "tie_word_embeddings": True}),
        ("gemma2", GEMMA | {"sliding_window": 45, "attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0}),
        ("gemma3_text", GEMMA | {"sliding_window": 33, "rope_theta": 1e6, "num_hidden_layers": 7}),
    ],
)
def test_reads_the_config_and_every_tensor_of_the_folder_that_a_file_was_made_from(model_type, fields, tmp_path):
    folder = write_folder(tmp_path / "folder", model_type, **fields)
    unpacked = unpack_gguf(write_gguf(tmp_path / "model.gguf", folder, "BF16"))
    stored, original = Checkpoint(unpacked), Checkpoint(folder)
    assert set(stored.tensor_names) == set(original.tensor_names)
    for name in stored.tensor_names:
        shape = original.tensor_shape(name)
        assert torch.equal(stored.view_tensor(name, *shape).float(), original.view_tensor(name, *shape).float()), name
    assert read_decoder_config(read_config(unpacked)) == read_decoder_config(read_config(folder))


def random_blocks(kind: str, rows: int, in_features: int) -> GgufBlockWeight:
    """Random blocks with scales that weights have, instead of any float16."""
    number, blocks = next(numbered_type for numbered_type in BLOCK_TYPES.items() if numbered_type[1].name == kind)
    raw = np.random.default_rng(number).integers(
        0, 256, (rows, in_features // blocks.numbers, blocks.size), dtype=np.uint8
    )
    places = {"Q3_K": [108], "Q6_K": [208], "Q2_K": [80, 82], "Q4_K": [0, 2], "Q5_K": [0, 2]}
    for at in (places | {"TQ1_0": [52], "TQ2_0": [64]}).get(kind, [0, 2]):
        if kind == "MXFP4":
            raw[..., 0] = 120 + raw[..., 0] % 8
        elif kind == "NVFP4":
            raw[..., :4] = raw[..., :4] % 64
        elif kind == "IQ1_M":  # four bits of the scale in each of four words
            raw[..., 53], raw[..., 55] = raw[..., 53] & 15, raw[..., 55] & 15 | 0x20
        elif at in (0, 52, 64) or "_1" in kind or "_K" in kind:
            raw[..., at + 1] = raw[..., at + 1] % 8 + 0x20  # 0.008 to 0.1
    return GgufBlockWeight(torch.from_numpy(raw).view(rows, -1), blocks)


@pytest.mark.parametrize("kind", [blocks.name for blocks in BLOCK_TYPES.values() if blocks.numbers > 1])
def test_multiplies_packed_blocks_as_the_decoded_weight(kind):
    parts = [random_blocks(kind, rows, 512) for rows in (102, 26)]
    x = torch.randn(9, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = GgufBlockWeight.pack_merged(parts, None, torch.bfloat16, torch.device("cpu"))
    actual = native.lm_head_logits(x, packed)
    decoded = torch.cat([part.decode_into(torch.empty(part.out_features, 512)) for part in parts])
    expected = (x.double() @ decoded.double().T).float()
    # Sums are float32. Weights in bf16 would be off by 1e-3
    assert (actual - expected).norm() / expected.norm() < largest_product_error()
    assert torch.equal(native.lm_head_logits(x[4:5], packed), actual[4:5])
    if native.packed_layout_id():
        assert packed.weight.nbytes * 8 == 128 * 512 * grouped_bits(kind)
        assert kind in WIDER_KINDS or packed.weight.nbytes <= 1.1 * sum(part.rows.nbytes for part in parts)


def test_keeps_the_types_of_merged_layers():
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    for kinds in (["Q4_K", "Q4_K", "Q6_K"], ["Q8_0", "Q5_K"], ["Q6_K", "Q4_1"]):
        parts = [random_blocks(kind, rows, 512) for kind, rows in zip(kinds, (64, 33, 40), strict=False)]
        ones = torch.ones(sum(part.out_features for part in parts), dtype=torch.bfloat16)  # as biases are read
        packed = GgufBlockWeight.pack_merged(parts, ones, torch.bfloat16, CPU)
        decoded = torch.cat([part.decode_into(torch.empty(part.out_features, 512)) for part in parts])
        is_packed = native.packed_layout_id() is not None
        decoded = decoded if is_packed else decoded.bfloat16().float()
        expected = x.float() @ decoded.T + 1
        assert (native.lm_head_logits(x, packed) - expected).norm() / expected.norm() < (2e-5 if is_packed else 4e-3)
        assert (
            not is_packed or packed.weight.nbytes < sum(part.rows.nbytes for part in parts) * 1.5
        )  # outputs are padded


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_loads_quantized_rows_in_the_order_of_the_heads(kind, tmp_path):
    folder = write_folder(tmp_path / "folder", "llama")
    unpacked = unpack_gguf(write_gguf(tmp_path / "model.gguf", folder, kind))
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"):
        out_features, in_features = Checkpoint(folder).tensor_shape(name)
        values = Checkpoint(folder).view_tensor(name, out_features, in_features).float()
        rounded = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[kind])
        expected = torch.from_numpy(gguf.quants.dequantize(rounded, gguf.GGMLQuantizationType[kind]))
        weight = read_plain_weight(Checkpoint(unpacked), name, out_features, in_features)
        assert torch.equal(weight.decode_into(torch.empty(out_features, in_features)), expected)
    settings = ParleySettings(model=str(unpacked), kv_memory=1 << 22)
    assert check_model(settings).load_caveat == ""
    assert load_runner(settings, lambda stage, fraction: None)[1].quantization == "gguf"


def test_serves_a_split_file_by_the_name_of_any_part_and_names_a_missing_one(tmp_path):
    source = write_gguf(tmp_path / "whole.gguf", write_folder(tmp_path / "folder", "qwen3"), "F16")
    whole, names = read_model(source), []
    parts = [tmp_path / f"model-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, part in enumerate(parts):
        shutil.copy(source, part) if number == 0 else None
    # The second part has the tensors, the first one the metadata
    data, first = source.read_bytes(), gguf.GGUFWriter(parts[0], "qwen3")
    for key, value in whole.metadata.items():
        if isinstance(value, list):
            first.add_array(key, value)
        elif key != "general.architecture":
            kind = {str: gguf.GGUFValueType.STRING, bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32}
            first.add_key_value(key, value, kind.get(type(value), gguf.GGUFValueType.FLOAT32))
    second = gguf.GGUFWriter(parts[1], "qwen3")
    for number, writer in enumerate((first, second)):
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
    for name, tensor in whole.tensors.items():
        dtype = {"F16": np.float16, "F32": np.float32}[tensor.blocks.name]
        names.append(name)
        (first if len(names) % 2 else second).add_tensor(
            name, np.frombuffer(data[tensor.start : tensor.end], dtype).reshape(tensor.shape)
        )
    close_writer(first)
    close_writer(second)
    folder = hub.resolve_model(str(parts[1]))
    assert folder == hub.resolve_model(str(parts[0]))
    expected, joined = Checkpoint(unpack_gguf(source)), Checkpoint(folder)
    assert sorted(joined.tensor_names) == sorted(expected.tensor_names)
    shape = joined.tensor_shape("model.norm.weight")
    assert torch.equal(
        joined.view_tensor("model.norm.weight", *shape), expected.view_tensor("model.norm.weight", *shape)
    )
    parts[1].unlink()
    with pytest.raises(hub.ModelMissing, match=r"model-00002-of-00002\.gguf is missing"):
        hub.resolve_model(str(parts[0]))


def test_a_scale_of_a_whole_weight_multiplies_the_numbers_of_nvfp4(tmp_path):
    folder = write_folder(tmp_path / "folder", "llama")
    model = read_model(write_gguf(tmp_path / "model.gguf", folder))
    path, queries = tmp_path / "scaled.gguf", model.tensors["blk.0.attn_q.weight"]
    raw = np.random.default_rng(0).integers(0, 120, (queries.shape[0], queries.shape[1] // 64 * 36), dtype=np.uint8)
    reader, writer = gguf.GGUFReader(model.paths[0]), gguf.GGUFWriter(path, "llama")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            values = field.contents()
            writer.add_key_value(key, values, field.types[0], field.types[1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        if tensor.name == queries.name:
            writer.add_tensor(tensor.name, raw, raw_dtype=gguf.GGMLQuantizationType.NVFP4)
            writer.add_tensor("blk.0.attn_q.scale", np.array([0.5], dtype=np.float32))
            writer.add_tensor("blk.0.attn_q.input_scale", np.array([3.0], dtype=np.float32))
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    close_writer(writer)
    stored, out, into = Checkpoint(unpack_gguf(path)), *queries.shape
    assert not [name for name in stored.tensor_names if name.endswith("scale")]
    weight = read_plain_weight(stored, "model.layers.0.self_attn.q_proj.weight", out, into)
    decoded = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.NVFP4)) * 0.5
    heads = read_config(unpack_gguf(path))["num_attention_heads"]
    expected = decoded.view(heads, -1, 2, into).transpose(1, 2).reshape(out, into)
    assert torch.equal(weight.decode_into(torch.empty(out, into)), expected)


def pack_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def pack_file(
    *,
    version: int = 3,
    tensors: list[tuple[str, list[int], int, int]] | None = None,
    counts: tuple[int, int] = (0, 0),
    data: int = 256,
) -> bytes:
    """Write a file by hand: with one metadata value, tensors (name, dimensions, type, offset), and ``data`` bytes."""
    tensors = tensors or []
    header = b"GGUF" + struct.pack("<IQQ", version, counts[0] or len(tensors), counts[1] or 1)
    header += pack_text("general.architecture") + struct.pack("<I", 8) + pack_text("llama")
    for name, dimensions, kind, offset in tensors:
        header += pack_text(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        header += struct.pack("<IQ", kind, offset)
    return header + bytes(-len(header) % 32) + bytes(data)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "x.gguf is not a GGUF file: it does not begin with GGUF"),
        (b"PK\3\4" * 9, "x.gguf is not a GGUF file: it does not begin with GGUF"),
        (
            b"version https://git-lfs.github.com/spec/v1",
            "x.gguf is only Git LFS's pointer to the file; run git lfs pull",
        ),
        (b"GGUF\3", "x.gguf is cut off: its header does not end within its 5 bytes"),
        (pack_file()[:40], "x.gguf is cut off or damaged: it states 20 characters in 40 bytes"),
        (pack_file(version=1), "x.gguf has version 1 of the format; 2 and 3 are read"),
        (
            pack_file(version=3 << 24),
            "x.gguf has version 50331648 of the format; it is big-endian, and only little-endian files are read",
        ),
        (
            pack_file(counts=(1 << 60, 0)),
            "x.gguf is cut off or damaged: it states 1152921504606846976 tensors in 352 bytes",
        ),
        (
            pack_file(counts=(0, 1 << 40)),
            "x.gguf is cut off or damaged: it states 1099511627776 metadata values in 352 bytes",
        ),
        (pack_file(tensors=[("a", [4, 9], 0, 0), ("a", [4], 0, 160)]), "x.gguf has the tensor a twice"),
        (
            pack_file(tensors=[("a", [4, 9], 0, 0), ("b", [4], 0, 128)]),
            "x.gguf is damaged: tensor b overlaps another one",
        ),
        (
            pack_file(tensors=[("a", [4], 0, 8)]),
            "x.gguf is damaged: tensor a begins at no multiple of 32 bytes",
        ),
        (pack_file(tensors=[("a", [33], 2, 0)]), "x.gguf is damaged: tensor a has shape [33] as Q4_0"),
        (pack_file(tensors=[("a", [1] * 5, 0, 0)]), "x.gguf is damaged: tensor a has 5 dimensions"),
        (pack_file(tensors=[("a", [64, 1 << 50], 0, 0)]), "ends at byte"),
        (pack_file(tensors=[("a", [256], 24, 0)]), "x.gguf stores tensor a as I8, which is not read; F32, "),
    ],
)
def test_refuses_a_malformed_file_in_one_sentence(content, reason, tmp_path):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(hub.ModelMissing) as refusal:
        hub.resolve_model(str(tmp_path / "x.gguf"))
    assert reason in str(refusal.value) and str(refusal.value).count("cannot be served") == 1
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("numbers", "size"), [(64, 18), (128, 34)])
def test_room_between_tensors_tells_the_two_forms_of_q2_0_apart(numbers, size, tmp_path):
    length = 64 * 128 // numbers * size  # bytes of 64 rows of 128 numbers
    tensors = [("a", [128, 64], 42, 0), ("b", [128, 64], 42, length)]
    (tmp_path / "x.gguf").write_bytes(pack_file(tensors=tensors, data=2 * length))
    read = read_model(tmp_path / "x.gguf").tensors
    assert [tuple(tensor.blocks[1:]) for tensor in read.values()] == [(numbers, size)] * 2


def test_never_raises_anything_else_for_a_file_that_is_cut_anywhere(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", write_folder(tmp_path / "folder", "llama"), "Q8_0").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 400, 7), *range(400, len(whole) - 32, 29999)]:
        cut.write_bytes(whole[:size])
        with pytest.raises(GgufError, match=r"^cut\.gguf "):
            unpack_gguf(cut)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"general.architecture": "made-up"}, "has the architecture made-up, which is none of the "),
        (
            {"general.architecture": "phi3", "phi3.expert_count": 8},
            "is a mixture of experts of the architecture phi3, which is not read from GGUF",
        ),
        ({"llama.block_count": None}, "gives llama.block_count as None, so the model's shape is unknown"),
        ({"llama.rope.dimension_count": "16"}, "gives llama.rope.dimension_count as '16'"),
        (
            {"tokenizer.ggml.model": "bert"},
            "has a tokenizer of the kind bert, which is not read; gpt2, llama and gemma4 are",
        ),
        (
            {"general.architecture": "clip"},
            "holds an image or audio encoder and no language model; name that, and this",
        ),
        (
            {"general.type": "mmproj"},
            "holds an image or audio encoder and no language model; name that, and this",
        ),
        ({"general.type": "adapter"}, "holds a LoRA adapter, which is not read from GGUF; name its model"),
        ({"general.type": "imatrix"}, "holds the statistics of a quantizer and no model"),
        ({"general.type": "vocab"}, "holds a vocabulary without weights"),
        ({"tokenizer.ggml.pre": None}, "names no pre-tokenizer, so texts would become wrong tokens; convert its model"),
        ({"tokenizer.ggml.pre": "klingon"}, "names the pre-tokenizer klingon, which is not known"),
        ({"tokenizer.ggml.pre": ["gpt-2"]}, "names the pre-tokenizer ['gpt-2'], which is not known"),
        ({"tokenizer.ggml.tokens": None}, "has no tokenizer: there is no list of texts tokenizer.ggml.tokens"),
    ],
)
def test_error_names_unsupported_parts_of_a_valid_gguf_file(changes, reason, tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "x.gguf", write_folder(tmp_path / "folder", "llama"))
    model = read_model(path)
    for key, value in changes.items():
        model.metadata[key] = value
    monkeypatch.setattr("parley.gguf.folder.read_model", lambda path: model)
    with pytest.raises(hub.ModelMissing, match=re.escape(reason)):
        hub.resolve_model(str(path))


def test_a_file_is_found_after_a_link_to_it_is_gone(tmp_path):
    real = write_gguf(tmp_path / "x.gguf", write_folder(tmp_path / "folder", "llama"))
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "x.gguf"
    link.symlink_to(real)
    unpacked = unpack_gguf(link)
    link.unlink()
    assert unpack_gguf(real) == unpacked
    assert Checkpoint(unpacked).tensor_names


def test_refuses_layers_that_differ_from_the_config_as_the_engine_does(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", write_folder(tmp_path / "folder", "llama"))
    folder = unpack_gguf(path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "xielu"}))
    with pytest.raises(LoadError, match="The weights of a GGUF file run on the fused decoder only, and its activation"):
        check_model(ParleySettings(model=str(folder), kv_memory=1 << 22))


def test_refuses_a_scale_that_is_no_number(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", write_folder(tmp_path / "folder", "llama"), "Q8_0")
    content = bytearray(path.read_bytes())
    (down,) = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.0.ffn_down.weight"]
    content[down.data_offset : down.data_offset + 2] = b"\x00\x7e"  # of the first block, a float16
    path.write_bytes(content)
    with pytest.raises(
        LoadError, match="Layer 0 cannot be packed: scales of q8_0" if native.packed_layout_id() else "fused decoder"
    ):
        load_runner(ParleySettings(model=str(unpack_gguf(path)), kv_memory=1 << 22), lambda stage, fraction: None)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
def test_refuses_rotary_factors_that_are_not_positive(factor, tmp_path):
    folder = write_folder(tmp_path / "folder", "llama", rope_parameters=LLAMA_3_ROPE, rope_theta=500000.0)
    path = write_gguf(tmp_path / "x.gguf", folder)
    content = bytearray(path.read_bytes())
    (factors,) = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "rope_freqs.weight"]
    content[factors.data_offset : factors.data_offset + factors.n_bytes] = (
        struct.pack("<f", factor) * factors.n_elements
    )
    path.write_bytes(content)
    with pytest.raises(GgufError, match=r"^x\.gguf divides frequencies by numbers that are not positive"):
        unpack_gguf(path)


def test_folder_with_several_gguf_models_needs_a_name(tmp_path):
    (tmp_path / "models").mkdir()
    path = write_gguf(tmp_path / "models" / "a.gguf", write_folder(tmp_path / "folder", "llama"))
    (tmp_path / "models" / "mmproj-a.gguf").write_bytes(b"")
    statistics = gguf.GGUFWriter(path.with_name("a-imatrix.gguf"), "llama")  # of a quantizer
    statistics.add_type("imatrix")
    close_writer(statistics)
    with pytest.raises(hub.ModelMissing, match=r"a-imatrix\.gguf holds the statistics of a quantizer and no model"):
        hub.resolve_model(str(path.with_name("a-imatrix.gguf")))
    assert hub.resolve_model(str(path.parent)) == hub.resolve_model(str(path))
    assert hub.served_name(str(path)) == "a" and hub.served_name("owner/name:Q4_K_M") == "owner/name:Q4_K_M"
    shutil.copy(path, path.with_name("b.gguf"))
    with pytest.raises(hub.ModelMissing, match=r"its folder has 2 GGUF models; name one of them, such as a\.gguf"):
        hub.resolve_model(str(path.parent))


def test_chooses_a_file_of_a_repository_by_its_quantization_or_name():
    parts = [f"Q8_0/big-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    names = ["m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-IQ4_XS.gguf", "mmproj-F16.gguf", *parts, "README"]
    assert choose_gguf(names, "q4_k_m", None) == ["m-Q4_K_M.gguf"]
    assert choose_gguf(names, "Q8_0", None) == parts
    assert choose_gguf(names, None, "m-UD-Q4_K_M.gguf") == ["m-UD-Q4_K_M.gguf"]
    assert choose_gguf(names, "Q4_K", None) == choose_gguf(names, "F16", None) == choose_gguf(names, "4_XS", None) == []
