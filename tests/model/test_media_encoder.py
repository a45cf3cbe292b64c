"""Encoders of images, video and sound give the embeddings of Transformers, from the tensors of a media process."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save, save_file
from support.media_items import FRAME_RATE, make_media, media_item, process_media
from support.media_requests import all_placeholder_ids
from support.multimodal_models import (
    FAMILIES,
    SAMPLED_FAMILIES,
    load_whole_model,
    multimodal_folder,
    write_multimodal_model,
    write_whole_omni,
)
from support.run_model import load_test_runner

from parley.model.checkpoint.files import read_config
from parley.model.load.check import check_model
from parley.model.load.loader import LoadError, load_runner
from parley.model.load.towers import load_towers, plan_towers
from parley.model.media import slices
from parley.model.media.encoder import TransformersEncoder, encoder_parts
from parley.model.media.feature_file import EncoderError
from parley.model.media.slices import optimize_encoders
from parley.model.media_embeddings import EncodedItem
from parley.model.media_input.processor import ItemProcessor
from parley.model.media_input.video import DecodedVideo, VideoClock
from parley.text.media_family import read_media_family
from parley.types import MediaKind, ParleySettings

CPU = torch.device("cpu")
KINDS = [(family, kind) for family, shape in SAMPLED_FAMILIES.items() for kind in shape.parts]


class ProcessedItem(NamedTuple):
    """An item's features, and the embeddings that Transformers puts in place of its placeholders."""

    features: dict[str, torch.Tensor]
    expected: EncodedItem


def make_encoder(folder: Path, dtype: torch.dtype) -> TransformersEncoder:
    towers = plan_towers(folder, read_config(folder), dtype, CPU)
    assert towers is not None
    return TransformersEncoder(lambda: load_towers(towers), dtype, CPU)


@cache
def shared_encoder(family: str, dtype: torch.dtype = torch.float32) -> TransformersEncoder:
    return make_encoder(multimodal_folder(family), dtype)


@cache
def reference_model(family: str) -> Any:
    if family in ("got_ocr2", "phi4_multimodal", "granite_speech", "granite_speech_plus"):
        return load_whole_model(multimodal_folder(family))  # their encoders run with no other attention
    if family == "deepseek_ocr2":  # as the first of its two encoders
        model = load_whole_model(multimodal_folder(family))
        model.base_model.vision_tower.vision_encoder.set_attn_implementation("sdpa")
        return model
    eager_parts = {
        "gemma4": "audio_config",
        "idefics2": "perceiver_config",
        "paligemma2": "text_config",
        "granite4_vision": "qformer_config",
        "deepseek_vl_hybrid": "high_res_vision_config",
    }
    eager_part = eager_parts.get(family)
    attention = {eager_part: "eager", "vision_config": "sdpa", "": "sdpa"} if eager_part else "sdpa"
    return load_whole_model(multimodal_folder(family), attention=attention)


@cache
def item_processor(family: str) -> ItemProcessor:
    return ItemProcessor(multimodal_folder(family))


