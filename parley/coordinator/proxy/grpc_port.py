"""The gRPC port, for Triton's API. Calls run through the front message by message; health is the coordinator's own, and
statistics are summed over all instances. With servers other than parley, calls pass through (``grpc_passthrough``).

Imported only if the port is configured; needs the extra ``grpc``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import msgspec
from google.protobuf.message import DecodeError
from starlette.types import ASGIApp

from parley.coordinator.config import Options, Tls
from parley.coordinator.proxy.client import HELD
from parley.coordinator.proxy.grpc_call import FATAL, Answers, Cycle, Headers
from parley.coordinator.proxy.grpc_passthrough import DROPPED, Bypass
from parley.coordinator.routing.instance_table import Table
from parley.dialects.dialect import Head
from parley.dialects.facts import Card, Facts
from parley.dialects.triton import control
from parley.dialects.triton.calls import INFER, SERVICE, STREAM
from parley.dialects.triton.rpc import control as methods
from parley.dialects.triton.rpc import infer
from parley.dialects.triton.rpc.messages import INFERENCE, Message, filled, told
from parley.dialects.triton.rpc.reply import UNREADABLE
from parley.dialects.triton.rpc.status import Refused, refused
from parley.dialects.triton.rpc.watch import watch
from parley.disagg.wire.headers import OWN
from parley.errors import ParleyError
from parley.version import __version__
from parley.web.banner import reached
from parley.web.exchange import REQUEST_ID, TIMEOUT
from parley.web.random_ids import draw
from parley.web.tls import BadTls

Context = Any  # grpc.aio.ServicerContext, which has no types
STATISTICS = f"{SERVICE}/ModelStatistics"
ASKED = frozenset(f"{SERVICE}/{name}" for name in methods.CALLS)
PROBES = {
    f"{SERVICE}/ServerLive": (methods.live, methods.question("ServerLive")),
    f"{SERVICE}/ServerReady": (methods.ready, methods.question("ServerReady")),
    "/grpc.health.v1.Health/Check": (methods.check, methods.QUESTION),
}
WATCH = "/grpc.health.v1.Health/Watch"
REAL_STATUS = b"triton_grpc_error"  # metadata key: the first error ends the stream with its own status


class Port:
    """The gRPC server.

    ``front`` answers requests; ``start_server`` and ``stop_server`` must run in the same event loop.
    """

    def __init__(self, table: Table, front: ASGIApp, options: Options):
        self._table, self._front, self._options = table, front, options
        self._bypass = Bypass(table)
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", options.body_limit),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", options.max_requests),  # per connection
                ("grpc.keepalive_time_ms", 60_000),  # detects clients whose network is gone
                ("grpc.keepalive_timeout_ms", 20_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ]
        )
        self._server.add_generic_rpc_handlers((_Every(self._handler),))

    async def start(self, host: str, port: int) -> str:
        """Listen on a port (0: any free one) and return the address for clients. Raises OSError, BadTls."""
        name = f"[{host}]" if ":" in host else host
        place, credentials = f"{name}:{port}", encryption(self._options.tls)
        try:
            bound = self._server.add_secure_port(place, credentials) if credentials else (
                self._server.add_insecure_port(place)
            )  # fmt: skip
        except RuntimeError as error:
            raise OSError(f"cannot listen on {host} port {port} for gRPC.") from error
        await self._server.start()
        return reached(host, bound)

    async def stop(self, seconds: float) -> None:
        """Stop the server, giving open calls ``seconds`` to finish."""
        await self._server.stop(seconds)
        await self._bypass.close()

    def _handler(self, method: str) -> Any:
        """Return the handler of a method; None if unknown. With servers other than parley, calls are passed through."""
        usable = self._table.usable()
        unary = grpc.unary_unary_rpc_method_handler
        if method in PROBES:
            return unary(partial(self._enter, partial(self._probe, *PROBES[method])))
        if method == WATCH:
            return grpc.unary_stream_rpc_method_handler(partial(self._enter, self._watch))
        if all(each.extended for each in usable):
            if method == STATISTICS:
                return unary(partial(self._enter, self._statistics))
            if method == INFER:
                return unary(partial(self._enter, self._infer))
            if method == STREAM:
                return grpc.stream_stream_rpc_method_handler(partial(self._enter, self._stream))
            if method in ASKED:
                return unary(partial(self._enter, partial(self._ask, method)))
            if usable:
                return None
        return grpc.stream_stream_rpc_method_handler(partial(self._bypass.call, method))

    async def _enter(self, work: Callable[..., Any], given: Any, context: Context) -> bytes | None:
        """Run a handler with the call's headers and request id, and report its errors as gRPC statuses."""
        headers = _headers(context)
        said = dict(headers).get(b"x-request-id", b"")
        id = said.decode() if REQUEST_ID.fullmatch(said) else f"req_{draw().hex()}"
        context.set_trailing_metadata((("x-request-id", id),))
        try:
            headers = [*(pair for pair in headers if pair[0] != b"x-request-id"), (b"x-request-id", id.encode())]
            answer: bytes | None = await work(given, headers, context)
            return answer
        except Refused as error:
            await context.abort(error.code, error.message)
            raise AssertionError from error  # abort has raised

    # -- calls that generate

    async def _infer(self, data: bytes, headers: Headers, context: Context) -> bytes:
        _parsed(infer.REQUEST, data)
        return await Cycle().run(self._front, "POST", INFER, headers, data)

    async def _stream(self, requests: AsyncIterator[bytes], headers: Headers, context: Context) -> None:
        """Run the requests of a stream concurrently, each with its own answers; read no more than may be open."""
        answers = Answers(context.write, self._options.http_timeout_seconds)
        room = asyncio.Semaphore(self._options.max_requests)
        try:
            async with asyncio.TaskGroup() as writing:
                writing.create_task(answers.run())
                async with asyncio.TaskGroup() as group:
                    async for data in requests:
                        message = _parsed(infer.REQUEST, data)
                        await room.acquire()
                        task = group.create_task(self._one(data, message, headers, answers))
                        task.add_done_callback(lambda _: room.release())
                answers.end()
        except BaseExceptionGroup as several:
            raise _first(several) from None

    async def _one(self, data: bytes, message: Message, headers: Headers, answers: Answers) -> None:
        """Run one request of a stream. Its failure is sent as an answer, and the stream continues."""
        try:
            await Cycle(answers).run(self._front, "POST", STREAM, headers, data)
        except Refused as error:
            if error.code in FATAL or dict(headers).get(REAL_STATUS, b"").lower() == b"true":
                answers.end(error)
            else:
                answers.put(infer.failed(message, error.message).SerializeToString())

    # -- probes and statistics

    async def _probe(self, ask: methods.Ask, kind: Any, data: bytes, headers: Headers, context: Context) -> bytes:
        """Answer a probe about the coordinator itself, which works without any instance."""
        facts = await self._facts(headers)
        try:
            return bytes(ask(_parsed(kind, data), Head("", 0, ""), facts).SerializeToString())
        except ParleyError as error:
            raise refused(error) from None

    async def _watch(self, data: bytes, headers: Headers, context: Context) -> None:
        """Report the coordinator's health, now and after each change."""
        message = _parsed(methods.QUESTION, data)

        async def look() -> Message:
            return methods.check(message, Head("", 0, ""), await self._facts(headers))

        await watch(look, context.write)

    async def _facts(self, headers: Headers) -> Facts:
        ready = True
        try:
            await Cycle().run(self._front, "GET", "/v2/health/ready", headers)
        except Refused:
            ready = False
        return Facts(__version__, (), ready)

    async def _ask(self, method: str, data: bytes, headers: Headers, context: Context) -> bytes:
        """Return the answer of one instance."""
        return await Cycle().run(self._front, "POST", method, headers, data)

    async def _statistics(self, data: bytes, headers: Headers, context: Context) -> bytes:
        """Return the statistics of all instances, summed."""
        message = _parsed(INFERENCE("ModelStatisticsRequest"), data)
        page = await Cycle().run(self._front, "GET", "/v2/models/stats", headers)
        every = msgspec.json.decode(page)["model_stats"]
        path = {"model": message.name, "version": message.version}
        facts = Facts(__version__, [Card(each["name"], 0, None) for each in every], ready=True)
        head = Head("", 0, "", path={part: value for part, value in path.items() if value})
        try:
            names = {each["name"] for each in told(control.statistics(b"", head, facts))["model_stats"]}
        except ParleyError as error:
            raise refused(error) from None
        wanted = {"model_stats": [each for each in every if each["name"] in names]}
        return bytes(filled("ModelStatisticsResponse", wanted).SerializeToString())


