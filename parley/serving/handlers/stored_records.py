"""Handlers of stored records, of requests in the background, and of batches."""

from __future__ import annotations

from functools import partial

from parley.dialects.batch_job import BatchJob
from parley.dialects.records import StreamReplay
from parley.dialects.reply import Answer, Reply
from parley.dialects.route import Route
from parley.serving.answer_writer import follow_events
from parley.serving.model_registry import ModelRegistry
from parley.serving.records.background import BackgroundRunner
from parley.serving.records.inner_sender import resume_info, sender_of_client
from parley.serving.request_reader import request_context
from parley.web.exchange import Exchange
from parley.web.offload import OFFLOAD_SIZE


async def handle_stored(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Read or change the client's stored records, stream a background request again, or begin a batch."""
    assert route.reader is not None
    body = await exchange.read_body()
    context = request_context(registry, registry.main_model, exchange)
    size = OFFLOAD_SIZE + 1 if route.reads_many else len(body)
    result: Answer | StreamReplay | BatchJob = await exchange.to_thread_if_large(
        size, partial(route.reader, body, context)
    )
    if isinstance(result, Answer):
        await exchange.send_answer(result)
    elif isinstance(result, BatchJob):
        app, tenant = exchange.scope["app"], exchange.tenant
        sender = sender_of_client(app, exchange.scope, result)
        run = resume_info(exchange.scope, result, app.apis, app.keys.tenant_reference(tenant))
        await exchange.send_response(registry.batch_runner.accept_batch(tenant.id, result, sender, run))
    else:
        await replay_stream(registry.background_runs, exchange.tenant.id, exchange, result)


async def replay_stream(runs: BackgroundRunner, tenant: str, exchange: Exchange, replay: StreamReplay) -> None:
    """Stream a background request again. Raises its refusal if its events are not kept."""
    run = runs.find_run(tenant, replay.name)
    if run is None or not run.is_stream:
        raise replay.refusal
    await follow_events(exchange, run.kept_events, replay.first_event, Reply.media_type)