def media_process_features(family: str, kind: MediaKind, media: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a media process writes for an item."""
    processor = item_processor(family)
    if kind == "image":
        return processor.process_image(Image.fromarray(media), {}).tensors
    if kind == "audio":
        return processor.process_audio(media, {}).tensors
    frames = list(range(len(media)))
    clock = VideoClock([number / FRAME_RATE for number in frames], FRAME_RATE)
    return processor.process_video(DecodedVideo(media, frames, clock), {}).tensors


@cache
def process_item(family: str, kind: MediaKind) -> ProcessedItem:
    """Process a noisy item, and see what the whole model gives its decoder."""
    inputs = process_media(multimodal_folder(family), kind, make_media(kind))
    model, seen = reference_model(family), {}
    if family == "phi4_multimodal":  # whose decoder puts the embeddings in place itself
        hook = (
            model.get_decoder().layers[0].register_forward_pre_hook(lambda _, args: seen.update(inputs_embeds=args[0]))
        )
    else:
        hook = model.get_decoder().register_forward_pre_hook(
            lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True
        )
    with torch.inference_mode():
        model(**inputs)
    hook.remove()
    media_family = read_media_family(read_config(multimodal_folder(family)))
    places = torch.isin(inputs["input_ids"][0], torch.tensor(all_placeholder_ids(media_family, kind)))
    if family == "mllama":  # whose decoder reads them beside the text
        tiles = seen["cross_attention_states"][: int(inputs["aspect_ratio_mask"].sum())]
        features = media_process_features(family, kind, make_media(kind))
        return ProcessedItem(features, EncodedItem(tiles.flatten(0, 1), []))
    deep = seen.get("deepstack_visual_embeds") or list(seen.get("deepstack_features", {}).values())
    expected = EncodedItem(seen["inputs_embeds"][0, places], deep)
    return ProcessedItem(media_process_features(family, kind, make_media(kind)), expected)


def encode_processed(encoder: TransformersEncoder, item: ProcessedItem, kind: MediaKind, **changes: Any) -> EncodedItem:
    count = changes.get("count", len(item.expected.rows))
    with media_item(kind, changes.get("features", item.features), count) as media:
        return encoder.encode_item(media, changes.get("between_blocks", lambda: None))


def are_equal(one: EncodedItem, other: EncodedItem) -> bool:
    return len(one.deepstack) == len(other.deepstack) and all(
        torch.equal(mine, theirs)
        for mine, theirs in zip((one.rows, *one.deepstack), (other.rows, *other.deepstack), strict=True)
    )


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_embeddings_equal_those_of_transformers(family: str, kind: MediaKind):
    item = process_item(family, kind)
    encoded = encode_processed(shared_encoder(family), item, kind)
    assert are_equal(encoded, item.expected)
    assert bool(encoded.deepstack) == (kind != "audio" and family.startswith(("qwen3_vl", "qwen3_omni", "granite")))
    assert encoded.nbytes == 4 * 64 * len(encoded.rows) * (1 + len(encoded.deepstack))


@pytest.mark.parametrize("family", ["gemma4", "gemma4_31b", "mllama"])
def test_a_model_whose_media_need_the_fused_decoder_reads_text_only_without_it(family: str):
    runner, info = load_test_runner(multimodal_folder(family), dtype="float32", lowering=False)
    assert not info.fused
    assert info.media_kinds == frozenset() and runner.media_encoder is None
    checked, fused = (
        check_model(ParleySettings(model=str(multimodal_folder(family)), lowering=lowering))
        for lowering in (False, True)
    )
    assert fused.memory_bytes > checked.memory_bytes


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl_moe", "qwen2_vl"])
def test_a_model_that_runs_through_transformers_uses_its_own_encoders(family: str):
    runner, info = load_test_runner(multimodal_folder(family), dtype="float32", lowering=False)
    assert not info.fused
    assert info.media_kinds == set(FAMILIES[family].parts)
    item = process_item(family, "image")
    assert are_equal(encode_processed(runner.media_encoder, item, "image"), item.expected)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "qwen3_asr", "gemma4"])
def test_bfloat16_has_the_same_bits_in_each_call_with_any_number_of_threads(family: str):
    kind = next(iter(FAMILIES[family].parts))
    item = process_item(family, kind)
    encoder = shared_encoder(family, torch.bfloat16)
    threads = torch.get_num_threads()
    encoded = []
    try:
        for count in (1, 2, 2, 1):
            torch.set_num_threads(count)
            encoded.append(encode_processed(encoder, item, kind))
    finally:
        torch.set_num_threads(threads)
    assert encoded[0].rows.dtype == torch.bfloat16
    assert all(are_equal(encoding, encoded[0]) for encoding in encoded[1:])
    error = (encoded[0].rows.float() - item.expected.rows).norm() / item.expected.rows.norm()
    assert error < 0.05


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "smolvlm", "qwen3_asr", "gemma4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_items_are_computed_in_slices(monkeypatch, family: str, dtype: torch.dtype):
    """Of linear layers and of attention, with masks and without."""
    kind = next(iter(FAMILIES[family].parts))
    item, encoder = process_item(family, kind), shared_encoder(family, dtype)
    calls: list[list[int]] = [[], []]
    encode_processed(encoder, item, kind)  # loads the model, which calls back as well
    whole = encode_processed(encoder, item, kind, between_blocks=lambda: calls[0].append(1))
    monkeypatch.setattr(slices, "MIN_ROWS", 3)
    monkeypatch.setattr(slices, "SLICE_PRODUCTS", 1)
    sliced = encode_processed(encoder, item, kind, between_blocks=lambda: calls[1].append(1))
    assert len(calls[1]) > 2 * len(calls[0])
    error = (sliced.rows.float() - whole.rows.float()).norm() / whole.rows.float().norm()
    assert error < {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize("family", SAMPLED_FAMILIES)
def test_calls_back_before_each_block(family: str):
    kind = next(iter(FAMILIES[family].parts))
    shape = FAMILIES[family].config
    config = next(shape[name] for name in ("vision_config", "audio_config", "encoder_config") if name in shape)
    names = ("num_hidden_layers", "depth", "encoder_layers", "num_layers")
    blocks = next((config[name] for name in names if name in config), 0)
    calls = []
    encoder = shared_encoder(family)
    encode_processed(encoder, process_item(family, kind), kind)  # loads the model, which calls back as well
    encode_processed(encoder, process_item(family, kind), kind, between_blocks=lambda: calls.append(1))
    assert len(calls) > blocks


def test_stops_between_blocks_and_encodes_the_next_item():
    def stop() -> None:
        raise KeyError("stop")

    item, encoder = process_item("qwen2_vl", "image"), shared_encoder("qwen2_vl")
    encode_processed(encoder, item, "image")
    with pytest.raises(KeyError, match="stop"):
        encode_processed(encoder, item, "image", between_blocks=stop)
    assert are_equal(encode_processed(encoder, item, "image"), item.expected)


def test_calls_back_while_the_model_is_loaded():
    released = Event()
    calls = []

    def load_model() -> Any:
        assert released.wait(60)
        return optimize_encoders(copy.deepcopy(reference_model("llava")))

    def between_blocks() -> None:
        calls.append(1)
        released.set()

    item = process_item("llava", "image")
    encoder = TransformersEncoder(load_model, torch.float32, CPU)
    assert are_equal(encode_processed(encoder, item, "image", between_blocks=between_blocks), item.expected)
    assert calls


def test_tries_to_load_again_after_a_failure():
    models = [lambda: reference_model("llava"), lambda: 1 // 0]
    encoder = TransformersEncoder(lambda: models.pop()(), torch.float32, CPU)
    item = process_item("llava", "image")
    with pytest.raises(EncoderError, match=r"^The model's encoder cannot be loaded\.$"):
        encode_processed(encoder, item, "image")
    assert are_equal(encode_processed(encoder, item, "image"), item.expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda features: b"no safetensors", "The processed features are damaged."),
        (lambda features: save(features)[:-1], "The processed features are damaged."),
        (
            lambda features: {"image_grid_thw": features["image_grid_thw"]},
            "The processed features of the image have no pixel_values.",
        ),
        (
            lambda features: features | {"image_grid_thw": torch.tensor([[1, 2, 2]])},
            "The model's encoder cannot process the image.",
        ),
        (
            lambda features: features | {"pixel_values": torch.zeros(8, 4, dtype=torch.uint8)},
            "The processed features hold pixel_values as uint8.",
        ),
    ],
)
def test_refuses_damaged_features_with_a_sentence(change: Callable[[Any], Any], message: str):
    item = process_item("qwen2_vl", "image")
    with pytest.raises(EncoderError) as refused:
        encode_processed(shared_encoder("qwen2_vl"), item, "image", features=change(item.features))
    assert str(refused.value) == message


def test_refuses_another_number_of_placeholders():
    item = process_item("qwen2_vl", "image")
    with pytest.raises(EncoderError) as refused:
        encode_processed(shared_encoder("qwen2_vl"), item, "image", count=len(item.expected.rows) + 1)
    assert str(refused.value) == ("The encoder gave 2 embeddings for the image, but its text has 3 placeholders.")


def test_refuses_a_file_of_another_size_and_one_that_is_closed():
    encoder, processed = shared_encoder("qwen2_vl"), process_item("qwen2_vl", "image")
    with media_item("image", processed.features, 2) as item:
        other_size = msgspec.structs.replace(item.features, size=item.features.size - 1)
        with pytest.raises(EncoderError, match="not those of the request"):
            encoder.encode_item(msgspec.structs.replace(item, features=other_size), lambda: None)
    with pytest.raises(EncoderError, match="no longer exist"):
        encoder.encode_item(item, lambda: None)


def copy_model(folder: Path, target: Path, rename: Callable[[str], str | None]) -> Path:
    """Copy a model with other names for its tensors; those without a name are left out."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    renamed = {new_name: tensor for name, tensor in tensors.items() if (new_name := rename(name)) is not None}
    save_file(renamed, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("family", "prefixes"),
    [
        ("llava", {"vision_tower.": "vision_tower.vision_model."}),
        ("gemma3", {"vision_tower.": "vision_tower.vision_model."}),
        ("qwen3_vl", {"model.visual.": "visual.", "model.language_model.": "model."}),
        ("internvl", {"vision_tower.": "model.vision_tower.", "multi_modal_": "model.multi_modal_"}),
    ],
)
def test_alternative_tensor_names_give_the_same_embeddings(tmp_path, family: str, prefixes: dict[str, str]):
    def rename(name: str) -> str:
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        return prefixes.get(prefix, "") + name.removeprefix(prefix)

    item = process_item(family, "image")
    folder = copy_model(multimodal_folder(family), tmp_path / "copy", rename)
    assert are_equal(encode_processed(make_encoder(folder, torch.float32), item, "image"), item.expected)


def test_encoders_of_a_whole_omni_model_equal_those_of_its_thinker(tmp_path):
    folder = write_whole_omni(tmp_path / "whole", "qwen2_5_omni_thinker")
    check_model(ParleySettings(model=str(folder)))
    item = process_item("qwen2_5_omni_thinker", "audio")
    assert are_equal(encode_processed(make_encoder(folder, torch.float32), item, "audio"), item.expected)
    tensors = ItemProcessor(folder).process_audio(make_media("audio"), {}).tensors
    assert all(torch.equal(tensors[name], tensor) for name, tensor in item.features.items())


def test_a_checkpoint_without_a_tensor_of_a_block_is_refused_at_the_start(tmp_path):
    name = "vision_tower.encoder.layers.1.mlp.fc1.weight"
    folder = copy_model(
        multimodal_folder("llava"), tmp_path / "copy", lambda tensor_name: None if tensor_name == name else tensor_name
    )
    for load in (load_test_runner, lambda folder: check_model(ParleySettings(model=str(folder)))):
        with pytest.raises(LoadError, match=rf"^The checkpoint has no tensor {name}\.$"):
            load(folder)


def test_the_check_and_an_eager_start_find_any_missing_tensor(tmp_path):
    check_model(ParleySettings(model=str(multimodal_folder("llava"))))
    runner, _ = load_test_runner(multimodal_folder("llava"), dtype="float32", media_eager=True)
    assert len(encode_processed(runner.media_encoder, process_item("llava", "image"), "image").rows)
    name = "multi_modal_projector.linear_1.weight"
    folder = copy_model(
        multimodal_folder("llava"), tmp_path / "copy", lambda tensor_name: None if tensor_name == name else tensor_name
    )
    load_test_runner(folder)  # text needs no projector
    for check in (check_model, partial(load_runner, progress=lambda stage, fraction: None)):
        with pytest.raises(LoadError, match=rf"^The checkpoint has no tensor model\.{name} \(1 missing in all\)\.$"):
            check(ParleySettings(model=str(folder), media_eager=True, kv_memory=1 << 20))


def test_the_check_finds_a_tensor_of_another_shape(tmp_path):
    folder = copy_model(multimodal_folder("llava"), tmp_path / "copy", lambda tensor_name: tensor_name)
    tensors = load_file(folder / "model.safetensors")
    tensors["multi_modal_projector.linear_1.weight"] = torch.zeros(64, 48)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match=r"linear_1\.weight has shape \[64, 48\]; the config asks for \[64, 32\]\.$"):
        check_model(ParleySettings(model=str(folder)))


