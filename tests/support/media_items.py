"""Images, videos and clips for tests: noise, what a model's processor makes of it, and the item for the engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save
from support.multimodal_models import load_processor

from parley.types import EmbeddingRun, FeatureFile, MediaItem, MediaKind

FRAMES = 6
FRAME_RATE = 2.0  # per second
SAMPLING_RATE = 16000


def make_media(kind: MediaKind, *, height: int = 50, width: int = 40, seed: int = 0) -> Any:
    """Return an image [height, width, 3] or FRAMES of them, uint8, or half a second of sound, float32."""
    random = np.random.default_rng(seed)
    if kind == "audio":
        return random.standard_normal(SAMPLING_RATE // 2).astype(np.float32)
    frames = random.integers(0, 256, (FRAMES, height, width, 3), dtype=np.uint8)
    return frames[0] if kind == "image" else frames


@cache
def cached_processor(folder: Path) -> Any:
    """Return the processor of a model folder."""
    return load_processor(folder)


def process_media(folder: Path, kind: MediaKind, media: Any, text: str = "What is it?") -> dict[str, Any]:
    """Return the processor's tensors for a prompt of one item and a text, ``input_ids`` [1, T] among them."""
    from transformers.video_utils import VideoMetadata

    processor = cached_processor(folder)
    content = [{"type": kind}, {"type": "text", "text": text}]
    # The processor of Phi-4-multimodal has no template
    template_owner = processor if getattr(processor, "chat_template", True) else processor.tokenizer
    prompt = template_owner.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    arguments: dict[str, Any] = {"audio": {"audio": [media], "sampling_rate": SAMPLING_RATE}}.get(kind, {})
    if kind == "image":
        arguments = {"images": [Image.fromarray(media)]}
    elif kind == "video":
        timing = {
            "fps": FRAME_RATE,
            "total_num_frames": FRAMES,
            "duration": FRAMES / FRAME_RATE,
            "frames_indices": list(range(FRAMES)),
        }
        is_single = "nemotron" in type(processor).__name__.lower()  # it reads one video
        if is_single:
            timing = VideoMetadata(**timing)
        arguments = {
            "videos": [list(media)],
            "video_metadata": timing if is_single else [timing],
            "do_sample_frames": False,
            "return_metadata": True,
        }
    return in_float32(processor(text=[prompt], return_tensors="pt", **arguments))


def in_float32(inputs: Any) -> dict[str, Any]:
    """Return a processor's tensors for a model in float32. Llama 4's are in bfloat16. PaliGemma's labels are for
    training."""
    return {
        name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
        if name not in ("labels", "video_metadata")
    }


def encoder_features(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the processor's tensors that are not about the text."""
    text_names = {"input_ids", "attention_mask", "mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids"}
    return {
        name: torch.as_tensor(value).contiguous()
        for name, value in inputs.items()
        if name not in text_names and not isinstance(value, str)
    }


@contextmanager
def media_item(
    kind: MediaKind, features: dict[str, torch.Tensor] | bytes, count: int, digest: bytes = b"digest"
) -> Iterator[MediaItem]:
    """Keep features in a file in memory, and return an item of ``count`` embeddings that uses it."""
    content = features if isinstance(features, bytes) else save(features, {"digest": digest.hex()})
    descriptor = os.memfd_create("features")
    try:
        os.write(descriptor, content)
        file = FeatureFile(os.getpid(), descriptor, len(content))
        yield MediaItem(kind, digest, 0, count, [EmbeddingRun(0, count)], features=file)
    finally:
        os.close(descriptor)
