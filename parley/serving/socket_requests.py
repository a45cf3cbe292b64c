"""A WebSocket whose messages are requests: each is answered by the same application as any request of the port.

So keys, limits, logs, metrics and errors of a request are those of one that came over HTTP. Its key is checked again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from typing import Any

from parley.dialects.socket_session import LaneEnd, SocketAnswer, SocketRequest, SocketSession
from parley.errors import SERVER_ERROR, BodyTimedOut, Overloaded, ParleyError, ServerStopping, TooLarge
from parley.serving.inherited_headers import inherited_headers
from parley.web.exchange import Exchange
from parley.web.offload import to_thread_if_large
from parley.web.request_body import ClientGone, HeldBody
from parley.web.websocket.handshake import key_in_protocols
from parley.web.websocket.message_cycle import MessageCycle
from parley.web.websocket.protocol import (
    GOING_AWAY,
    INTERNAL_ERROR,
    NORMAL,
    POLICY,
    SHUTTING_DOWN,
    TOO_BIG,
    TRY_AGAIN,
    WebSocketProtocol,
)

log = logging.getLogger("parley.server")


ENVELOPE_BYTES = 4096  # bytes that a message may have in addition to the body in it
MAX_READING = 4  # times the limit of a body that the messages of a connection may take until their requests run


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request with the memory of its message."""

    request: SocketRequest
    held: HeldBody


