"""An item's features are those of Transformers' processor, bit for bit, and its description fits them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load
from support.media_files import image_array, image_file, sine_wave, video_file, wav_file
from support.multimodal_models import (
    FAMILIES,
    SAMPLED_FAMILIES,
    load_processor,
    multimodal_folder,
    write_multimodal_model,
)

from parley.engine.media_messages import DecodingLimits, MediaJobRequest, MediaJobResult, MediaRefused, encode_options
from parley.model.media_input.jobs import MediaJobs
from parley.model.media_input.processor import load_jobs
from parley.serving.media.memory_files import MemoryBudget, MemoryFile
from parley.text.media_family import read_media_family
from parley.text.tokens.json_files import read_json_object

BUDGET = MemoryBudget(1 << 30)
IMAGE = image_file(image_array(90, 60))
RATE = 16_000
REFUSE_NARROW = (
    "qwen", "glm", "exaone", "video_llama", "paddleocr", "hyperclovax", "lfm2_vl", "lfm3_vl", "lighton_ocr", "pixtral",
    "phi4_multimodal", "ernie4_5_vl", "hunyuan_vl",
)  # fmt: skip
_jobs: dict[str, MediaJobs] = {}


def jobs_of(family: str) -> MediaJobs:
    if family not in _jobs:
        _jobs[family] = load_jobs(multimodal_folder(family))
    return _jobs[family]


def process(
    jobs: MediaJobs, kind: Any, data: bytes, **fields: Any
) -> tuple[MediaJobResult | MediaRefused, dict[str, torch.Tensor]]:
    """Do a job; return its result and its tensors."""
    source, target = MemoryFile(BUDGET), MemoryFile(BUDGET)
    source.write_bytes(data)
    defaults = {"form": "file", "is_small": False}
    options = encode_options(fields.pop("loading_options", {}), fields.pop("processor_options", {}))
    job = MediaJobRequest(
        kind=kind,
        source=source.feature_file,
        target=target.feature_file,
        options=options,
        limits=DecodingLimits(),
        **(defaults | fields),
    )
    result = jobs.process_media(job)
    written = Path(f"/proc/self/fd/{target.feature_file.fd}").read_bytes()
    if isinstance(result, MediaRefused):
        assert written == b""
        return result, {}
    assert len(written) == result.size
    return result, load(written)


def expected_tensors(family: str, arguments: dict[str, Any], text: str) -> tuple[dict[str, torch.Tensor], str]:
    """Return what the processor itself returns, and the text in which it has put the item."""
    processor = load_processor(multimodal_folder(family))
    output = processor(text=[text], return_tensors="pt", return_text_replacement_offsets=True, **arguments)
    if family == "mllama":
        replaced = {"replacement": "<|image|>"}
    elif family in ("idefics2", "nemotron_h_omni"):  # whose processors do not tell
        replaced = {"replacement": processor.tokenizer.decode(output["input_ids"][0])}
    else:
        (replaced,) = output["text_replacement_offsets"][0]
    text_names = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}
    text_names |= {"moe_mm_token_type_ids", "labels"}  # ERNIE's and PaliGemma's names of more about the tokens
    text_names |= {"video_metadata", "cross_attention_mask"}
    return {name: torch.as_tensor(value) for name, value in output.items() if name not in text_names}, replaced[
        "replacement"
    ]


def prompt_mark(family: str, kind: Any) -> str:
    folder = multimodal_folder(family)
    from parley.text.tokens.tokenizer import Tokenizer

    model_family = read_media_family(read_json_object(folder / "config.json"))
    assert model_family is not None
    marks = model_family.read_marks(Tokenizer.from_folder(folder))[kind]
    return marks.opening + marks.prompt_mark + marks.closing  # as a template writes them


def families_with(kind: str) -> list[str]:
    return [name for name, family in SAMPLED_FAMILIES.items() if kind in family.parts]


def check_same(result: MediaJobResult | MediaRefused, tensors: dict[str, torch.Tensor], expected: Any) -> None:
    assert isinstance(result, MediaJobResult), result
    expected_features, replacement = expected
    item = result.item
    numbers = tensors.pop("placeholder_numbers") if item.other_placeholders else None
    assert tensors.keys() == expected_features.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected_features[name]), name
    assert item.replacement == replacement
    marks = [item.placeholder, *item.other_placeholders]
    if item.leads_prompt:  # a mark, and 17 embeddings of each tile
        assert item.embedding_count == 17 * int(tensors["aspect_ratio_mask"].sum()) > 0
    else:
        assert sum(map(item.replacement.count, marks)) == item.embedding_count > 0
    assert numbers is None or "".join(marks[number] for number in numbers) == replacement
    assert len(item.digest) == 32


@pytest.mark.parametrize("family", families_with("image"))
def test_has_the_processors_features_of_an_image(family: str):
    result, tensors = process(jobs_of(family), "image", IMAGE)
    image = Image.fromarray(image_array(90, 60))
    nested = family in ("gemma3", "idefics3", "smolvlm")
    arguments = {"images": [[image]] if nested else [image]}
    check_same(result, tensors, expected_tensors(family, arguments, prompt_mark(family, "image")))


@pytest.mark.parametrize("family", families_with("video"))
def test_has_the_processors_features_of_a_video(family: str):
    data = video_file(frames=24, rate=4)
    loading = {"num_frames": 6}
    result, tensors = process(jobs_of(family), "video", data, loading_options=loading)
    from transformers import AutoProcessor
    from transformers.video_utils import VideoMetadata

    frames = torch.from_numpy(read_all_frames(data))
    metadata = VideoMetadata(total_num_frames=24, fps=4.0, width=64, height=48, duration=6.0)
    sampler = AutoProcessor.from_pretrained(multimodal_folder(family)).video_processor
    joined = {"temporal_patch_size": sampler.temporal_patch_size} if hasattr(sampler, "temporal_patch_size") else {}
    indices = sampler.sample_frames(metadata=metadata, num_frames=6, fps=None, **joined)
    metadata.frames_indices = [int(index) for index in indices]
    arguments = {
        "videos": [frames[metadata.frames_indices].permute(0, 3, 1, 2)],
        "video_metadata": metadata if family == "nemotron_h_omni" else [metadata],
        "do_sample_frames": False,
        "return_metadata": True,
    }
    if "_omni_" in family:  # Qwen's
        arguments["fps"] = 1.0  # 6 frames of 6 seconds; the others read it from the metadata
    check_same(result, tensors, expected_tensors(family, arguments, prompt_mark(family, "video")))
    assert isinstance(result, MediaJobResult)
    assert result.item.seconds == 6


def read_all_frames(data: bytes) -> np.ndarray:
    from io import BytesIO

    import av

    with av.open(BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@pytest.mark.parametrize("family", families_with("audio"))
def test_has_the_processors_features_of_a_clip(family: str):
    data = wav_file(sine_wave(1.5, RATE)[None], RATE)
    result, tensors = process(jobs_of(family), "audio", data)
    samples = (sine_wave(1.5, RATE) * 32767).round().astype(np.float32) / 32768
    expected = expected_tensors(family, {"audio": [samples], "sampling_rate": RATE}, prompt_mark(family, "audio"))
    check_same(result, tensors, expected)
    assert isinstance(result, MediaJobResult)
    assert result.item.seconds == 1.5


# Those that Transformers 5.23 computes with torchaudio 2.11, which cannot be installed next to a torch for CPUs.
GRANITE_ROWS = {
    0: [1.5052, 1.66495, 0.70915, 0.37809, 0.9263, 0.21062, -0.10765],
    1: [0.31436, 1.17461, -0.10765, -0.10765, 0.20641, -0.10765, -0.10765],
    13: [-0.10765, -0.10765, 1.79678, -0.10765, -0.10765, 0.96229, -0.10765],
    24: [-0.10765] * 7,
}


def test_features_of_granite_speech_are_those_of_torchaudio():
    numbers = np.arange(8123)
    clip = (np.sin(2 * np.pi * (200 + 0.2 * numbers) * numbers / RATE) * 0.5).astype(np.float32)
    processor = load_processor(multimodal_folder("granite_speech"))
    output = processor(["<|audio|>"], [clip], return_text_replacement_offsets=True)
    features = output["input_features"]
    assert features.shape == (1, 25, 160)
    rows = features[0, list(GRANITE_ROWS)][:, [0, 7, 40, 79, 80, 119, 159]]
    assert torch.allclose(rows, torch.tensor(list(GRANITE_ROWS.values())), atol=2e-5)
    assert output["text_replacement_offsets"][0][0]["replacement"] == "<|audio|>" * 6


def test_describes_grids_and_steps_of_rope():
    result, _ = process(jobs_of("qwen2_vl"), "image", IMAGE)
    assert isinstance(result, MediaJobResult)
    assert (result.item.grids, result.item.frame_steps) == ([(1, 2, 3)], [1.0])
    video = video_file(frames=8, rate=2)
    result, tensors = process(jobs_of("qwen2_5_vl"), "video", video)
    assert isinstance(result, MediaJobResult)
    assert result.item.grids == [(4, 2, 2)]
    assert result.item.frame_steps == [2 * float(tensors["second_per_grid_ts"][0])] == [2.0]
    result, _ = process(jobs_of("qwen3_vl"), "video", video)
    assert isinstance(result, MediaJobResult)
    assert result.item.grids == [(1, 2, 2)] * 4  # text with the time stands between the frames
    result, _ = process(jobs_of("llava"), "image", IMAGE)
    assert isinstance(result, MediaJobResult)
    assert (result.item.grids, result.item.sees_both_ways) == ([], False)
    result, _ = process(jobs_of("gemma3"), "image", IMAGE)
    assert isinstance(result, MediaJobResult)
    assert result.item.sees_both_ways


def test_samples_videos_as_the_processor_does_or_as_the_request_says():
    video = video_file(frames=60, rate=10)

    def frame_count(family: str, **loading: float) -> int:
        result, _ = process(jobs_of(family), "video", video, loading_options=loading)
        assert isinstance(result, MediaJobResult), result
        return sum(grid[0] for grid in result.item.grids)

    assert frame_count("qwen2_vl") == 16  # 32 frames, two of them in each row of the grid
    assert frame_count("qwen3_vl") == 6  # its processor takes 2 frames a second
    assert frame_count("qwen3_vl", fps=1) == 3
    assert frame_count("qwen3_vl", num_frames=10) == 5
    assert frame_count("qwen2_vl", num_frames=-1) == 30


@pytest.mark.parametrize("size", [(1, 1), (3, 1), (1, 3), (300, 1)])
@pytest.mark.parametrize("family", families_with("image"))
def test_accepts_or_refuses_images_of_odd_sizes(family: str, size: tuple[int, int]):
    result, _ = process(jobs_of(family), "image", image_file(image_array(*size)))
    # Some processors refuse narrow images; Mistral's encoder needs two embeddings, and 300 x 1 would have none.
    # Idefics2's cuts each image into four.
    is_refused = family in ("mistral3", "idefics2") or (family.startswith(REFUSE_NARROW) and size == (300, 1))
    assert isinstance(result, MediaRefused) == is_refused
    if isinstance(result, MediaRefused):
        assert result.reason == "refused_by_model"


def digest(data: bytes = IMAGE, family: str = "qwen2_vl", kind: str = "image", **fields: Any) -> bytes:
    result, _ = process(jobs_of(family), kind, data, **fields)
    assert isinstance(result, MediaJobResult), result
    return result.item.digest


def test_digests_are_equal_for_equal_files_and_options():
    encoded = base64.b64encode(IMAGE)
    assert digest() == digest() == digest(encoded, form="base64")
    assert load_jobs(multimodal_folder("qwen2_vl"))._fingerprint == jobs_of("qwen2_vl")._fingerprint


def test_digests_differ_by_everything_that_changes_a_result():
    video, frames = video_file(), base64.b64encode(image_file(image_array(), "JPEG"))
    one, two = {"form": "base64_frames"}, {"form": "base64_frames", "loading_options": {"fps": 2}}
    digests = [
        digest(),
        digest(image_file(image_array(60, 90))),
        digest(is_small=True),
        digest(processor_options={"max_pixels": 28 * 28 * 4}),
        digest(family="qwen2_5_vl"),
        digest(video, kind="video"),
        digest(video, kind="video", loading_options={"num_frames": 4}),
        digest(video, kind="video", loading_options={"fps": 4}),
        digest(frames + b"," + frames, kind="video", **one),
        digest(frames + b"," + frames, kind="video", **two),
    ]
    assert len(set(digests)) == len(digests)


def test_forgets_the_options_of_earlier_items():
    jobs = jobs_of("qwen2_vl")
    before, tensors = process(jobs, "image", IMAGE)
    smaller, _ = process(jobs, "image", IMAGE, processor_options={"min_pixels": 784, "max_pixels": 1568})
    assert isinstance(before, MediaJobResult)
    assert isinstance(smaller, MediaJobResult)
    assert smaller.item.embedding_count < before.item.embedding_count
    after, tensors_after = process(jobs, "image", IMAGE)
    assert after == before
    assert all(torch.equal(tensors[name], tensors_after[name]) for name in tensors)


def test_shrinks_an_image_for_low_detail():
    result, tensors = process(jobs_of("llava_next"), "image", image_file(image_array(1024, 512)), is_small=True)
    assert isinstance(result, MediaJobResult)
    assert tensors["image_sizes"].tolist() == [[256, 512]]


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("image", {"processor_options": {"tokenizer": "/etc/passwd"}}, "refused_by_model"),
        ("image", {"processor_options": {"text": "x"}}, "refused_by_model"),
        ("image", {"processor_options": {"max_pixels": "many"}}, "refused_by_model"),
        ("image", {"processor_options": {"min_pixels": 10**30}}, "refused_by_model"),
        ("image", {"loading_options": {"fps": 1}}, "refused_by_model"),
        ("video", {"loading_options": {"fps": 0}}, "refused_by_model"),
        ("video", {"loading_options": {"num_frames": True}}, "refused_by_model"),
        ("video", {"loading_options": {"num_frames": 0}}, "refused_by_model"),
        ("video", {"loading_options": {"seek": 1}}, "refused_by_model"),
        ("image", {"form": "base64"}, "bad_base64"),
        ("audio", {}, "refused_by_model"),
    ],
)
def test_refuses_options_that_it_does_not_know(kind: str, fields: dict[str, Any], reason: str):
    data = {"image": IMAGE, "video": video_file(), "audio": wav_file(sine_wave(1, RATE)[None], RATE)}[kind]
    result, _ = process(jobs_of("qwen2_vl"), kind, data, **fields)
    assert isinstance(result, MediaRefused)
    assert result.reason == reason


def test_refuses_clips_longer_than_the_model_reads():
    result, _ = process(jobs_of("qwen2_audio"), "audio", wav_file(sine_wave(31, 8_000)[None], 8_000))
    assert isinstance(result, MediaRefused)
    assert (result.reason, result.predicate) == ("too_long", "has 31.0 seconds, and this model reads at most 30")


def test_says_how_long_a_clip_is_to_the_hundredth_of_a_second():
    result, _ = process(jobs_of("gemma4"), "audio", wav_file(sine_wave(30.02, RATE)[None], RATE))
    assert isinstance(result, MediaRefused)
    assert result.predicate == "has 30.02 seconds, and this model reads at most 29.99"


@pytest.mark.skipif("gemma3n" not in FAMILIES, reason="timm is not installed")
def test_clips_of_gemma_3n_may_have_30_seconds():
    for seconds, reads_all in ((29.995, True), (30, True), (30.02, False)):
        result, _ = process(jobs_of("gemma3n"), "audio", wav_file(sine_wave(seconds, RATE)[None], RATE))
        assert isinstance(result, MediaJobResult) == reads_all


@pytest.mark.parametrize("kind", ["image", "video"])
def test_refuses_images_with_more_patches_in_a_row_than_the_encoder_has_positions(tmp_path: Path, kind: str):
    folder = write_multimodal_model(tmp_path / "gemma4", "gemma4", vision={"position_embedding_size": 64})
    jobs = load_jobs(folder)
    narrow, wide = {
        "image": (image_file(image_array(400, 2)), IMAGE),
        "video": (video_file(width=400, height=2, frames=2), video_file(frames=2)),
    }[kind]
    result, _ = process(jobs, kind, narrow)
    assert isinstance(result, MediaRefused)
    assert result.reason == "refused_by_model"
    assert isinstance(process(jobs, kind, wide)[0], MediaJobResult)


@pytest.mark.parametrize("family", ["audioflamingo3", "glmasr", "voxtral"])
def test_reads_long_clips_in_windows(family: str):
    result, tensors = process(jobs_of(family), "audio", wav_file(sine_wave(31, 8_000)[None], 8_000))
    assert isinstance(result, MediaJobResult), result
    assert tensors["input_features"].shape[0] == 2
