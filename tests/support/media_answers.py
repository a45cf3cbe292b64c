"""What Transformers answers to a conversation with images, and the images themselves."""

from __future__ import annotations

import base64
import io
import threading
from functools import cache
from typing import Any

import numpy as np
import torch
from support.multimodal_models import load_whole_model, multimodal_folder

NESTED_IMAGES = ("gemma3", "idefics3", "smolvlm")  # their processors want a list of images for each text

_generating = threading.Lock()


@cache
def make_image(seed: int, width: int = 60, height: int = 44) -> Any:
    """Return an image of coloured patches."""
    from PIL import Image

    patches = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(patches).resize((width, height), Image.Resampling.NEAREST)


@cache
def image_bytes(seed: int, image_format: str = "PNG") -> bytes:
    """Return the file of an image, in a format that loses nothing."""
    file = io.BytesIO()
    make_image(seed).save(file, image_format)
    return file.getvalue()


@cache
def image_base64(seed: int) -> str:
    return base64.b64encode(image_bytes(seed)).decode()


def image_data_url(seed: int) -> str:
    """Return an image as a ``data:`` URL."""
    return f"data:image/png;base64,{image_base64(seed)}"


def altered_image_url(seed: int) -> str:
    """Return an image of which one pixel differs, as a ``data:`` URL."""
    image, file = make_image(seed).copy(), io.BytesIO()
    red, green, blue = image.getpixel((30, 20))
    image.putpixel((30, 20), (red ^ 128, green, blue))
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@cache
def load_reference(family: str) -> tuple[Any, Any]:
    """Return the whole model of a family in float32, and its processor."""
    from transformers import AutoProcessor

    folder = multimodal_folder(family)
    model = load_whole_model(folder)
    return model.eval(), AutoProcessor.from_pretrained(folder)


@cache
def reference_ids(family: str, text: str, seeds: tuple[int, ...], count: int) -> tuple[list[int], list[int]]:
    """Return the ids of a prompt and the ``count`` tokens that greedy generation adds to it.

    ``text``: the rendered prompt, with the family's marks for the images ``seeds``.
    """
    model, processor = load_reference(family)
    images: Any = [make_image(seed) for seed in seeds]
    if images and family in NESTED_IMAGES:
        images = [images]
    if family.startswith("paligemma") and not images:  # its processor refuses texts without images
        batch = processor.tokenizer([text], return_tensors="pt", add_special_tokens=False)
    else:
        batch = processor(text=[text], images=images or None, return_tensors="pt", add_special_tokens=False)
    batch.pop("labels", None)  # what PaliGemma's writes for training
    with _generating, torch.inference_mode():
        output = model.generate(**batch, max_new_tokens=count, do_sample=False)
    prompt_ids = batch["input_ids"][0].tolist()
    return prompt_ids, output[0, len(prompt_ids) :].tolist()


def chat_text(family: str, *turns: tuple[str, list[str | None]]) -> str:
    """Return the rendered text of a conversation. Each turn has its role and parts; None stands for an image."""
    _, processor = load_reference(family)
    messages = [
        {
            "role": role,
            "content": [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts],
        }
        for role, parts in turns
    ]
    text: str = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return text