class SocketConversation:
    """The requests of one connection. ``exchange``: of its handshake, whose headers they have as well."""

    def __init__(self, websocket: WebSocketProtocol, session: SocketSession, exchange: Exchange):
        self._websocket, self._session = websocket, session
        self._options = exchange.options
        self._body_limit = min(exchange.body_limit or self._options.body_limit, exchange.dialect.body_limit or 1 << 62)
        headers = inherited_headers(exchange.scope["headers"])
        if protocol_key := key_in_protocols(exchange.headers):
            headers.append((b"x-api-key", protocol_key))
        self._scope = {**exchange.scope, "method": "POST", "headers": headers}
        self._waiting: dict[str, deque[WaitingRequest]] = {}  # the waiting requests of each lane that has any
        self._waiting_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._cycles: dict[str, MessageCycle] = {}  # the request of each lane that runs
        self._lane_ends: Counter[str] = Counter()  # how often the requests of each lane were ended
        self._has_expired = False

    async def run(self) -> None:
        """Answer requests until the connection ends; then end those that run."""
        expiry = asyncio.get_running_loop().call_later(self._session.max_seconds, self._expire)
        code, reason = GOING_AWAY, SHUTTING_DOWN
        try:
            self._send_messages(self._session.opening_messages())
            while await self._wait_for_message():
                await self._take_message()
                await asyncio.sleep(0)  # messages that have come already must not keep others waiting
        except ClientGone:
            pass
        except TooLarge as error:
            code, reason = TOO_BIG, error.message
        except BodyTimedOut as error:
            code, reason = POLICY, error.message
        except Overloaded as error:
            code, reason = TRY_AGAIN, error.message
        except Exception:
            log.exception("A message on a WebSocket could not be read.")
            code, reason = INTERNAL_ERROR, SERVER_ERROR
        finally:
            expiry.cancel()
            self._websocket.close(code, reason)
            await self._end_requests()

    async def _wait_for_message(self) -> bool:
        """Wait until a message has begun to arrive. Return False at the end. Raises BodyTimedOut if none comes for
        long."""
        while True:
            try:
                async with asyncio.timeout(self._session.max_idle):
                    return await self._websocket.wait_for_message()
            except TimeoutError:
                if not self._waiting:
                    raise BodyTimedOut(f"No message came for {self._session.max_idle:g} seconds.") from None

    def _send_messages(self, messages: list[bytes]) -> None:
        for message in messages:
            self._websocket.send_text(message)

    async def _take_message(self) -> None:
        """Read a message, and answer its request or refuse it. Raises TooLarge, BodyTimedOut, Overloaded,
        ClientGone."""
        options, held = self._options, self._options.body_budget.hold_body()
        try:
            limit = self._body_limit + ENVELOPE_BYTES
            receive = self._websocket.receive_part
            data = await held.receive(receive, limit, options.body_timeout, options.body_rate)
            result = await to_thread_if_large(len(data), partial(self._session.read_message, data))
            if isinstance(result, SocketRequest):
                self._send_messages(self._session.acknowledge(result))
                refusal = self._refuse_request(result, held)
                if refusal is None:
                    self._add_request(WaitingRequest(result, held))
                    return
                self._websocket.send_text(refusal)
            elif isinstance(result, LaneEnd):
                self._end_lane(result)
            else:
                self._send_messages(result)
            await self._websocket.drain()  # it may repeat much of the message, whose memory is counted until then
        except BaseException:
            held.release()
            raise
        held.release()

    def _refuse_request(self, request: SocketRequest, held: HeldBody) -> bytes | None:
        """Return the message that refuses a request which does not fit on the connection; None if it does."""
        if (refusal := self._refuse_late(request)) is not None:
            return refusal
        session, waiting = self._session, self._waiting.get(request.lane)
        if waiting is None:
            lane_count = sum(bool(lane) for lane in self._waiting)
            return session.refuse_lane(request) if request.lane and lane_count >= session.max_lanes else None
        if len(waiting) >= session.max_waiting:
            message = f"At most {session.max_waiting} requests may wait for the one that is being answered."
        elif self._waiting_bytes + held.size > MAX_READING * self._body_limit:
            message = "The requests that wait on this connection are too large together."
        else:
            return None
        return session.refuse_request(request, Overloaded(message))

    def _refuse_late(self, request: SocketRequest) -> bytes | None:
        """Return the message that refuses a request because the connection ends once those that run are answered."""
        if self._has_expired:
            return self._session.render_expiry(request.lane)
        if self._websocket.is_leaving:
            return self._session.refuse_request(request, ServerStopping(SHUTTING_DOWN))
        return None

    def _add_request(self, waiting: WaitingRequest) -> None:
        """Answer a request now, or after those before it in its lane."""
        self._waiting_bytes += waiting.held.size
        lane = waiting.request.lane
        if lane in self._waiting:
            self._waiting[lane].append(waiting)
            return
        self._waiting[lane] = deque([waiting])
        self._websocket.mark_busy()
        task = asyncio.get_running_loop().create_task(self._answer_lane(lane))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_lane(self, lane: str) -> None:
        """Answer the requests of a lane, until there are none."""
        waiting = self._waiting[lane]
        try:
            while waiting and not self._websocket.is_closing():
                request = waiting.popleft()
                if (refusal := self._refuse_late(request.request)) is None:
                    await self._answer_request(request)
                else:
                    self._release_memory(request.held)
                    self._websocket.send_text(refusal)
        except Exception:
            log.exception("A request on a WebSocket failed.")
            self._websocket.close(INTERNAL_ERROR, SERVER_ERROR)
        finally:
            for waiting_task in waiting:
                self._release_memory(waiting_task.held)
            del self._waiting[lane]
            if not self._waiting:
                self._websocket.mark_idle()
                if self._has_expired:
                    self._end_expired()

    async def _answer_request(self, waiting: WaitingRequest) -> None:
        """Answer a request. Nothing is raised but cancellation: the application answers its own errors."""
        release = partial(self._release_memory, waiting.held)
        lane, ends = waiting.request.lane, self._lane_ends[waiting.request.lane]
        try:
            size = waiting.held.size + self._session.count_earlier_bytes(waiting.request)
            try:
                answer = await to_thread_if_large(size, partial(self._session.start_request, waiting.request))
            except ParleyError as error:
                if self._lane_ends[lane] == ends:
                    self._websocket.send_text(self._session.refuse_request(waiting.request, error))
                return
            if self._lane_ends[lane] != ends:
                return
            scope = self._request_scope(answer)
            cycle = self._cycles[lane] = MessageCycle(scope, self._websocket, answer.body, answer, release)
            answer.body = b""  # it may be large, and the application drops it once it is read
            try:
                await cycle.run_app(self._websocket.app)
            finally:
                del self._cycles[lane]
        finally:
            release()

    def _request_scope(self, answer: SocketAnswer) -> dict[str, Any]:
        """Return the scope of a request: that of the connection, with the request's own headers and path."""
        own_headers = (*answer.headers, (b"content-length", b"%d" % len(answer.body)))
        own_names = {name for name, _ in own_headers}
        inherited = [header for header in self._scope["headers"] if header[0] not in own_names]
        scope = {**self._scope, "headers": [*inherited, *own_headers]}
        if answer.sibling:
            path = f"{self._scope['path'].rpartition('/')[0]}/{answer.sibling}"
            scope |= {"path": path, "raw_path": path.encode(), "query_string": b""}
        return scope

    def _end_lane(self, end: LaneEnd) -> None:
        """End the requests of a lane, as if their client had left."""
        for waiting in self._waiting.get(end.lane, ()):
            self._release_memory(waiting.held)
        if end.lane in self._waiting:
            self._waiting[end.lane].clear()
        self._lane_ends[end.lane] += 1
        if (cycle := self._cycles.get(end.lane)) is not None:
            cycle.disconnect()
        self._send_messages(list(end.messages))

    def _release_memory(self, held: HeldBody) -> None:
        """Stop counting the memory of a message. May be called twice."""
        self._waiting_bytes -= held.size
        held.release()

    def _expire(self) -> None:
        """End the connection, which has lasted for long enough, once no request runs."""
        self._has_expired = True
        if not self._waiting:
            self._end_expired()

    def _end_expired(self) -> None:
        self._websocket.send_text(self._session.render_expiry(""))
        self._websocket.close(NORMAL)

    async def _end_requests(self) -> None:
        """End the requests that run, as if their clients had left."""
        try:
            for cycle in tuple(self._cycles.values()):
                cycle.disconnect()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            for task in self._tasks:
                task.cancel()
