"""Media items for prompts that no model reads."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

from parley.types import EmbeddingRun, FeatureFile, MediaItem

FEATURES = FeatureFile(1, 2, 3)


def make_item(
    name: str, start: int, count: int, *, sees_both_ways: bool = False, features: FeatureFile | None = FEATURES
) -> MediaItem:
    """Make an item named ``name`` of ``count`` embeddings, with a text token among them from 5 on."""
    runs = [EmbeddingRun(0, count)] if count < 5 else [EmbeddingRun(0, 2), EmbeddingRun(3, count - 3)]
    return MediaItem("image", sha256(name.encode()).digest(), start, count, runs, sees_both_ways, features)


def place_items(length: int, choose: Callable[[list[int]], int], *, sees_both_ways: bool = False) -> list[MediaItem]:
    """Place up to three items of two kinds in a prompt of this length; ``choose`` picks one of several numbers."""
    items: list[MediaItem] = []
    end = 0
    for _ in range(choose([0, 1, 1, 2, 3])):
        start, count = end + choose([0, 0, 4, 9, 20]), choose([1, 3, 16, 20, 45])
        if start + count > length:
            break
        name = f"{choose([1, 2])} of {count}"
        items.append(make_item(name, start, count, sees_both_ways=sees_both_ways))
        end = items[-1].end
    return items
