"""Media items for prompts that no model reads."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

from parley.types import EmbeddingRun, FeatureFile, MediaItem

FEATURES = FeatureFile(1, 2, 3)


def make_item(
    name: str,
    start: int,
    count: int,
    *,
    sees_both_ways: bool = False,
    features: FeatureFile | None = FEATURES,
    prompt_sees_both_ways: bool = False,
) -> MediaItem:
    """Make an item named ``name`` of ``count`` embeddings, with a text token among them from 5 on."""
    runs = [EmbeddingRun(0, count)] if count < 5 else [EmbeddingRun(0, 2), EmbeddingRun(3, count - 3)]
    digest = sha256(name.encode()).digest()
    return MediaItem("image", digest, start, count, runs, sees_both_ways, features, prompt_sees_both_ways)


def place_items(length: int, choose: Callable[[list[int]], int], **flags: bool) -> list[MediaItem]:
    """Place up to three items of two kinds in a prompt of this length; ``choose`` picks one of several numbers.

    ``flags``: those of the items' tokens, as for ``make_item``.
    """
    items: list[MediaItem] = []
    end = 0
    for _ in range(choose([0, 1, 1, 2, 3])):
        start, count = end + choose([0, 0, 4, 9, 20]), choose([1, 3, 16, 20, 45])
        if start + count > length:
            break
        name = f"{choose([1, 2])} of {count}"
        items.append(make_item(name, start, count, **flags))
        end = items[-1].end
    return items
