"""What the tests with generated bodies share: how many there are, bytes that are no JSON, and a way to run them."""

from __future__ import annotations

import asyncio
import functools
import gzip
import json
import os
import zlib
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

MAX_EXAMPLES = int(os.environ.get("PARLEY_FUZZ", "1000"))  # examples of all these tests in total

raw_bytes = st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass"))


# A Content-Encoding, and what compresses a body. The last three are no valid bodies, unless the body is empty.
BODY_CODINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "plain": ("", bytes),
    "gzip": ("gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "members": ("gzip", lambda body: gzip.compress(body[:9]) + gzip.compress(body[9:])),
    "cut": ("gzip", lambda body: gzip.compress(body)[:-1]),
    "twice": ("gzip", lambda body: gzip.compress(gzip.compress(body))),
}
body_codings = st.just("plain") | st.sampled_from(sorted(BODY_CODINGS))


def encode(body: Any) -> bytes:
    return json.dumps(body).encode("utf-8", "surrogatepass")


def fuzz_settings(divisor: int) -> settings:
    """Return the settings of a test that makes its part of all examples."""
    checks = list(HealthCheck)
    return settings(max_examples=MAX_EXAMPLES // divisor, deadline=None, suppress_health_check=checks, database=None)


async def run_undisturbed(server: Any, *tests: Any) -> None:
    """Run tests; no request may remain afterwards, and the answer to another request is the same as before."""
    before = await server.control()
    for test in tests:
        await run_in_loop(test)
    await server.wait_until_idle()
    assert await server.control() == before


async def run_in_loop(test: Any) -> None:
    """Run a hypothesis test of coroutines inside the running event loop."""
    loop = asyncio.get_running_loop()
    inner = test.hypothesis.inner_test

    @functools.wraps(inner)
    def sync(*args: Any, **kwargs: Any) -> None:
        asyncio.run_coroutine_threadsafe(inner(*args, **kwargs), loop).result()

    test.hypothesis.inner_test = sync
    await asyncio.to_thread(test)
