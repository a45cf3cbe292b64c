"""llama.cpp's encoders of further families, of images and sound, against the folders that they were made from."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.damaged_files import damage_header, damage_metadata
from support.encoded_media import answer_about_image, encode_media
from support.media_requests import random_image
from support.multimodal_models import multimodal_folder
from support.projector_files import convert_multimodal, is_encoder
from support.tiny_models import models_home

from parley.gguf.folder import unpack_gguf
from parley.gguf.header import GgufError, GgufModel, read_model
from parley.gguf.projectors.gemma_4_projectors import GEMMA_4_MARKS
from parley.gguf.projectors.projector_tensors import check_block_tensors, projector_tensors
from parley.gguf.projectors.refused_projectors import REFUSED_PROJECTORS
from parley.gguf.projectors.table import PROJECTORS, find_projector
from parley.gguf.projectors.whole_model import add_marks, processor_config, tokenizer_marks, whole_config
from parley.model.checkpoint.files import Checkpoint, read_config
from parley.model.checkpoint.gguf_tensors import read_gguf_entries
from parley.model.load.multimodal import keep_language_model, language_model_config
from parley.model.networks.config_reader import read_decoder_config

IS_NIGHT = bool(os.environ.get("PARLEY_NIGHTLY"))
# What processors of the published models have, and files do not say
PUBLISHED = {
    "gemma4": {"max_soft_tokens": 280},
    "gemma4_31b": {"max_soft_tokens": 280},
    "lfm2_vl": {
        "tile_size": 512,
        "min_image_tokens": 64,
        "max_image_tokens": 256,
        "max_tiles": 10,
        "max_num_patches": 1024,
    },
    "llama4": {"max_patches": 16},
    "gemma4_unified": {"max_soft_tokens": 280},
    "qwen2_5_omni_thinker": {},
}
PUBLISHED_SOUND = {"qwen2_5_omni_thinker": {"n_window": 100}}
PUBLISHED_TEXT = {
    "gemma4": {"pad_token_id": 0},  # whose inputs of layers images get
    "gemma4_unified": {"use_bidirectional_attention": "vision"},
    "llama4": {
        "attention_chunk_size": 8192,
        "no_rope_layers": [1, 1, 1],
        "layer_types": ["chunked_attention"] * 3,
    },
}
UNUSED = {"audio_tower.audio_bos_eos_token.weight"}  # by Transformers as well
SOUND = ["audioflamingo3", "granite_speech", "granite_speech_plus", "qwen2_audio", "qwen3_asr", "voxtral"]
WITH_SOUND = ["gemma4", "gemma4_unified", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"]
WITH_AXES = ["glm4v", "glm_ocr", "paddleocr_vl"]
FAMILIES = [
    *PUBLISHED,
    *WITH_AXES,
    "qwen3_omni_moe_thinker",
    "minicpmv4_6",
    "minicpmv4_7",
    "kimi_k25",
    "janus",
    "exaone4_5",
    "idefics3",
    "internvl",
    "lighton_ocr",
    "mistral3",
    "pixtral",
    *SOUND,
]
DAILY = ["gemma4_unified", "glm4v", "granite_speech", "internvl", "janus", "minicpmv4_6", "mistral3", "qwen2_audio"]
ENCODED = FAMILIES if IS_NIGHT else DAILY


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@functools.cache
def family_folder(family):
    """Return a folder of a family, with what the published models have, written once."""
    if family not in PUBLISHED:
        return multimodal_folder(family)
    folder = models_home() / f"{family}-published"
    shutil.copytree(multimodal_folder(family), folder)
    processor = json.loads((folder / "processor_config.json").read_text())
    processor["image_processor"] |= PUBLISHED[family]
    (folder / "processor_config.json").write_text(json.dumps(processor))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= PUBLISHED_TEXT.get(family, {})
    if family in PUBLISHED_SOUND:
        config["audio_config"] |= PUBLISHED_SOUND[family]
    (folder / "config.json").write_text(json.dumps(config))
    if family == "gemma4":  # files have softplus of these, so they get numbers that can be restored to the last bit
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in tensors.items():
            if name.endswith("per_dim_scale"):
                tensors[name] = torch.nn.functional.softplus(tensor).double().expm1().log().float()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@functools.cache
def family_files(family, kind="F32"):
    """Return the files of a family's model and encoder, written once."""
    return convert_multimodal(models_home() / f"{family}-media-gguf-{kind}", family_folder(family), kind)


