"""Triton's API over gRPC: a port of its own in the same event loop, with the same keys, limits and queue slots.

``dialects/triton`` defines the calls; this file authorizes them, parses messages and runs generations. A call that the
client cancels, or whose deadline passes, is a cancelled task, which cancels its generation. The file is imported only
if the port is enabled; it needs the extra ``grpc``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from parley.dialects.triton.rpc import control, infer
from parley.dialects.triton.rpc.messages import HEALTH_SCHEMA, INFERENCE_SCHEMA, ProtoMessage
from parley.dialects.triton.rpc.parsing import parse_message
from parley.dialects.triton.rpc.status import GrpcError
from parley.dialects.triton.rpc.watch import watch_health
from parley.dialects.triton.sampling import TRITON_FIELD_NAMES
from parley.errors import BadRequest, UnknownModel
from parley.serving.generation import Generation
from parley.serving.grpc.grpc_call import GrpcCall
from parley.serving.keys.accounts import RequestAccount
from parley.serving.keys.scopes import check_key_api, check_key_name
from parley.serving.model_registry import ModelRegistry
from parley.serving.request_metrics import RequestMetrics
from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.types import NO_LIMITS, Tenant
from parley.web.auth import ApiKeys
from parley.web.grpc_limits import IdleCallLimit, grpc_server_options
from parley.web.grpc_listener import GrpcListener
from parley.web.offload import to_thread_if_large
from parley.web.tls.files import TlsFiles

GrpcContext = Any  # grpc.aio.ServicerContext, which has no types
CallHandler = Callable[[GrpcCall, Any, GrpcContext], Awaitable[bytes | None]]
AnswerSender = Callable[[ProtoMessage, bool], Awaitable[None]]  # an answer, and whether it is the last one

# Open to clients without a key; not logged.
KEYLESS_METHODS = frozenset({"ServerLive", "ServerReady", "Check", "Watch"})
REAL_STATUS_HEADER = b"triton_grpc_error"  # metadata: the first error ends a stream, with the error's own status


class TritonGrpcPort:
    """A gRPC server in front of the served models. ``start_server`` and ``stop_server`` belong to one event loop.

    ``check_client`` is called where no keys are required, with the metadata of a call and the IP address that it came
    from. It raises Unauthorized if that client may not call this server.
    """

    def __init__(
        self, registry: ModelRegistry, check_client: Callable[[Mapping[bytes, bytes], str], None] = lambda *client: None
    ):
        self._registry = registry
        self._check_client = check_client
        self._idle_calls = IdleCallLimit(max(1, registry.options.grpc_connections // 2))
        self.listener = GrpcListener()
        options = registry.options
        self._keys = ApiKeys(*options.key_sources)

    def use_options(self, options: ServerOptions) -> None:
        """Accept the keys of other options from now on."""
        self._keys.replace_keys(*options.key_sources)

    async def start_server(self, listen_addresses: Sequence[tuple[str, int]], tls: TlsFiles | None = None) -> list[str]:
        """Listen on these hosts and ports; 0 takes a free port. Return the addresses for clients.

        Raises OSError, TlsFileError.
        """
        self.listener.load_certificate(tls)
        registry = self._registry
        self._grpc_server = grpc.aio.server(options=grpc_server_options(registry.options, registry.total_slots))
        self._grpc_server.add_generic_rpc_handlers(self._method_handlers())
        addresses = [self.listener.open_port(self._grpc_server, *listen_address) for listen_address in listen_addresses]
        await self._grpc_server.start()
        return addresses

    async def stop_server(self, seconds: float) -> None:
        """Accept no more calls, and cancel those that have not finished within ``seconds``."""
        await self._grpc_server.stop(seconds)

    # -- methods

    def _method_handlers(self) -> list[Any]:
        unary, server_streaming = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        bidirectional = grpc.stream_stream_rpc_method_handler
        inference, _ = INFERENCE_SCHEMA.find_service("GRPCInferenceService")
        health, _ = HEALTH_SCHEMA.find_service("Health")
        calls = {
            "ModelInfer": unary(self._method_entry(inference, "ModelInfer", self._infer_one)),
            "ModelStreamInfer": bidirectional(self._method_entry(inference, "ModelStreamInfer", self._infer_stream)),
        }
        for name, ask in control.GRPC_METHODS.items():
            calls[name] = unary(
                self._method_entry(inference, name, partial(self._answer_info, ask, control.request_class(name)))
            )
        probes = {
            "Check": unary(
                self._method_entry(
                    health, "Check", partial(self._answer_info, control.answer_health_check, control.HEALTH_REQUEST)
                )
            ),
            "Watch": server_streaming(self._method_entry(health, "Watch", self._watch_health)),
        }
        return [
            grpc.method_handlers_generic_handler(inference, calls),
            grpc.method_handlers_generic_handler(health, probes),
        ]

    def _method_entry(
        self, service_name: str, method_name: str, call_handler: CallHandler
    ) -> Callable[[Any, GrpcContext], Awaitable[bytes | None]]:
        """Return the handler of a method. Messages are parsed inside it, so that errors are worded by parley."""

        async def enter_call(payload: Any, context: GrpcContext) -> bytes | None:
            metadata = {key.encode(): _as_bytes(value) for key, value in context.invocation_metadata()}
            call = GrpcCall(self._registry, f"/{service_name}/{method_name}", metadata)
            call.log_entry.is_probe = method_name in KEYLESS_METHODS
            call.log_entry.api, call.log_entry.client = "triton", _client_host(context.peer())
            context.set_trailing_metadata((("x-request-id", call.request_id),))
            try:
                with call.reporting_outcome():
                    if method_name not in KEYLESS_METHODS:
                        if not self._keys:
                            self._check_client(metadata, _client_host(context.peer()))
                        call.tenant = self._keys.check_key(metadata)
                        call.log_entry.key = self._keys.name_key(call.tenant)
                        check_key_api(call.tenant, "triton")
                    return await call_handler(call, payload, context)
            except GrpcError as refused:
                if refused.retry_after is not None:
                    seconds = max(1, math.ceil(refused.retry_after))
                    context.set_trailing_metadata((("x-request-id", call.request_id), ("retry-after", str(seconds))))
                await context.abort(refused.code, refused.message)
                raise AssertionError from refused  # ``abort`` has raised

        return enter_call

    async def _answer_info(
        self, ask: control.GrpcHandler, message_type: Any, call: GrpcCall, data: bytes, context: GrpcContext
    ) -> bytes:
        """Answer a question about the server or its models."""
        message = await _parse_message(message_type, data)
        self._check_named_model(message, call.tenant)
        context_of_call = call.request_context(self._registry.main_model, {})
        work = partial(ask, message, context_of_call, self._registry.server_facts(call.tenant))
        result: bytes = (await to_thread_if_large(len(data), work)).SerializeToString()
        return result

    def _check_named_model(self, message: ProtoMessage, tenant: Tenant) -> None:
        """Raise Forbidden if a message names a model that the client's key may not use."""
        name = str(getattr(message, "name", "") or getattr(message, "model_name", ""))
        model = self._registry.get_model(name) if name and tenant.models else None
        if model is not None:
            check_key_name(tenant, model, name)

    async def _watch_health(self, call: GrpcCall, data: bytes, context: GrpcContext) -> None:
        """Stream the state of a service: now, and whenever it changes."""
        message = await _parse_message(control.HEALTH_REQUEST, data)

        async def current_health() -> ProtoMessage:
            return control.answer_health_check(
                message, call.request_context(self._registry.main_model, {}), self._registry.server_facts()
            )

        with self._idle_calls.hold_call():
            await watch_health(current_health, context.write)

    async def _infer_one(self, call: GrpcCall, data: bytes, context: GrpcContext) -> bytes:
        """Answer one request with one message."""
        answers: list[ProtoMessage] = []

        async def keep_answer(answer: ProtoMessage, final: bool) -> None:
            answers.append(answer)

        with self._registry.options.body_budget.hold_bytes(len(data)):
            message = await _parse_message(infer.INFER_REQUEST, data)
            await self._admit_generation(call, message, keep_answer, whole=True)
        result: bytes = answers[0].SerializeToString()
        return result

    async def _infer_stream(self, call: GrpcCall, requests: AsyncIterator[bytes], context: GrpcContext) -> None:
        """Answer many requests concurrently, each with its own messages. Reading pauses while all slots are taken."""
        writing, free_slots = asyncio.Lock(), asyncio.Semaphore(self._registry.total_slots)

        async def send_message(message: ProtoMessage) -> None:
            data = message.SerializeToString()
            try:
                async with writing, asyncio.timeout(self._registry.options.write_timeout):
                    await context.write(data)
            except TimeoutError:
                raise GrpcError(grpc.StatusCode.ABORTED, "The answers were not read in time.", fatal=True) from None

        call.log_entry.is_probe = True  # its requests are logged one by one
        try:
            with self._idle_calls.hold_call() as idle_call:
                async with asyncio.TaskGroup() as group:
                    async for data in requests:
                        message = await _parse_message(infer.INFER_REQUEST, data)
                        await free_slots.acquire()
                        task = group.create_task(self._run_stream_request(call, message, send_message))
                        idle_call.mark_busy_until_done(task)
                        task.add_done_callback(lambda _: free_slots.release())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _run_stream_request(
        self, stream: GrpcCall, message: ProtoMessage, send: Callable[[ProtoMessage], Awaitable[None]]
    ) -> None:
        """Answer one request of a stream. An error becomes an answer, and the stream continues."""

        async def send_streamed(answer: ProtoMessage, final: bool) -> None:
            await send(infer.stream_response(answer, final=final))

        call = GrpcCall(self._registry, stream.method, stream.headers)
        call.tenant = stream.tenant
        entry = stream.log_entry
        call.log_entry.api, call.log_entry.client, call.log_entry.key = entry.api, entry.client, entry.key
        try:
            with call.reporting_outcome(), self._registry.options.body_budget.hold_bytes(message.ByteSize()):
                await self._admit_generation(call, message, send_streamed, whole=False)
        except GrpcError as refused:
            if refused.fatal or stream.headers.get(REAL_STATUS_HEADER, b"").lower() == b"true":
                raise
            await send(infer.stream_error(message, refused.message))

    async def _admit_generation(
        self, call: GrpcCall, message: ProtoMessage, send: AnswerSender, *, whole: bool
    ) -> None:
        """Answer a request. Raises ParleyError, and anything that ``send`` raises."""
        self._registry.require_any_ready()
        if not message.model_name:
            raise UnknownModel("Request for unknown model: '' is not found")
        call.log_entry.note_model(message.model_name)
        model = self._registry.find_model(message.model_name, call.tenant)
        model.require_ready()
        account = self._registry.key_ledger.open_account(call.tenant, call.log_entry.key)
        if call.tenant.limits != NO_LIMITS:
            account.lease = self._registry.key_ledger.limiter.admit_request(call.tenant)
        try:
            await self._run_generation(model, call, message, send, account, whole=whole)
        except BadRequest as error:
            if error.field is not None:
                error.rename_field(TRITON_FIELD_NAMES.get(error.field, error.field))
            model.metrics.invalid_requests.add_count()
            raise
        finally:
            account.cancel()  # unless it is settled

    async def _run_generation(
        self,
        model: ServedModel,
        call: GrpcCall,
        message: ProtoMessage,
        send: AnswerSender,
        account: RequestAccount,
        *,
        whole: bool,
    ) -> None:
        read_message = partial(
            infer.read_grpc_infer, message, call.request_context(model, infer.path_parts_of(message)), whole=whole
        )
        inference = await to_thread_if_large(message.ByteSize(), read_message)
        request_metrics = RequestMetrics(model.metrics, call.log_entry, call.arrived, call.trace)
        generation = Generation(model, inference.request, request_metrics, call.tenant, account=account)
        try:
            await generation.submit_request()
            while events := await generation.next_events():
                answer = inference.make_response(events)
                if answer is not None:
                    await send(answer, inference.all_ended)
        finally:
            generation.close()


async def _parse_message(message_type: Any, data: bytes) -> ProtoMessage:
    try:
        return await to_thread_if_large(len(data), partial(parse_message, message_type, data))
    except DecodeError:
        raise GrpcError(grpc.StatusCode.INTERNAL, "The message could not be read.", fatal=True) from None


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def _client_host(peer: str) -> str:
    """Return the IP address in gRPC's name for a client, such as ``ipv4:10.0.0.1:52000``; empty if it has none."""
    family, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if family in ("ipv4", "ipv6") else ""
