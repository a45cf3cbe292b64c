"""Images for vLLM: a media process's description of an item, the host's reading of it, and its place in a prompt.

vLLM's own part of an item is bytes here. ``tests/system/test_vllm_reads_media.py`` has it with vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from parley.engine.feature_content import BadFeatures
from parley.engine.vllm_engine import media_marks
from parley.types import EmbeddingRun, FeatureFile, MediaItem
from parley.worker.vllm.media.item_features import (
    ItemFeatures,
    Placeholder,
    describe_features,
    locate_placeholder,
    read_item_features,
)

PAD, EDGE, ROW, LINE = 100, 101, 102, 103
SPELLINGS = {PAD: "<pad>", EDGE: "<edge>", ROW: "<row>", LINE: "\n"}
DIGEST = bytes(range(32))
# A line break and an edge before the embeddings, a mark between two rows of them, an edge behind.
MASK = [False, True, True, False, True, False]
TILES = ItemFeatures(DIGEST, [LINE, EDGE, PAD, PAD, ROW, PAD, EDGE], 1, 6, MASK, b"x")


def item_at(start: int, count: int, runs: list[EmbeddingRun], features: FeatureFile | None = None) -> MediaItem:
    return MediaItem("image", DIGEST, start, count, runs, features=features)


@pytest.fixture
def write_file() -> Iterator[Callable[[bytes], FeatureFile]]:
    opened: list[int] = []

    def write(content: bytes) -> FeatureFile:
        opened.append(os.memfd_create("features"))
        os.write(opened[-1], content)
        return FeatureFile(os.getpid(), opened[-1], len(content))

    yield write
    for descriptor in opened:
        os.close(descriptor)


def test_item_is_described_by_the_token_that_embeddings_replace():
    item = describe_features("image", TILES, SPELLINGS, "\n<edge><pad><pad><row><pad><edge>")
    assert item is not None and item.placeholder == "<pad>" and item.embedding_count == 3
    assert item.digest == DIGEST and item.grids == [] and item.replacement.startswith("\n<edge>")


@pytest.mark.parametrize(
    "changes",
    [
        {"are_embedded": [True, True, True, False, True, False]},  # two tokens are replaced
        {"are_embedded": [False] * 6},
        {"token_ids": [PAD, EDGE, PAD, PAD, ROW, PAD, EDGE]},  # a placeholder that is none
        {"placeholder_start": 2},
    ],
)
def test_item_whose_places_cannot_be_found_again_is_not_described(changes):
    assert describe_features("image", msgspec.structs.replace(TILES, **changes), SPELLINGS, "") is None


def test_placeholder_is_the_one_vllm_makes():
    item = item_at(7, 4, [EmbeddingRun(0, 2), EmbeddingRun(3, 1)])
    token_ids = [1, 2, 3, 4, 5, LINE, EDGE, PAD, PAD, ROW, PAD, EDGE, 9]
    assert locate_placeholder(item, TILES, token_ids) == Placeholder(6, 6, TILES.are_embedded)


def test_placeholder_with_other_neighbours_is_the_text_between_its_embeddings():
    item = item_at(1, 4, [EmbeddingRun(0, 2), EmbeddingRun(3, 1)])
    assert locate_placeholder(item, TILES, [77, PAD, PAD, ROW, PAD, 78]) == Placeholder(1, 4, [True, True, False, True])
    beginning = item_at(0, 4, item.runs)
    assert locate_placeholder(beginning, TILES, [PAD, PAD, ROW, PAD]).start == 0


def test_placeholder_of_embeddings_alone_has_no_mask():
    features = ItemFeatures(DIGEST, [PAD, PAD], 0, 2, [True, True], b"")
    assert locate_placeholder(item_at(3, 2, [EmbeddingRun(0, 2)]), features, [1, 2, 3, PAD, PAD]) == (3, 2, None)


def test_host_reads_what_the_media_process_wrote(write_file):
    file = write_file(msgspec.msgpack.encode(TILES))
    assert read_item_features(item_at(0, 4, [], file)) == TILES


@pytest.mark.parametrize("size", [0, 5, 40])
def test_broken_files_are_refused(write_file, size):
    content = msgspec.msgpack.encode(TILES)[:size]
    with pytest.raises(BadFeatures, match="damaged"):
        read_item_features(item_at(0, 4, [], write_file(content)))


def test_files_of_other_items_are_refused(write_file, tmp_path: Path):
    other = write_file(msgspec.msgpack.encode(msgspec.structs.replace(TILES, digest=bytes(32))))
    for features in (other, FeatureFile(other.pid, other.fd, other.size + 1)):
        with pytest.raises(BadFeatures, match="not those of the request"):
            read_item_features(item_at(0, 4, [], features))
    pipe = os.pipe()
    try:
        with pytest.raises(BadFeatures, match="not those of the request"):
            read_item_features(item_at(0, 4, [], FeatureFile(os.getpid(), pipe[0], 0)))
    finally:
        for descriptor in pipe:
            os.close(descriptor)
    with pytest.raises(BadFeatures, match="no longer exist"):
        read_item_features(item_at(0, 4, [], FeatureFile(os.getpid(), 1 << 20, 4)))
    with pytest.raises(BadFeatures, match="elsewhere"):
        read_item_features(item_at(0, 4, []))


def test_marks_are_ids_or_texts_of_the_config():
    assert media_marks({"model_type": "qwen2_vl", "image_token_id": 7, "video_token_id": 8}) == {"image": 7, "video": 8}
    assert media_marks({"model_type": "gemma3", "image_token_index": 7}) == {"image": "<start_of_image>"}
    assert media_marks({"model_type": "llama"}) == {}
