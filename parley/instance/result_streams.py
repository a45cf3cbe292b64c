"""Results on their way to coordinators: one connection per coordinator carries the frames of all its requests.

A coordinator without a name is MindIE's: it gets every frame once, and there is only one of them. For a coordinator
with a name, frames are numbered, kept for a while after sending, and sent again from the point where a connection
broke. ``ResultChannel`` belongs to a request and ``ResultConnection`` to a connection; ``ResultClient`` joins them and
outlives both. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from parley.disagg.wire import result_frames
from parley.disagg.wire.replay_buffer import REPLAY_SECONDS, ReplayBuffer
from parley.errors import InUse, excerpt
from parley.instance.result_channel import ResultChannel
from parley.instance.result_connection import ResultConnection, ResultSink

MAX_QUEUED_BYTES = 8 << 20  # bytes of unsent frames above which requests must wait


class ResultClient:
    """A coordinator: its requests, its connection if any, the queued frames, and the frames it may request again.
    ``native``: it has a name; frames are numbered within its ``epoch``."""

    def __init__(self, name: str, on_expired: Callable[[ResultClient], None]):
        self.name = name
        self.native = bool(name)
        self.coordinator_id = ""
        self.epoch = secrets.token_hex(8)
        self.queue_full = False
        self.channels: dict[str, ResultChannel] = {}
        self._on_expired = on_expired
        self._connection: ResultConnection | None = None
        self._replay_buffer = ReplayBuffer()
        self._queued_frames: list[bytes] = []
        self._queued_bytes = 0
        self._flush_scheduled = False
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._start_expiry()

    @property
    def is_connected(self) -> bool:
        """Whether the coordinator has a connection."""
        return self._connection is not None

    # -- requests

    def open_channel(self, request_id: str, recall_request: Callable[[], None] = lambda: None) -> ResultChannel:
        """Open a channel for a request. Raises InUse."""
        if request_id in self.channels:
            raise InUse(f"Another request is running under the id {excerpt(request_id)}.")
        channel = self.channels[request_id] = ResultChannel(self, request_id, recall_request)
        channel.update_writable()
        return channel

    def forget_channel(self, channel: ResultChannel) -> None:
        """Forget a channel; its id is free again."""
        if self.channels.get(channel.request_id) is channel:
            del self.channels[channel.request_id]

    def queue_frames(self, frames: list[bytes]) -> None:
        """Queue frames; all frames of one iteration of the event loop are sent together."""
        self._queued_frames += frames
        self._queued_bytes += sum(map(len, frames))
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_scheduled_flush)
        if self._queued_bytes > MAX_QUEUED_BYTES:
            self.queue_full = True

    # -- connections

    def attach_connection(
        self, sink: ResultSink, epoch: str = "", first_frame: int | None = None
    ) -> tuple[ResultConnection, bytes]:
        """Replace the coordinator's connection, and return the new one and the data to send over it first.

        ``first_frame``: the first frame in ``epoch`` that the coordinator lacks. If that frame is no longer kept, or
        the epoch is another one, a new epoch begins and the requests of the old one are lost.
        """
        if self._connection is not None:
            self._connection.end_connection(result_frames.CLOSE_FRAME)
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
            self._expiry_timer = None
        first = b""
        if self.native:
            replay = self._replay_buffer.frames_since(first_frame or 0) if epoch in ("", self.epoch) else None
            if replay is None:
                self._begin_epoch()
                replay = b""
            first = result_frames.encode_epoch_frame(self.epoch) + replay
        self._connection = ResultConnection(self, sink)
        return self._connection, first

    def detach_connection(self, connection: ResultConnection) -> None:
        """Forget a connection that has ended, and wait for the coordinator to reconnect."""
        if self._connection is connection:
            self._connection = None
            self._start_expiry()

    def flush_frames(self) -> None:
        """Send the queued frames if the connection accepts them."""
        connection = self._connection
        if not self._queued_frames or connection is None or not connection.can_send:
            return
        frames, size = self._queued_frames, self._queued_bytes
        self._queued_frames, self._queued_bytes = [], 0
        if self.native:
            self._replay_buffer.add_sent(frames, size)
        connection.send_frames(b"".join(frames))
        if self.queue_full:
            self.queue_full = False
            for channel in tuple(self.channels.values()):
                channel.update_writable()

    def drop_old_frames(self) -> None:
        """Drop sent frames that need not be kept any longer."""
        self._replay_buffer.drop_expired()

    def recall_requests(self) -> None:
        """Continue the client's requests on other instances, as far as possible."""
        for channel in list(self.channels.values()):
            channel.recall_request()

    def close_client(self) -> None:
        """End the client's connection and requests."""
        if self._connection is not None:
            self.flush_frames()
            self._connection.end_connection()
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
        self._expire_client()

    def lose_requests(self) -> None:
        """End the client's requests, because the coordinator is gone or has lost them."""
        channels, self.channels = list(self.channels.values()), {}
        for channel in channels:
            channel.lose_coordinator()

    def _run_scheduled_flush(self) -> None:
        self._flush_scheduled = False
        self.flush_frames()

    def _begin_epoch(self) -> None:
        """Begin a new epoch."""
        self.lose_requests()
        self.epoch, self._replay_buffer = secrets.token_hex(8), ReplayBuffer()
        self._queued_frames.clear()
        self._queued_bytes = 0
        self.queue_full = False

    def _start_expiry(self) -> None:
        """Start the time that the coordinator has to reconnect, which is as long as sent frames are kept."""
        self._expiry_timer = asyncio.get_running_loop().call_later(REPLAY_SECONDS, self._expire_client)

    def _expire_client(self) -> None:
        self.lose_requests()
        self._on_expired(self)


