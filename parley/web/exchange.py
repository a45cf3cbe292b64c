"""One HTTP exchange: reads the request body, writes the response, and detects that the client disconnects.

The client is watched in every phase, also while nothing is sent; the responders of the frameworks notice a disconnect
only when they write. The headers of a stream are sent with its first bytes, so that every earlier failure can still set
the HTTP status. This module does not depend on engines, and on an API only for its headers and its error format.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from starlette.types import Message, Receive, Scope, Send

from parley.dialects.dialect import Dialect
from parley.dialects.reply import Answer, HeaderList, Reply
from parley.errors import BadRequest, InvalidValue, ParleyError, RateLimited, TooLarge, UnknownCoding, excerpt
from parley.tracing.http_span import HttpRequestEnd, encode_http_span
from parley.tracing.request_trace import RequestTrace, SpanExporter
from parley.types import NO_TENANT, KeyLimitStates, Tenant
from parley.web.content_coding import decompress_body
from parley.web.http_cycle import CHUNK_PER_EVENT, CYCLE_KEY, ResponseWriter
from parley.web.http_options import HttpOptions
from parley.web.logs import LOGGED_BODY_BYTES, AccessLogEntry
from parley.web.offload import OFFLOAD_SIZE, to_thread_if_large
from parley.web.random_ids import draw_id
from parley.web.request_body import ClientGone, HeldBody, receive_part, too_large_error

T = TypeVar("T")

REQUEST_ID_PATTERN = re.compile(rb"[A-Za-z0-9._:=+@/-]{1,128}")
TIMEOUT_HEADER = b"x-request-timeout"
SECONDS_PATTERN = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")
JSON_MEDIA_TYPE = b"application/json"
MAX_AUDITED_BODY = 1024  # bytes


class AnswerRecorder(Protocol):
    """Keeps the answer while it is sent."""

    def add_piece(self, data: bytes) -> None:
        """Add a piece of the body that is sent."""

    def finish(self, status: int, seconds: float) -> None:
        """Record the end of the request. ``status``: the HTTP status, 0 without an answer; ``seconds``: its
        duration.
        """


class StageErrors(Protocol):
    """The error responses of a request stage, for requests that are split between servers."""

    def coordinator_answer(self, error: ParleyError) -> Answer | None:
        """Return the whole response if the error concerns another server rather than the client's API, else None."""

    def coordinator_headers(self, error: ParleyError | None) -> HeaderList:
        """Return headers that say to a coordinator how to proceed; ``None``: the dialect has worded a refusal."""


