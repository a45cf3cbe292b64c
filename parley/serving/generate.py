"""A generation request over HTTP, from its body to the last byte of its answer.

    parse -> admit -> prepare (render, tokenize) -> check -> submit -> [outputs -> events -> bytes]* -> finish

The middle is in ``generation.py``, which knows no HTTP; this file connects a generation to its client. Knows neither
the field names of an API nor the format of its answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol
from uuid import UUID

import msgspec

from parley.dialects.batch_job import BATCH_HEADER
from parley.dialects.dialect import Acknowledgement, Answer, Reply, RequestContext, Route
from parley.dialects.records import INLINED_RECORDS, NO_RECORDS, TenantRecords
from parley.disagg.wire.headers import FORWARDED_HEADER, RECORDS_HEADER
from parley.disagg.wire.vouched_client import USED_HEADER, ReservedTokens
from parley.errors import SERVER_ERROR, BadRequest, ParleyError, UnknownModel, excerpt
from parley.serving import model_facts
from parley.serving.endpoints.rate_limits import EndpointLease
from parley.serving.generation import Generation
from parley.serving.keys.accounts import RequestAccount
from parley.serving.keys.scopes import check_key_models
from parley.serving.media.request_media import request_media
from parley.serving.prepare import check_request, prepare_engine_requests, reserved_counts
from parley.serving.records.background import KeptEvents, generate_events
from parley.serving.registry import ModelRegistry
from parley.serving.request_metrics import RequestMetrics
from parley.serving.served_model import ServedModel
from parley.serving.stage import RequestStage
from parley.types import Event
from parley.web.content_coding import compress_body
from parley.web.exchange import Exchange
from parley.web.offload import off_loop
from parley.web.request_body import ClientGone

log = logging.getLogger("parley.server")


class Admission(Protocol):
    """Counts requests for the limits of keys, and takes slots for them."""

    async def open_account(self, registry: ModelRegistry, exchange: Exchange) -> RequestAccount:
        """Count a request for the client's key, and return its account. Raises RateLimited."""

    async def admit_generation(
        self, registry: ModelRegistry, model: ServedModel, exchange: Exchange, reply: Reply, account: RequestAccount
    ) -> Generation:
        """Take slots for a request, and pass ``account`` on to its generation. Raises Overloaded, BadRequest."""


async def handle_generate(
    registry: ModelRegistry, route: Route, exchange: Exchange, admission: Admission | None = None
) -> None:
    """Answer a request of a generating route. Raises ClientGone, and ParleyError if nothing has been sent yet.

    ``admission``: where slots and limits are counted; None: in this process.
    """
    registry.require_any_ready()
    admission = admission or OWN_ADMISSION
    model = registry.main_model  # until the path or the body names another one
    account: RequestAccount | None = await admission.open_account(registry, exchange)
    try:
        if path_model := exchange.path_params.get("model"):
            exchange.log_entry.note_model(path_model)
            model = registry.find_model(path_model)
            model.require_ready()
        body = await exchange.read_body()
        model, reply = await exchange.run_work(
            len(body), partial(read_generation_body, registry, route, exchange, body)
        )
        del body  # it may be large, and the answer long
        if isinstance(reply, Answer):
            await _send_ready_answer(model, reply, exchange)
            return
        exchange.adopt_reply(reply)
        model.require_ready()
        if (client_timeout := exchange.client_timeout()) is not None:
            reply.request.timeout = min(client_timeout, reply.request.timeout or client_timeout)
        reply.request.in_batch = BATCH_HEADER in exchange.headers
        if exchange.counts_tokens:
            await exchange.while_connected(_answer_token_count(model, reply, exchange))
            return
        assert account is not None
        generation = await admission.admit_generation(registry, model, exchange, reply, account)
        account = None
        if reply.background_name:
            await _run_in_background(registry, exchange, reply, generation)
            return
        try:
            await exchange.while_connected(_answer_generation(exchange, reply, generation))
        finally:
            generation.close()
    except BadRequest:
        model.metrics.invalid_requests.add_count()
        raise
    finally:
        if account is not None:  # no generation has taken it over
            account.cancel()


