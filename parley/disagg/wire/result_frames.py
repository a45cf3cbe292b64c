"""The frames in which results travel from an instance to a coordinator, written and read. Pure: bytes in, bytes out.

A frame is ``reqId:{id}`` and ``{keyword}:{payload}``, each with a NUL behind it; ``ka:`` and ``epoch:`` stand alone.
Nothing is escaped, so in the *plain* form a payload can have a NUL at its end only, which a second one follows. A
stream that begins with ``epoch:`` is *exact*: payloads with NULs are in base64, the first NUL ends a frame, and there
are keywords of its own. Knows no sockets, and not what a payload means.
"""

from __future__ import annotations

import binascii
from typing import Literal

import msgspec

Kind = Literal["data", "lastData", "error", "retry", "head", "close", "ka", "epoch"]

MOST = 16 << 20  # bytes of a payload; what is larger goes in several frames
LIMIT = 8 * MOST  # of a frame that is read
HEARTBEAT = b"ka:heartbeat\0"
CLOSE = b"reqId:0xffffffffffffffff\0close:new connection is to established, close the old one.\0"

KINDS: dict[bytes, Kind] = {
    b"data": "data",
    b"lastData": "lastData",
    b"error": "error",
    b"retry": "retry",
    b"head": "head",
}
CODED: dict[bytes, Kind] = {b"data64": "data", b"lastData64": "lastData"}
OPENING = b"reqId:"


class BadFrame(Exception):
    """What was read is no frame: too large, no base64 where there should be, or a record of nothing."""


class Frame(msgspec.Struct, gc=False):
    """``id``: of the request; empty where the frame is of none. ``payload`` is decoded.

    data, lastData: what the client gets; the ``record`` of what stands behind it stays in base64, for it is seldom
    wanted. error: a sentence. retry: the body of a new request. head: status and headers of an answer in one piece, as
    JSON. close, ka: none. epoch: its name.
    """

    id: bytes
    kind: Kind
    payload: bytes = b""
    record: bytes | None = None


# -- writing


def results(id: str, payload: bytes, *, last: bool = False, exact: bool = False) -> list[bytes]:
    """The frames of a result, one or more. An empty one that is not the last makes none, unless ``exact``."""
    head, coding = b"reqId:%b\0" % id.encode(), b""
    pieces = _cut(payload) if exact else _parts(payload)
    if exact and b"\0" in payload:
        pieces, coding = [binascii.b2a_base64(piece, newline=False) for piece in pieces], b"64"
    if not pieces and (last or exact):
        pieces = [b""]
    made = [b"%bdata%b:%b\0" % (head, coding, piece) for piece in pieces]
    if last:
        made[-1] = b"%blastData%b:%b\0" % (head, coding, pieces[-1])
    return made


def record(id: str, data: bytes) -> bytes:
    """What stands behind the data that follows at once: only in the exact form."""
    return b"reqId:%b\0record:%b\0" % (id.encode(), binascii.b2a_base64(data, newline=False))


def head(id: str, status: int, headers: list[tuple[str, str]]) -> bytes:
    """How an answer in one piece begins, before its data: only in the exact form."""
    return b"reqId:%b\0head:%b\0" % (id.encode(), msgspec.json.encode({"status": status, "headers": headers}))


def error(id: str, text: str) -> bytes:
    """The end of a request by an error."""
    return b"reqId:%b\0error:%b\0" % (id.encode(), text.replace("\0", " ").encode())


def retry(id: str, body: bytes) -> bytes:
    """The end of a request here, and the body (JSON) with which it goes on elsewhere."""
    return b"reqId:%b\0retry:%b\0" % (id.encode(), body)


def epoch(name: str) -> bytes:
    """The beginning of an exact stream: what its frames are counted in."""
    return b"epoch:%b\0" % name.encode()


def _parts(payload: bytes) -> list[bytes]:
    """A payload in pieces that have a NUL at their end or none."""
    if b"\0" not in payload:
        return _cut(payload)
    *ended, rest = payload.split(b"\0")
    pieces = [piece for part in ended for piece in _cut(part + b"\0")]
    return pieces + _cut(rest)


