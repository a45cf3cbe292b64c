"""The frames that carry results from an instance to a coordinator: encoded and decoded. Pure: bytes in, bytes out.

A frame is ``reqId:{id}`` and ``{keyword}:{payload}``, each followed by a NUL; ``ka:`` and ``epoch:`` stand alone.
Nothing is escaped. In the ``mindie`` form, a payload may therefore contain a NUL only at its end, followed by the NUL
that ends the frame. A stream that begins with ``epoch:`` has the ``native`` form: payloads with NULs are in base64, the
first NUL ends a frame, and there are further keywords. Knows neither sockets nor the meaning of payloads.
"""

from __future__ import annotations

import binascii
from typing import Literal

import msgspec

Kind = Literal["data", "lastData", "error", "retry", "head", "close", "ka", "epoch"]

MOST = 16 << 20  # bytes of a payload; larger ones are sent in several frames
LIMIT = 8 * MOST  # bytes of a frame that is read
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
    """The bytes are no frame: too large, invalid base64, or a record without its data."""


class Frame(msgspec.Struct, gc=False):
    """``id``: of the request; empty if the frame belongs to no request. ``payload`` is decoded.

    data, lastData: bytes for the client. The ``record`` of the engine outputs they were rendered from stays in base64,
    as it is rarely needed. error: a sentence. retry: the body of a new request. head: status and headers of a complete
    answer, as JSON. close, ka: no payload. epoch: its name.
    """

    id: bytes
    kind: Kind
    payload: bytes = b""
    record: bytes | None = None


# -- encoding


def results(id: str, payload: bytes, *, last: bool = False, exact: bool = False) -> list[bytes]:
    """Encode a result in one or more frames. An empty one that is not the last yields none, unless ``exact``."""
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
    """Encode the outputs that the next data frame was rendered from. Native form only."""
    return b"reqId:%b\0record:%b\0" % (id.encode(), binascii.b2a_base64(data, newline=False))


def head(id: str, status: int, headers: list[tuple[str, str]]) -> bytes:
    """Encode status and headers of a complete answer, sent before its data. Native form only."""
    return b"reqId:%b\0head:%b\0" % (id.encode(), msgspec.json.encode({"status": status, "headers": headers}))


def error(id: str, text: str) -> bytes:
    """Encode the end of a request by an error."""
    return b"reqId:%b\0error:%b\0" % (id.encode(), text.replace("\0", " ").encode())


def retry(id: str, body: bytes) -> bytes:
    """Encode the end of a request here, with the body (JSON) that continues it on another instance."""
    return b"reqId:%b\0retry:%b\0" % (id.encode(), body)


def epoch(name: str) -> bytes:
    """Encode the beginning of a native stream. Frames are numbered within the epoch."""
    return b"epoch:%b\0" % name.encode()


def _parts(payload: bytes) -> list[bytes]:
    """Cut a payload into pieces that contain no NUL except at their end."""
    if b"\0" not in payload:
        return _cut(payload)
    *ended, rest = payload.split(b"\0")
    pieces = [piece for part in ended for piece in _cut(part + b"\0")]
    return pieces + _cut(rest)


def _cut(payload: bytes) -> list[bytes]:
    if 0 < len(payload) <= MOST:  # nearly always
        return [payload]
    return [payload[begin : begin + MOST] for begin in range(0, len(payload), MOST)]


# -- decoding


class Reader:
    """Decodes frames from a stream of bytes, independent of how the bytes are cut.

    ``number``: frames of requests read so far, including unknown ones; this is the numbering within an epoch. A record
    counts once its data has arrived.
    ``strange``: number of pieces that were skipped because they are no frames, or unknown ones.
    ``held``: a frame is complete unless a further NUL follows. If nothing follows for some milliseconds, call
    ``flush``. A native stream never holds a frame.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.number = 0
        self.strange = 0
        self.exact = False
        self._limit = limit
        self._rest: list[bytes] = []  # of an incomplete piece
        self._size = 0
        self._opening = b""  # first half of an incomplete frame, which names its request
        self._record: bytes | None = None  # a record whose data has not arrived
        self._behind = b""  # first half of that record's frame
        self._held: Frame | None = None

    @property
    def held(self) -> bool:
        return self._held is not None

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that these bytes complete. Raises BadFrame, after which the stream is unusable."""
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
        """Return the held frame: nothing followed it, so it is complete."""
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
        last = frames[0] if frames else None  # the previous frame, if a NUL that follows would belong to it
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
                    raise BadFrame("A record must be followed by its data.")
                number += 1
            if kind is None:
                self.strange += 1
            else:
                frames.append(Frame(opening[6:], kind, payload, record))
                # Events of a stream end in a line break; only other payloads may end in a NUL.
                if not self.exact and keyword in (b"data", b"lastData") and payload[-1:] != b"\n":
                    last = frames[-1]
            opening, record = b"", None
        self._opening, self._record, self.number = opening, record, number
        if last is not None and not more:
            self._held = frames.pop()
        return frames

    def _alone(self, piece: bytes, frames: list[Frame]) -> None:
        """Decode a piece that belongs to no request."""
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
        raise BadFrame("A payload is not valid base64.") from None
