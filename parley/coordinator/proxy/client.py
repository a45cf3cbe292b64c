"""The client side of a request: reads its body, and writes an answer computed elsewhere. Knows no instance."""

from __future__ import annotations

from parley.disagg.wire.handover import CONNECTION
from parley.disagg.wire.headers import LOST, ORDERS, OWN, SHORT
from parley.web.connection import CYCLE, Cycle
from parley.web.exchange import Exchange

# Headers of one connection rather than of the request, or set anew for the next connection.
HOP = CONNECTION | {b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"host", b"origin"}
HELD = HOP | ORDERS
BACK = (HOP - {b"content-encoding"}) | {b"date", b"server", LOST, SHORT}  # headers of an answer that are not passed on


class Caller(Exchange):
    """The request of one client."""

    @property
    def cycle(self) -> Cycle:
        """The HTTP connection's request-response cycle."""
        return self.scope[CYCLE]

    @property
    def target(self) -> bytes:
        """Path and query string exactly as the client sent them."""
        path, query = self.scope["raw_path"], self.scope["query_string"]
        return path + b"?" + query if query else path

    def forwarded(self) -> list[tuple[bytes, bytes]]:
        """Return the client's headers that are forwarded to an instance."""
        dropped = HELD
        if named := self.headers.get(b"connection"):
            dropped = dropped | {name.strip().lower() for name in named.split(b",")}
        return [
            header for header in self.scope["headers"] if header[0] not in dropped and not header[0].startswith(OWN)
        ]

    @property
    def label(self) -> bytes:
        """The request id that the client chose, as clients of MindIE may; empty if none."""
        return self.headers.get(b"req-id", b"")

    def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Set the head of the answer; it is written together with the first part."""
        self.status = status
        self.separate()
        if self.options.cors:
            headers = [*headers, *self._shared()]
        self.cycle.begin(status, headers)

    def _shared(self) -> list[tuple[bytes, bytes]]:
        """Return the CORS headers that let a browser page of another origin read the answer, if its origin may."""
        origin, origins = self.headers.get(b"origin", b""), self.options.cors
        if not origin or ("*" not in origins and origin.decode("latin-1") not in origins):
            return []
        shared = [(b"access-control-expose-headers", b"X-Request-Id")]
        if "*" in origins and b"cookie" not in self.headers:
            return [(b"access-control-allow-origin", b"*"), *shared]
        return [(b"access-control-allow-origin", origin), (b"vary", b"Origin"), *shared]

    def finish(self, data: bytes = b"") -> None:
        """Write the last part of the answer."""
        self.cycle.part(data, last=True)
        self.complete = True

    def whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Write an answer in one piece."""
        self.begin(status, [*returned(headers), (b"content-length", b"%d" % len(body))])
        self.finish(body)


def returned(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of an instance's answer that are passed on to the client."""
    return [header for header in headers if header[0] not in BACK]
