"""Handlers that act on the server as a whole: self-test, empty caches, pause, stop. One function per kind of route."""

from __future__ import annotations

import asyncio
from functools import partial

from parley.dialects.admin_requests import PauseAnswer, PauseCommand
from parley.dialects.route import Route
from parley.errors import Forbidden
from parley.serving.model_registry import ModelRegistry
from parley.serving.request_reader import request_context
from parley.types import EngineRequest, PoolingOptions, PoolingTask, TextPrompt
from parley.web.exchange import Exchange

TESTED_TASKS: tuple[PoolingTask, ...] = (
    "classify",
    "embed",
    "token_embed",
    "token_classify",
)  # the first that the model has
FORCED_DRAIN_SECONDS = 5.0  # seconds that running answers get if the server must end at once
PAUSE_STATES: dict[PauseCommand, str] = {"hold": "held", "prepare": "prepared", "release": ""}


async def handle_self_test(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Generate, embed or classify one token, to prove that the model works. A busy engine passes if it completes
    steps."""
    assert route.reader is not None and route.writer is not None
    model = registry.main_model
    seconds: float = route.reader(request_context(registry, model, exchange))
    model.require_ready()
    steps_before = model.engine.stats.steps
    token_ids = model.text_pipeline.prepare_prompt(TextPrompt("a")).token_ids[-1:]
    pooling = None
    if not model.model_info.generates:
        offered = model.model_info.pooling_tasks
        pooling = PoolingOptions(task=next((task for task in TESTED_TASKS if task in offered), "embed"))
    engine_request = EngineRequest(exchange.request_uuid, token_ids, max_tokens=1, pooling=pooling)
    stream = model.engine.submit_request(engine_request)
    try:
        async with asyncio.timeout(seconds):
            succeeded = all(output.finish_reason != "error" for output in await stream.next_outputs())
    except TimeoutError:
        succeeded = model.engine.stats.steps > steps_before
    finally:
        stream.cancel_choice()
    answer = route.writer(succeeded)
    await exchange.send_answer(answer)


async def handle_cache_reset(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Clear the prefix cache of every model."""
    assert route.reader is not None and route.writer is not None
    registry.require_ready()
    running: bool = route.reader(request_context(registry, registry.main_model, exchange))
    reset_results = await asyncio.gather(
        *(model.engine.reset_prefix_cache(running=running) for model in registry.models)
    )
    await exchange.send_response(route.writer(all(reset_results)))


async def handle_media_reset(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Drop the processed media of every model."""
    registry.require_ready()
    for model in registry.models:
        model.drop_kept_media()
    await exchange.send_response(b"", content_type=b"")


async def handle_pause(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Pause admission of new requests, or resume it."""
    assert route.reader is not None
    body = await exchange.read_body()
    read_command = partial(
        route.reader, body, request_context(registry, registry.main_model, exchange), registry.server_facts()
    )
    pause_answer: PauseAnswer = await exchange.to_thread_if_large(len(body), read_command)
    if pause_answer.command is not None:
        registry.set_pause(PAUSE_STATES[pause_answer.command])
    await exchange.send_answer(pause_answer.answer)


async def handle_stop(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Stop the server; the answer is sent when the running requests have finished, or at once if forced.

    Raises Forbidden.
    """
    assert route.reader is not None and route.writer is not None
    if exchange.headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        raise Forbidden("A web page of another origin may not stop this server.")
    force: bool = route.reader(request_context(registry, registry.main_model, exchange))
    first_stop = not registry.shutting_down
    registry.stop_admission()
    if first_stop and not force:
        await registry.drain_models()
    answer = route.writer(first_stop)
    await exchange.send_answer(answer)
    if first_stop:
        if force:
            await registry.drain_models(FORCED_DRAIN_SECONDS)
        registry.stop_server()