class _Every(grpc.GenericRpcHandler):
    """Claims every method name."""

    def __init__(self, handler: Callable[[str], Any]):
        self._handler = handler

    def service(self, details: Any) -> Any:
        """Return the handler of the method (gRPC's callback)."""
        return self._handler(details.method)


def encryption(tls: Tls) -> grpc.ServerCredentials | None:
    """Return the TLS credentials for clients' calls; None for plain text. Raises BadTls."""
    if tls.certificate is None or tls.key is None:
        return None
    if tls.password is not None:
        raise BadTls(f"{tls.key} is encrypted with a password, which gRPC does not support")
    pair = Path(tls.key).read_bytes(), Path(tls.certificate).read_bytes()
    clients = Path(tls.clients).read_bytes() if tls.clients else None
    return grpc.ssl_server_credentials([pair], clients, require_client_auth=clients is not None)


def _headers(context: Context) -> list[tuple[bytes, bytes]]:
    """Convert a call's metadata to request headers: text values that concern the request, not the connection."""
    pairs = [
        (key.encode(), value.encode())
        for key, value in context.invocation_metadata() or ()
        if isinstance(value, str) and key not in DROPPED and not key.startswith("grpc-")
    ]
    return [pair for pair in pairs if pair[0] not in HELD and pair[0] != TIMEOUT and not pair[0].startswith(OWN)]


def _parsed(kind: Any, data: bytes) -> Message:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise Refused(grpc.StatusCode.INTERNAL, UNREADABLE) from None


def _first(error: BaseException) -> BaseException:
    """Return the first error of nested exception groups."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
