"""Decodes images with Pillow: JPEG, PNG, WebP, GIF and BMP, recognized by their first bytes.

Only the decoder of that format runs, and only after the header's size has been checked: a file of one kilobyte may
stand for gigabytes of pixels. Of an animation the first frame counts.
"""

from __future__ import annotations

import re
import warnings
from io import BytesIO

import numpy as np
from PIL import Image, ImageOps

from parley.model.media_input.unusable import UnusableMedia, damaged_media

FORMATS = "JPEG, PNG, WebP, GIF or BMP"
SMALL_SIZE = (512, 512)  # of an image with little detail, at most
MAX_SCANS = 100  # of a JPEG file; encoders write 11 at most, but each of a few bytes may change all pixels
MAX_SEGMENTS = 100_000  # of a JPEG file; those of metadata have up to 64 KB each

# Markers of JPEG that a segment with its length follows, and that of the image's end (ITU T.81, table B.1). Within a
# scan, FF 00 is a byte of data, and FF D0 to FF D7 divide it.
JPEG_MARKER = re.compile(rb"\xff([\x02-\xcf\xd9-\xfe])")
END_OF_IMAGE, BEGIN_OF_SCAN = 0xD9, 0xDA

# The limit is checked here, so that the client gets its numbers; a warning of Pillow would go to the log.
Image.MAX_IMAGE_PIXELS = None
warnings.filterwarnings("ignore", module="PIL")


def image_format(data: bytes) -> str | None:
    """Return Pillow's name of the format that a file begins like; None if it is not accepted."""
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    return "BMP" if data.startswith(b"BM") else None


def decode_image(data: bytes, max_pixels: int) -> Image.Image:
    """Return an image as people see it: turned as its EXIF data says, on white where it is transparent, in RGB.

    Raises UnusableMedia, MemoryError.
    """
    name = image_format(data)
    if name is None:
        raise UnusableMedia(f"is in no format that is read here: {FORMATS}", "unknown_format")
    try:
        if name == "JPEG":
            _check_scans(data)  # Pillow reads all segments of the header, and keeps them, to know the size
        with Image.open(BytesIO(data), formats=[name]) as image:
            _check_pixels(image.size, max_pixels)
            image.load()
            _check_pixels(image.size, max_pixels)  # a frame of a GIF may be larger than its header says
            return _convert_to_rgb(_turn_upright(image))
    except (UnusableMedia, MemoryError):
        raise
    except Exception:
        raise damaged_media() from None


def shrink_image(image: Image.Image) -> Image.Image:
    """Return an image of at most 512 x 512 pixels."""
    image.thumbnail(SMALL_SIZE, Image.Resampling.BICUBIC)
    return image


def _check_pixels(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise UnusableMedia(
            f"has {width} x {height} pixels, and at most {max_pixels} are allowed",
            "too_many_pixels",
            limit=max_pixels,
            size=width * height,
            width=width,
            height=height,
        )


def _check_scans(data: bytes) -> None:
    """Raise UnusableMedia if a JPEG file has too many scans or segments. What follows the end of the image is not
    read."""
    place = scans = segments = 0
    while (match := JPEG_MARKER.search(data, place)) is not None and (marker := match[1][0]) != END_OF_IMAGE:
        place = match.end() + max(2, int.from_bytes(data[match.end() : match.end() + 2]))
        segments += 1
        scans += marker == BEGIN_OF_SCAN
        if scans > MAX_SCANS:
            raise UnusableMedia(f"has more than {MAX_SCANS} scans", "too_slow")
        if segments > MAX_SEGMENTS:
            raise UnusableMedia(f"has more than {MAX_SEGMENTS} segments", "too_slow")


def _turn_upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except MemoryError:
        raise
    except Exception:  # broken EXIF data does not make an image unusable
        return image


def _convert_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits; Pillow would cut the values off at 255
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8))
    elif image.has_transparency_data:
        transparent = image.convert("RGBA")
        image = Image.new("RGBA", transparent.size, "white")
        image.alpha_composite(transparent)
    return image.convert("RGB")
