"""llama.cpp's encoders of images beside GGUF language models, against the folders that they were made from."""

from __future__ import annotations

import functools
import os
import re
import reprlib
import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.encoded_media import answer_about_image, encode_media
from support.gguf_files import close_writer
from support.media_requests import random_image
from support.multimodal_models import multimodal_folder, write_multimodal_model
from support.projector_files import ENCODERS, convert_multimodal, write_projector
from support.tiny_models import models_home

from parley import hub
from parley.gguf.folder import choose_projector, unpack_gguf
from parley.gguf.header import GgufError, GgufModel, read_model
from parley.gguf.projectors.projector_tensors import projector_tensors
from parley.gguf.projectors.whole_model import add_marks, processor_config, whole_config
from parley.model.checkpoint.files import Checkpoint, read_config
from parley.types import ModelOverrides

FAMILIES = ["gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@functools.cache
def family_folder(family):
    """Return a folder of a family that llama.cpp can have as well, written once."""
    if family != "gemma3":
        return multimodal_folder(family)
    layers = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
    return write_multimodal_model(models_home() / "gemma3-of-six-layers", family, text=layers)


@functools.cache
def family_files(family):
    """Return the files of a family's model and encoder, written once."""
    return convert_multimodal(models_home() / f"{family}-gguf", family_folder(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_of_an_image_are_those_of_the_folder(family):
    image = random_image(3, 70, 50)
    expected_text, expected = encode_media(family_folder(family), "image", image)
    text, embeddings = encode_media(unpack_gguf(*family_files(family)), "image", image)
    assert text == expected_text
    assert len(embeddings) == len(expected)
    assert all(map(torch.equal, embeddings, expected))


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5"])
def test_answers_about_images_are_those_of_the_folder(family, monkeypatch):
    """The encoder's file lies beside the model's, and nobody names it."""
    assert answer_about_image(family_files(family)[0], monkeypatch) == answer_about_image(
        family_folder(family), monkeypatch
    )


def test_quantized_encoders_have_the_numbers_of_their_blocks(tmp_path):
    files = convert_multimodal(tmp_path, family_folder("qwen2_5_vl"), "Q8_0")
    stored, original = Checkpoint(unpack_gguf(*files)), Checkpoint(family_folder("qwen2_5_vl"))
    name = "visual.blocks.1.attn.qkv.weight"
    parts = original.view_tensor(name, 96, 32).chunk(3)
    rounded = [gguf.quants.quantize(part.numpy(), gguf.GGMLQuantizationType.Q8_0) for part in parts]
    expected = np.concatenate([gguf.quants.dequantize(part, gguf.GGMLQuantizationType.Q8_0) for part in rounded])
    assert torch.equal(stored.view_tensor(f"model.{name}", 96, 32), torch.from_numpy(expected))


@pytest.mark.parametrize(
    ("family", "name"),
    [("gemma3", "vision_tower.encoder.layers.0.mlp.fc1.weight"), ("qwen2_vl", "model.visual.blocks.0.mlp.fc1.weight")],
)
def test_encoder_whose_layers_have_swapped_names_is_the_same(family, name, tmp_path):
    """As early converters wrote MLPs."""
    files = convert_multimodal(tmp_path, family_folder(family), swaps_layers=True)
    swapped, usual = unpack_gguf(*files), unpack_gguf(*family_files(family))
    assert read_config(swapped)["vision_config"] == read_config(usual)["vision_config"]
    shape = Checkpoint(usual).tensor_shape(name)
    assert torch.equal(Checkpoint(swapped).view_tensor(name, *shape), Checkpoint(usual).view_tensor(name, *shape))


def changed(path, **changes):
    """Return the header of a file with other metadata."""
    model = read_model(path)
    metadata = model.metadata | {key.replace("__", "."): value for key, value in changes.items()}
    return GgufModel([path], metadata, model.tensors)


def test_token_that_gemma_files_lack_takes_the_place_of_an_unused_one():
    """Its own place is after the last row of their embedding."""
    encoder = read_model(family_files("gemma3")[1])
    tokens = ["<unused1>", "<unused2>", "a", "<start_of_image>", "<end_of_image>"]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [5, 5, 1, 3, 4]}
    marked = add_marks(encoder, metadata, "x.gguf")
    assert marked["tokenizer.ggml.tokens"] == ["<unused1>", "<image_soft_token>", "a", *tokens[3:]]
    assert marked["tokenizer.ggml.token_type"] == [5, 3, 1, 3, 3]
    metadata["tokenizer.ggml.tokens"] = ["u1", "u2", *tokens[2:]]
    with pytest.raises(GgufError, match=r"^x\.gguf has no token <image_soft_token>, which stands for an image$"):
        add_marks(encoder, metadata, "x.gguf")


TOKENS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
GEMMA_TOKENS = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
TEXT_TYPES = {"gemma3": "gemma3_text", "qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_vl_text"}


def language_model_of(family):
    """Return what ``whole_config`` reads of the config of a family's language model."""
    return {
        "model_type": TEXT_TYPES.get(family, f"{family}_text"),
        "hidden_size": 64,
        "dtype": "float32",
        "tie_word_embeddings": True,
        "quantization_config": {},
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"clip__projector_type": "made-up"}, "is an encoder of the kind made-up, which is not read; .*, gemma3, "),
        ({"clip__projector_type": "gemma3"}, "is the encoder of a model of the type gemma3_text, and not of qwen2_vl"),
        ({"clip__vision__projection_dim": 65}, "makes embeddings of 65 numbers, but the model's have 64"),
        ({"clip__vision__block_count": 0}, "gives clip.vision.block_count as 0, so the encoder's shape is unknown"),
        ({"general__type": "model", "general__architecture": "llama"}, "is no image or audio encoder"),
    ],
)
def test_error_names_what_does_not_fit(changes, reason):
    encoder = changed(family_files("qwen2_5_vl")[1], **changes)
    with pytest.raises(GgufError, match=rf"^mmproj-model\.gguf {reason}"):
        whole_config(encoder, language_model_of("qwen2_5_vl"), TOKENS)


