"""The client side of a request: reads its body, and writes an answer computed elsewhere. Knows no instance."""

from __future__ import annotations

import re
import time
from typing import Protocol

from parley.dialects.records import InlinedRequest
from parley.dialects.reply import HeaderList
from parley.disagg.wire.handover import CONNECTION_HEADERS
from parley.disagg.wire.headers import (
    COMMAND_HEADERS,
    LOST_HEADER,
    NATIVE_PREFIX,
    RECORDS_HEADER,
    REFUSED_HEADER,
    SHORT_HEADER,
)
from parley.disagg.wire.vouched_client import USED_HEADER, UsedTokens
from parley.serving.keys.accounts import RequestAccount
from parley.tracing.trace_context import TRACE_HEADERS
from parley.web.exchange import Exchange
from parley.web.http_cycle import CYCLE_KEY, HttpCycle
from parley.web.logs import MAX_LOGGED_ERROR

# Headers of one connection rather than of the request, or set anew for the next connection.
HOP_HEADERS = CONNECTION_HEADERS | {
    b"proxy-connection",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"host",
    b"origin",
}
NOT_FORWARDED = HOP_HEADERS | COMMAND_HEADERS
# Headers of an answer that are not passed on.
NOT_RETURNED = (HOP_HEADERS - {b"content-encoding"}) | {
    b"date",
    b"server",
    LOST_HEADER,
    REFUSED_HEADER,
    SHORT_HEADER,
    USED_HEADER,
}


class AnswerSizes(Protocol):
    """Estimates token usage from the parts of an answer, for servers that do not report it."""

    def add_bytes(self, data: bytes) -> None:
        """Note a part of the answer."""

    def used_tokens(self) -> UsedTokens | None:
        """Return the token usage; None without an answer."""


class DownstreamClient(Exchange):
    """The request of one client.

    * ``records_inlined``: its body for instances contains the records that it refers to.
    * ``watcher``: sees the parts of the answer.
    * ``vouched_headers``: headers that tell a parley instance that the key was checked here.
    * ``account``: charged for its tokens; None if they are not counted, or have been charged.
    * ``reserved_prompt_tokens``: tokens of its prompts, if an instance was asked.
    * ``used_tokens``: the usage that the answer to a forwarded request reports; ``meter`` estimates it from the parts
      of an answer without such a report.
    """

    records_inlined = False
    watcher: InlinedRequest | None = None
    vouched_headers: HeaderList = ()
    account: RequestAccount | None = None
    reserved_prompt_tokens = 0
    used_tokens: UsedTokens | None = None
    meter: AnswerSizes | None = None

    async def read_body(self) -> bytes:
        """Return the whole decompressed body. From here on it counts as a body of an open request."""
        body = await super().read_body()
        self.release_body()
        return body

    @property
    def http_cycle(self) -> HttpCycle:
        """The HTTP connection's request-response cycle."""
        result: HttpCycle = self.scope[CYCLE_KEY]
        return result

    @property
    def request_target(self) -> bytes:
        """Path and query string exactly as the client sent them."""
        path, query = self.scope["raw_path"], self.scope["query_string"]
        result: bytes = path + b"?" + query if query else path
        return result

    def forwarded_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the client's headers that are forwarded to an instance."""
        excluded = NOT_FORWARDED
        if connection_options := self.headers.get(b"connection"):
            excluded = excluded | {name.strip().lower() for name in connection_options.split(b",")}
        own_headers = [(RECORDS_HEADER, b"inlined")] if self.records_inlined else []
        if self.trace is not None:
            excluded = excluded | TRACE_HEADERS
            own_headers += self.trace.context.headers()
        return own_headers + [
            header
            for header in self.scope["headers"]
            if header[0] not in excluded and not header[0].startswith(NATIVE_PREFIX)
        ]

    @property
    def client_request_id(self) -> bytes:
        """The request id that the client chose, as clients of MindIE may; empty if none."""
        return self.headers.get(b"req-id", b"")

    def begin_answer(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Set the head of the answer; it is written together with the first part."""
        self.status = status
        self.enable_event_chunks()
        if b"origin" in self.headers:
            headers = [*headers, *self._cors_headers()]
        if self.limit_states is not None:
            headers = [*headers, *self.dialect.limit_headers(self.limit_states(), time.time())]
        self.http_cycle.begin_response(status, headers)

    def _cors_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the CORS headers that let a browser page of another origin read the answer, if its origin may."""
        origin, origins = self.headers[b"origin"], self.options.cors
        text = origin.decode("latin-1")
        if "*" not in origins and text not in origins and not re.fullmatch(self.dialect.web_origins, text):
            return []
        cors_headers = [(b"access-control-expose-headers", b"X-Request-Id")]
        if "*" in origins and b"cookie" not in self.headers:
            return [(b"access-control-allow-origin", b"*"), *cors_headers]
        return [(b"access-control-allow-origin", origin), (b"vary", b"Origin"), *cors_headers]

    def forwarded_use(self) -> UsedTokens | None:
        """Return the request's token usage as far as the answer reports it; None if it was refused or reports none."""
        if self.used_tokens is None and self.meter is not None and self.status < 400:
            return self.meter.used_tokens()
        return self.used_tokens

    def finish_answer(self, data: bytes = b"") -> None:
        """Write the last part of the answer."""
        self.http_cycle.write_part(data, last=True)
        self.response_sent = True

    def note_refusal(self, status: int, body: bytes) -> None:
        """Note an instance's refusal for the log. ``body``: the body of its answer, or the beginning of it."""
        if status >= 400 and not self.log_entry.error:
            self.log_entry.error = body[:MAX_LOGGED_ERROR].decode("utf-8", "replace")

    def send_complete(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Write an answer in one piece."""
        self.note_refusal(status, body)
        if self.watcher is not None and status == 200:
            body = self.watcher.watch_body(body)
        self.begin_answer(status, [*returned_headers(headers), (b"content-length", b"%d" % len(body))])
        self.finish_answer(body)


def returned_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of an instance's answer that are passed on to the client."""
    return [header for header in headers if header[0] not in NOT_RETURNED]