def read_generation_body(
    registry: ModelRegistry, route: Route, exchange: Exchange, body: bytes
) -> tuple[ServedModel, Reply | Answer]:
    """Find the model that a body is for and read the body. An unknown model is reported only if all else is right."""
    assert route.reader is not None
    if route.names_endpoint:
        return _read_endpoint_body(registry, route, exchange, body)
    model_name = exchange.path_params.get("model") or (
        route.model_reader(body) if route.model_reader is not None else ""
    )
    model = None
    if not model_name and route.suits_labels is not None:
        model = registry.first_model_with_labels(route.suits_labels)
    exchange.log_entry.note_model(model_name or (model or registry.main_model).name)
    if route.resolve_model_first:
        registry.find_model(model_name).require_ready()
    model = model or registry.get_model(model_name)
    reply = route.reader(body, request_context(registry, model or registry.main_model, exchange))
    if isinstance(reply, Answer):
        return model or registry.main_model, reply
    exchange.adopt_reply(reply)  # so that this API words an unknown-model error
    if model is None or reply.request.model != model_name:  # the API may ignore the name in the body
        model = registry.find_model(reply.request.model)
    return model, reply


def _read_endpoint_body(
    registry: ModelRegistry, route: Route, exchange: Exchange, body: bytes
) -> tuple[ServedModel, Reply | Answer]:
    """Read a body for an endpoint whose models share the requests, and choose the model. Raises NotFound."""
    assert route.reader is not None
    endpoint_name = exchange.path_params.get("endpoint") or (
        route.model_reader(body) if route.model_reader is not None else ""
    )
    endpoint_name = endpoint_name or registry.main_model.name
    registry.endpoint_store.check_query(endpoint_name, exchange.tenant)
    # Derived from the request's id: every instance draws the same.
    random_fraction = int(exchange.request_uuid[:13], 16) / 16**13
    share = registry.endpoint_store.choose_share(
        endpoint_name, exchange.path_params.get("served", ""), lambda: random_fraction
    )
    if share.model not in registry.served_names:  # names that stand for any model are not valid here
        raise UnknownModel(
            f"There is no model {excerpt(share.model)}.", name=endpoint_name, served=registry.served_names
        )
    _begin_table_row(registry, exchange, endpoint_name, share.name, body)
    model = registry.find_model(share.model)
    reply = route.reader(body, request_context(registry, model, exchange))
    if isinstance(reply, Reply):
        reply.request.model, reply.served_model, reply.endpoint_name = share.model, share.name, endpoint_name
    return model, reply


def _begin_table_row(
    registry: ModelRegistry, exchange: Exchange, endpoint_name: str, served_name: str, body: bytes
) -> None:
    """Record the request and its answer if its endpoint has an inference table. Of a separated request, the instance
    that answers records it."""
    endpoint, tables = registry.endpoint_store.by_name.get(endpoint_name), registry.inference_tables
    stage = _request_stage(exchange)
    if endpoint is None or endpoint.table is None or tables is None:
        return
    if stage is not None and stage.prior_outputs is None:
        return
    requester = exchange.tenant.owner.name or exchange.log_entry.key
    request_id = str(UUID(exchange.request_uuid))
    exchange.recorder = tables.begin_row(endpoint.table, request_id, served_name, requester, body)


class OwnAdmission:
    """Counts slots and limits in this process."""

    async def open_account(self, registry: ModelRegistry, exchange: Exchange) -> RequestAccount:
        """Count a request for the client's key, and return its account. Raises RateLimited.

        The limits of a separated request are counted once: by the coordinator, or where it began.
        """
        stage, ledger = _request_stage(exchange), registry.key_ledger
        if exchange.limits_counted:
            return RequestAccount(exchange.tenant, exchange.log_entry.key)
        if stage is not None and stage.prior_outputs is not None:
            return ledger.open_account(exchange.tenant, exchange.log_entry.key)
        return ledger.admit_request(exchange)

    async def admit_generation(
        self, registry: ModelRegistry, model: ServedModel, exchange: Exchange, reply: Reply, account: RequestAccount
    ) -> Generation:
        """Take slots for a request, and pass ``account`` on to its generation. Raises Overloaded, BadRequest."""
        account.endpoint_lease = _admit_to_endpoint(registry, exchange, reply)
        return begin_generation(model, exchange, reply, account)


OWN_ADMISSION = OwnAdmission()


def begin_generation(model: ServedModel, exchange: Exchange, reply: Reply, account: RequestAccount) -> Generation:
    """Return the generation of a request, which takes its slots. Raises Overloaded, BadRequest."""
    request_metrics = RequestMetrics(model.metrics, exchange.log_entry, exchange.arrived_at, exchange.trace)
    return Generation(model, reply.request, request_metrics, exchange.tenant, _request_stage(exchange), account)


