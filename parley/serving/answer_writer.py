"""Writes the answer of a generation to its client: in one piece, as a stream, or while it runs in the background.

Turns a generation's events into bytes by the request's ``Reply``; knows nothing of the format of these bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec

from parley.dialects.reply import Reply
from parley.disagg.wire.vouched_client import USED_HEADER
from parley.errors import SERVER_ERROR, ParleyError
from parley.serving.generation import Generation
from parley.serving.model_registry import ModelRegistry
from parley.serving.records.background import KeptEvents, generate_events
from parley.serving.request_stage import request_stage
from parley.types import Event, PromptVector
from parley.web.content_coding import compress_body
from parley.web.exchange import Exchange
from parley.web.offload import to_thread_if_large
from parley.web.request_body import ClientGone

log = logging.getLogger("parley.server")


async def answer_generation(exchange: Exchange, reply: Reply, generation: Generation) -> None:
    """Answer in one piece or as a stream."""
    if reply.request.stream:
        await _stream_generation(exchange, reply, generation)
        return
    await generation.submit_request()
    exchange.release_body()
    stage = request_stage(exchange)
    for events in generation.replay_outputs():
        reply.add_events(events or ())

    vector_bytes, pools = 0, reply.request.pooling is not None

    def add_to_reply(steps: list[list[Event]]) -> bool:
        nonlocal vector_bytes
        for events in steps:
            reply.add_events(events)
            if pools:
                vector_bytes += sum(len(event.values) for event in events if isinstance(event, PromptVector))
        if stage is not None and generation.expects_events:
            stage.on_progress()
        return True

    await generation.feed_events(add_to_reply)
    if not generation.finished:
        await generation.hand_over_request()
        return
    reply.timings = generation.request_timings
    body = await to_thread_if_large(vector_bytes, partial(reply.render_body, generation.usage))
    extra_headers = reply.answer_headers(reply.timings)
    if reply.content_coding:
        body = await to_thread_if_large(len(body), partial(compress_body, body, reply.content_coding))
        extra_headers = [*extra_headers, (b"content-encoding", reply.content_coding)]
    if exchange.limits_counted and stage is None:
        extra_headers = [*extra_headers, (USED_HEADER, msgspec.json.encode(generation.used_tokens))]
    await exchange.send_response(body, content_type=reply.content_type, extra_headers=extra_headers)


async def _stream_generation(exchange: Exchange, reply: Reply, generation: Generation) -> None:
    """Write events as they arrive.

    ``held_bytes`` need a coroutine to be written: the first ones, the last ones, and those after backpressure.
    """
    media_type, ping_interval = reply.media_type, exchange.options.ping_interval or reply.ping_interval
    ping_task = None
    held_bytes, writable = b"", False

    def write_steps(steps: list[list[Event]]) -> bool:
        nonlocal held_bytes, writable
        data = reply.render_chunk(steps[0]) if len(steps) == 1 else b"".join(map(reply.render_chunk, steps))
        if not data:
            return True
        if writable and not generation.finished:
            writable = exchange.write_part(data)
            return writable
        held_bytes = data
        return False

    try:
        await generation.submit_request()
        exchange.release_body()
        if ping_interval and reply.ping_bytes and media_type.startswith("text/event-stream"):
            ping_task = asyncio.create_task(_send_pings(exchange, reply, ping_interval, lambda: bool(held_bytes)))
            ping_task.add_done_callback(partial(_end_with_pings, exchange, generation))
        exchange.extra_headers = reply.answer_headers(None)
        for events in generation.replay_outputs():
            # The client already has these bytes.
            reply.render_ping() if events is None else reply.render_chunk(events)
        while generation.expects_events:
            await generation.feed_events(write_steps)
            if held_bytes and not generation.finished:
                data, held_bytes = held_bytes, b""
                await exchange.write_stream(data, media_type)
                writable = True
        if not generation.finished:
            await exchange.write_stream(b"", media_type)  # sends the head if there were no bytes yet
            await generation.hand_over_request()
            return
        reply.timings = generation.request_timings
        last_bytes = held_bytes + reply.finish_stream(generation.usage)
    except ParleyError as error:
        if not exchange.response_begun:
            raise
        last_bytes = held_bytes + reply.fail_stream(exchange.translate_field(error))
    finally:
        if ping_task is not None:
            ping_task.cancel()
    await exchange.write_stream(last_bytes, media_type, last=True)


async def _send_pings(exchange: Exchange, reply: Reply, ping_interval: float, chunk_due: Callable[[], bool]) -> None:
    """Write a comment whenever the stream has been silent for ``ping_interval`` seconds.

    Nothing is written while ``chunk_due()`` is true: a comment before that chunk would reach the client after the
    outputs that the chunk was made of.
    """
    start_time = time.perf_counter()
    while True:
        silent_seconds = time.perf_counter() - max(start_time, exchange.last_write_at)
        if silent_seconds >= ping_interval:
            if not chunk_due() and (exchange.stage is None or exchange.response_begun):
                if (stage := request_stage(exchange)) is not None:
                    stage.on_ping()
                await exchange.write_stream(reply.render_ping(), reply.media_type)
            silent_seconds = 0.0
        await asyncio.sleep(ping_interval - silent_seconds)


def _end_with_pings(exchange: Exchange, generation: Generation, ping_task: asyncio.Task[None]) -> None:
    """Fail a stream whose pings have failed: without them, a proxy may take a slow answer for a dead one."""
    error = None if ping_task.cancelled() else ping_task.exception()
    if isinstance(error, ClientGone):
        return  # the stream's own task notices that as well
    if error is not None:
        log.error("The pings of request %s failed.", exchange.request_id, exc_info=error)
        generation.fail_request(ParleyError(SERVER_ERROR))


async def run_in_background(registry: ModelRegistry, exchange: Exchange, reply: Reply, generation: Generation) -> None:
    """Submit a request, and let it run without its client from then on. Raises ParleyError, ClientGone before that."""
    try:
        await exchange.while_connected(generation.submit_request())
        accepted = reply.render_accepted()
    except BaseException:
        generation.close()
        raise
    exchange.release_body()
    kept_events, is_stream = KeptEvents(), reply.request.stream
    work = generate_events(reply, generation, kept_events)
    registry.background_runs.start_run(
        exchange.tenant.id, reply.background_name, kept_events, work, is_stream=is_stream
    )
    if is_stream:
        await follow_events(exchange, kept_events, 0, reply.media_type)
    else:
        await exchange.send_response(accepted, content_type=reply.content_type)


async def follow_events(exchange: Exchange, kept_events: KeptEvents, first_event: int, media_type: str) -> None:
    """Write the events of a run from this one on, until it ends. Raises ClientGone."""

    async def write(data: bytes) -> None:
        await exchange.write_stream(data, media_type)

    await exchange.while_connected(kept_events.write_events(first_event, write))
    await exchange.write_stream(b"", media_type, last=True)
