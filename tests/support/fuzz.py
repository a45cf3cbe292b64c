"""What the tests with generated bodies share: how many there are, bytes that are no JSON, and a way to run them."""

from __future__ import annotations

import asyncio
import functools
import json
import os
from typing import Any

from hypothesis import strategies as st

MAX_EXAMPLES = int(os.environ.get("PARLEY_FUZZ", "1000"))  # examples of all these tests in total

raw_bytes = st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass"))


def encode(body: Any) -> bytes:
    return json.dumps(body).encode("utf-8", "surrogatepass")


async def run_in_loop(test: Any) -> None:
    """Run a hypothesis test of coroutines inside the running event loop."""
    loop = asyncio.get_running_loop()
    inner = test.hypothesis.inner_test

    @functools.wraps(inner)
    def sync(*args: Any, **kwargs: Any) -> None:
        asyncio.run_coroutine_threadsafe(inner(*args, **kwargs), loop).result()

    test.hypothesis.inner_test = sync
    await asyncio.to_thread(test)
