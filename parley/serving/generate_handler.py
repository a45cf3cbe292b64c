"""A generating request over HTTP, from its body to the last byte of its answer.

    read -> admit -> prepare (render, tokenize) -> check -> submit -> [outputs -> events -> bytes]* -> finish

This file has that order and the admission. ``request_reader.py`` reads the body, ``generation.py``, which knows no
HTTP, prepares and submits the request and makes events of its outputs, and ``answer_writer.py`` sends their bytes.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import msgspec

from parley.dialects.batch_job import BATCH_HEADER
from parley.dialects.reply import Acknowledgement, Answer, Reply
from parley.dialects.route import Route
from parley.disagg.wire.vouched_client import ReservedTokens
from parley.errors import BadRequest
from parley.serving.answer_writer import answer_generation, run_in_background
from parley.serving.endpoints.rate_limits import EndpointLease
from parley.serving.engine_requests import check_request, prepare_engine_requests, reserved_counts, resolve_model_name
from parley.serving.generation import Generation
from parley.serving.keys.accounts import RequestAccount
from parley.serving.keys.scopes import check_key_models
from parley.serving.media.request_media import request_media
from parley.serving.model_registry import ModelRegistry
from parley.serving.request_metrics import RequestMetrics
from parley.serving.request_reader import read_generation_body
from parley.serving.request_stage import request_stage
from parley.serving.served_model import ServedModel
from parley.web.exchange import Exchange


class RequestAdmission(Protocol):
    """Counts requests for the limits of keys, and takes slots for them."""

    async def open_account(self, registry: ModelRegistry, exchange: Exchange) -> RequestAccount:
        """Count a request for the client's key, and return its account. Raises RateLimited."""

    async def admit_generation(
        self, registry: ModelRegistry, model: ServedModel, exchange: Exchange, reply: Reply, account: RequestAccount
    ) -> Generation:
        """Take slots for a request, and pass ``account`` on to its generation. Raises Overloaded, BadRequest."""


async def handle_generate(
    registry: ModelRegistry, route: Route, exchange: Exchange, admission: RequestAdmission | None = None
) -> None:
    """Answer a request of a generating route. Raises ClientGone, and ParleyError if nothing has been sent yet.

    ``admission``: where slots and limits are counted; None: in this process.
    """
    registry.require_any_ready()
    admission = admission or IN_PROCESS_ADMISSION
    model = registry.main_model  # until the path or the body names another one
    account: RequestAccount | None = await admission.open_account(registry, exchange)
    try:
        if path_model := exchange.path_params.get("model"):
            exchange.log_entry.note_model(path_model)
            model = registry.find_model(path_model, exchange.tenant)
            model.require_ready()
        body = await exchange.read_body()
        model, reply = await exchange.to_thread_if_large(
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
            await run_in_background(registry, exchange, reply, generation)
            return
        try:
            await exchange.while_connected(answer_generation(exchange, reply, generation))
        finally:
            generation.close()
    except BadRequest:
        model.metrics.invalid_requests.add_count()
        raise
    finally:
        if account is not None:  # no generation has taken it over
            account.cancel()


class InProcessAdmission:
    """Counts requests and takes slots in this process."""

    async def open_account(self, registry: ModelRegistry, exchange: Exchange) -> RequestAccount:
        """Count a request for the client's key, and return its account. Raises RateLimited.

        The limits of a separated request are counted once: by the coordinator, or where it began.
        """
        stage, ledger = request_stage(exchange), registry.key_ledger
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


IN_PROCESS_ADMISSION = InProcessAdmission()


def begin_generation(model: ServedModel, exchange: Exchange, reply: Reply, account: RequestAccount) -> Generation:
    """Return the generation of a request, which takes its slots. Raises Overloaded, BadRequest."""
    request_metrics = RequestMetrics(model.metrics, exchange.log_entry, exchange.arrived_at, exchange.trace)
    return Generation(model, reply.request, request_metrics, exchange.tenant, request_stage(exchange), account)


async def _send_ready_answer(model: ServedModel, answer: Answer, exchange: Exchange) -> None:
    """Send an answer that needs no model. Unless it acknowledges something, it refuses the request."""
    if not isinstance(answer, Acknowledgement):
        model.metrics.invalid_requests.add_count()
    coordinator_headers = exchange.coordinator_headers(None)
    await exchange.send_answer(answer, coordinator_headers)


async def _answer_token_count(model: ServedModel, reply: Reply, exchange: Exchange) -> None:
    """Answer a coordinator with the tokens that a request would reserve. Errors in the request are reported as if it
    ran."""
    request, tenant = reply.request, exchange.tenant
    resolve_model_name(model, request)
    check_key_models(tenant, model.names if request.adapter is None else (request.adapter,))
    check_request(model, request)
    media = request_media(request)
    lease = await model.load_media(media, tenant) if media else None
    try:
        items = () if lease is None else lease.items
        prepared_prompts = await prepare_engine_requests(model, request, tenant, items)
        counts = ReservedTokens(*reserved_counts(request, prepared_prompts))
        await exchange.send_response(msgspec.json.encode(counts))
    finally:
        if lease is not None:
            lease.release()


def _admit_to_endpoint(registry: ModelRegistry, exchange: Exchange, reply: Reply) -> EndpointLease | None:
    """Count a request for an endpoint that has limits. Return its lease, which counts its tokens; None without limits.

    Raises Overloaded. A request that another instance began was counted there.
    """
    stage, endpoint = request_stage(exchange), registry.endpoint_store.by_name.get(reply.endpoint_name)
    if endpoint is None or not endpoint.limits or (stage is not None and stage.prior_outputs is not None):
        return None
    return registry.endpoint_usage.admit_request(endpoint, exchange.tenant.id)
