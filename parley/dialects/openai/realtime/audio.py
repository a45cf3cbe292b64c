"""Audio that arrives in pieces: base64 of PCM with 16 bits and one channel.

The pieces are records of the connection. The memory of all connections' records is limited, so a piece may be dropped;
that is noticed when the audio is read.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parley.dialects.socket_session import ConnectionRecords
from parley.errors import InvalidValue, Overloaded, TooLarge

SAMPLE_BYTES = 2
MAX_AUDIO_BYTES = 25 << 20  # in a buffer: the limit of OpenAI's for files
MAX_AUDIO_TEXT = 1 << 26  # characters of base64 in one event
RECORD_BYTES = 64 << 10  # smaller pieces are joined in one record


@dataclass(frozen=True, slots=True)
class CommittedAudio:
    """Audio that is complete. ``names``: of the records that have it; ``size``: in bytes; ``rate``: in Hz."""

    records: ConnectionRecords
    names: Sequence[str]
    size: int
    rate: int

    def read_samples(self) -> bytes:
        """Return the samples. Raises Overloaded if a part was dropped."""
        samples = b"".join(self.records.find_record(name) or b"" for name in self.names)
        if len(samples) != self.size:
            raise Overloaded("The audio was dropped, because the server has no memory for it. Send it again.")
        return samples

    def drop_audio(self) -> None:
        """Forget the audio."""
        for name in self.names:
            self.records.delete_record(name)


class AudioBuffer:
    """The audio that a client has appended and not committed."""

    def __init__(self, records: ConnectionRecords):
        self._records = records
        self._names: list[str] = []
        self._record_count = 0  # so far
        self._last_size = RECORD_BYTES  # bytes of the last record, which takes more if it has fewer
        self.size = 0  # bytes

    def append_audio(self, text: str) -> None:
        """Keep audio in base64. Raises InvalidValue, TooLarge."""
        data = decode_realtime_audio(text, "audio")
        if self.size + len(data) > MAX_AUDIO_BYTES:
            message = f"The audio buffer holds at most {MAX_AUDIO_BYTES} bytes; commit it first."
            raise TooLarge(message, size=self.size + len(data), limit=MAX_AUDIO_BYTES)
        if self._last_size >= RECORD_BYTES:
            self._names.append(f"audio {self._record_count}")
            self._record_count += 1
            self._last_size = 0
        earlier = self._records.find_record(self._names[-1]) or b""  # a dropped one is noticed by the audio's size
        self._records.save_record(self._names[-1], earlier + data)
        self._last_size += len(data)
        self.size += len(data)

    def commit_audio(self, rate: int) -> CommittedAudio:
        """Return the audio, whose ``rate`` is in Hz, and start with an empty buffer."""
        committed = CommittedAudio(self._records, tuple(self._names), self.size, rate)
        self._names, self._last_size, self.size = [], RECORD_BYTES, 0
        return committed


def decode_realtime_audio(text: str, field: str) -> bytes:
    """Return audio in base64. ``field``: its position in the message. Raises InvalidValue."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidValue(f"Invalid '{field}': it must be base64.", field=field) from None
    if not data:
        raise InvalidValue(f"Invalid '{field}': it must not be empty.", field=field)
    return data


def wave_file(samples: bytes, rate: int) -> bytes:
    """Return a WAV file of PCM samples with 16 bits and one channel. ``rate``: in Hz."""
    samples = samples[: len(samples) // SAMPLE_BYTES * SAMPLE_BYTES]
    byte_rate, bits = rate * SAMPLE_BYTES, 8 * SAMPLE_BYTES
    form = struct.pack("<IHHIIHH", 16, 1, 1, rate, byte_rate, SAMPLE_BYTES, bits)  # PCM in one channel
    size = struct.pack("<I", 36 + len(samples))
    return b"RIFF" + size + b"WAVEfmt " + form + b"data" + struct.pack("<I", len(samples)) + samples


def write_clip_form(clip: bytes, members: Mapping[str, str]) -> tuple[bytes, bytes]:
    """Return the form of a request for a transcript, and its content type. ``members``: empty ones are left out."""
    boundary = secrets.token_hex(16)
    start = f'--{boundary}\r\nContent-Disposition: form-data; name="'
    texts = "".join(f'{start}{name}"\r\n\r\n{value}\r\n' for name, value in members.items() if value)
    file = f'{start}file"; filename="audio.wav"\r\nContent-Type: audio/x-wav\r\n\r\n'
    body = b"".join([(texts + file).encode(), clip, f"\r\n--{boundary}--\r\n".encode()])
    return body, f"multipart/form-data; boundary={boundary}".encode()
