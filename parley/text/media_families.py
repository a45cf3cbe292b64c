"""What stands for pictures, videos and sound in the prompts of a multimodal model, from its config and vocabulary.

A family's config names the tokens that embeddings replace. In most families the same token marks an item's place before
the processor has run; ``FAMILIES`` lists what differs. The tokens are those of Transformers' configs and processors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from parley.text.tokens.tokenizer import read_json_object
from parley.types import MEDIA_KINDS, MediaKind

# Fields of config.json with the id of the token that embeddings replace; older files end in _index.
PLACEHOLDER_FIELDS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
}


class MediaMark(NamedTuple):
    """``mark``: what a chat template writes in an item's place. ``placeholder``: the token of each embedding."""

    mark: str
    placeholder: str


class MediaFamily(NamedTuple):
    """What differs in a model type.

    ``image_mark_field``: the field with the id of the mark, where that is not the placeholder. ``video_mark``: the mark
    of videos whose frames have the placeholder of images. ``sees_both_ways``: the tokens of a picture see each other.
    """

    image_mark_field: str = ""
    video_mark: str = ""
    sees_both_ways: bool = False


FAMILIES: Mapping[str, MediaFamily] = {
    "gemma3": MediaFamily(image_mark_field="boi_token_index", sees_both_ways=True),
    "internvl": MediaFamily(video_mark="<video>"),
    "smolvlm": MediaFamily(video_mark="<video>"),
}
USUAL_FAMILY = MediaFamily()


def find_family(config: Mapping[str, Any]) -> MediaFamily:
    """Return what differs in the family of a model, by its config."""
    return FAMILIES.get(config.get("model_type", ""), USUAL_FAMILY)


def read_media_marks(folder: Path, find_text: Callable[[int], str | None]) -> dict[MediaKind, MediaMark]:
    """Return the marks of a model folder by kind of media; none for a model that reads text only.

    ``find_text`` returns the text of a token. Raises BadTokenizer if config.json is not JSON.
    """
    config = read_json_object(folder / "config.json")
    family, marks = find_family(config), dict[MediaKind, MediaMark]()
    for kind in MEDIA_KINDS:
        placeholder = _token_text(config, PLACEHOLDER_FIELDS[kind], find_text)
        if placeholder is not None:
            marks[kind] = MediaMark(placeholder, placeholder)
    if "image" in marks:
        placeholder = marks["image"].placeholder
        if family.image_mark_field:
            mark = _token_text(config, (family.image_mark_field,), find_text)
            marks["image"] = MediaMark(mark or placeholder, placeholder)
        if family.video_mark:
            marks["video"] = MediaMark(family.video_mark, placeholder)
    return marks


def _token_text(
    config: Mapping[str, Any], fields: tuple[str, ...], find_text: Callable[[int], str | None]
) -> str | None:
    """Return the text of the token that the first of these fields names; None if there is none."""
    for name in fields:
        if type(token_id := config.get(name)) is int:
            return find_text(token_id)
    return None
