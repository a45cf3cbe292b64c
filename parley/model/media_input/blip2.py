"""Turns images into the features of BLIP-2.

Transformers' ``Blip2Processor`` writes the placeholders of an image before a prompt, and accepts no mark for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

from parley.text.tokens.json_files import read_json_object


class Blip2Processor:
    """The part of a processor of Transformers that ``ItemProcessor`` uses. ``placeholder_id``: of the token that each
    embedding replaces. Raises OSError or ValueError if the folder's files cannot be loaded."""

    def __init__(self, folder: Path, placeholder_id: int):
        from transformers import AutoImageProcessor, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self.image_processor: Any = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
        self.image_token = str(self.tokenizer.convert_ids_to_tokens(placeholder_id))
        self._embeddings = int(read_json_object(folder / "config.json").get("num_query_tokens", 32))  # of an image

    def __call__(
        self,
        *,
        text: list[str],
        images: list[Image.Image],
        return_tensors: str,
        return_text_replacement_offsets: bool,
        **options: Any,
    ) -> dict[str, Any]:
        """Return the pixels [1, 3, height, width] of one image, and the text that stands for it."""
        pixels = self.image_processor(images, return_tensors=return_tensors, **options)["pixel_values"]
        replacement = self.image_token * self._embeddings
        return {"pixel_values": pixels, "text_replacement_offsets": [[{"replacement": replacement}]]}
