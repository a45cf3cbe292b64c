"""Images of TGI's requests: Markdown links in ``inputs``, parts of a conversation, and the sentences of refusals.

A link has an empty text: ``![](https://…)`` or ``![](data:image/png;base64,…)``. TGI reads no other media.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from parley.dialects import media
from parley.dialects.fields import Fields
from parley.dialects.openai.media_parts import MediaReader
from parley.dialects.request_context import RequestContext
from parley.errors import BadMedia, InvalidValue, MediaFault, ParleyError, excerpt
from parley.types import EncodedMedia, Media, MediaAddress, MediaKind, TextPrompt

IMAGE_LINK = re.compile(r"!\[\]\(([^\)]*)\)")
UNREAD_KIND = "{} modality is not supported"
# Sentences of the original, followed by its decoder's words. These are not passed on: they may contain addresses.
SENTENCES: dict[MediaFault, str] = {
    "bad_base64": "base64 encoding is invalid: the data could not be decoded",
    "unknown_format": "invalid image: The image format could not be determined",
    "undecodable": "invalid image: Format error decoding the image",
    "refused_by_model": "invalid image: The model does not accept this image",
    "too_slow": "invalid image: The image could not be decoded in time",
    "too_many_pixels": "invalid image: Image size exceeds limit",
    "too_long": "invalid image: Image size exceeds limit",
    "forbidden_address": "Could not fetch image: the server does not fetch from this address",
    "unreachable": "Could not fetch image: the server could not be reached",
    "not_found": "Could not fetch image: it was not found",
}
TOO_LARGE = "Image size {} bytes exceeds maximum allowed size of {} bytes"


class TgiMediaReader(MediaReader):
    """Reads the images of a conversation: parts ``{"type": "image_url", "image_url": {"url": …}}``."""

    part_types = ("image_url",)

    def __init__(self, context: RequestContext):
        super().__init__(context.media_limits)

    def unread_kind(self, part: Fields, part_type: str, kind: MediaKind) -> ParleyError:
        """Return the refusal of a kind that the model does not read."""
        return InvalidValue(UNREAD_KIND.format(kind), field=part.member_path(part_type))

    def read_item(self, part: Fields, part_type: str, *, plain_urls: bool) -> Media:
        """Return the image of a part. Raises BadRequest."""
        self.check_kind(part, part_type, "image")
        url_object = part.object("image_url")
        if url_object is None:
            raise part.missing_member("image_url")
        url = url_object.string("url", None)
        if url is None:
            raise url_object.missing_member("url")
        path = part.member_path("image_url")
        return Media("image", _read_image_url(url, path), path)


def read_text_with_images(text: str, field: str, context: RequestContext) -> TextPrompt:
    """Return a prompt with the images that it links to; without a model that reads media, a link is text.

    Raises BadRequest.
    """
    if not context.media_limits:
        return TextPrompt(text)
    prompt = media.interleave_parts(_split_links(text, field, context))
    media.check_media_counts((placed.media for placed in prompt.media), context.media_limits)
    return TextPrompt(prompt.text, media=prompt.media)


def tgi_image_sentence(error: BadMedia) -> str:
    """Return the sentence of an error about an image."""
    if error.reason == "too_large" and "size" in error.detail and "limit" in error.detail:
        return TOO_LARGE.format(error.detail["size"], error.detail["limit"])
    if error.reason == "unreachable" and "status" in error.detail:
        return f"Could not fetch image: HTTP status {error.detail['status']}"
    return SENTENCES.get(error.reason, error.message)


def _split_links(text: str, field: str, context: RequestContext) -> Iterator[str | Media]:
    for number, piece in enumerate(IMAGE_LINK.split(text)):  # texts and URLs take turns
        if number % 2:
            if "image" not in context.media_limits:
                raise InvalidValue(UNREAD_KIND.format("image"), field=field)
            yield Media("image", _read_image_url(piece, field), field)
        elif piece:
            yield piece


def _read_image_url(url: str, field: str) -> EncodedMedia | MediaAddress:
    if url.startswith(("http://", "https://")):
        return media.read_address(url, "image", field)
    if url.startswith("data:") and url.count(";") == 1:
        media_type, _, content = url.removeprefix("data:").partition(";")
        if content.startswith("base64,"):
            return EncodedMedia(content.removeprefix("base64,"), media_type[: media.MAX_HEADER])
    message = f"invalid image content: {excerpt(url)[1:-1]}"
    raise BadMedia(message, reason="bad_address", kind="image", field=field)
