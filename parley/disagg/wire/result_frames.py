"""The frames that carry results from an instance to a coordinator: encoded and decoded. Pure: bytes in, bytes out.

A frame is ``reqId:{id}`` and ``{keyword}:{payload}``, each followed by a NUL; ``ka:`` and ``epoch:`` stand alone.
Nothing is escaped. In the ``mindie`` form, a payload may therefore contain a NUL only at its end, followed by the NUL
that ends the frame. A stream that begins with ``epoch:`` has the ``native`` form: payloads with NULs are in base64, the
first NUL ends a frame, and there are further keywords. Knows neither sockets nor the meaning of payloads.
"""

from __future__ import annotations

import binascii
import re
from typing import Literal

import msgspec

FrameKind = Literal["data", "lastData", "error", "retry", "head", "used", "close", "ka", "epoch"]

MAX_PAYLOAD_SIZE = 16 << 20  # bytes of a payload; larger ones are sent in several frames
MAX_FRAME_SIZE = 8 * MAX_PAYLOAD_SIZE  # bytes of a frame that is read
HEARTBEAT_FRAME = b"ka:heartbeat\0"
CLOSE_FRAME = b"reqId:0xffffffffffffffff\0close:new connection is to established, close the old one.\0"

KEYWORD_KINDS: dict[bytes, FrameKind] = {
    b"data": "data",
    b"lastData": "lastData",
    b"error": "error",
    b"retry": "retry",
    b"head": "head",
    b"used": "used",
}
BASE64_KINDS: dict[bytes, FrameKind] = {b"data64": "data", b"lastData64": "lastData"}
REQUEST_PREFIX = b"reqId:"
# The mark at the end of OpenAI's streams stays with the event before it: coordinators end at the first lastData.
EVENT_PATTERN = re.compile(rb"\0|[^\0]+?(?:\n\n(?!data: \[DONE\]\n\n\Z)|\0|\Z)")


class BadFrame(Exception):
    """The bytes are no frame: too large, invalid base64, or a record without its data."""


class ResultFrame(msgspec.Struct, gc=False):
    """``request_id``: of the request; empty if the frame belongs to no request. ``payload`` is decoded.

    data, lastData: bytes for the client. The ``record`` of the engine outputs they were rendered from stays in base64,
    as it is rarely needed. error: a sentence. retry: the body of a new request. head: status and headers of a complete
    answer, as JSON. used: the tokens that the request has used, as JSON. close, ka: no payload. epoch: its name.
    """

    request_id: bytes
    kind: FrameKind
    payload: bytes = b""
    record: bytes | None = None


# -- encoding


def encode_result(request_id: str, payload: bytes, *, last: bool = False, native: bool = False) -> list[bytes]:
    """Encode a result in one or more frames. An empty one that is not the last yields none, unless ``native``."""
    head, coding = b"reqId:%b\0" % request_id.encode(), b""
    pieces = _split_large(payload) if native else _split_events(payload)
    if native and b"\0" in payload:
        pieces, coding = [binascii.b2a_base64(piece, newline=False) for piece in pieces], b"64"
    if not pieces and (last or native):
        pieces = [b""]
    frames = [b"%bdata%b:%b\0" % (head, coding, piece) for piece in pieces]
    if last:
        frames[-1] = b"%blastData%b:%b\0" % (head, coding, pieces[-1])
    return frames


def encode_record_frame(request_id: str, data: bytes) -> bytes:
    """Encode the outputs that the next data frame was rendered from. Native form only."""
    return b"reqId:%b\0record:%b\0" % (request_id.encode(), binascii.b2a_base64(data, newline=False))


def encode_head_frame(request_id: str, status: int, headers: list[tuple[str, str]]) -> bytes:
    """Encode status and headers of a complete answer, sent before its data. Native form only."""
    return b"reqId:%b\0head:%b\0" % (request_id.encode(), msgspec.json.encode({"status": status, "headers": headers}))


def encode_used_frame(request_id: str, used_tokens: bytes) -> bytes:
    """Encode the tokens that a request has used (JSON), sent before its last data. Native form only."""
    return b"reqId:%b\0used:%b\0" % (request_id.encode(), used_tokens)


def encode_error_frame(request_id: str, text: str) -> bytes:
    """Encode the end of a request by an error."""
    return b"reqId:%b\0error:%b\0" % (request_id.encode(), text.replace("\0", " ").encode())


def encode_retry_frame(request_id: str, body: bytes) -> bytes:
    """Encode the end of a request here, with the body (JSON) that continues it on another instance."""
    return b"reqId:%b\0retry:%b\0" % (request_id.encode(), body)


def encode_epoch_frame(name: str) -> bytes:
    """Encode the beginning of a native stream. Frames are numbered within the epoch."""
    return b"epoch:%b\0" % name.encode()


def _split_events(payload: bytes) -> list[bytes]:
    """Cut a payload into the events of a stream: coordinators send each frame to the client as one chunk.

    An event ends with an empty line or a NUL, so that no piece contains a NUL except at its end.
    """
    last = len(payload) - 1
    if payload.find(b"\n\n", 0, last) < 0 and payload.find(b"\0", 0, last) < 0:  # one event, or an answer in one piece
        return _split_large(payload)
    return [piece for event in EVENT_PATTERN.findall(payload) for piece in _split_large(event)]