@pytest.mark.parametrize(
    ("family", "field", "value", "reason"),
    [
        ("gemma3", "block_count", 1 << 62, ", but has the tensors of 3"),
        ("qwen2_5_vl", "block_count", 1 << 62, ", but has the tensors of 4"),
        ("qwen2_vl", "block_count", 1, ", but has the tensors of 2"),
        ("gemma3", "attention.head_count", 3, "; 32 numbers are not so many heads"),
        ("qwen2_vl", "attention.head_count", 16, "; 32 numbers are not so many heads of a multiple of 4"),
        ("gemma3", "attention.layer_norm_epsilon", 0.0, "; it is a positive number"),
        ("gemma3", "attention.layer_norm_epsilon", float("nan"), "; it is a positive number"),
        ("gemma3", "attention.layer_norm_epsilon", "tiny", "; it is a positive number"),
        ("qwen2_5_vl", "window_size", 27, "; it is 28 pixels or more"),
        ("qwen3_vl", "is_deepstack_layers", [True] * 5, "; it is true or false for each of 4 blocks"),
        ("qwen3_vl", "is_deepstack_layers", ["yes"] * 4, "; it is true or false for each of 4 blocks"),
        ("gemma3", "image_std", [0.5, 0.5, 0.0], "; it is three positive numbers"),
        ("qwen2_vl", "image_min_pixels", 1 << 62, "; image_max_pixels is 50176 only"),
    ],
)
def test_error_names_the_field_whose_value_is_impossible(family, field, value, reason):
    encoder = changed(family_files(family)[1], **{f"clip.vision.{field}": value})
    with pytest.raises(GgufError) as raised:
        whole_config(encoder, language_model_of(family), TOKENS + GEMMA_TOKENS)
        processor_config(encoder)
    assert str(raised.value) == f"mmproj-model.gguf gives clip.vision.{field} as {reprlib.repr(value)}{reason}"


def test_image_of_fewer_patches_than_an_embedding_has_is_refused():
    encoder = changed(family_files("gemma3")[1], clip__vision__image_size=6)
    with pytest.raises(GgufError, match=r"^mmproj-model\.gguf makes an embedding of 2 patches in a row, but has 0$"):
        whole_config(encoder, language_model_of("gemma3"), GEMMA_TOKENS)


def test_positions_that_make_no_square_are_refused():
    encoder = read_model(family_files("qwen3_vl")[1])
    positions = encoder.tensors["v.position_embd.weight"]
    tensors = encoder.tensors | {positions.name: positions._replace(shape=(63, *positions.shape[1:]))}
    with pytest.raises(
        GgufError, match=r"^mmproj-model\.gguf has 63 positions in v\.position_embd\.weight, which make no"
    ):
        whole_config(GgufModel(encoder.paths, encoder.metadata, tensors), language_model_of("qwen3_vl"), TOKENS)


def test_encoder_in_several_files_is_refused():
    encoder = read_model(family_files("qwen2_vl")[1])
    parts = GgufModel(encoder.paths * 2, encoder.metadata, encoder.tensors)
    with pytest.raises(GgufError, match=r"^mmproj-model\.gguf is one of 2 parts; an encoder is read from one"):
        whole_config(parts, language_model_of("qwen2_vl"), TOKENS)


def test_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "mmproj.gguf")
    with pytest.raises(GgufError, match=r"^mmproj\.gguf is a pipe or a device, and not a file$"):
        unpack_gguf(family_files("qwen2_vl")[0], tmp_path / "mmproj.gguf")