def test_encoders_beside_a_language_model_with_mamba_layers_are_loaded(tmp_path):
    """Its config has an infinite number, which Transformers writes as an object."""
    text = {"model_type": "granitemoehybrid", "layer_types": ["attention", "mamba", "attention"]}
    text |= {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "num_local_experts": 0}
    folder = write_multimodal_model(tmp_path, "llava_next", text=text)
    assert "__float__" in (folder / "config.json").read_text()
    towers = plan_towers(folder, read_config(folder), torch.float32, CPU)
    assert encoder_parts(load_towers(towers))


@pytest.mark.parametrize(
    ("text", "sentence"), [('{"a":', "of the model cannot be read"), ("[1]", "does not hold a JSON object")]
)
def test_a_broken_config_of_a_processor_is_an_error(tmp_path, text, sentence):
    folder = write_multimodal_model(tmp_path, "llava")
    (folder / "processor_config.json").write_text(text)
    with pytest.raises(LoadError, match=rf"^processor_config\.json .*{sentence}"):
        check_model(ParleySettings(model=str(folder)))


def test_a_checkpoint_without_encoders_reads_text_only(tmp_path):
    folder = copy_model(
        multimodal_folder("llava"), tmp_path / "copy", lambda name: name if name.startswith("language_model.") else None
    )
    runner, info = load_test_runner(folder)
    assert runner.media_encoder is None
    assert info.media_kinds == frozenset()


