"""Clients' options for the processing of their media, and the frames of a video that are read by default."""

from __future__ import annotations

from typing import Any

import numpy as np

from parley.errors import excerpt
from parley.model.media_input.unusable import UnusableMedia
from parley.types import MediaKind

DEFAULT_FRAMES = 32  # of a video, if neither the processor nor the request says how many
# Options of processors that clients may set; others could name files, or replace the input.
# fmt: off
SAMPLING_OPTIONS = frozenset({"fps", "num_frames", "min_frames", "max_frames"})
CLIENT_OPTIONS = SAMPLING_OPTIONS | {
    "min_pixels", "max_pixels", "size", "max_image_size", "do_resize", "do_image_splitting", "do_pan_and_scan",
    "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate",
    "crop_to_patches", "min_patches", "max_patches", "max_soft_tokens",
}
# fmt: on


def check_options(kind: MediaKind, options: dict[str, Any]) -> dict[str, Any]:
    """Return the processor's options of a request. Raises UnusableMedia for options that clients may not set."""
    for name in options:
        if name not in CLIENT_OPTIONS:
            raise UnusableMedia(f"cannot be processed with the option {excerpt(name)}", "refused_by_model")
    return options


def equal_distances(total: int, count: int = DEFAULT_FRAMES) -> list[int]:
    """Return ``count`` numbers below ``total``, from the first to the last; all of them if there are not more."""
    return [int(index) for index in np.linspace(0, total - 1, min(count, total)).round()]


def processor_refusal() -> UnusableMedia:
    """Return the error of an item that the processor does not accept, for example because it is too narrow."""
    return UnusableMedia(
        "cannot be processed by this model: its size or one of its options is out of range", "refused_by_model"
    )
