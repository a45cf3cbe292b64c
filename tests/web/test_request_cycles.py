"""The memory of a body is freed when its request ends, and does not wait for a collection of garbage, which is rare."""

import gc
from collections.abc import Iterator

import pytest
from support.json_bombs import write_bomb

from parley.dialects import json_body
from parley.dialects.mounts import mount_table, universal_mounts

BODY_SIZE = 200_000
POST_PATHS = sorted(
    path.replace("{model}", "tiny")
    for method, path in mount_table(universal_mounts())
    if method == "POST" and not path.startswith("/inference.")  # those are gRPC's
)


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what exists already is not looked through
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def bodies_in_garbage() -> set[bytes]:
    """Return the beginnings of the bodies that only a collection of garbage frees."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        held = [part for each in gc.garbage for part in gc.get_referents(each)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    return {bytes(part[:160]) for part in held if is_body(part)}


def is_body(value: object) -> bool:
    """Whether it is a body at the server; the client's begins with a request line."""
    return isinstance(value, bytes | bytearray) and len(value) >= BODY_SIZE and not value.startswith(b"POST ")


@pytest.mark.parametrize("kind", ["arrays", "one string", "nesting", "no JSON"])
async def test_no_route_leaves_a_body_to_the_garbage_collector(serve, no_collection, monkeypatch, kind):
    monkeypatch.setattr(json_body, "MAX_ARRAYS", 10_000)
    server = await serve()
    for path in POST_PATHS:
        body = write_bomb("one string" if kind == "no JSON" else kind, BODY_SIZE + 10, member=path)
        await server.post(path, body[:-1] if kind == "no JSON" else body)
    assert bodies_in_garbage() == set()