@pytest.mark.parametrize(("mode", "has_opencv"), [("adaptive", False), ("adaptive", True), ("never", False)])
def test_minicpm_ocr_reads_text_only_where_a_package_is_missing(tmp_path, monkeypatch, caplog, mode, has_opencv):
    caplog.set_level("INFO", "parley.engine")
    monkeypatch.setattr("parley.model.load.towers.find_spec", lambda name: name if has_opencv else None)
    folder = shutil.copytree(multimodal_folder("minicpm_ocr"), tmp_path / "model")
    settings = json.loads((folder / "processor_config.json").read_text())
    settings["image_processor"]["small_image_upsize"] = mode
    (folder / "processor_config.json").write_text(json.dumps(settings))
    is_missing = mode == "adaptive" and not has_opencv
    assert (plan_towers(folder, read_config(folder), torch.float32, CPU) is None) == is_missing
    reason = "its processor needs the package opencv-python-headless, which is not installed."
    assert caplog.messages == [f"The model reads text only: {reason}"] * is_missing


def test_the_log_says_that_a_family_without_encoders_here_reads_text_only(caplog):
    config = read_config(multimodal_folder("llava")) | {"model_type": "molmo2"}
    with caplog.at_level("INFO", logger="parley.engine"):
        assert plan_towers(multimodal_folder("llava"), config, torch.float32, CPU) is None
        assert plan_towers(multimodal_folder("llava"), config["text_config"], torch.float32, CPU) is None
    assert caplog.messages == ["The model reads text only: encoders of molmo2 models are not supported."]


def test_the_kv_cache_leaves_memory_for_encoders_and_embeddings(monkeypatch):
    """Both are needed from the first item on, so their memory still looks free when the KV cache gets its share."""
    monkeypatch.setattr("parley.model.load.memory.free_device_memory", lambda device: 1_000_000)
    towers = plan_towers(multimodal_folder("llava"), read_config(multimodal_folder("llava")), torch.float32, CPU)
    _, info = load_test_runner(multimodal_folder("llava"), dtype="float32", kv_memory=None, media_cache=300_000)
    assert info.kv_bytes <= 0.4 * (700_000 - towers.nbytes)
    assert towers.nbytes == 4 * sum(
        parameter.numel() for part in encoder_parts(reference_model("llava")) for parameter in part.parameters()
    )