@pytest.mark.parametrize("name", ["v.blk.0.ls1.weight", f"v.blk.{'9' * 5000}.ln1.weight"])
def test_unknown_tensors_of_an_encoder_are_refused(name, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "mmproj.gguf", "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_projector_type("gemma3")
    writer.add_tensor(name, np.ones(4, np.float32))
    close_writer(writer)
    with pytest.raises(GgufError, match=rf"^mmproj\.gguf has the tensor {re.escape(name[:100])}, which its kind does"):
        projector_tensors(read_model(tmp_path / "mmproj.gguf"))


def test_encoder_next_to_a_model_is_found_unless_another_is_named(tmp_path, caplog):
    model, encoder = (shutil.copy(path, tmp_path) for path in family_files("qwen2_5_vl"))
    other = family_files("gemma3")[1]
    with_images = hub.resolve_model(model)
    assert read_config(with_images)["model_type"] == "qwen2_5_vl"
    assert hub.resolve_model(str(tmp_path)) == with_images
    assert hub.resolve_model(model, overrides=ModelOverrides(mmproj=encoder)) == with_images
    templated = hub.resolve_model(model, overrides=ModelOverrides(chat_template="{{ messages }}"))
    assert Checkpoint(templated).tensor_names == Checkpoint(with_images).tensor_names
    text_only = hub.resolve_model(model, overrides=ModelOverrides(mmproj="none"))
    assert read_config(text_only)["model_type"] == "qwen2_vl_text" and not caplog.records
    shutil.copy(other, tmp_path)
    shutil.copy(other, encoder)
    assert hub.resolve_model(model) == text_only
    shutil.copy(other, tmp_path / "mmproj-other.gguf")
    assert hub.resolve_model(model) == text_only
    assert [record.message for record in caplog.records] == [
        "model.gguf reads text only: mmproj-model.gguf is the encoder of a model of the type gemma3_text, and not of "
        "qwen2_vl_text.",
        "model.gguf reads text only: its folder has 2 mmproj files; name one (--mmproj).",
    ]


def test_damaged_encoder_next_to_a_model_is_ignored_unless_it_is_named(tmp_path, caplog):
    model, folder = shutil.copy(family_files("qwen2_vl")[0], tmp_path), family_folder("qwen2_vl")
    tensors = load_file(folder / "model.safetensors")
    names = [name for name in tensors if name.startswith(ENCODERS) and "1.norm2.bias" not in name]
    encoder = {name: tensors[name] for name in names}
    path = write_projector(tmp_path / "mmproj-model.gguf", folder, read_config(folder), encoder, "F32")
    reason = "mmproj-model.gguf has no tensor v.blk.1.ln2.bias, which other blocks have."
    assert read_config(hub.resolve_model(model))["model_type"] == "qwen2_vl_text"
    assert [record.message for record in caplog.records] == [f"model.gguf reads text only: {reason}"]
    with pytest.raises(hub.ModelMissing) as raised:
        hub.resolve_model(model, overrides=ModelOverrides(mmproj=str(path)))
    assert str(raised.value) == f"{model} cannot be served: {reason}"


@pytest.mark.parametrize(
    ("model", "mmproj", "reason"),
    [
        (
            "gguf",
            "gemma3",
            "mmproj-model.gguf is the encoder of a model of the type gemma3_text, and not of qwen2_vl_t",
        ),
        ("gguf", "/nowhere/mmproj.gguf", "mmproj.gguf is missing"),
        ("/nowhere/model.gguf", "gemma3", "there is no such file"),
        ("folder", "gemma3", "it is no GGUF file, and mmproj "),
        ("parley-demo", "gemma3", "it is no GGUF file, and mmproj "),
    ],
)
def test_encoder_that_is_named_and_cannot_be_used_is_an_error(model, mmproj, reason):
    known = {"gguf": str(family_files("qwen2_5_vl")[0]), "folder": str(family_folder("qwen2_5_vl"))}
    named = str(family_files("gemma3")[1]) if mmproj == "gemma3" else mmproj
    with pytest.raises(hub.ModelMissing, match=rf" cannot be served: {reason}"):
        hub.resolve_model(known.get(model, model), overrides=ModelOverrides(mmproj=named))


def test_encoder_in_a_repository_is_near_the_model_in_place_and_bits():
    names = ["mmproj-F16.gguf", "mmproj-m-Q8_0.gguf", "a/mmproj-BF16.gguf", "b/m-mmproj-f32.gguf", "m-Q4_K_M.gguf"]
    assert choose_projector(names, "m-Q4_K_M.gguf") == choose_projector(names, "c/m-Q8_0.gguf") == "mmproj-m-Q8_0.gguf"
    assert choose_projector(names, "m-BF16.gguf") == "mmproj-F16.gguf"
    assert choose_projector(names, "a/m-Q4_0.gguf") == "a/mmproj-BF16.gguf"
    assert choose_projector(names, "b/c/m-Q4_0.gguf") == "b/m-mmproj-f32.gguf"
    assert choose_projector(["m-Q4_K_M.gguf", "a/mmproj-F16.gguf", "mmproj.md"], "m-Q4_K_M.gguf") is None
