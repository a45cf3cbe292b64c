"""The gRPC port, for Triton's API. Calls run through the front message by message; health is the coordinator's own, and
statistics are summed over all instances. With servers other than parley, calls pass through (``grpc_passthrough``),
unless the coordinator checks keys.

Imported only if the port is configured; needs the extra ``grpc``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc
import msgspec
from google.protobuf.message import DecodeError
from starlette.types import ASGIApp

from parley.coordinator.config import CoordinatorOptions
from parley.coordinator.proxy.downstream.client import NOT_FORWARDED
from parley.coordinator.proxy.grpc.grpc_call import STREAM_FATAL_CODES, GrpcAnswerQueue, GrpcCycle, HeaderList
from parley.coordinator.proxy.grpc.grpc_passthrough import CONNECTION_METADATA, GrpcPassthrough
from parley.coordinator.routing.instance_table import InstanceTable
from parley.dialects.facts import ModelCard, ServerFacts
from parley.dialects.request_context import RequestContext
from parley.dialects.triton import control
from parley.dialects.triton.calls import INFER_PATH, SERVICE_PATH, STREAM_PATH
from parley.dialects.triton.rpc import control as methods
from parley.dialects.triton.rpc import infer
from parley.dialects.triton.rpc.messages import INFERENCE_SCHEMA, ProtoMessage, decode_http_answer, fill_message
from parley.dialects.triton.rpc.parsing import parse_message
from parley.dialects.triton.rpc.reply import UNREADABLE_MESSAGE
from parley.dialects.triton.rpc.status import GrpcError, grpc_error
from parley.dialects.triton.rpc.watch import watch_health
from parley.disagg.wire.headers import NATIVE_PREFIX
from parley.errors import InvalidValue, ParleyError
from parley.version import __version__
from parley.web.exchange import REQUEST_ID_PATTERN, TIMEOUT_HEADER
from parley.web.grpc_limits import IdleCallLimit, grpc_server_options
from parley.web.grpc_listener import GrpcListener
from parley.web.http_options import HttpOptions
from parley.web.offload import to_thread_if_large
from parley.web.random_ids import draw_id
from parley.web.tls.files import TlsFiles

GrpcContext = Any  # grpc.aio.ServicerContext, which has no types
STATISTICS_METHOD = f"{SERVICE_PATH}/ModelStatistics"
REPOSITORY_METHOD = f"{SERVICE_PATH}/RepositoryIndex"
FORWARDED_METHODS = frozenset(f"{SERVICE_PATH}/{name}" for name in methods.GRPC_METHODS)
PROBE_HANDLERS = {
    f"{SERVICE_PATH}/ServerLive": (methods.server_live, methods.request_class("ServerLive")),
    f"{SERVICE_PATH}/ServerReady": (methods.server_ready, methods.request_class("ServerReady")),
    "/grpc.health.v1.Health/Check": (methods.answer_health_check, methods.HEALTH_REQUEST),
}
WATCH_METHOD = "/grpc.health.v1.Health/Watch"
NO_PASSTHROUGH = "This coordinator checks API keys, so it passes no calls on to servers other than parley. Use HTTP."
REAL_STATUS = b"triton_grpc_error"  # metadata key: the first error ends the stream with its own status


class CoordinatorGrpcPort:
    """The gRPC server.

    ``front`` answers requests; ``start_server`` and ``stop_server`` must run in the same event loop.
    """

    def __init__(self, table: InstanceTable, front: ASGIApp, options: CoordinatorOptions, limits: HttpOptions):
        self._table, self._front, self._options = table, front, options
        self._idle_calls = IdleCallLimit(max(1, limits.grpc_connections // 2))
        self._passthrough = GrpcPassthrough(table)
        self.listener = GrpcListener()
        self._server = grpc.aio.server(options=grpc_server_options(limits, options.max_requests))
        self._server.add_generic_rpc_handlers((_AllMethods(self._find_handler),))

    async def start_server(self, host: str, port: int, tls: TlsFiles | None = None) -> str:
        """Listen on a port (0: any free one) and return the address for clients. Raises OSError, TlsFileError."""
        self.listener.load_certificate(tls)
        address = self.listener.open_port(self._server, host, port)
        await self._server.start()
        return address

    async def stop_server(self, seconds: float) -> None:
        """Stop the server, giving open calls ``seconds`` to finish."""
        await self._server.stop(seconds)
        await self._passthrough.close_channels()

    def _find_handler(self, method: str) -> Any:
        """Return the handler of a method; None if unknown. With servers other than parley, calls are passed through."""
        usable = self._table.usable_instances()
        unary = grpc.unary_unary_rpc_method_handler
        if method in PROBE_HANDLERS:
            return unary(partial(self._run_handler, partial(self._answer_probe, *PROBE_HANDLERS[method])))
        if method == WATCH_METHOD:
            return grpc.unary_stream_rpc_method_handler(partial(self._run_handler, self._watch_health))
        if all(instance.native for instance in usable):
            if method == STATISTICS_METHOD:
                return unary(partial(self._run_handler, self._sum_statistics))
            if method == REPOSITORY_METHOD:
                return unary(partial(self._run_handler, self._list_repository))
            if method == INFER_PATH:
                return unary(partial(self._run_handler, self._infer_one))
            if method == STREAM_PATH:
                return grpc.stream_stream_rpc_method_handler(partial(self._run_handler, self._infer_stream))
            if method in FORWARDED_METHODS:
                return unary(partial(self._run_handler, partial(self._forward_call, method)))
            if usable:
                return None
        if self._options.hashed_keys is not None:
            return grpc.stream_stream_rpc_method_handler(_refuse_passthrough)
        return grpc.stream_stream_rpc_method_handler(partial(self._passthrough.pass_through, method))

    async def _run_handler(self, work: Callable[..., Any], payload: Any, context: GrpcContext) -> bytes | None:
        """Run a handler with the call's headers and request id, and report its errors as gRPC statuses."""
        headers = _request_headers(context)
        sent_id = dict(headers).get(b"x-request-id", b"")
        request_id = sent_id.decode() if REQUEST_ID_PATTERN.fullmatch(sent_id) else f"req_{draw_id().hex()}"
        context.set_trailing_metadata((("x-request-id", request_id),))
        try:
            headers = [
                *(pair for pair in headers if pair[0] != b"x-request-id"),
                (b"x-request-id", request_id.encode()),
            ]
            answer: bytes | None = await work(payload, headers, context)
            return answer
        except GrpcError as error:
            if error.retry_after is not None:
                retry_after = ("retry-after", str(math.ceil(error.retry_after)))
                context.set_trailing_metadata((("x-request-id", request_id), retry_after))
            await context.abort(error.code, error.message)
            raise AssertionError from error  # abort has raised

    # -- calls that generate

    async def _infer_one(self, data: bytes, headers: HeaderList, context: GrpcContext) -> bytes:
        await _parse_message(infer.INFER_REQUEST, data)
        return await GrpcCycle().run_request(self._front, "POST", INFER_PATH, headers, data)

    async def _infer_stream(self, requests: AsyncIterator[bytes], headers: HeaderList, context: GrpcContext) -> None:
        """Run the requests of a stream concurrently, each with its own answers; read no more than may be open."""
        answers = GrpcAnswerQueue(context.write, self._options.http_timeout_seconds)
        room = asyncio.Semaphore(self._options.max_requests)
        try:
            async with asyncio.TaskGroup() as writing:
                writing.create_task(answers.write_messages())
                with self._idle_calls.hold_call() as call:
                    async with asyncio.TaskGroup() as group:
                        async for data in requests:
                            message = await _parse_message(infer.INFER_REQUEST, data)
                            await room.acquire()
                            task = group.create_task(self._run_stream_request(data, message, headers, answers))
                            call.mark_busy_until_done(task)
                            task.add_done_callback(lambda _: room.release())
                answers.end_stream()
        except BaseExceptionGroup as several:
            raise _first_error(several) from None

    async def _run_stream_request(
        self, data: bytes, message: ProtoMessage, headers: HeaderList, answers: GrpcAnswerQueue
    ) -> None:
        """Run one request of a stream. Its failure is sent as an answer, and the stream continues."""
        try:
            await GrpcCycle(answers).run_request(self._front, "POST", STREAM_PATH, headers, data)
        except GrpcError as error:
            if error.code in STREAM_FATAL_CODES or dict(headers).get(REAL_STATUS, b"").lower() == b"true":
                answers.end_stream(error)
            else:
                answers.queue_message(infer.stream_error(message, error.message).SerializeToString())

    # -- probes, statistics and the list of models

    async def _answer_probe(
        self, ask: methods.GrpcHandler, kind: Any, data: bytes, headers: HeaderList, context: GrpcContext
    ) -> bytes:
        """Answer a probe about the coordinator itself, which works without any instance."""
        facts = await self._cluster_facts(headers)
        try:
            return bytes(ask(await _parse_message(kind, data), RequestContext("", 0, ""), facts).SerializeToString())
        except ParleyError as error:
            raise grpc_error(error) from None

    async def _watch_health(self, data: bytes, headers: HeaderList, context: GrpcContext) -> None:
        """Report the coordinator's health, now and after each change."""
        message = await _parse_message(methods.HEALTH_REQUEST, data)

        async def current_health() -> ProtoMessage:
            return methods.answer_health_check(message, RequestContext("", 0, ""), await self._cluster_facts(headers))

        with self._idle_calls.hold_call():
            await watch_health(current_health, context.write)

    async def _cluster_facts(self, headers: HeaderList) -> ServerFacts:
        ready = True
        try:
            await GrpcCycle().run_request(self._front, "GET", "/v2/health/ready", headers)
        except GrpcError:
            ready = False
        return ServerFacts(__version__, (), ready)

    async def _forward_call(self, method: str, data: bytes, headers: HeaderList, context: GrpcContext) -> bytes:
        """Return the answer of one instance."""
        return await GrpcCycle().run_request(self._front, "POST", method, headers, data)

    async def _sum_statistics(self, data: bytes, headers: HeaderList, context: GrpcContext) -> bytes:
        """Return the statistics of all instances, summed."""
        message = await _parse_message(INFERENCE_SCHEMA("ModelStatisticsRequest"), data)
        page = await GrpcCycle().run_request(self._front, "GET", "/v2/models/stats", headers)
        entries = msgspec.json.decode(page)["model_stats"]
        path = {"model": message.name, "version": message.version}
        facts = ServerFacts(__version__, [ModelCard(entry["name"], 0, None) for entry in entries], ready=True)
        request_context = RequestContext("", 0, "", path_parts={part: value for part, value in path.items() if value})
        try:
            answer = decode_http_answer(control.model_statistics(b"", request_context, facts))
        except ParleyError as error:
            raise grpc_error(error) from None
        names = {entry["name"] for entry in answer["model_stats"]}
        selected = {"model_stats": [entry for entry in entries if entry["name"] in names]}
        return bytes(fill_message("ModelStatisticsResponse", selected).SerializeToString())

    async def _list_repository(self, data: bytes, headers: HeaderList, context: GrpcContext) -> bytes:
        """Return the models of all instances."""
        message = await _parse_message(INFERENCE_SCHEMA("RepositoryIndexRequest"), data)
        if message.repository_name:  # which an instance refuses
            return await self._forward_call(REPOSITORY_METHOD, data, headers, context)
        body = msgspec.json.encode({"ready": message.ready})
        page = await GrpcCycle().run_request(self._front, "POST", "/v2/repository/index", headers, body)
        models = {"models": msgspec.json.decode(page)}
        return bytes(fill_message("RepositoryIndexResponse", models).SerializeToString())