def media_of(family):
    """Return a kind of media that a family reads, and an item."""
    if family in SOUND:
        return "audio", np.random.default_rng(3).standard_normal(16_000).astype(np.float32) / 8
    return "image", random_image(3, 70, 50)


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_of_encoders_are_those_of_the_folder(family):
    stored, original = Checkpoint(unpack_gguf(*family_files(family))), Checkpoint(family_folder(family))
    expected = {name for name in original.tensor_names if is_encoder(name)}
    unread = {name for name in expected if ".head." in name or name.endswith("num_batches_tracked")}
    assert {name for name in stored.tensor_names if is_encoder(name)} == expected - unread
    computed = {name for name in expected if ".batch_norm." in name}  # which files have as other numbers
    for name in expected - unread - computed - UNUSED:
        shape = original.tensor_shape(name)
        assert torch.equal(stored.view_tensor(name, *shape), original.view_tensor(name, *shape)), name


@pytest.mark.parametrize("family", WITH_AXES)
def test_language_models_with_position_axes_equal_those_of_the_folder(family):
    folders = unpack_gguf(*family_files(family)), family_folder(family)
    stored, original = map(Checkpoint, folders)
    for checkpoint in (stored, original):
        keep_language_model(checkpoint)
    assert set(stored.tensor_names) == set(original.tensor_names)
    for name in stored.tensor_names:
        shape = original.tensor_shape(name)
        assert torch.equal(stored.view_tensor(name, *shape), original.view_tensor(name, *shape)), name
    decoders = [read_decoder_config(language_model_config(read_config(folder))) for folder in folders]
    assert decoders[0] == decoders[1]


@pytest.mark.parametrize("family", ENCODED)
def test_embeddings_are_those_of_the_folder(family):
    kind, item = media_of(family)
    expected_text, expected = encode_media(family_folder(family), kind, item)
    text, embeddings = encode_media(unpack_gguf(*family_files(family)), kind, item)
    assert text == expected_text
    assert len(embeddings) == len(expected)
    if family.startswith("granite_speech"):  # whose files have batch norms as other numbers, which round otherwise
        torch.testing.assert_close(embeddings, expected, rtol=1e-4, atol=1e-5)
    else:
        assert all(map(torch.equal, embeddings, expected))


@pytest.mark.parametrize("family", WITH_SOUND if IS_NIGHT else ["gemma4", "qwen3_omni_moe_thinker"])
def test_audio_embeddings_of_a_file_with_two_encoders_equal_those_of_the_folder(family):
    sound = media_of("qwen2_audio")[1]
    expected_text, expected = encode_media(family_folder(family), "audio", sound)
    text, embeddings = encode_media(unpack_gguf(*family_files(family)), "audio", sound)
    assert text == expected_text
    assert torch.equal(embeddings[0], expected[0])


def test_a_missing_block_of_the_second_encoder_is_refused():
    lacking = read_model(family_files("qwen2_5_omni_thinker")[1])
    del lacking.tensors["a.blk.1.attn_q.weight"]
    with pytest.raises(GgufError, match=r"^mmproj-model\.gguf has no tensor a\.blk\.1\.attn_q\.weight, which other"):
        check_block_tensors(lacking)


@pytest.mark.skipif(not IS_NIGHT, reason="seconds for each; PARLEY_NIGHTLY=1 tries them")
@pytest.mark.parametrize("family", ["glm4v_moe", *(family for family in FAMILIES if family not in SOUND)])
def test_answers_about_images_are_those_of_the_folder(family, monkeypatch):
    of_file = answer_about_image(family_files(family)[0], monkeypatch)
    of_folder = answer_about_image(family_folder(family), monkeypatch)
    if family == "qwen2_5_omni_thinker":  # which says a token that ends answers, as files know and folders here do not
        tokens = of_file[0].tokens
        assert len(tokens) > 1 and tokens == of_folder[0].tokens[: len(tokens)]
    else:
        assert of_file == of_folder


