"""The client's side of a request: its body in, and out to it an answer that was made elsewhere. Knows no instance."""

from __future__ import annotations

from parley.instance.handover import CONNECTION
from parley.instance.heads import LOST, ORDERS, OWN, SHORT
from parley.server.cycle import CYCLE, Cycle
from parley.server.respond import Exchange

# Of one connection, not of the request; or said anew for the next one.
HOP = CONNECTION | {b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"host", b"origin"}
HELD = HOP | ORDERS
BACK = (HOP - {b"content-encoding"}) | {b"date", b"server", LOST, SHORT}  # of an answer


class Caller(Exchange):
    """One client's request."""

    @property
    def cycle(self) -> Cycle:
        return self.scope[CYCLE]

    @property
    def target(self) -> bytes:
        """Path and query as the client wrote them."""
        path, query = self.scope["raw_path"], self.scope["query_string"]
        return path + b"?" + query if query else path

    def forwarded(self) -> list[tuple[bytes, bytes]]:
        """The headers that go on to an instance."""
        dropped = HELD
        if named := self.headers.get(b"connection"):
            dropped = dropped | {name.strip().lower() for name in named.split(b",")}
        return [
            header for header in self.scope["headers"] if header[0] not in dropped and not header[0].startswith(OWN)
        ]

    @property
    def label(self) -> bytes:
        """The name that the client has for its request, as clients of MindIE may."""
        return self.headers.get(b"req-id", b"")

    def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """The head of an answer; it is written with the first part."""
        self.status = status
        self.separate()
        if self.options.cors:
            headers = [*headers, *self._shared()]
        self.cycle.begin(status, headers)

    def _shared(self) -> list[tuple[bytes, bytes]]:
        """What tells a browser that a page of another origin may read the answer, if it may."""
        origin, origins = self.headers.get(b"origin", b""), self.options.cors
        if not origin or ("*" not in origins and origin.decode("latin-1") not in origins):
            return []
        shared = [(b"access-control-expose-headers", b"X-Request-Id")]
        if "*" in origins and b"cookie" not in self.headers:
            return [(b"access-control-allow-origin", b"*"), *shared]
        return [(b"access-control-allow-origin", origin), (b"vary", b"Origin"), *shared]

    def finish(self, data: bytes = b"") -> None:
        """The last part."""
        self.cycle.part(data, last=True)
        self.complete = True

    def whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """An answer in one piece."""
        self.begin(status, [*returned(headers), (b"content-length", b"%d" % len(body))])
        self.finish(body)


def returned(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of an instance's answer that go on to the client."""
    return [header for header in headers if header[0] not in BACK]