async def _refuse_passthrough(requests: AsyncIterator[bytes], context: GrpcContext) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, NO_PASSTHROUGH)


class _AllMethods(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Claims every method name."""

    def __init__(self, handler: Callable[[str], Any]):
        self._handler = handler

    def service(self, details: Any) -> Any:
        """Return the handler of the method (gRPC's callback)."""
        return self._handler(details.method)


def _request_headers(context: GrpcContext) -> list[tuple[bytes, bytes]]:
    """Convert a call's metadata to request headers: text values that concern the request, not the connection."""
    pairs = [
        (key.encode(), value.encode())
        for key, value in context.invocation_metadata() or ()
        if isinstance(value, str) and key not in CONNECTION_METADATA and not key.startswith("grpc-")
    ]
    return [
        pair
        for pair in pairs
        if pair[0] not in NOT_FORWARDED and pair[0] != TIMEOUT_HEADER and not pair[0].startswith(NATIVE_PREFIX)
    ]


async def _parse_message(kind: Any, data: bytes) -> ProtoMessage:
    try:
        return await to_thread_if_large(len(data), partial(parse_message, kind, data))
    except InvalidValue as error:
        raise grpc_error(error) from None
    except DecodeError:
        raise GrpcError(grpc.StatusCode.INTERNAL, UNREADABLE_MESSAGE) from None


def _first_error(error: BaseException) -> BaseException:
    """Return the first error of nested exception groups."""
    return _first_error(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