def test_quantized_queries_have_the_order_of_the_folder():
    stored = Checkpoint(unpack_gguf(*family_files("mistral3", "Q8_0")))
    original = Checkpoint(family_folder("mistral3"))
    name = "vision_tower.transformer.layers.1.attention.q_proj.weight"
    expected = original.view_tensor(name, 32, 32)
    assert 0 < (stored.view_tensor(name, 32, 32) - expected).norm() / expected.norm() < 0.01


TOKENS = ["<img>", "</img>", "<IMG_CONTEXT>", "a"]


def test_mark_of_videos_may_be_missing_in_intern_vl():
    """Its published vocabularies have no room for it. Images need it not."""
    encoder = read_model(family_files("internvl")[1])
    marked = add_marks(encoder, {"tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.token_type": [1] * 4}, "x.gguf")
    assert marked["tokenizer.ggml.tokens"] == TOKENS
    assert tokenizer_marks(encoder, TOKENS)["video_token"] == "<IMG_CONTEXT>"
    padded = add_marks(
        encoder, {"tokenizer.ggml.tokens": [*TOKENS, "[PAD4]"], "tokenizer.ggml.token_type": [1] * 5}, "x.gguf"
    )
    assert padded["tokenizer.ggml.tokens"] == [*TOKENS, "<video>"]
    edgeless = {"tokenizer.ggml.tokens": [*TOKENS[1:], "[PAD4]", "[PAD5]"], "tokenizer.ggml.token_type": [1] * 5}
    with pytest.raises(GgufError, match=r"^x\.gguf has no token <img>, which stands for an image$"):
        add_marks(encoder, edgeless, "x.gguf")
    with pytest.raises(GgufError, match=r"^x\.gguf has no token <\|AUDIO\|>, which stands for audio$"):
        add_marks(
            read_model(family_files("qwen2_audio")[1]),
            {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": [1]},
            "x.gguf",
        )


def changed_file(family, *, metadata=None, tensors=None):
    """Return the header of a file with other metadata, and tensors of other shapes."""
    model = read_model(family_files(family)[1])
    shapes = {name: model.tensors[name]._replace(shape=shape) for name, shape in (tensors or {}).items()}
    return GgufModel(model.paths, model.metadata | (metadata or {}), model.tensors | shapes)


@pytest.mark.parametrize(
    ("family", "metadata", "reason"),
    [
        ("internvl", {"clip.vision.preproc_min_tiles": 9}, "gives clip.vision.preproc_min_tiles as 9; preproc_max"),
        ("internvl", {"clip.vision.projector.scale_factor": 3}, "makes an embedding of 3 patches in a row, but has 4"),
        ("qwen2_audio", {"clip.audio.num_mel_bins": 0}, "gives clip.audio.num_mel_bins as 0, so the encoder's shape"),
        ("qwen2_audio", {"clip.audio.block_count": 9}, "gives clip.audio.block_count as 9, but has the tensors of 2"),
        ("mistral3", {"clip.vision.attention.head_count": 32}, "gives clip.vision.attention.head_count as 32; 32 numb"),
    ],
)
def test_error_names_the_field_whose_value_is_impossible(family, metadata, reason):
    encoder = changed_file(family, metadata=metadata)
    config = {"model_type": "mistral" if family == "mistral3" else "qwen2", "hidden_size": 64, "dtype": "float32"}
    tokens = [*TOKENS, "[IMG]", "<|AUDIO|>"]
    with pytest.raises(GgufError) as raised:
        whole_config(encoder, config | {"tie_word_embeddings": True, "quantization_config": {}}, tokens)
        processor_config(encoder)
        projector_tensors(encoder)
    assert str(raised.value).startswith(f"mmproj-model.gguf {reason}")


@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("lfm2_vl", "v.patch_embd.weight", (32, 192)),
        ("gemma4", "v.blk.0.attn_q.input_max", (2,)),
        ("mistral3", "v.blk.0.attn_q.weight", (34, 32)),
        ("kimi_k25", "v.blk.0.attn_qkv.weight", (98, 32)),
    ],
)
def test_tensors_of_impossible_shapes_are_refused(family, name, shape):
    with pytest.raises(GgufError, match=rf"^mmproj-model\.gguf has .*{name}"):
        projector_tensors(changed_file(family, tensors={name: shape}))


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("v.blk.0.attn_k.weight", (33, 32), r"the first axis must be a multiple of \d+, the dimensions of a head"),
        ("v.position_embd.weight", (16, 32), "it must have 3 axes"),
    ],
)
def test_gemma_4_whose_keys_or_positions_have_impossible_shapes_is_refused(name, shape, reason):
    config = {"model_type": "gemma4_text", "hidden_size": 64, "dtype": "float32", "tie_word_embeddings": True}
    encoder = changed_file("gemma4", tensors={name: shape})
    stored = re.escape(f"{name} of the shape {shape}")
    with pytest.raises(GgufError, match=rf"^mmproj-model\.gguf has {stored}; {reason}$"):
        whole_config(encoder, config | {"quantization_config": {}}, list(GEMMA_4_MARKS.values()))


