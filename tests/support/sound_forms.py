"""Forms with a clip of sound, as clients write them, and the clips themselves."""

import io
import math
import struct
import wave
from collections.abc import Iterable

BOUNDARY = "0123456789abcdef"
FORM_TYPE = f"multipart/form-data; boundary={BOUNDARY}".encode()

Part = tuple[str, str | bytes, str | None]  # its name, its content, and its file name


def encode_form(parts: Iterable[Part], boundary: str = BOUNDARY, file_type: str = "audio/x-wav") -> bytes:
    """Return a form with these parts, in this order. ``file_type``: media type of its files; "" for none."""
    type_header = f"\r\nContent-Type: {file_type}" if file_type else ""
    pieces = []
    for name, content, filename in parts:
        file_part = "" if filename is None else f'; filename="{filename}"{type_header}'
        pieces += [f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{file_part}\r\n\r\n'.encode()]
        pieces += [content if isinstance(content, bytes) else content.encode(), b"\r\n"]
    return b"".join([*pieces, f"--{boundary}--\r\n".encode()])


def clip_form(clip: bytes = b"RIFF", /, **members: str | list[str]) -> bytes:
    """Return a form with these members, whose arrays have brackets, and with a clip as its last part."""
    texts = [
        (f"{name}[]" if isinstance(value, list) else name, text, None)
        for name, value in members.items()
        for text in (value if isinstance(value, list) else [value])
    ]
    return encode_form([*texts, ("file", clip, "clip.wav")])


def tone_clip(seconds: float, pitch: float = 440.0, rate: int = 16_000) -> bytes:
    """Return a tone as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        samples = (int(9000 * math.sin(2 * math.pi * pitch * i / rate)) for i in range(int(seconds * rate)))
        writer.writeframes(b"".join(struct.pack("<h", sample) for sample in samples))
    return file.getvalue()
