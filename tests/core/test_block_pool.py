"""The block pool: order of reuse, reuse of freed pages, hashes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parley.core.pages.block_pool import HASH_BYTES, BlockPool, count_pages, extend_hashes, hash_chain_root


def page_hashes(tokens: list[int], *names: str) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, hash_chain_root(*names), tokens, len(tokens) // 16)
    return hashes


def test_pool_reuses_blank_pages_first_then_oldest_tail_first() -> None:
    pool = BlockPool(6)
    old, new, plain = [pool.allocate(), pool.allocate()], [pool.allocate(), pool.allocate()], [pool.allocate()]
    for block, digest in zip([*old, *new], page_hashes(list(range(64))), strict=True):
        pool.cache_block(block, digest)
    pool.free_blocks(old)
    pool.free_blocks(new)
    pool.free_blocks(plain)
    assert [pool.allocate() for _ in range(6)] == [*plain, 5, old[1], old[0], new[1], new[0]]
    with pytest.raises(IndexError):
        pool.allocate()


def test_shared_page_leaves_free_list_and_is_not_evicted() -> None:
    pool = BlockPool(3)
    table = [pool.allocate(), pool.allocate(), pool.allocate()]
    hashes = page_hashes(list(range(48)))
    for block, digest in zip(table, hashes, strict=True):
        assert pool.cache_block(block, digest)
    pool.free_blocks(table)
    assert pool.free_count == pool.count_free(table) == 3
    middle = pool.find_cached(hashes[1])
    assert middle == table[1]
    pool.add_reference(middle)
    pool.check_invariants([[middle]])
    assert {pool.allocate(), pool.allocate()} == {table[0], table[2]}
    assert [pool.find_cached(digest) for digest in hashes] == [None, middle, None]


def test_first_published_page_keeps_its_hash() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    (digest,) = page_hashes(list(range(16)))
    assert pool.cache_block(first, digest)
    assert not pool.cache_block(second, digest)
    assert pool.find_cached(digest) == first
    pool.free_blocks([first, second])
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
    extend_hashes(hashes, hash_chain_root(), tokens, 4)
    assert hashes == page_hashes(tokens)
    extend_hashes(hashes, hash_chain_root(), tokens, 2)
    assert len(hashes) == 4


def test_page_count_rounds_up() -> None:
    assert [count_pages(tokens) for tokens in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.sampled_from(["take", "share", "drop", "publish", "forget"]), st.integers(0, 99))),
)
@settings(deadline=None, max_examples=200)
def test_block_pool_agrees_with_reference_model(size: int, actions: list[tuple[str, int]]) -> None:
    """Random actions against a simple reference model: tables, and a dictionary of contents."""
    pool = BlockPool(size)
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
            pool.free_blocks(tables.pop(value % len(tables)))
        elif action == "publish" and table and table[0] not in contents.values():
            digest = hashes[value % len(hashes)]
            assert pool.cache_block(table[0], digest) == (digest not in contents)
            contents.setdefault(digest, table[0])
        elif action == "forget":
            pool.evict_block(value % size)
            contents = {digest: block for digest, block in contents.items() if block != value % size}
        pool.check_invariants(tables)
        assert {digest: pool.find_cached(digest) for digest in hashes} == {
            digest: contents.get(digest) for digest in hashes
        }
