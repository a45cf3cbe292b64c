"""A request's memory is freed when it ends, and does not wait for a collection of garbage: it is rare, and all streams
pause for it."""

import gc
from collections.abc import Iterator

import pytest
from support.http_client import HELLO_CHAT
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
    gc.freeze()  # what exists already is not looked through; not by later tests either, which takes seconds
    gc.disable()
    yield
    gc.enable()


def find_garbage() -> list[object]:
    """Return the objects that only a collection of garbage frees."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return gc.garbage.copy()
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def bodies_in_garbage() -> set[bytes]:
    """Return the beginnings of the bodies in the garbage."""
    held = [part for garbage in find_garbage() for part in gc.get_referents(garbage)]
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


BODIES = {
    "/v1/chat/completions": HELLO_CHAT | {"n": 2, "stop": ["zebra"], "timeout": 60},
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 4},
    "/v1/responses": {"input": "hello", "max_output_tokens": 20},
    "/v1/messages": {"model": "tiny", "max_tokens": 4, "messages": HELLO_CHAT["messages"]},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_answered_request_leaves_nothing_to_the_garbage_collector(serve, no_collection, path, stream):
    server = await serve(timeout=60.0, token_timeout=60.0)
    assert (await server.post(path, BODIES[path] | {"stream": stream})).status == 200  # caches are filled
    await server.wait_until_idle()
    find_garbage()
    assert (await server.post(path, BODIES[path] | {"stream": stream})).status == 200
    await server.wait_until_idle()
    served_types = ("parley.serving", "parley.text", "parley.dialects", "parley.engine.output_stream", "jinja2")
    assert [garbage for garbage in find_garbage() if type(garbage).__module__.startswith(served_types)] == []
