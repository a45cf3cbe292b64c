"""Limits of a gRPC port: its connections, and the calls that keep a connection open without doing anything."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from parley.dialects.triton.rpc.status import GrpcError, grpc_status
from parley.web.http_options import HttpOptions


def grpc_server_options(options: HttpOptions, concurrent_streams: int) -> list[tuple[str, int]]:
    """Return gRPC's options of a port. ``concurrent_streams``: calls at a time on each connection."""
    return [
        ("grpc.so_reuseport", 0),  # otherwise two servers would silently share a port
        ("grpc.max_receive_message_length", options.body_limit),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", concurrent_streams),
        ("grpc.max_allowed_incoming_connections", options.grpc_connections),
        ("grpc.max_connection_idle_ms", int(options.keep_alive * 1000)),
        ("grpc.server_handshake_timeout_ms", int(options.header_timeout * 1000)),
        ("grpc.keepalive_time_ms", 60_000),  # detects clients whose network is gone
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]


class IdleCall:
    """An open call that may be idle. ``replaced``: it was ended in favour of another one."""

    def __init__(self, calls: IdleCallLimit, task: asyncio.Task[object]):
        self._calls, self.task, self.replaced = calls, task, False
        self._work: set[asyncio.Task[None]] = set()

    def mark_busy_until_done(self, work: asyncio.Task[None]) -> None:
        """Keep the call from being ended while this task runs."""
        self._work.add(work)
        self._calls.remove_call(self)
        work.add_done_callback(self._on_work_done)

    def _on_work_done(self, work: asyncio.Task[None]) -> None:
        self._work.discard(work)
        if not self._work and not self.task.done():
            self._calls.add_call(self)


class IdleCallLimit:
    """The idle calls of a port: health watches, and streams without a request.

    gRPC closes idle connections, but one with an open call never is idle. So at most ``limit`` calls may be idle; for
    one more, the call that has been idle the longest is ended.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._calls: dict[IdleCall, None] = {}

    def add_call(self, call: IdleCall) -> None:
        """Register an idle call."""
        self._calls[call] = None
        if len(self._calls) > self._limit:
            oldest = next(iter(self._calls))
            self.remove_call(oldest)
            oldest.replaced = True
            oldest.task.cancel()

    def remove_call(self, call: IdleCall) -> None:
        """Unregister a call that is idle no more."""
        self._calls.pop(call, None)

    @contextmanager
    def hold_call(self) -> Iterator[IdleCall]:
        """Register the current task's call as idle for this block. Raises GrpcError if it is ended."""
        task = asyncio.current_task()
        assert task is not None
        call = IdleCall(self, task)
        self.add_call(call)
        try:
            yield call
        except asyncio.CancelledError:
            if not call.replaced:
                raise
            task.uncancel()
            raise GrpcError(grpc_status(503), "The call was idle, and others need its connection.") from None
        finally:
            self.remove_call(call)