class ResultStreams:
    """All coordinators that get results from this instance."""

    def __init__(self) -> None:
        self.clients: dict[str, ResultClient] = {}

    def get_client(self, name: str = "") -> ResultClient:
        """Return the coordinator of this name, adding it if it is new."""
        if name not in self.clients:
            self.clients[name] = ResultClient(name, self._remove_client)
        return self.clients[name]

    def open_request_channel(
        self, coordinator_name: str, request_id: str, recall_request: Callable[[], None] = lambda: None
    ) -> ResultChannel:
        """Open the result channel of a request, which ``recall_request`` makes continue elsewhere. Raises InUse."""
        return self.get_client(coordinator_name).open_channel(request_id, recall_request)

    async def serve_results(
        self,
        coordinator_name: str,
        sink: ResultSink,
        epoch: str = "",
        first_frame: int | None = None,
        coordinator_id: str = "",
    ) -> None:
        """Make a connection the coordinator's current one, and send results over it until it is replaced or ends.

        ``first_frame``: see ``ResultClient.attach_connection``. ``coordinator_id``: the coordinator's id, the same
        after a restart. A coordinator that starts (and does not just reconnect) ends the requests of unconnected
        predecessors with its id.
        """
        client = self.get_client(coordinator_name)
        is_new_start = bool(coordinator_id) and not client.coordinator_id and not epoch
        connection, first = client.attach_connection(sink, epoch, first_frame)
        client.coordinator_id = coordinator_id
        for other in list(self.clients.values()) if is_new_start else ():
            if other.coordinator_id == coordinator_id and not other.is_connected:
                other.close_client()
        await connection.serve_connection(first)

    def set_results_paused(self, coordinator_name: str, request_id: str, paused: bool) -> bool:
        """Pause or resume the results of one request. False if the request is unknown."""
        client = self.clients.get(coordinator_name)
        channel = client.channels.get(request_id) if client is not None else None
        if channel is None:
            return False
        channel.set_paused(paused)
        return True

    def drop_held_results(self, request_id: str) -> bool:
        """Drop the held results of a request that has ended. False if there are none."""
        ended_channels = [
            found_channel
            for client in self.clients.values()
            if (found_channel := client.channels.get(request_id)) and found_channel.is_over
        ]
        for channel in ended_channels:
            channel.set_paused(False)
        return bool(ended_channels)

    def close_clients(self) -> None:
        """End all connections and all requests that still wait for one, as the server ends."""
        for client in list(self.clients.values()):
            client.close_client()

    def _remove_client(self, client: ResultClient) -> None:
        if self.clients.get(client.name) is client:
            del self.clients[client.name]