@pytest.mark.parametrize(
    ("family", "shape", "reason"),
    [
        ("glm4v", (15, 32), "has 15 positions in v.position_embd.weight, which make no square"),
        ("paddleocr_vl", (15, 32), "has 15 positions in v.position_embd.weight, which make no square"),
        ("minicpmv4_6", (15, 32), "has 15 positions in v.position_embd.weight, which make no square"),
        ("kimi_k25", (16, 32), "has v.position_embd.weight of the shape (16, 32); it must have 3 axes"),
    ],
)
def test_positions_of_impossible_shapes_are_refused(family, shape, reason):
    encoder = changed_file(family, tensors={"v.position_embd.weight": shape})
    model_type = next(iter(find_projector(encoder).whole_models))
    config = {"model_type": model_type, "hidden_size": 64, "dtype": "float32", "tie_word_embeddings": True}
    tokens = list(find_projector(encoder).marks.values())
    with pytest.raises(GgufError) as raised:
        whole_config(encoder, config | {"quantization_config": {}}, tokens)
    assert str(raised.value) == f"mmproj-model.gguf {reason}"


@pytest.mark.parametrize("listed", [None, [], [7], [True], [0, 1], 6])
def test_minicpm_whose_merger_has_no_place_is_refused(listed):
    encoder = changed_file("minicpmv4_6", metadata={"clip.vision.wa_layer_indexes": listed})
    config = {"model_type": "qwen3_5_text", "hidden_size": 64, "dtype": "float32", "tie_word_embeddings": True}
    with pytest.raises(GgufError, match=r"gives clip\.vision\.wa_layer_indexes as .*; it is one of 3 blocks$"):
        whole_config(encoder, config | {"quantization_config": {}}, list(find_projector(encoder).marks.values()))


def test_minicpm_without_line_breaks_is_refused():
    """Positions depend on them."""
    encoder = read_model(family_files("minicpmv4_7")[1])
    config = {"model_type": "qwen3_5_text", "hidden_size": 64, "dtype": "float32", "tie_word_embeddings": True}
    marks = list(find_projector(encoder).marks.values())
    assert whole_config(encoder, config | {"quantization_config": {}}, [*marks, "Ċ"])["newline_id"] == len(marks)
    with pytest.raises(GgufError, match=r"is the encoder of a model whose vocabulary has the token Ċ$"):
        whole_config(encoder, config | {"quantization_config": {}}, marks)


