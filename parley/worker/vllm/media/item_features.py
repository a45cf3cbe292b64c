"""One image, video or clip for vLLM: its features, which a media process writes and the host reads, and its
placeholder.

The tensors are bytes in vLLM's encoding here, so this module is plain data and can be tested without vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from parley.engine.feature_content import BadFeatures, read_feature_content
from parley.types import MediaItem, MediaKind, ProcessedMedia


class ItemFeatures(msgspec.Struct, array_like=True, frozen=True):
    """An item after vLLM's processor. ``token_ids``: the tokens that replace the item's mark.

    ``placeholder_start``, ``placeholder_length``: the part of these tokens that vLLM calls the item's placeholder.
    ``are_embedded``: for each token of that part, whether an embedding replaces it. ``content``: the tensors, in vLLM's
    encoding.
    """

    digest: bytes
    token_ids: list[int]
    placeholder_start: int
    placeholder_length: int
    are_embedded: list[bool]
    content: bytes


class Placeholder(NamedTuple):
    """The tokens of a prompt that stand for an item: ``length`` of them from ``start``. ``are_embedded``: for each,
    whether an embedding replaces it; None if it does for all."""

    start: int
    length: int
    are_embedded: list[bool] | None


_decoder = msgspec.msgpack.Decoder(ItemFeatures)


def describe_features(
    kind: MediaKind, features: ItemFeatures, spellings: Mapping[int, str], replacement: str
) -> ProcessedMedia | None:
    """Return an item as the API process knows it; None if several tokens, or none, are replaced by embeddings, or if
    one of them also stands for something else. ``spellings``: of the tokens; ``replacement``: the text of all."""
    end = features.placeholder_start + features.placeholder_length
    positions = [
        position
        for position, is_embedded in enumerate(features.are_embedded, features.placeholder_start)
        if is_embedded
    ]
    placeholder_ids = {features.token_ids[position] for position in positions}
    if len(placeholder_ids) != 1 or end > len(features.token_ids):
        return None
    (placeholder_id,) = placeholder_ids
    if features.token_ids.count(placeholder_id) != len(positions):
        return None
    return ProcessedMedia(
        kind=kind,
        digest=features.digest,
        replacement=replacement,
        placeholder=spellings[placeholder_id],
        embedding_count=len(positions),
    )


def read_item_features(item: MediaItem) -> ItemFeatures:
    """Return the features that a media process wrote for an item of a request. Raises BadFeatures."""
    if item.features is None:
        raise BadFeatures("An item of the request was processed elsewhere.")
    try:
        features = _decoder.decode(read_feature_content(item.features))
    except msgspec.DecodeError:
        raise BadFeatures("The processed features of an item are damaged.") from None
    if features.digest != item.digest:  # the file's number may be another file's by now
        raise BadFeatures("The processed features are not those of the request.")
    return features


def locate_placeholder(item: MediaItem, features: ItemFeatures, token_ids: Sequence[int]) -> Placeholder:
    """Return the tokens of a prompt that stand for an item.

    vLLM's placeholder may begin before the first embedding and end after the last. If the prompt has other tokens
    there, because a text at the edge was tokenized together with its neighbours, the placeholder is the part from the
    first embedding to the last.
    """
    first_embedded = features.are_embedded.index(True)
    start = item.start - first_embedded
    own_ids = features.token_ids[features.placeholder_start : features.placeholder_start + features.placeholder_length]
    if start >= 0 and list(token_ids[start : start + features.placeholder_length]) == own_ids:
        embedded = features.are_embedded
    else:
        start = item.start
        embedded = features.are_embedded[first_embedded : first_embedded + item.count]
    return Placeholder(start, len(embedded), None if all(embedded) else embedded)
