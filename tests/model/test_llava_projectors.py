"""LLaVA's encoders in files of llama.cpp's first converter, against the folders that they were made from."""

from __future__ import annotations

import functools
import json
import os
import shutil

import pytest
import torch
from support.encoded_media import answer_about_image, encode_media
from support.media_requests import random_image
from support.multimodal_models import multimodal_folder
from support.projector_files import convert_multimodal
from support.tiny_models import models_home

from parley.gguf.folder import unpack_gguf
from parley.gguf.header import GgufError, GgufModel, read_model
from parley.gguf.projectors.table import PROJECTORS, find_projector
from parley.gguf.projectors.whole_model import add_marks, processor_config, whole_config
from parley.model.checkpoint.files import read_config

IS_NIGHT = bool(os.environ.get("PARLEY_NIGHTLY"))
TEXT = {"model_type": "llama", "hidden_size": 64, "dtype": "float32", "tie_word_embeddings": False}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@functools.cache
def family_folder(family):
    """Return a folder of a family whose processor pads images as the published LLaVA 1.5, written once."""
    if family != "llava":
        return multimodal_folder(family)
    folder = models_home() / "llava-that-pads"
    shutil.copytree(multimodal_folder(family), folder)
    processor = json.loads((folder / "processor_config.json").read_text())
    processor["image_processor"]["do_pad"] = True
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


@functools.cache
def family_files(family):
    """Return the files of a family's model and encoder, written once."""
    return convert_multimodal(models_home() / f"{family}-clip-gguf", family_folder(family))


@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_embeddings_are_those_of_the_folder(family):
    """The file has no block after the one whose output is used, and the layers of MLPs have swapped names."""
    image = random_image(3, 70, 50)
    expected_text, expected = encode_media(family_folder(family), "image", image)
    text, embeddings = encode_media(unpack_gguf(*family_files(family)), "image", image)
    assert text == expected_text
    assert len(embeddings) == len(expected) == 1
    assert torch.equal(embeddings[0], expected[0])


@pytest.mark.skipif(not IS_NIGHT, reason="seconds for each; PARLEY_NIGHTLY=1 tries them")
@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_answers_about_images_are_those_of_the_folder(family, monkeypatch):
    of_file = answer_about_image(family_files(family)[0], monkeypatch)
    assert of_file == answer_about_image(family_folder(family), monkeypatch)


def changed_file(family, **metadata):
    """Return the header of a family's encoder with other metadata; None takes a field away."""
    model = read_model(family_files(family)[1])
    changed = model.metadata | {key.replace("__", "."): value for key, value in metadata.items()}
    return GgufModel(model.paths, {key: value for key, value in changed.items() if value is not None}, model.tensors)


def test_early_files_name_no_kind():
    encoder = changed_file("llava", clip__projector_type=None)
    assert find_projector(encoder) is PROJECTORS["mlp"]
    encoder = changed_file("llava", clip__projector_type=None, clip__has_llava_projector=None)
    with pytest.raises(GgufError, match=r"^mmproj-model\.gguf is an encoder of the kind None, which is not read"):
        find_projector(encoder)


def test_embeddings_of_another_size_than_the_models_are_refused():
    with pytest.raises(GgufError, match=r"^mmproj-model\.gguf makes embeddings of 64 numbers, but"):
        whole_config(changed_file("llava"), TEXT | {"hidden_size": 32}, ["<image>"])


@pytest.mark.parametrize(
    ("family", "field", "value", "reason"),
    [
        ("llava", "feature_layer", [1, 2], "; only the output of the last block is read"),
        ("llava_next", "image_grid_pinpoints", [28, 56, 56], "; it is pairs of multiples of 28"),
        ("llava_next", "image_grid_pinpoints", [28, 50], "; it is pairs of multiples of 28"),
        ("llava_next", "image_grid_pinpoints", [], "; it is pairs of multiples of 28"),
    ],
)
def test_error_names_the_field_whose_value_is_impossible(family, field, value, reason):
    encoder = changed_file(family, **{f"clip.vision.{field}": value})
    with pytest.raises(GgufError) as raised:
        whole_config(encoder, TEXT | {"quantization_config": {}}, ["<image>"])
        processor_config(encoder)
    assert str(raised.value) == f"mmproj-model.gguf gives clip.vision.{field} as {value}{reason}"


def test_encoder_of_another_kind_than_clip_is_refused():
    encoder = changed_file("llava")
    del encoder.tensors["v.class_embd"]
    with pytest.raises(GgufError, match=r"^mmproj-model\.gguf has no tensor v\.class_embd$"):
        whole_config(encoder, TEXT | {"quantization_config": {}}, ["<image>"])


def test_activation_is_the_quick_one_unless_the_file_says_otherwise():
    """CLIP's is; the folder here has it as well."""
    assert read_config(unpack_gguf(*family_files("llava")))["vision_config"]["hidden_act"] == "quick_gelu"
    config = whole_config(changed_file("llava", clip__use_gelu=True), TEXT | {"quantization_config": {}}, ["<image>"])
    assert config["vision_config"]["hidden_act"] == "gelu"


def test_images_take_the_place_of_a_token_without_use():
    """Files of language models lack LLaVA's token. With a token for each byte, no text has an unknown part."""
    encoder = read_model(family_files("llava")[1])
    tokens, kinds = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a"], [2, 3, *[6] * 256, 1]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
    }
    marked = add_marks(encoder, metadata, "x.gguf")
    assert marked["tokenizer.ggml.tokens"] == ["<image>", *tokens[1:]]
    assert marked["tokenizer.ggml.token_type"] == [3, *kinds[1:]]
    assert "tokenizer.ggml.unknown_token_id" not in marked and marked["tokenizer.ggml.bos_token_id"] == 1
    kinds[5] = 1  # a byte without a token: texts may be unknown
    with pytest.raises(GgufError, match=r"^x\.gguf has no token <image>, which stands for an image$"):
        add_marks(encoder, metadata, "x.gguf")
    reserved = ["a", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"]
    metadata = {"tokenizer.ggml.tokens": reserved, "tokenizer.ggml.token_type": [1, 3, 3]}
    assert add_marks(encoder, metadata, "x.gguf")["tokenizer.ggml.tokens"] == [*reserved[:2], "<image>"]