async def _send_ready_answer(model: ServedModel, answer: Answer, exchange: Exchange) -> None:
    """Send an answer that needs no model. Unless it acknowledges something, it refuses the request."""
    if not isinstance(answer, Acknowledgement):
        model.metrics.invalid_requests.add_count()
    marks = exchange.coordinator_headers(None)
    await exchange.send_response(answer.body, answer.status, answer.content_type, marks)


async def _answer_token_count(model: ServedModel, reply: Reply, exchange: Exchange) -> None:
    """Answer a coordinator with the tokens that a request would reserve. Errors in the request are reported as if it
    ran."""
    request, tenant = reply.request, exchange.tenant
    request.model = model.answer_name(request.model)
    if request.adapter is None and request.model in model.adapters:
        request.adapter = request.model
    check_key_models(tenant, model.names if request.adapter is None else (request.adapter,))
    check_request(model, request)
    media = request_media(request)
    lease = await model.load_media(media, tenant) if media else None
    try:
        items = () if lease is None else lease.items
        prepared_prompts = await prepare_engine_requests(model, request, tenant, items)
        counts = ReservedTokens(*reserved_counts(request, [prepared for _, prepared in prepared_prompts]))
        await exchange.send_response(msgspec.json.encode(counts))
    finally:
        if lease is not None:
            lease.release()


def _admit_to_endpoint(registry: ModelRegistry, exchange: Exchange, reply: Reply) -> EndpointLease | None:
    """Count a request for an endpoint that has limits. Return its lease, which counts its tokens; None without limits.

    Raises Overloaded. A request that another instance began was counted there.
    """
    stage, endpoint = _request_stage(exchange), registry.endpoint_store.by_name.get(reply.endpoint_name)
    if endpoint is None or not endpoint.limits or (stage is not None and stage.prior_outputs is not None):
        return None
    return registry.endpoint_usage.admit_request(endpoint, exchange.tenant.id)


def request_context(registry: ModelRegistry, model: ServedModel, exchange: Exchange) -> RequestContext:
    """Return the server state that a dialect needs to read this request."""
    return model_facts.request_context(
        model,
        exchange.request_uuid,
        exchange.path_params,
        exchange.headers,
        query_string=exchange.scope.get("query_string", b""),
        created=exchange.created_at,
        tenant_id=exchange.tenant.id,
        reasoning_seal=registry.reasoning_seal,
        records=_tenant_records(registry, exchange),
    )


def _tenant_records(registry: ModelRegistry, exchange: Exchange) -> TenantRecords:
    """Return the records of the client's tenant. Instances keep none, because the next request may come to another
    instance; their coordinator keeps them, if any."""
    if RECORDS_HEADER in exchange.headers:
        return INLINED_RECORDS
    if exchange.stage is not None or FORWARDED_HEADER in exchange.headers:
        return NO_RECORDS
    return registry.tenant_records(exchange.tenant)


def _request_stage(exchange: Exchange) -> RequestStage | None:
    """Return the stage of a separated request that runs here; None if the whole request does."""
    stage = exchange.stage
    assert stage is None or isinstance(stage, RequestStage)
    return stage


async def _run_in_background(registry: ModelRegistry, exchange: Exchange, reply: Reply, generation: Generation) -> None:
    """Submit a request that then runs without its client. Raises ParleyError, ClientGone before that."""
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


async def follow_events(exchange: Exchange, kept: KeptEvents, first_event: int, media_type: str) -> None:
    """Write the events of a run from this one on, until it ends. Raises ClientGone."""

    async def write(data: bytes) -> None:
        await exchange.write_stream(data, media_type)

    await exchange.while_connected(kept.write_events(first_event, write))
    await exchange.write_stream(b"", media_type, last=True)


async def _answer_generation(exchange: Exchange, reply: Reply, generation: Generation) -> None:
    """Answer in one piece or as a stream."""
    if reply.request.stream:
        await _stream_generation(exchange, reply, generation)
        return
    await generation.submit_request()
    exchange.release_body()
    stage = _request_stage(exchange)
    for events in generation.replay_outputs():
        reply.add_events(events or ())

    def add_to_reply(steps: list[list[Event]]) -> bool:
        for events in steps:
            reply.add_events(events)
        if stage is not None and generation.expects_events:
            stage.on_progress()
        return True

    await generation.feed_events(add_to_reply)
    if not generation.finished:
        await generation.hand_over_request()
        return
    reply.timings = generation.request_timings
    body, extra_headers = reply.render_body(generation.usage), reply.answer_headers(reply.timings)
    if reply.content_coding:
        body = await off_loop(len(body), partial(compress_body, body, reply.content_coding))
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
                if (stage := _request_stage(exchange)) is not None:
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