@dataclass(slots=True)  # a dictionary of all these attributes would take 1.5 KB for each open request
class Exchange:
    """One request and its response.

    * ``field_names``: maps neutral field names in errors to the API's own.
    * ``dialect``: writes errors unless the reply does (``adopt_reply``).
    * ``extra_headers``: further headers of a stream.
    * ``tenant``: the client, by its API key.
    * ``stage``: set if this server runs only one stage of the request.
    * ``created_at``: creation time that the response shows, in seconds since the epoch; None: now.
    * ``preface_size``: number of bytes before the client's body; they are stored in ``preface_bytes``.
    * ``body_limit``: in bytes; None: as in the options.
    * ``limit_states``: returns the limits of the client's key that the answer reports; None: there are none.
    * ``limits_counted``: a coordinator has checked the client's key, and counts its limits and its usage.
    * ``counts_tokens``: the coordinator only asks how many tokens the request would reserve; the request does not run.
    * ``is_passed``: another process answers the request, and records it.
    """

    scope: Scope
    receive: Receive
    raw_send: Send
    options: HttpOptions
    dialect: Dialect
    field_names: Mapping[str, str] = field(default_factory=dict)
    log_entry: AccessLogEntry = field(default_factory=AccessLogEntry)
    extra_headers: HeaderList = ()
    tenant: Tenant = NO_TENANT
    stage: StageErrors | None = None
    created_at: int | None = None
    preface_size: int = 0
    preface_bytes: bytes = b""
    body_limit: int | None = None
    recorder: AnswerRecorder | None = None
    trace: RequestTrace | None = None  # where its spans go, if it is traced
    limit_states: Callable[[], KeyLimitStates] | None = None
    limits_counted: bool = False
    counts_tokens: bool = False
    is_admin_call: bool = False  # it may change the server
    audited_body: bytes = b""  # the beginning of the body of such a call
    status: int = 0  # 0: nothing was sent yet
    route_path: str = ""  # the template of the route's path, once it is known
    response_sent: bool = False
    is_passed: bool = False
    arrived_at: float = field(init=False)  # by `perf_counter`
    last_write_at: float = field(init=False, default=0.0)  # by `perf_counter`
    headers: dict[bytes, bytes] = field(init=False)
    request_uuid: str = field(init=False)
    request_id: str = field(init=False)
    kept_body: bytes | None = field(init=False, default=None)
    _peeked_body: bytes | None = field(init=False, default=None)
    _held_body: HeldBody | None = field(init=False, default=None)  # its share in the budget, while it is counted
    _writer: ResponseWriter = field(init=False)
    _reply: Reply | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.arrived_at = time.perf_counter()
        self.headers = dict(self.scope["headers"])
        self._writer = self.scope[CYCLE_KEY]
        self.set_request_uuid(draw_id().hex())

    def set_request_uuid(self, request_uuid: str) -> None:
        """Set the request's id, 32 hexadecimal digits. Ids in the response are derived from it."""
        client_id = self.headers.get(b"x-request-id", b"")
        self.request_uuid = request_uuid
        self.request_id = client_id.decode() if REQUEST_ID_PATTERN.fullmatch(client_id) else f"req_{request_uuid}"

    def redirect_response(self, writer: ResponseWriter) -> None:
        """Redirect the response from the request's own connection to another writer."""
        self._writer, self.raw_send = writer, writer.send_message

    def enable_event_chunks(self) -> None:
        """Send each event as a chunk of its own if the dialect's clients rely on that."""
        if self.dialect.chunk_per_event:
            self.scope[CHUNK_PER_EVENT] = True

    @property
    def response_begun(self) -> bool:
        """Whether the receiver of the response already has its beginning."""
        return self._writer.response_started

    @property
    def path_params(self) -> Mapping[str, str]:
        """The parameters in the path, by the names in the route."""
        result: Mapping[str, str] = self.scope.get("path_params", {})
        return result

    @property
    def client_host(self) -> str:
        """The IP address that the request came from; empty if it came over no network."""
        return str((self.scope.get("client") or ("", 0))[0])

    def client_timeout(self) -> float | None:
        """Return the client's timeout from the request header in seconds, None if there is none. Raises
        InvalidValue."""
        header = self.headers.get(TIMEOUT_HEADER)
        if header is None:
            return None
        if not SECONDS_PATTERN.fullmatch(header) or not float(header):
            requirement = "The header X-Request-Timeout must be a number of seconds above 0 and below 1000000000"
            raise InvalidValue(f"{requirement}, but is {excerpt(header.decode('latin-1'))}.", field="timeout")
        return float(header)

    async def read_body(self) -> bytes:
        """Return the whole decompressed body and drop it here. Raises the same errors as ``peek_body``."""
        body = await self.peek_body()
        self._peeked_body = None
        return body

    async def peek_body(self) -> bytes:
        """Return the whole decompressed body and keep it.

        Raises TooLarge, BodyTimedOut, Overloaded, BadRequest, ClientGone.
        """
        if self._peeked_body is None:
            self._peeked_body = await self._read_whole_body()
        return self._peeked_body

    def replace_body(self, body: bytes) -> None:
        """Replace the body that ``peek_body`` returned."""
        self._peeked_body = body

    def keep_body(self, body: bytes) -> None:
        """Keep the body that was read, in case the request has to be passed to another process."""
        self.kept_body = body

    def take_kept_body(self) -> bytes:
        """Return the body that was kept, and keep it no longer."""
        body, self.kept_body = self.kept_body, None
        assert body is not None
        return body

    def release_body(self) -> None:
        """Stop counting the body's memory: the request needs it no more. May be called twice."""
        if self._held_body is not None:
            self._held_body.release()
            self._held_body = None

    async def _read_whole_body(self) -> bytes:
        options = self.options
        limit = self.body_limit or options.body_limit
        limit = min(limit, self.dialect.body_limit or limit)
        if self.preface_size:
            limit += min(limit, self.preface_size)  # bounded, because any sender may announce a preface
        content_length = self.headers.get(b"content-length", b"")
        if content_length.isdigit() and int(content_length) > limit:
            size = int(content_length)
            raise TooLarge(f"The body has {size} bytes; {limit} are allowed.", size=size, limit=limit)
        coding = self.headers.get(b"content-encoding", b"")
        if self._writer.body_complete and not coding:  # the usual small body, too short-lived to be counted
            body, _ = await receive_part(self.receive)
            if len(body) > limit:
                raise too_large_error(limit)
        else:
            self._held_body = held_body = options.body_budget.hold_body()
            body = await held_body.receive(self.receive, limit, options.body_timeout, options.body_rate)
        if self.preface_size:
            self.preface_bytes, body = body[: self.preface_size], body[self.preface_size :]
        if coding:
            compressed_size = len(body)
            body = await to_thread_if_large(limit, partial(decompress_body, body, coding, limit))
            held_body.count_bytes(len(body) - compressed_size)
        if options.log_bodies:
            self.log_entry.request_body = body[:LOGGED_BODY_BYTES]
        if self.is_admin_call:
            self.audited_body = body[:MAX_AUDITED_BODY]
        return body

    async def to_thread_if_large(self, size: int, work: Callable[[], T]) -> T:
        """Call ``work`` and return its result; use a thread if its input, ``size`` bytes, is larger than OFFLOAD_SIZE.

        Work in a thread is abandoned as soon as the client disconnects (ClientGone).
        """
        return work() if size <= OFFLOAD_SIZE else await self.while_connected(to_thread_if_large(size, work))

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and cancel it as soon as the client disconnects. Raises ClientGone in that case."""
        task = asyncio.current_task()
        assert task is not None
        disconnected = False

        def on_disconnect() -> None:
            nonlocal disconnected
            if not disconnected and not self.response_sent:
                disconnected = True
                task.cancel()

        try:
            if not self._writer.watch_disconnect(on_disconnect):
                work.close()
                raise ClientGone
            return await work
        except asyncio.CancelledError:
            if disconnected and not task.uncancel():
                raise ClientGone from None
            raise
        finally:
            self._writer.unwatch_disconnect(on_disconnect)

    async def send_response(
        self, body: bytes, status: int = 200, content_type: bytes = JSON_MEDIA_TYPE, extra_headers: HeaderList = ()
    ) -> None:
        """Send a response in one piece; an empty ``content_type`` is left out."""
        type_header = [(b"content-type", content_type)] if content_type else []
        length_header = [(b"content-length", b"%d" % len(body))] if status != HTTPStatus.NOT_MODIFIED else []
        headers = [
            *type_header,
            *length_header,
            *self.dialect.whole_answer_headers,
            *extra_headers,
        ]
        await self._start_response(status, headers)
        await self._write_body(body, last=True)

    async def send_answer(self, answer: Answer, extra_headers: HeaderList = ()) -> None:
        """Send an answer that a dialect has rendered. The log line of a refusal has its text."""
        if answer.status >= 400 and not self.log_entry.error:
            self.log_entry.error = answer.body[:LOGGED_BODY_BYTES].decode("utf-8", "replace")
        await self.send_response(answer.body, answer.status, answer.content_type, extra_headers)

    async def write_stream(self, data: bytes, media_type: str, *, last: bool = False) -> None:
        """Send a part of a stream, after the headers if it is the first one; an empty media type is left out."""
        if not self.status:
            type_header = [(b"content-type", media_type.encode())] if media_type else []
            await self._start_response(
                200,
                [
                    *type_header,
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),
                    *self.extra_headers,
                ],
            )
        await self._write_body(data, last=last)

    async def pass_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Begin the response with status and headers of another process, and no others."""
        self.status = status
        self.enable_event_chunks()
        await self._send_or_disconnect({"type": "http.response.start", "status": status, "headers": headers})

    async def pass_part(self, data: bytes, *, last: bool = False) -> None:
        """Send a part of the body of another process."""
        await self._send_or_disconnect({"type": "http.response.body", "body": data, "more_body": not last})
        self.response_sent = last

    def write_part(self, data: bytes) -> bool:
        """Write a part that is not the first one, without a coroutine.

        Return True if another part may be written in this way, False if the client has not read the previous ones.
        """
        self.last_write_at = time.perf_counter()
        if self.options.log_bodies:
            self.log_entry.record_answer(data)
        if self.recorder is not None:
            self.recorder.add_piece(data)
        return self._writer.write_part(data)

    def coordinator_headers(self, error: ParleyError | None) -> HeaderList:
        """Return headers that report an error to a coordinator; ``None`` is a refusal in the dialect's own words."""
        return self.stage.coordinator_headers(error) if self.stage is not None else ()

    async def send_error(self, error: ParleyError, extra_headers: HeaderList = ()) -> None:
        """Send an error as the whole response."""
        error = self.translate_field(error)
        self.log_entry.record_error(error)
        error.request_uuid = self.request_uuid
        stage_answer = self.stage.coordinator_answer(error) if self.stage is not None else None
        reply_answer = self._reply.render_refusal(error) if self._reply is not None else None
        answer = stage_answer or reply_answer or self.dialect.render_error(error)
        headers = [*extra_headers, *self.coordinator_headers(error)]
        retry_after = getattr(error, "retry_after", None)
        if retry_after is not None and (self.dialect.retry_hints or isinstance(error, RateLimited)):
            headers += [
                (b"retry-after", b"%d" % max(1, math.ceil(retry_after))),
                (b"retry-after-ms", b"%d" % (retry_after * 1000)),
            ]
        if isinstance(error, UnknownCoding):
            headers.append((b"accept-encoding", b"gzip, deflate"))
        if answer.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await self.send_answer(answer, headers)

    def adopt_reply(self, reply: Reply) -> None:
        """Format errors with this reply from now on, because the body has been read."""
        self.field_names, self._reply = reply.field_names, reply

    def translate_field(self, error: ParleyError) -> ParleyError:
        """Replace the neutral field name in the error by the API's own, and return the error."""
        if isinstance(error, BadRequest) and error.field is not None:
            error.rename_field(self.field_names.get(error.field, error.field))
        return error

    def finish_recording(self) -> None:
        """Tell the recorder, if there is one, that the request has ended."""
        if self.recorder is not None:
            self.recorder.finish(self.status, time.perf_counter() - self.arrived_at)

    def begin_trace(self, exporter: SpanExporter) -> None:
        """Trace the request, as a part of the trace that its headers name, if any."""
        self.trace = RequestTrace(exporter, self.headers)

    def finish_trace(self) -> None:
        """Add the span of the whole request, unless it is not traced or was a probe."""
        if self.trace is not None and not self.log_entry.is_probe:
            end = HttpRequestEnd(
                time.perf_counter(),
                self.scope["method"],
                route=self.route_path,
                path=self.scope["path"],
                status=self.status,
                client=self.client_host,
                api=self.dialect.name,
                request_id=self.request_id,
                key=self.log_entry.key,
                error=self.log_entry.error,
            )
            self.trace.finish(partial(encode_http_span, self.trace, end))

    def abort_connection(self) -> None:
        """Close the connection at once and drop unsent data."""
        self._writer.abort_connection()

    def id_headers(self) -> HeaderList:
        """Return the response headers that carry the request's ids."""
        id_header = self.dialect.id_header
        own_id = [(id_header, self.dialect.id_prefix + self.request_uuid.encode())] if id_header else []
        return [(b"x-request-id", self.request_id.encode()), *own_id]

    async def _start_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.enable_event_chunks()
        headers += self.id_headers()
        headers += self.dialect.common_headers(time.perf_counter() - self.arrived_at)
        if self.limit_states is not None:
            headers += self.dialect.limit_headers(self.limit_states(), time.time())
        await self._send_or_disconnect({"type": "http.response.start", "status": status, "headers": headers})

    async def _write_body(self, data: bytes, *, last: bool) -> None:
        self.last_write_at = time.perf_counter()
        if self.options.log_bodies:
            self.log_entry.record_answer(data)
        if self.recorder is not None:
            self.recorder.add_piece(data)
        if self._writer.write_blocked:
            await self._send_or_disconnect({"type": "http.response.body", "body": data, "more_body": not last})
        else:
            self._writer.write_part(data, last=last)
        self.response_sent = last

    async def _send_or_disconnect(self, message: Message) -> None:
        """Send a message. A client that has not read anything for ``write_timeout`` seconds is disconnected."""
        if not self._writer.write_blocked:
            await self.raw_send(message)
            return
        watchdog = asyncio.get_running_loop().call_later(self.options.write_timeout, self.abort_connection)
        try:
            await self.raw_send(message)
        finally:
            watchdog.cancel()
