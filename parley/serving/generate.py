"""A generation request over HTTP, from its body to the last byte of its answer.

    parse -> admit -> prepare (render, tokenize) -> check -> submit -> [outputs -> events -> bytes]* -> finish

The middle is in ``generation.py``, which knows no HTTP; this file connects a generation to its client. Knows neither
the field names of an API nor the format of its answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from parley.dialects.dialect import Answer, Head, Reply, Route
from parley.errors import BadRequest, ParleyError, UnknownModel, excerpt
from parley.serving.generation import Generation
from parley.serving.registry import Service
from parley.serving.request_metrics import Tally
from parley.serving.served_model import Model
from parley.serving.stage import Leg
from parley.types import Event
from parley.web.content_coding import deflate
from parley.web.exchange import Exchange
from parley.web.offload import off_loop


async def generate(service: Service, route: Route, exchange: Exchange) -> None:
    """Answer a request of a generating route. Raises ClientGone, and ParleyError if nothing has been sent yet."""
    service.admit()
    model = service.main  # until the path or the body names another one
    try:
        if named := exchange.path.get("model"):
            model = service.find(named)
            model.require()
        body = await exchange.body()
        model, reply = await off_loop(len(body), partial(_read, service, route, exchange, body))
        del body  # it may be large, and the answer long
        if isinstance(reply, Answer):
            model.metrics.refused.add()
            await exchange.answer(reply.body, reply.status, reply.type)
            return
        exchange.names, exchange.refusal = reply.names, reply.refusal
        model.require()
        if (limit := exchange.patience()) is not None:
            reply.request.timeout = min(limit, reply.request.timeout or limit)
        tally = Tally(model.metrics, exchange.note, exchange.arrived)
        generation = Generation(model, reply.request, tally, exchange.tenant, _leg(exchange))
        try:
            await exchange.while_connected(_answer(exchange, reply, generation))
        finally:
            generation.close()
    except BadRequest:
        model.metrics.refused.add()
        raise


def _read(service: Service, route: Route, exchange: Exchange, body: bytes) -> tuple[Model, Reply | Answer]:
    """Find the model that a body is for and read the body. An unknown model is reported only if all else is right."""
    assert route.read is not None
    if route.shares:
        return _shared(service, route, exchange, body)
    named = exchange.path.get("model") or (route.model(body) if route.model is not None else "")
    if route.first:
        service.find(named).require()
    model = service.get(named)
    reply = route.read(body, head(model or service.main, exchange))
    if isinstance(reply, Answer):
        return model or service.main, reply
    exchange.names, exchange.refusal = reply.names, reply.refusal  # so that this API words an unknown-model error
    if model is None or reply.request.model != named:  # the API may ignore the name in the body
        model = service.find(reply.request.model)
    return model, reply


def _shared(service: Service, route: Route, exchange: Exchange, body: bytes) -> tuple[Model, Reply | Answer]:
    """Read a body for an endpoint whose models share the requests, and choose the model. Raises NotFound."""
    assert route.read is not None
    named = exchange.path.get("endpoint") or (route.model(body) if route.model is not None else "")
    named = named or service.main.name
    chance = int(exchange.unique[:13], 16) / 16**13  # derived from the request's id: every instance draws the same
    share = service.endpoints.choose(named, exchange.path.get("served", ""), lambda: chance)
    if share.model not in service.names:  # names that stand for any model are not valid here
        raise UnknownModel(f"There is no model {excerpt(share.model)}.", name=named, served=service.names)
    model = service.find(share.model)
    reply = route.read(body, head(model, exchange))
    if isinstance(reply, Reply):
        reply.request.model, reply.served = share.model, share.name
    return model, reply


def head(model: Model, exchange: Exchange) -> Head:
    """Return the server state that a dialect needs to read this request."""
    query = exchange.scope.get("query_string", b"")
    return model.head(exchange.unique, exchange.path, exchange.headers, query, exchange.created)


def _leg(exchange: Exchange) -> Leg | None:
    """Return the stage of a separated request that runs here; None if the whole request does."""
    leg = exchange.leg
    assert leg is None or isinstance(leg, Leg)
    return leg


async def _answer(exchange: Exchange, reply: Reply, generation: Generation) -> None:
    """Answer in one piece or as a stream."""
    if reply.request.stream:
        await _stream(exchange, reply, generation)
        return
    await generation.begin()
    leg = _leg(exchange)
    for events in generation.replay():
        reply.add(events)

    def add(events: list[Event]) -> bool:
        reply.add(events)
        if leg is not None and generation.live:
            leg.moved()
        return True

    await generation.feed(add)
    if not generation.ended:
        await generation.leave()
        return
    body, extra = reply.body(generation.usage), reply.headers(generation.timings)
    if reply.coding:
        body = await off_loop(len(body), partial(deflate, body, reply.coding))
        extra = [*extra, (b"content-encoding", reply.coding)]
    await exchange.answer(body, type=reply.type, extra=extra)


async def _stream(exchange: Exchange, reply: Reply, generation: Generation) -> None:
    """Write events as they arrive.

    ``held_bytes`` need a coroutine to be written: the first ones, the last ones, and those after backpressure.
    """
    media_type, interval = reply.media_type, exchange.options.ping_interval or reply.silence
    pinging = None
    held, flowing = b"", False

    def write(events: list[Event]) -> bool:
        nonlocal held, flowing
        data = reply.chunk(events)
        if not data:
            return True
        if flowing and not generation.ended:
            flowing = exchange.part(data)
            return flowing
        held = data
        return False

    try:
        await generation.begin()
        if interval and reply.ping and media_type.startswith("text/event-stream"):
            pinging = asyncio.create_task(_ping(exchange, reply, interval, lambda: bool(held)))
        exchange.extra = reply.headers(None)
        for events in generation.replay():
            reply.chunk(events)  # the client already has these bytes
        while generation.live:
            await generation.feed(write)
            if held and not generation.ended:
                data, held = held, b""
                await exchange.write(data, media_type)
                flowing = True
        if not generation.ended:
            await exchange.write(b"", media_type)  # sends the head if there were no bytes yet
            await generation.leave()
            return
        last = held + reply.end(generation.usage)
    except ParleyError as error:
        if not exchange.begun:
            raise
        last = held + reply.fail(exchange.translate(error))
    finally:
        if pinging is not None:
            pinging.cancel()
    await exchange.write(last, media_type, last=True)


async def _ping(exchange: Exchange, reply: Reply, interval: float, due: Callable[[], bool]) -> None:
    """Write a comment whenever the stream has been silent for ``ping_interval`` seconds.

    Nothing is written while ``chunk_due()`` is true: a comment before that chunk would reach the client after the
    outputs that the chunk was made of.
    """
    began = time.perf_counter()
    while True:
        silent = time.perf_counter() - max(began, exchange.written)
        if silent >= interval:
            if not due() and (exchange.leg is None or exchange.begun):
                await exchange.write(reply.ping, reply.media_type)
            silent = 0.0
        await asyncio.sleep(interval - silent)
