"""Images are decoded as people see them, whatever their format; damaged, huge and foreign files are refused."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from support.media_files import IMAGE_FILES, image_array, image_file, png_header

from parley.model.media_input import images
from parley.model.media_input.images import decode_image, shrink_image
from parley.model.media_input.unusable import UnusableMedia

PIXELS = 50_000_000


def decode(data: bytes) -> np.ndarray:
    return np.asarray(decode_image(data, PIXELS))


def refusal(data: bytes, max_pixels: int = PIXELS) -> UnusableMedia:
    with pytest.raises(UnusableMedia) as caught:
        decode_image(data, max_pixels)
    return caught.value


@pytest.mark.parametrize("name", IMAGE_FILES)
def test_reads_each_format(name: str):
    decoded = decode(IMAGE_FILES[name])
    assert decoded.shape == (30, 40, 3)
    if name not in ("JPEG", "GIF"):  # which lose something
        assert np.array_equal(decoded, image_array())


COMMENT = b"\xff\xfe\0\2"  # a segment of a JPEG file without content


@pytest.mark.parametrize("place", [2, -2])  # before everything else, and behind the last scan
def test_reads_a_jpeg_file_with_as_many_segments_as_are_allowed(place: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(images, "MAX_SEGMENTS", 1000)
    data = IMAGE_FILES["JPEG"]
    own_segments = next(count for count in range(1, 100) if _is_refused(data, place, 1000 - count) is False)
    assert own_segments < 20 and _is_refused(data, place, 1000 - own_segments + 1)
    assert _is_refused(data + COMMENT * 1000, place, 0) is False  # what follows the image is not read


def _is_refused(data: bytes, place: int, comments: int) -> bool:
    """Whether a file with comments at one place has too many segments; otherwise it has to be read as without them."""
    commented = data[:place] + COMMENT * comments + data[place:]
    try:
        decoded = decode(commented)
    except UnusableMedia as error:
        assert error.reason == "too_slow" and "1000 segments" in error.predicate
        return True
    assert np.array_equal(decoded, decode(data))
    return False


def test_segments_are_counted_before_pillow_reads_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Image, "open", None)
    data = IMAGE_FILES["JPEG"]
    assert refusal(data[:2] + COMMENT * (images.MAX_SEGMENTS + 1) + data[2:]).reason == "too_slow"


@pytest.mark.parametrize("size", [(1, 1), (3, 1), (1, 3), (300, 1), (1, 300)])
def test_reads_images_of_odd_sizes(size: tuple[int, int]):
    image = image_array(*size)
    assert np.array_equal(decode(image_file(image)), image)


def test_reads_grey_images_of_8_and_16_bits():
    grey = image_array()[:, :, 0]
    deep = grey.astype(np.uint16) * 256 + 77
    for data in (image_file(grey), image_file(deep)):
        assert np.array_equal(decode(data), np.repeat(grey[:, :, None], 3, axis=2))


def test_reads_palettes_and_cmyk():
    palette = Image.fromarray(image_array()).quantize(16)
    assert np.array_equal(decode(image_file(palette)), np.asarray(palette.convert("RGB")))
    assert decode(image_file(Image.fromarray(image_array()).convert("CMYK"), "JPEG")).shape == (30, 40, 3)


def test_puts_transparent_images_on_white():
    clear = np.zeros((2, 2, 4), np.uint8)
    clear[0, 0] = (200, 0, 0, 255)
    clear[0, 1] = (0, 0, 0, 128)
    decoded = decode(image_file(clear))
    assert decoded[0, 0].tolist() == [200, 0, 0]
    assert decoded[0, 1].tolist() == [127, 127, 127]
    assert decoded[1].tolist() == [[255, 255, 255]] * 2
    grey = Image.fromarray(clear[:, :, 0]).convert("LA")
    grey.putalpha(0)
    assert (decode(image_file(grey)) == 255).all()
    palette = Image.fromarray(clear[:, :, :3]).quantize(4)
    assert (decode(image_file(palette, transparency=palette.getpixel((0, 1)))) == 255).any()


def test_turns_images_as_their_exif_data_says():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn right
    image = image_array()
    assert np.array_equal(decode(image_file(image, exif=exif)), np.rot90(image, -1))


def test_reads_images_with_broken_exif_data():
    image = image_array()
    assert np.array_equal(decode(image_file(image, exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01")), image)


@pytest.mark.parametrize("name", ["GIF", "WEBP", "PNG"])
def test_reads_the_first_frame_of_an_animation(name: str):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    options = {"lossless": True} if name == "WEBP" else {}
    data = image_file(frames[0], name, save_all=True, append_images=frames[1:], **options)
    assert (decode(data) == (255, 0, 0)).all()


def test_checks_the_size_before_it_decodes():
    error = refusal(png_header(60_000, 60_000))
    assert error.reason == "too_many_pixels"
    assert error.detail == {"limit": PIXELS, "size": 60_000**2, "width": 60_000, "height": 60_000}
    black = image_file(Image.new("1", (14_000, 14_000)))
    assert len(black) < 100_000
    assert refusal(black).reason == "too_many_pixels"
    assert refusal(image_file(image_array(10, 11)), 109).predicate == "has 10 x 11 pixels, and at most 109 are allowed"
    assert decode_image(image_file(image_array(10, 11)), 110).size == (10, 11)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        image_file(image_array(), "TIFF"),
        image_file(image_array(), "JPEG2000"),
        image_file(image_array(), "ICO"),
        image_file(image_array(), "PPM"),
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
    ],
    ids=["empty", "svg", "tiff", "jpeg2000", "ico", "ppm", "eps"],
)
def test_refuses_other_formats(data: bytes):
    assert refusal(data).reason == "unknown_format"


@pytest.mark.parametrize("name", IMAGE_FILES)
def test_refuses_files_that_were_cut_off(name: str):
    data = IMAGE_FILES[name]
    error = refusal(data[: len(data) // 2])
    assert error.reason == "undecodable"
    assert error.predicate == "is damaged and cannot be decoded"  # none of Pillow's words


def test_shrinks_large_images_for_low_detail():
    assert shrink_image(Image.new("RGB", (1024, 100))).size == (512, 50)
    assert shrink_image(Image.new("RGB", (3000, 1))).size == (512, 1)
    assert shrink_image(Image.new("RGB", (20, 10))).size == (20, 10)
