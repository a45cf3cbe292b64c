"""The block pool: order of reuse, reuse of freed pages, hashes."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parley.core.pages.page_pool import HASH_BYTES, PagePool, count_pages, extend_hashes, hash_chain_root
from parley.types import EmbeddingRun, MediaItem


def page_hashes(tokens: list[int], *names: str, media: list[MediaItem] | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, hash_chain_root(*names), tokens, len(tokens) // 16, media or [])
    return hashes


def image(name: str, start: int, count: int) -> MediaItem:
    return MediaItem("image", sha256(name.encode()).digest(), start, count, [EmbeddingRun(0, count)])


def test_pool_reuses_blank_pages_first_then_oldest_tail_first() -> None:
    pool = PagePool(6)
    old, new, plain = [pool.allocate(), pool.allocate()], [pool.allocate(), pool.allocate()], [pool.allocate()]
    for block, digest in zip([*old, *new], page_hashes(list(range(64))), strict=True):
        pool.cache_page(block, digest)
    pool.release_pages(old)
    pool.release_pages(new)
    pool.release_pages(plain)
    assert [pool.allocate() for _ in range(6)] == [*plain, 5, old[1], old[0], new[1], new[0]]
    with pytest.raises(IndexError):
        pool.allocate()


def test_shared_page_leaves_free_list_and_is_not_evicted() -> None:
    pool = PagePool(3)
    table = [pool.allocate(), pool.allocate(), pool.allocate()]
    hashes = page_hashes(list(range(48)))
    for block, digest in zip(table, hashes, strict=True):
        assert pool.cache_page(block, digest)
    pool.release_pages(table)
    assert pool.free_count == pool.count_free(table) == 3
    middle = pool.find_cached(hashes[1])
    assert middle == table[1]
    pool.add_reference(middle)
    pool.check_invariants([[middle]])
    assert {pool.allocate(), pool.allocate()} == {table[0], table[2]}
    assert [pool.find_cached(digest) for digest in hashes] == [None, middle, None]


def test_first_published_page_keeps_its_hash() -> None:
    pool = PagePool(2)
    first, second = pool.allocate(), pool.allocate()
    (digest,) = page_hashes(list(range(16)))
    assert pool.cache_page(first, digest)
    assert not pool.cache_page(second, digest)
    assert pool.find_cached(digest) == first
    pool.release_pages([first, second])
    assert pool.allocate() == second


def test_page_hash_covers_preceding_tokens_and_root_names() -> None:
    tokens = list(range(48))
    hashes = page_hashes(tokens, "model", "salt")
    assert [len(digest) for digest in hashes] == [HASH_BYTES] * 3
    assert page_hashes(tokens[:32], "model", "salt") == hashes[:2]
    assert not set(page_hashes([99, *tokens[1:]], "model", "salt")) & set(hashes)
    for names in [("model",), ("model", ""), ("models", "alt"), ("modelsalt",), ("model", "salt", "")]:
        assert not set(page_hashes(tokens, *names)) & set(hashes)
    assert hash_chain_root("\ud800") != hash_chain_root("\ud801")  # JSON may carry lone surrogates


def test_extend_appends_to_existing_page_hashes() -> None:
    tokens = list(range(64))
    hashes = page_hashes(tokens[:32])
    extend_hashes(hashes, hash_chain_root(), tokens, 4, [])
    assert hashes == page_hashes(tokens)
    extend_hashes(hashes, hash_chain_root(), tokens, 2, [])
    assert len(hashes) == 4


def test_page_hashes_of_text_keep_their_values() -> None:
    """Instances of two versions exchange pages only if both hash them alike."""
    hashes = page_hashes(list(range(48)), "model", "salt")
    assert [digest.hex() for digest in hashes] == [
        "a4bb638da03cb096a1fd0481a0f36d19",
        "e6d80a01ec6597fe2a395d9d36b64825",
        "e02232ae47b205cd46a62ab98bc090e2",
    ]


@pytest.mark.parametrize(
    ("item", "other", "shared_pages"),
    [
        (image("cat", 20, 8), image("cat", 20, 8), 5),
        (image("cat", 20, 8), image("dog", 20, 8), 1),  # the page of the item and all later ones differ
        (image("cat", 20, 8), image("cat", 21, 8), 1),
        (image("cat", 20, 8), image("cat", 36, 8), 1),
        (image("cat", 32, 16), image("dog", 32, 16), 2),
        (image("cat", 31, 2), image("dog", 31, 2), 1),  # its first token is the last of a page
        (image("cat", 16, 64), image("dog", 16, 64), 1),
        (image("cat", 79, 1), image("dog", 79, 1), 4),
        (image("cat", 80, 4), image("dog", 80, 4), 5),
    ],
)
def test_prompts_share_pages_up_to_the_first_media_item_that_differs(
    item: MediaItem, other: MediaItem, shared_pages: int
) -> None:
    tokens = [7] * 80
    hashes, other_hashes = page_hashes(tokens, media=[item]), page_hashes(tokens, media=[other])
    assert [a == b for a, b in zip(hashes, other_hashes, strict=True)] == [page < shared_pages for page in range(5)]
    before = item.start // 16
    text_hashes = page_hashes(tokens)
    assert hashes[:before] == text_hashes[:before] and not set(hashes[before:]) & set(text_hashes[before:])


def test_order_of_media_items_within_a_page_changes_its_hash() -> None:
    cat, dog = image("cat", 2, 3), image("dog", 9, 3)
    swapped = [image("dog", 2, 3), image("cat", 9, 3)]
    hashes = {page_hashes([7] * 16, media=media)[0] for media in ([cat], [dog], [cat, dog], swapped, [])}
    assert len(hashes) == 5


@given(st.integers(0, 5), st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20)), max_size=5))
def test_page_hashes_with_media_do_not_depend_on_how_they_are_extended(
    first: int, lengths: list[tuple[int, int]]
) -> None:
    media, end = [], 0
    for count, gap in lengths:
        media.append(image(f"{count}", end + gap, count))
        end = media[-1].end
    tokens = list(range(96))
    hashes: list[bytes] = []
    extend_hashes(hashes, hash_chain_root(), tokens, first, media)
    extend_hashes(hashes, hash_chain_root(), tokens, 6, media)
    assert hashes == page_hashes(tokens, media=media)


def test_page_count_rounds_up() -> None:
    assert [count_pages(tokens) for tokens in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.sampled_from(["take", "share", "drop", "publish", "forget"]), st.integers(0, 99))),
)
@settings(deadline=None, max_examples=200)
def test_page_pool_agrees_with_reference_model(size: int, actions: list[tuple[str, int]]) -> None:
    """Random actions against a simple reference model: tables, and a dictionary of contents."""
    pool = PagePool(size)
    tables: list[list[int]] = []
    hashes = page_hashes([token % 7 for token in range(16 * 20)])
    contents: dict[bytes, int] = {}
    for action, value in actions:
        table = tables[value % len(tables)] if tables else []
        if action == "take" and pool.free_count:
            block = pool.allocate()
            contents = {digest: other for digest, other in contents.items() if other != block}
            tables.append([block])
        elif action == "share" and (block := pool.find_cached(hashes[value % len(hashes)])) is not None:
            pool.add_reference(block)
            table.append(block) if table else tables.append([block])
        elif action == "drop" and tables:
            pool.release_pages(tables.pop(value % len(tables)))
        elif action == "publish" and table and table[0] not in contents.values():
            digest = hashes[value % len(hashes)]
            assert pool.cache_page(table[0], digest) == (digest not in contents)
            contents.setdefault(digest, table[0])
        elif action == "forget":
            pool.evict_page(value % size)
            contents = {digest: block for digest, block in contents.items() if block != value % size}
        pool.check_invariants(tables)
        assert {digest: pool.find_cached(digest) for digest in hashes} == {
            digest: contents.get(digest) for digest in hashes
        }
