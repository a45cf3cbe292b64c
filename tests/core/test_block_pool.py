"""The block pool: order of reuse, reuse of freed pages, hashes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parley.core.pages.block_pool import HASH_BYTES, BlockPool, extend, pages, root


def chain(tokens: list[int], *names: str) -> list[bytes]:
    hashes: list[bytes] = []
    extend(hashes, root(*names), tokens, len(tokens) // 16)
    return hashes


def test_pool_reuses_blank_pages_first_then_oldest_tail_first() -> None:
    pool = BlockPool(6)
    old, new, plain = [pool.take(), pool.take()], [pool.take(), pool.take()], [pool.take()]
    for block, digest in zip([*old, *new], chain(list(range(64))), strict=True):
        pool.publish(block, digest)
    pool.drop(old)
    pool.drop(new)
    pool.drop(plain)
    assert [pool.take() for _ in range(6)] == [*plain, 5, old[1], old[0], new[1], new[0]]
    with pytest.raises(IndexError):
        pool.take()


def test_shared_page_leaves_free_list_and_is_not_evicted() -> None:
    pool = BlockPool(3)
    table = [pool.take(), pool.take(), pool.take()]
    hashes = chain(list(range(48)))
    for block, digest in zip(table, hashes, strict=True):
        assert pool.publish(block, digest)
    pool.drop(table)
    assert pool.free == pool.idle(table) == 3
    middle = pool.find(hashes[1])
    assert middle == table[1]
    pool.share(middle)
    pool.check([[middle]])
    assert {pool.take(), pool.take()} == {table[0], table[2]}
    assert [pool.find(digest) for digest in hashes] == [None, middle, None]


def test_first_published_page_keeps_its_hash() -> None:
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    (digest,) = chain(list(range(16)))
    assert pool.publish(first, digest)
    assert not pool.publish(second, digest)
    assert pool.find(digest) == first
    pool.drop([first, second])
    assert pool.take() == second


def test_page_hash_covers_preceding_tokens_and_root_names() -> None:
    tokens = list(range(48))
    hashes = chain(tokens, "model", "salt")
    assert [len(digest) for digest in hashes] == [HASH_BYTES] * 3
    assert chain(tokens[:32], "model", "salt") == hashes[:2]
    assert not set(chain([99, *tokens[1:]], "model", "salt")) & set(hashes)
    for names in [("model",), ("model", ""), ("models", "alt"), ("modelsalt",), ("model", "salt", "")]:
        assert not set(chain(tokens, *names)) & set(hashes)
    assert root("\ud800") != root("\ud801")  # JSON may carry lone surrogates


def test_extend_appends_to_existing_page_hashes() -> None:
    tokens = list(range(64))
    hashes = chain(tokens[:32])
    extend(hashes, root(), tokens, 4)
    assert hashes == chain(tokens)
    extend(hashes, root(), tokens, 2)
    assert len(hashes) == 4


def test_page_count_rounds_up() -> None:
    assert [pages(tokens) for tokens in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.sampled_from(["take", "share", "drop", "publish", "forget"]), st.integers(0, 99))),
)
@settings(deadline=None, max_examples=200)
def test_block_pool_agrees_with_reference_model(size: int, actions: list[tuple[str, int]]) -> None:
    """Random actions against a simple reference model: tables, and a dictionary of contents."""
    pool = BlockPool(size)
    tables: list[list[int]] = []
    names = chain([token % 7 for token in range(16 * 20)])
    contents: dict[bytes, int] = {}
    for action, value in actions:
        table = tables[value % len(tables)] if tables else []
        if action == "take" and pool.free:
            block = pool.take()
            contents = {digest: other for digest, other in contents.items() if other != block}
            tables.append([block])
        elif action == "share" and (block := pool.find(names[value % len(names)])) is not None:
            pool.share(block)
            table.append(block) if table else tables.append([block])
        elif action == "drop" and tables:
            pool.drop(tables.pop(value % len(tables)))
        elif action == "publish" and table and table[0] not in contents.values():
            digest = names[value % len(names)]
            assert pool.publish(table[0], digest) == (digest not in contents)
            contents.setdefault(digest, table[0])
        elif action == "forget":
            pool.forget(value % size)
            contents = {digest: block for digest, block in contents.items() if block != value % size}
        pool.check(tables)
        assert {digest: pool.find(digest) for digest in names} == {digest: contents.get(digest) for digest in names}
