"""Triton's API over gRPC: a port of its own in the same event loop, with the same keys, limits and queue slots.

``dialects/triton`` defines the calls; this file authorizes them, parses messages and runs generations. A call that the
client cancels, or whose deadline passes, is a cancelled task, which cancels its generation. The file is imported only
if the port is enabled; it needs the extra ``grpc``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from parley.dialects.triton.rpc import control, infer
from parley.dialects.triton.rpc.messages import HEALTH, INFERENCE, Message
from parley.dialects.triton.rpc.status import Refused
from parley.dialects.triton.rpc.watch import watch
from parley.errors import BadRequest, UnknownModel
from parley.serving.generation import Generation
from parley.serving.grpc_call import Call
from parley.serving.registry import Service
from parley.serving.request_metrics import Tally
from parley.serving.served_model import Model
from parley.web.auth import Keys
from parley.web.banner import reached
from parley.web.offload import off_loop

Context = Any  # grpc.aio.ServicerContext, which has no types
Work = Callable[[Call, Any, Context], Awaitable[bytes | None]]
Send = Callable[[Message, bool], Awaitable[None]]  # an answer, and whether it is the last one

OPEN = frozenset({"ServerLive", "ServerReady", "Check", "Watch"})  # open to clients without a key; not logged
REAL_STATUS = b"triton_grpc_error"  # metadata: the first error ends a stream, with the error's own status


class Port:
    """A gRPC server in front of the served models. ``start_server`` and ``stop_server`` belong to one event loop."""

    def __init__(self, service: Service):
        self._service = service
        self._keys = Keys(service.options.api_keys, service.options.admin_keys)

    async def start(self, places: Sequence[tuple[str, int]]) -> list[str]:
        """Listen on these hosts and ports; 0 takes a free port. Return the addresses for clients. Raises OSError."""
        service = self._service
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # otherwise two servers would silently share a port
                ("grpc.max_receive_message_length", service.options.body_limit),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", service.places),  # per connection
                ("grpc.keepalive_time_ms", 60_000),  # detects clients whose network is gone
                ("grpc.keepalive_timeout_ms", 20_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ]
        )
        self._server.add_generic_rpc_handlers(self._handlers())
        addresses = [self._bind(*place) for place in places]
        await self._server.start()
        return addresses

    def _bind(self, host: str, port: int) -> str:
        name = f"[{host}]" if ":" in host else host
        try:
            return reached(host, self._server.add_insecure_port(f"{name}:{port}"))
        except RuntimeError as error:
            raise OSError(
                f"cannot listen on {host} port {port} for gRPC: the port is taken, or the address is unknown."
            ) from error

    async def stop(self, seconds: float) -> None:
        """Accept no more calls, and cancel those that have not finished within ``seconds``."""
        await self._server.stop(seconds)

    # -- methods

    def _handlers(self) -> list[Any]:
        unary, answers = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        both = grpc.stream_stream_rpc_method_handler
        inference, _ = INFERENCE.service("GRPCInferenceService")
        health, _ = HEALTH.service("Health")
        calls = {
            "ModelInfer": unary(self._entry(inference, "ModelInfer", self._infer)),
            "ModelStreamInfer": both(self._entry(inference, "ModelStreamInfer", self._stream)),
        }
        for name, ask in control.CALLS.items():
            calls[name] = unary(self._entry(inference, name, partial(self._ask, ask, control.question(name))))
        probes = {
            "Check": unary(self._entry(health, "Check", partial(self._ask, control.check, control.QUESTION))),
            "Watch": answers(self._entry(health, "Watch", self._watch)),
        }
        return [
            grpc.method_handlers_generic_handler(inference, calls),
            grpc.method_handlers_generic_handler(health, probes),
        ]

    def _entry(self, service: str, name: str, work: Work) -> Callable[[Any, Context], Awaitable[bytes | None]]:
        """Return the handler of a method. Messages are parsed inside it, so that errors are worded by parley."""

        async def enter(given: Any, context: Context) -> bytes | None:
            metadata = {key.encode(): _bytes(value) for key, value in context.invocation_metadata()}
            call = Call(self._service, f"/{service}/{name}", metadata)
            call.note.probe = name in OPEN
            context.set_trailing_metadata((("x-request-id", call.id),))
            try:
                with call.ending():
                    if name not in OPEN:
                        call.tenant = self._keys.check(metadata)
                    return await work(call, given, context)
            except Refused as refused:
                await context.abort(refused.code, refused.message)
                raise AssertionError from refused  # ``abort`` has raised

        return enter

    async def _ask(self, ask: control.Ask, kind: Any, call: Call, data: bytes, context: Context) -> bytes:
        """Answer a question about the server or its models."""
        work = partial(ask, _parse(kind, data), call.head(self._service.main, {}), self._service.facts())
        return (await off_loop(len(data), work)).SerializeToString()

    async def _watch(self, call: Call, data: bytes, context: Context) -> None:
        """Stream the state of a service: now, and whenever it changes."""
        message = _parse(control.QUESTION, data)

        async def look() -> Message:
            return control.check(message, call.head(self._service.main, {}), self._service.facts())

        await watch(look, context.write)

    async def _infer(self, call: Call, data: bytes, context: Context) -> bytes:
        """Answer one request with one message."""
        made: list[Message] = []

        async def keep(answer: Message, final: bool) -> None:
            made.append(answer)

        await self._generate(call, _parse(infer.REQUEST, data), keep, whole=True)
        return made[0].SerializeToString()

    async def _stream(self, call: Call, requests: AsyncIterator[bytes], context: Context) -> None:
        """Answer many requests concurrently, each with its own messages. Reading pauses while all slots are taken."""
        writing, room = asyncio.Lock(), asyncio.Semaphore(self._service.places)

        async def send(message: Message) -> None:
            data = message.SerializeToString()
            try:
                async with writing, asyncio.timeout(self._service.options.write_timeout):
                    await context.write(data)
            except TimeoutError:
                raise Refused(grpc.StatusCode.ABORTED, "The answers were not read in time.", fatal=True) from None

        call.note.probe = True  # its requests are logged one by one
        try:
            async with asyncio.TaskGroup() as group:
                async for data in requests:
                    message = _parse(infer.REQUEST, data)
                    await room.acquire()
                    task = group.create_task(self._one(call, message, send))
                    task.add_done_callback(lambda _: room.release())
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None

    async def _one(self, stream: Call, message: Message, send: Callable[[Message], Awaitable[None]]) -> None:
        """Answer one request of a stream. An error becomes an answer, and the stream continues."""

        async def tell(answer: Message, final: bool) -> None:
            await send(infer.streamed(answer, final=final))

        call = Call(self._service, stream.method, stream.headers)
        call.tenant = stream.tenant
        try:
            with call.ending():
                await self._generate(call, message, tell, whole=False)
        except Refused as refused:
            if refused.fatal or stream.headers.get(REAL_STATUS, b"").lower() == b"true":
                raise
            await send(infer.failed(message, refused.message))

    async def _generate(self, call: Call, message: Message, send: Send, *, whole: bool) -> None:
        """Answer a request. Raises ParleyError, and anything that ``send`` raises."""
        self._service.admit()
        if not message.model_name:
            raise UnknownModel("Request for unknown model: '' is not found")
        model = self._service.find(message.model_name)
        model.require()
        try:
            await self._answer(model, call, message, send, whole)
        except BadRequest:
            model.metrics.refused.add()
            raise

    async def _answer(self, model: Model, call: Call, message: Message, send: Send, whole: bool) -> None:
        reading = partial(infer.read, message, call.head(model, infer.path(message)), whole=whole)
        inference = await off_loop(message.ByteSize(), reading)
        tally = Tally(model.metrics, call.note, call.arrived)
        generation = Generation(model, inference.request, tally, call.tenant)
        try:
            await generation.begin()
            while events := await generation.next():
                answer = inference.answer(events)
                if answer is not None:
                    await send(answer, inference.ended)
        finally:
            generation.close()


def _parse(kind: Any, data: bytes) -> Message:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise Refused(grpc.StatusCode.INTERNAL, "The message could not be read.", fatal=True) from None


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