def _split_large(payload: bytes) -> list[bytes]:
    if 0 < len(payload) <= MAX_PAYLOAD_SIZE:  # nearly always
        return [payload]
    return [payload[start : start + MAX_PAYLOAD_SIZE] for start in range(0, len(payload), MAX_PAYLOAD_SIZE)]


# -- decoding


class FrameReader:
    """Decodes frames from a stream of bytes, independent of how the bytes are cut.

    ``frame_number``: frames of requests read so far, including unknown ones; this is the numbering within an epoch. A
    record counts once its data has arrived. ``skipped_pieces``: number of pieces that were skipped because they are no
    frames, or unknown ones. ``holds_frame``: a frame is complete unless a further NUL follows. If nothing follows for
    some milliseconds, call ``flush_held``. A native stream never holds a frame.
    """

    def __init__(self, limit: int = MAX_FRAME_SIZE) -> None:
        self.frame_number = 0
        self.skipped_pieces = 0
        self.native = False
        self._limit = limit
        self._incomplete: list[bytes] = []  # the parts of an incomplete piece
        self._incomplete_size = 0
        self._opening = b""  # first half of an incomplete frame, which names its request
        self._pending_record: bytes | None = None  # a record whose data has not arrived
        self._record_opening = b""  # first half of that record's frame
        self._held_frame: ResultFrame | None = None

    @property
    def holds_frame(self) -> bool:
        """Whether a frame is held back because a further NUL may follow."""
        return self._held_frame is not None

    def feed_bytes(self, data: bytes) -> list[ResultFrame]:
        """Return the frames that these bytes complete. Raises BadFrame; the stream is then unusable."""
        if not data:
            return []
        if b"\0" not in data:
            self._keep_incomplete(data)
            return self.flush_held()
        if self._incomplete:
            self._incomplete.append(data)
            data = b"".join(self._incomplete)
        pieces = data.split(b"\0")
        rest_bytes = pieces.pop()
        self._incomplete, self._incomplete_size = [], 0
        if rest_bytes:
            self._keep_incomplete(rest_bytes)
        return self._parse_pieces(pieces, more=bool(rest_bytes))

    def flush_held(self) -> list[ResultFrame]:
        """Return the held frame: nothing followed it, so it is complete."""
        frames = [] if self._held_frame is None else [self._held_frame]
        self._held_frame = None
        return frames

    def _keep_incomplete(self, data: bytes) -> None:
        self._incomplete.append(data)
        self._incomplete_size += len(data)
        if self._incomplete_size > self._limit:
            raise BadFrame(f"A frame is larger than {self._limit} bytes.")

    def _parse_pieces(self, pieces: list[bytes], more: bool) -> list[ResultFrame]:
        frames = self.flush_held()
        last = frames[0] if frames else None  # the previous frame, if a NUL that follows would belong to it
        opening, record, number = self._opening, self._pending_record, self.frame_number
        for piece in pieces:
            if not piece:
                if last is not None:
                    last.payload += b"\0"
                    last = None
                continue
            last = None
            if not opening:
                if piece[:6] == REQUEST_PREFIX:
                    opening = piece
                else:
                    self._parse_lone_piece(piece, frames)
                continue
            keyword, _, payload = piece.partition(b":")
            if keyword == b"record" and record is None:
                record, self._record_opening, opening = payload, opening, b""
                continue
            kind = KEYWORD_KINDS.get(keyword)
            if kind is None:
                if piece[:6] == REQUEST_PREFIX:
                    self.skipped_pieces += 1
                    opening = piece
                    continue
                if keyword == b"close":
                    frames.append(ResultFrame(b"", "close", payload))
                    opening = b""
                    continue
                if keyword in BASE64_KINDS:
                    kind, payload = BASE64_KINDS[keyword], _decode_base64(payload)
            number += 1
            if record is not None:
                if opening != self._record_opening or kind not in ("data", "lastData"):
                    raise BadFrame("A record must be followed by its data.")
                number += 1
            if kind is None:
                self.skipped_pieces += 1
            else:
                frames.append(ResultFrame(opening[6:], kind, payload, record))
                # Events of a stream end in a line break; only other payloads may end in a NUL.
                if not self.native and keyword in (b"data", b"lastData") and payload[-1:] != b"\n":
                    last = frames[-1]
            opening, record = b"", None
        self._opening, self._pending_record, self.frame_number = opening, record, number
        if last is not None and not more:
            self._held_frame = frames.pop()
        return frames

    def _parse_lone_piece(self, piece: bytes, frames: list[ResultFrame]) -> None:
        """Decode a piece that belongs to no request."""
        keyword, _, payload = piece.partition(b":")
        if keyword == b"ka":
            frames.append(ResultFrame(b"", "ka"))
        elif keyword == b"epoch":
            self.native = True
            frames.append(ResultFrame(b"", "epoch", payload))
        else:
            self.skipped_pieces += 1


def _decode_base64(payload: bytes) -> bytes:
    try:
        return binascii.a2b_base64(payload, strict_mode=True)
    except binascii.Error:
        raise BadFrame("A payload is not valid base64.") from None