def _cut(payload: bytes) -> list[bytes]:
    if 0 < len(payload) <= MOST:  # as always
        return [payload]
    return [payload[begin : begin + MOST] for begin in range(0, len(payload), MOST)]


# -- reading


class Reader:
    """Frames from bytes as they come; however these are cut, the frames are the same.

    ``number``: how many frames of requests have been read, also unknown ones; those that are counted in an epoch. A
    record counts as soon as its data has come.
    ``strange``: how many pieces were no frames, or unknown ones, and were passed over.
    ``held``: a frame is there of which only what follows tells whether it has ended. Where nothing follows for some
    milliseconds, it has: ``flush``. An exact stream never holds one.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.number = 0
        self.strange = 0
        self.exact = False
        self._limit = limit
        self._rest: list[bytes] = []  # of a piece that has not ended
        self._size = 0
        self._opening = b""  # the first half of a frame that has begun, which names its request
        self._record: bytes | None = None  # whose data has not come
        self._behind = b""  # its opening
        self._held: Frame | None = None

    @property
    def held(self) -> bool:
        return self._held is not None

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that these bytes complete. Raises BadFrame, after which nothing more can be read."""
        if not data:
            return []
        if b"\0" not in data:
            self._keep(data)
            return self.flush()
        if self._rest:
            self._rest.append(data)
            data = b"".join(self._rest)
        pieces = data.split(b"\0")
        rest = pieces.pop()
        self._rest, self._size = [], 0
        if rest:
            self._keep(rest)
        return self._frames(pieces, more=bool(rest))

    def flush(self) -> list[Frame]:
        """The frame that was held, for nothing has followed it."""
        frames = [] if self._held is None else [self._held]
        self._held = None
        return frames

    def _keep(self, data: bytes) -> None:
        self._rest.append(data)
        self._size += len(data)
        if self._size > self._limit:
            raise BadFrame(f"A frame is larger than {self._limit} bytes.")

    def _frames(self, pieces: list[bytes], more: bool) -> list[Frame]:
        frames = self.flush()
        last = frames[0] if frames else None  # the one before, if a NUL that follows would be a part of it
        opening, record, number = self._opening, self._record, self.number
        for piece in pieces:
            if not piece:
                if last is not None:
                    last.payload += b"\0"
                    last = None
                continue
            last = None
            if not opening:
                if piece[:6] == OPENING:
                    opening = piece
                else:
                    self._alone(piece, frames)
                continue
            keyword, _, payload = piece.partition(b":")
            if keyword == b"record" and record is None:
                record, self._behind, opening = payload, opening, b""
                continue
            kind = KINDS.get(keyword)
            if kind is None:
                if piece[:6] == OPENING:
                    self.strange += 1
                    opening = piece
                    continue
                if keyword == b"close":
                    frames.append(Frame(b"", "close", payload))
                    opening = b""
                    continue
                if keyword in CODED:
                    kind, payload = CODED[keyword], _decoded(payload)
            number += 1
            if record is not None:
                if opening != self._behind or kind not in ("data", "lastData"):
                    raise BadFrame("A record stands before something else than its data.")
                number += 1
            if kind is None:
                self.strange += 1
            else:
                frames.append(Frame(opening[6:], kind, payload, record))
                # Events of a stream end in a line break; only what does not may have a NUL of its own.
                if not self.exact and keyword in (b"data", b"lastData") and payload[-1:] != b"\n":
                    last = frames[-1]
            opening, record = b"", None
        self._opening, self._record, self.number = opening, record, number
        if last is not None and not more:
            self._held = frames.pop()
        return frames

    def _alone(self, piece: bytes, frames: list[Frame]) -> None:
        """A piece that belongs to no request."""
        keyword, _, payload = piece.partition(b":")
        if keyword == b"ka":
            frames.append(Frame(b"", "ka"))
        elif keyword == b"epoch":
            self.exact = True
            frames.append(Frame(b"", "epoch", payload))
        else:
            self.strange += 1


def _decoded(payload: bytes) -> bytes:
    try:
        return binascii.a2b_base64(payload, strict_mode=True)
    except binascii.Error:
        raise BadFrame("A payload is no base64.") from None
