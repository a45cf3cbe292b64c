"""Handlers that act on the server as a whole: self-test, pause, stop. One function per kind of route."""

from __future__ import annotations

import asyncio
from functools import partial

from parley.dialects.dialect import Route
from parley.dialects.wishes import Command, Told
from parley.errors import Forbidden
from parley.serving.generate import head
from parley.serving.registry import Service
from parley.types import Pooling, Text, Work
from parley.web.exchange import Exchange
from parley.web.offload import off_loop

SOON = 5.0  # seconds that running answers get if the server must end at once
HOLDS: dict[Command, str] = {"hold": "held", "prepare": "prepared", "release": ""}


async def trial(service: Service, route: Route, exchange: Exchange) -> None:
    """Generate one token or embed one, to prove that the model works. A busy engine that makes steps passes as well."""
    assert route.read is not None and route.write is not None
    model = service.main
    seconds: float = route.read(head(model, exchange))
    model.require()
    before = model.engine.stats.steps
    ids = model.language.prepare(Text("a")).token_ids[-1:]
    work = Work(exchange.unique, ids, max_tokens=1, pooling=None if model.info.generates else Pooling())
    stream = model.engine.submit(work)
    try:
        async with asyncio.timeout(seconds):
            good = all(output.finish != "error" for output in await stream.next())
    except TimeoutError:
        good = model.engine.stats.steps > before
    finally:
        stream.cancel()
    answer = route.write(good)
    await exchange.answer(answer.body, answer.status, answer.type)


async def order(service: Service, route: Route, exchange: Exchange) -> None:
    """Pause admission of new requests, or resume it."""
    assert route.read is not None
    body = await exchange.body()
    read = partial(route.read, body, head(service.main, exchange), service.facts())
    told: Told = await off_loop(len(body), read)
    if told.command is not None:
        service.hold_back(HOLDS[told.command])
    await exchange.answer(told.answer.body, told.answer.status, told.answer.type)


async def stop(service: Service, route: Route, exchange: Exchange) -> None:
    """Stop the server; the answer is sent when the running requests have finished, or at once if forced.

    Raises Forbidden.
    """
    assert route.read is not None and route.write is not None
    if exchange.headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        raise Forbidden("A web page of another origin may not stop this server.")
    force: bool = route.read(head(service.main, exchange))
    first = not service.draining
    service.shut()
    if first and not force:
        await service.drain()
    answer = route.write(first)
    await exchange.answer(answer.body, answer.status, answer.type)
    if first:
        if force:
            await service.drain(SOON)
        service.stop()
