"""The inputs with images: ``image`` of vLLM's backend, in base64, and ``image_url`` of TensorRT-LLM's.

Neither says where an image stands among the text, so all stand before it: those of ``image`` first, in their order.
"""

from __future__ import annotations

from parley.dialects import media
from parley.dialects.fields import Fields
from parley.dialects.request_context import RequestContext
from parley.errors import Unsupported
from parley.types import EncodedMedia, Media, PlacedMedia

IMAGE_INPUTS = ("image", "image_url")
MAX_IMAGES = 4096  # elements of one of these inputs
MAX_CHARACTERS = 2**31  # of one of these inputs; the limit of a body is lower


def read_triton_images(body: Fields, context: RequestContext) -> list[PlacedMedia]:
    """Return the images of a request. Raises BadRequest."""
    images = []
    for name in IMAGE_INPUTS:
        value = body.raw_value(name)
        value = [text for text in value if text != ""] if isinstance(value, list) else value
        if not value or value == -1:  # asks for nothing
            continue
        if "image" not in context.media_limits:
            raise Unsupported(f"'{name}': The model does not read images.", field=name)
        texts = Fields({name: value}).strings(name, cap=MAX_IMAGES, total=MAX_CHARACTERS)
        images += [_read_image(name, f"{name}[{number}]", text) for number, text in enumerate(texts)]
    media.check_media_counts(images, context.media_limits)
    return [PlacedMedia(0, image) for image in images]


def _read_image(name: str, field: str, text: str) -> Media:
    source = EncodedMedia(text) if name == "image" else media.read_media_url(text, "image", field, files=False)
    return Media("image", source, field)
