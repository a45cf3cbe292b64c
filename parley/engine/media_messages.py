"""The messages between the API process and a media process (``worker/media_process.py``), which decodes media."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from parley.errors import MediaFault
from parley.types import FeatureFile, MediaKind, ProcessedMedia

# How the client's data is written: a file, a file in base64, JPEG files in base64 with commas between them (a video),
# or embeddings as a safetensors file in base64.
MediaForm = Literal["file", "base64", "base64_frames", "base64_embeddings"]


class DecodingLimits(msgspec.Struct, frozen=True):
    """Limits of a decoded item.

    * ``pixels``: the most of an image or of one frame.
    * ``seconds``: the longest clip.
    * ``frames``: the most frames of a video that are kept.
    * ``frame_bytes``: the most bytes of these frames together, which are scaled down if they take more.
    """

    pixels: int = 50_000_000
    seconds: float = 600.0
    frames: int = 1024
    frame_bytes: int = 512 << 20


class MediaJobRequest(msgspec.Struct, tag=True):
    """To a media process: decode ``source``, run the model's processor, and write its tensors to ``target``.

    Both are files in the sender's memory, opened at ``/proc/{pid}/fd/{fd}``; ``target`` is empty.
    """

    kind: MediaKind
    form: MediaForm
    source: FeatureFile
    target: FeatureFile
    is_small: bool  # shrink an image to 512 x 512 pixels
    options: str  # the client's, for loading and for the processor: JSON, whose integers may be of any size
    limits: DecodingLimits

    @property
    def loading_options(self) -> dict[str, Any]:
        """The options for sampling a video or clip."""
        return dict(json.loads(self.options)[0])

    @property
    def processor_options(self) -> dict[str, Any]:
        """Options of the model's processor."""
        return dict(json.loads(self.options)[1])


def encode_options(loading_options: Mapping[str, Any], processor_options: Mapping[str, Any]) -> str:
    """Return ``MediaJobRequest.options``, the same for the same options."""
    return json.dumps([loading_options, processor_options], sort_keys=True)


class MediaProcessReady(msgspec.Struct, tag=True):
    """From a media process: it has loaded the model's processor."""


class MediaProcessFailed(msgspec.Struct, tag=True):
    """From a media process: it ends, because the model's processor cannot be loaded."""


class MediaJobResult(msgspec.Struct, tag=True):
    """From a media process: the target holds ``size`` bytes, and ``item`` describes them."""

    item: ProcessedMedia
    size: int


class MediaRefused(msgspec.Struct, tag=True):
    """From a media process: the item cannot be used. ``predicate``: the end of a sentence that begins with the item;
    ``reason`` and ``detail`` as in ``BadMedia``."""

    predicate: str
    reason: MediaFault
    detail: dict[str, int | float | str] = {}


FromMediaProcess = MediaProcessReady | MediaProcessFailed | MediaJobResult | MediaRefused
