"""Requests with images, videos and clips for the engine, with embeddings of its own encoder."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from support.media_items import SAMPLING_RATE, encoder_features, in_float32, media_item
from support.multimodal_models import FAMILIES, load_processor, load_whole_model, multimodal_folder

import parley.model.load  # noqa: F401  (before Transformers, so that torchvision can be imported)
from parley.model.checkpoint.files import read_config
from parley.model.load.towers import load_towers, plan_towers
from parley.model.media.encoder import TransformersEncoder
from parley.model.media_embeddings import EncodedItem
from parley.text.media_canvas import place_on_canvas
from parley.text.media_family import MediaFamily, read_media_family
from parley.types import MEDIA_KINDS, EmbeddingRun, MediaItem, MediaKind, ProcessedMedia

FRAME_SECONDS = ("second_per_grid_ts", "video_second_per_grid")
MERGE = 2  # patches per embedding in rows and columns, in models with M-RoPE


@functools.cache
def whole_model(family: str) -> Any:
    """The whole model in Transformers, in float32."""
    return load_whole_model(multimodal_folder(family))


@functools.cache
def family_processor(family: str) -> Any:
    return load_processor(multimodal_folder(family))


def random_image(number: int, width: int, height: int) -> Any:
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def random_video(number: int, frames: int, width: int, height: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def random_sound(number: int) -> np.ndarray:
    """Half a second of noise."""
    return np.random.default_rng(number).standard_normal(SAMPLING_RATE // 2).astype(np.float32)


@dataclass
class MediaPrompt:
    """A prompt as the engine gets it, and the same as ``inputs`` of the whole model. ``features``: of each item."""

    token_ids: list[int]
    media: list[MediaItem]
    encoded: dict[bytes, EncodedItem]
    inputs: dict[str, Any]
    features: list[dict[str, Any]]

    @contextmanager
    def open_media(self) -> Iterator[list[MediaItem]]:
        """Return the items with files of their features."""
        with ExitStack() as files:
            yield [
                replace(
                    item,
                    features=files.enter_context(
                        media_item(item.kind, encoder_features(features), 0, item.digest)
                    ).features,
                )
                for item, features in zip(self.media, self.features, strict=True)
            ]


def build_media_prompt(family: str, parts: list[Any]) -> MediaPrompt:
    """Build a prompt of texts, images (PIL), videos (arrays of frames) and clips, with its embeddings."""
    folder_config = whole_model(family).config.to_dict()
    facts = read_media_family(folder_config)
    assert facts is not None
    inputs = dict(_process(family, parts))
    token_ids = inputs["input_ids"][0].tolist()
    if facts.leads_prompt:
        return _build_led_prompt(family, parts, inputs)
    kind_of = {token_id: kind for kind in facts.kinds for token_id in all_placeholder_ids(facts, kind)}
    runs = [
        (kind, [place for place, _ in group])
        for kind, group in itertools.groupby(enumerate(token_ids), lambda placed: kind_of.get(placed[1]))
        if kind
    ]
    media, encoded, all_features = [], {}, []
    for part in (part for part in parts if not isinstance(part, str)):
        features = dict(_process(family, [part]))
        all_features.append(features)
        kind = _kind_of(part)
        item = encode_features(family, features, kind)
        digest = sha256(part.tobytes()).digest()
        encoded[digest] = item
        own_runs: list[list[int]] = []
        while sum(map(len, own_runs)) < len(item.rows):
            own_runs.append(runs.pop(0)[1])
        start = own_runs[0][0]
        has_grids = facts.has_rope_grids and kind != "audio"
        grids, step = _grids(family, features, kind, len(own_runs)) if has_grids else ([], 1.0)
        item_runs = [
            EmbeddingRun(run[0] - start, len(run), grids[number] if grids else None, step, "_omni_" in family)
            for number, run in enumerate(own_runs)
        ]
        if facts.numbers_grids:  # with a mark after each row, and one at both ends
            (frames, rows, columns), last = grids[0], len(own_runs[0]) - 1
            numbered = EmbeddingRun(1, last - 1, (frames, rows, columns + 1), is_numbered=True)
            item_runs = [EmbeddingRun(0, 1), numbered, EmbeddingRun(last, 1)]
        media.append(
            MediaItem(
                kind,
                digest,
                start,
                own_runs[-1][-1] + 1 - start,
                item_runs,
                facts.sees_both_ways and kind != "audio",
                prompt_sees_both_ways=facts.is_prefix_lm,
            )
        )
    assert not runs
    if facts.canvas_marks is not None:
        items = [
            ProcessedMedia(item.kind, b"", "", "", item.embedding_count, grids=_canvas_grids(features))
            for item, features in zip(media, all_features, strict=True)
        ]
        media = place_on_canvas(token_ids, items, media, facts.canvas_marks)
    return MediaPrompt(token_ids, media, encoded, inputs, all_features)


def _canvas_grids(features: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Return the rows and columns of embeddings of each slice of MiniCPM-V 4.7, which has one for 4 x 4 patches."""
    sizes = features.get("target_sizes", features.get("target_sizes_videos"))
    return [(1, rows // 4, columns // 4) for rows, columns in sizes.tolist()]


def _build_led_prompt(family: str, parts: list[Any], inputs: dict[str, Any]) -> MediaPrompt:
    """Build a prompt that images lead: each group of marks begins with a page."""
    token_ids: list[int] = inputs["input_ids"][0].tolist()
    mark = whole_model(family).config.image_token_index
    marks = [place for place, token_id in enumerate(token_ids) if token_id == mark]
    media, encoded, all_features, end = [], {}, [], 0
    for part, place in zip((part for part in parts if not isinstance(part, str)), marks, strict=True):
        features = dict(_process(family, [part]))
        features.pop("cross_attention_mask")
        all_features.append(features)
        count = int(features["aspect_ratio_mask"].sum()) * whole_model(family).model.vision_model.num_patches
        with media_item("image", encoder_features(features), count) as item:
            rows = family_encoder(family).encode_item(item, lambda: None)
        digest = sha256(part.tobytes()).digest()
        encoded[digest] = rows
        end = end if place - 1 in marks else -(-end // 16) * 16
        media.append(MediaItem("image", digest, end, count, [EmbeddingRun(0, count)], seen_from=place))
        end += count
    lead = -(-end // 16) * 16
    media = [replace(item, seen_from=item.seen_from + lead) for item in media]
    return MediaPrompt([0] * lead + token_ids, media, encoded, inputs, all_features)


def all_placeholder_ids(facts: MediaFamily, kind: MediaKind) -> list[int]:
    """Return the tokens that embeddings of a kind replace."""
    return [facts.placeholder_ids[kind], *(facts.other_placeholder_ids if kind == "image" else ())]


def _kind_of(part: Any) -> MediaKind:
    if isinstance(part, np.ndarray):
        return "audio" if part.ndim == 1 else "video"
    return "image"


def _process(family: str, parts: list[Any]) -> Any:
    """Run the processor on texts with media between them."""
    marks = FAMILIES[family].parts
    text = "".join(part if isinstance(part, str) else marks[_kind_of(part)] for part in parts)
    media = [part for part in parts if not isinstance(part, str)]
    images, videos, clips = ([part for part in media if _kind_of(part) == kind] for kind in MEDIA_KINDS)
    from transformers.video_utils import VideoMetadata

    nested = family in ("gemma3", "idefics3", "smolvlm")
    options: dict[str, Any] = {}
    if images:
        options["images"] = [images] if nested else images
    if videos:
        options["videos"] = videos
        options["video_metadata"] = [
            {
                "fps": 2.0,
                "total_num_frames": len(video),
                "duration": len(video) / 2,
                "frames_indices": list(range(len(video))),
            }
            for video in videos
        ]
        if family == "nemotron_h_omni":  # whose processor reads one video
            options["video_metadata"] = VideoMetadata(**options["video_metadata"][0])
        options["do_sample_frames"] = False
        options["return_metadata"] = True
    if clips:
        options |= {"audio": clips, "sampling_rate": SAMPLING_RATE}
    if family.startswith("gemma4") or family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"):
        options["return_mm_token_type_ids"] = True
    return in_float32(family_processor(family)(text=[text], return_tensors="pt", **options))


@functools.cache
def family_encoder(family: str) -> TransformersEncoder:
    """The engine's encoder, in float32."""
    folder, device = multimodal_folder(family), torch.device("cpu")
    towers = plan_towers(folder, read_config(folder), torch.float32, device)
    assert towers is not None
    return TransformersEncoder(lambda: load_towers(towers), torch.float32, device)


def encode_features(family: str, features: dict[str, Any], kind: MediaKind) -> EncodedItem:
    """Compute the embeddings of one item as the engine does."""
    facts = read_media_family(read_config(multimodal_folder(family)))
    ids = all_placeholder_ids(facts, kind)
    places = [ids.index(token_id) for token_id in features["input_ids"][0].tolist() if token_id in ids]
    if facts.other_placeholder_ids:
        features["placeholder_numbers"] = torch.tensor(places)
    with media_item(kind, encoder_features(features), len(places)) as item:
        return family_encoder(family).encode_item(item, lambda: None)


def _grids(
    family: str, features: dict[str, Any], kind: str, run_count: int
) -> tuple[list[tuple[int, int, int]], float]:
    """Return the grid of each run, and the step between frames."""
    frames, rows, columns = features[f"{kind}_grid_thw"][0].tolist()
    grid = (frames, rows // MERGE, columns // MERGE)
    if run_count == 1:
        seconds = next((float(features[name][0]) for name in FRAME_SECONDS if name in features), 1.0)
        config = whole_model(family).config
        rate = getattr(config, "position_id_per_seconds", getattr(config.vision_config, "tokens_per_second", None))
        return [grid], rate * seconds if rate and kind == "video" else 1.0
    return [(1, *grid[1:])] * run_count, 1.0