@pytest.mark.parametrize(
    ("family", "metadata", "tensors", "reason"),
    [
        ("exaone4_5", {}, {"v.blk.0.attn_qkv.weight": (70, 32)}, "has 70 rows in v.blk.0.attn_qkv.weight, which 2 h"),
        ("exaone4_5", {}, {"v.blk.0.attn_qkv.weight": (32, 32)}, "has 32 rows in v.blk.0.attn_qkv.weight, which 2 h"),
        ("granite_speech", {"chunk_size": 17}, {}, "gives clip.audio.chunk_size as 17; max_pos_emb is 16 only"),
        ("granite_speech", {"projector.window_size": 7}, {}, "window_size as 7, no multiple of downsample_rate, 5"),
        ("granite_speech", {"projector.head_count": 3}, {}, "head_count as 3; 32 numbers are not so many heads"),
        ("granite_speech", {}, {"a.blk.0.ffn_up.weight": (33, 32)}, "rows in a.blk.0.ffn_up.weight, which are no mult"),
        ("granite_speech_plus", {"feature_layer": [9]}, {}, "feature_layer as [9]; it is numbers of 4 blocks"),
        ("granite_speech_plus", {"feature_layer": 2}, {}, "feature_layer as 2; it is numbers of 4 blocks"),
    ],
)
def test_encoder_of_impossible_sizes_is_refused(family, metadata, tensors, reason):
    modality = "audio" if family in SOUND else "vision"
    encoder = changed_file(
        family, metadata={f"clip.{modality}.{key}": value for key, value in metadata.items()}, tensors=tensors
    )
    projector = find_projector(encoder)
    config = {"model_type": next(iter(projector.whole_models)), "hidden_size": 64, "dtype": "float32"}
    config |= {"tie_word_embeddings": True, "quantization_config": {}}
    with pytest.raises(GgufError, match=re.escape(reason)):
        whole_config(encoder, config, list(projector.marks.values()))


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("v.patch_embd.weight", (48, 191), "a v.patch_embd.weight of 191 inputs, which are no square of pixels"),
        ("v.patch_embd.weight", (48, 147), "gives clip.vision.patch_size as 4, which does not divide 7 pixels"),
        ("v.patch_norm.1.bias", (190,), "the tensor v.patch_norm.1.bias of the shape [190]; its last axis has 192"),
        ("v.position_embd.weight", (16, 48), "has v.position_embd.weight of the shape (16, 48); it must have 3 axes"),
    ],
)
def test_gemma_4_12b_of_impossible_shapes_is_refused(name, shape, reason):
    encoder = changed_file("gemma4_unified", tensors={name: shape})
    config = {"model_type": "gemma4_text", "hidden_size": 64, "dtype": "float32", "tie_word_embeddings": True}
    with pytest.raises(GgufError, match=re.escape(reason)):
        whole_config(encoder, config | {"quantization_config": {}}, list(find_projector(encoder).marks.values()))
        projector_tensors(encoder)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("rope.dimension_count", 7, "7 of 16 dimensions of a head cannot turn"),
        ("attention.key_length", 24, "rows, which heads of 24 cannot share"),
    ],
)
def test_heads_of_glm_that_cannot_turn_are_refused(key, value, reason):
    model = read_model(family_files("glm4v")[0])
    model.metadata[f"glm4.{key}"] = value
    with pytest.raises(GgufError, match=reason):
        read_gguf_entries(model)


def test_every_kind_of_llama_cpp_is_read_or_refused_with_a_reason():
    kinds = {kind for name, kind in vars(gguf.VisionProjectorType).items() if name.isupper()}
    assert kinds - {"gemma4a"} <= PROJECTORS.keys() | REFUSED_PROJECTORS.keys()  # which comes with gemma4v
    assert not PROJECTORS.keys() & REFUSED_PROJECTORS.keys()
    encoder = read_model(family_files("internvl")[1])
    for kind, reason in REFUSED_PROJECTORS.items():
        encoder.metadata["clip.projector_type"] = kind
        with pytest.raises(GgufError) as refusal:
            find_projector(encoder)
        expected = f"mmproj-model.gguf is an encoder of the kind {kind}, which is not read: {reason}"
        assert str(refusal.value) == expected


def test_tensors_of_another_encoder_are_refused():
    encoder = changed_file("mistral3", metadata={"clip.projector_type": "qwen2a"})
    with pytest.raises(GgufError, match=r"^mmproj-model\.gguf has the tensor mm\.\S+, which its kind does not have"):
        projector_tensors(encoder)


@pytest.mark.parametrize("family", ["granite_speech", "janus", *(WITH_AXES + WITH_SOUND if IS_NIGHT else [])])
@pytest.mark.parametrize("damage", [damage_header, damage_metadata])
def test_damaged_encoder_files_are_read_or_refused_in_a_sentence(family, damage, tmp_path):
    model, intact = family_files(family)
    for seed in range(100 if IS_NIGHT else 8):
        path = shutil.copy(intact, tmp_path / f"mmproj-{seed}.gguf")
        damage(path, random.Random(seed))
        try:
            unpack_gguf(model, path)
        except GgufError as error:
            assert re.fullmatch(r"[^\n]{20,600}", str(error))
