"""Writers for answers whose client is connected to a coordinator. They have the interface of a connection's HTTP cycle.

``RemoteResponseWriter`` writes to a request's result channel. ``PrefillResponseWriter`` first answers the coordinator's
command over its own connection: that answer contains the bytes up to the handover, or the whole answer. Knows no
generations.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Message

from parley.dialects.instance_plane import OriginalRequest
from parley.dialects.mounts import INSTANCE_PLANE
from parley.dialects.reply import HeaderList
from parley.disagg.wire.handover import encode_record
from parley.disagg.wire.headers import PrefillCommand
from parley.disagg.wire.vouched_client import UsedTokens
from parley.errors import SERVER_ERROR
from parley.instance.result_channel import CoordinatorGone, ResultChannel
from parley.types import EngineRequest, OutputBatch
from parley.web.http_cycle import HttpCycle
from parley.web.request_body import ClientGone


class RemoteResponseWriter:
    """Writes an answer to a result channel.

    ``native``: results carry records; ``take_unrecorded`` returns the outputs rendered since the last call.
    ``is_silent``: discard everything. ``response_started``: the client has the beginning of this stream.
    ``used_tokens`` returns the request's usage, for a coordinator that counts it; else None.
    """

    body_complete = True

    def __init__(
        self,
        take_unrecorded: Callable[[], list[OutputBatch]],
        native: bool,
        used_tokens: Callable[[], UsedTokens | None],
    ):
        self.native = native
        self._used_tokens = used_tokens
        self.response_started = False
        self.is_silent = False
        self.channel: ResultChannel | None = None
        self._take_unrecorded = take_unrecorded
        self._watchers: set[Callable[[], None]] = set()
        self._client_gone = False
        self._head: tuple[int, list[tuple[str, str]]] | None = None  # status and headers of a complete answer

    @property
    def write_blocked(self) -> bool:
        """Whether the next write must wait."""
        return self.channel is not None and self.channel.must_wait

    def abort_connection(self) -> None:
        """End an answer that cannot be completed with an error."""
        if self.channel is not None and not self.is_silent:
            self.channel.write_error(SERVER_ERROR)
        self.cancel_response()

    def cancel_response(self) -> None:
        """Discard the rest of the answer, and tell the watchers that the client is gone."""
        self._client_gone = self.is_silent = True
        for on_disconnect in tuple(self._watchers):
            on_disconnect()

    def send_retry(self, path: str, origin: OriginalRequest, first_request: EngineRequest) -> None:
        """End the answer for MindIE's coordinator with a body that continues the request on another instance."""
        if self.channel is not None and not self.is_silent:
            self.channel.write_retry(
                INSTANCE_PLANE.write_resumed(path, origin, first_request.token_ids, first_request.seed)
            )
            self.is_silent = True

    def send_loss(self) -> None:
        """End the answer with an error. Parley's own coordinator resumes the request elsewhere from its records."""
        if self.channel is not None and not self.is_silent:
            self.channel.write_error(SERVER_ERROR)
            self.is_silent = True

    def watch_disconnect(self, on_disconnect: Callable[[], None]) -> bool:
        """Call ``on_disconnect`` once the client is gone. False if it already is."""
        self._watchers.add(on_disconnect)
        return not self._client_gone and (self.channel is None or self.channel.watch_coordinator(on_disconnect))

    def unwatch_disconnect(self, on_disconnect: Callable[[], None]) -> None:
        """Stop calling ``on_disconnect``."""
        self._watchers.discard(on_disconnect)
        if self.channel is not None:
            self.channel.unwatch_coordinator(on_disconnect)

    async def send_message(self, message: Message) -> None:
        """Send one ASGI message. Raises ClientGone."""
        if self.channel is not None:
            try:
                await self.channel.wait_until_writable()
            except CoordinatorGone:
                raise ClientGone from None
        if message["type"] == "http.response.start":
            self.start_response(message["status"], message["headers"])
        else:
            self.write_part(message.get("body", b""), last=not message.get("more_body", False))

    def start_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Keep status and headers until the first data."""
        if not self.response_started:
            self._head = status, [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]

    def write_part(self, data: bytes, *, last: bool = False) -> bool:
        """Send data, and return whether more can be sent at once."""
        if self.is_silent or self.channel is None:
            return not self.write_blocked
        encoded_record = b"" if last or not self.native else encode_record(self._take_unrecorded())
        used_tokens = self._used_tokens() if last else None
        return self.channel.write_result(
            data,
            last=last,
            record=encoded_record,
            head=None if self.response_started else self._head,
            used_tokens=b"" if used_tokens is None else msgspec.json.encode(used_tokens),
        )


class PrefillResponseWriter(RemoteResponseWriter):
    """Collects the first part of an answer for the answer to the coordinator's command.

    ``answer_command`` is called when the request continues on another instance or over the channel, or when the answer
    is complete before that. ``id_headers`` returns the headers that carry the request's ids. ``may_continue`` says
    whether the answer may continue over the channel from now on.
    """

    def __init__(
        self,
        http_cycle: HttpCycle,
        command: PrefillCommand,
        id_headers: Callable[[], HeaderList],
        take_unrecorded: Callable[[], list[OutputBatch]],
        may_continue: Callable[[], bool],
        used_tokens: Callable[[], UsedTokens | None],
    ):
        super().__init__(take_unrecorded, bool(command.coordinator_name), used_tokens)
        self.is_stream = False
        self.command_answered = False
        self._http_cycle = http_cycle
        self._command = command
        self._id_headers = id_headers
        self._may_continue = may_continue
        self._is_error = False  # the output is an error, not an answer
        self._collected_output: list[bytes] = []

    @property
    def body_complete(self) -> bool:  # type: ignore[override]
        """Whether the body of the coordinator's command has arrived completely."""
        return self._http_cycle.body_complete

    @property
    def write_blocked(self) -> bool:
        """Whether the next write must wait, on the command's connection until its answer, then on the channel."""
        return super().write_blocked if self.command_answered else self._http_cycle.write_blocked

    def abort_connection(self) -> None:
        """End an answer that cannot be completed; an unanswered command loses its connection."""
        if not self.command_answered:
            self._http_cycle.abort_connection()
        super().abort_connection()

    def send_retry(self, path: str, origin: OriginalRequest, first_request: EngineRequest) -> None:
        """End the answer with a retry if the command is answered; otherwise the answer to the command reports the
        retry.
        """
        if self.command_answered:
            super().send_retry(path, origin, first_request)

    def send_loss(self) -> None:
        """End the answer with an error, only if the command is answered."""
        if self.command_answered:
            super().send_loss()

    def watch_disconnect(self, on_disconnect: Callable[[], None]) -> bool:
        """Watch the command's connection; ``answer_command`` switches to the channel. False if the client is gone."""
        self._watchers.add(on_disconnect)
        return self._http_cycle.watch_disconnect(on_disconnect) and not self._client_gone

    def unwatch_disconnect(self, on_disconnect: Callable[[], None]) -> None:
        """Stop calling ``on_disconnect`` for the channel and for the command's connection."""
        super().unwatch_disconnect(on_disconnect)
        self._http_cycle.unwatch_disconnect(on_disconnect)

    async def send_message(self, message: Message) -> None:
        """Send one ASGI message. It waits for the channel only if the answer continues there. Raises ClientGone."""
        if self.command_answered and not self._is_error:
            await super().send_message(message)
        elif message["type"] == "http.response.start":
            self.start_response(message["status"], message["headers"])
        else:
            self.write_part(message.get("body", b""), last=not message.get("more_body", False))

    def start_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Answer the command at once with a status other than 200; otherwise keep status and headers until the data."""
        if not self.command_answered and status != 200:
            self.command_answered = self._is_error = True
            self._http_cycle.begin_response(status, headers)
        else:
            super().start_response(status, headers)

    def write_part(self, data: bytes, *, last: bool = False) -> bool:
        """Collect data for the answer to the command, later send it. Return whether more can be written at once."""
        if self._is_error:
            return self._http_cycle.write_part(data, last=last)
        if self.command_answered:
            return super().write_part(data, last=last)
        self._collected_output.append(data)
        if last or self._may_continue():
            self.answer_command(last=last)
        return not self.write_blocked

    def continue_if_ready(self) -> None:
        """Switch to the channel if a complete answer has grown enough."""
        if not self.command_answered and self._may_continue():
            self.answer_command()

    def answer_command(self, *, last: bool = False) -> None:
        """Answer the coordinator's command: the request has ended, or continues after it."""
        answer_body: dict[str, Any] = {
            "reqId": self._command.request_id,
            "isStream": self.is_stream,
            "isLastResp": last,
        }
        if self.is_stream or last:
            answer_body |= _output_members(b"".join(self._collected_output), self.native)
        if self.native:
            answer_body["records"] = b2a_base64(encode_record(self._take_unrecorded()), newline=False).decode()
            if self._head is not None:
                answer_body["status"], answer_body["headers"] = self._head
            if (used_tokens := self._used_tokens()) is not None:
                answer_body["usedTokens"] = used_tokens
        self._collected_output.clear()
        self.command_answered = True
        self.response_started = self.is_stream
        data = msgspec.json.encode(answer_body)
        content_headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        self._http_cycle.begin_response(200, [*content_headers, *self._id_headers()])
        self._http_cycle.write_part(data, last=True)
        for on_disconnect in self._watchers:
            self._http_cycle.unwatch_disconnect(on_disconnect)
            if self.channel is not None and not self.channel.watch_coordinator(on_disconnect):
                on_disconnect()


def _output_members(output: bytes, native: bool) -> dict[str, str]:
    try:
        return {"output": output.decode()}
    except UnicodeDecodeError:
        if native:
            return {"output": b2a_base64(output, newline=False).decode(), "encoding": "base64"}
        return {"output": output.decode("utf-8", "replace")}
