"""The bytes of a vocabulary entry, derived from the decoder that a tokenizer.json describes.

Nearly every language model has a decoder that works token by token (byte-level BPE, SentencePiece with byte fallback,
WordPiece): the text is the concatenation of each token's bytes, except that the first token may lose a blank. Knowing
these bytes makes detokenizing a concatenation, linear and exact. For any other decoder ``compile_decoder`` returns
None.

This module knows no ids, no special tokens and no files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

TokenDecoder = Callable[[str], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _make_byte_alphabet() -> dict[str, int]:
    """Map each printable character of byte-level BPE to its byte: itself if printable, else the next from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(hidden)}


_BYTE_ALPHABET = _make_byte_alphabet()


def _decode_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_ALPHABET[char] for char in token])
    except KeyError:  # added tokens are written as plain text
        return token.encode()


def _clean_up_spacing(text: str) -> str:
    """Remove the blanks before English punctuation and contractions, as WordPiece decoders do."""
    for spaced, tight in (
        (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"),
        (" 'm", "'m"), (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
    ):  # fmt: skip
        text = text.replace(spaced, tight)
    return text


def compile_decoder(decoder: dict[str, Any] | None) -> tuple[TokenDecoder, TokenDecoder] | None:
    """Return two functions from a token to its bytes: inside a text, and at its start. Return None for a decoder that
    does not work token by token.

    ``decoder``: the member "decoder" of a tokenizer.json; None for a tokenizer without one (words joined by blanks).
    """
    if decoder is None:
        return (lambda token: b" " + token.encode()), str.encode
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _decode_byte_level, _decode_byte_level
    if kinds == ["WordPiece"]:
        return _compile_word_piece(steps[0]["prefix"], steps[0]["cleanup"])
    return _compile_sentence_piece(steps)


def _compile_word_piece(prefix: str, cleanup: bool) -> tuple[TokenDecoder, TokenDecoder]:
    repair = _clean_up_spacing if cleanup else str

    def decode_word_piece(token: str) -> bytes:
        return repair(token[len(prefix) :] if token.startswith(prefix) else f" {token}").encode()

    return decode_word_piece, lambda token: repair(token).encode()


def _compile_sentence_piece(steps: list[dict[str, Any]]) -> tuple[TokenDecoder, TokenDecoder] | None:
    """Compile Replace, Metaspace and ByteFallback, then Fuse, which a Strip of one leading character may follow."""
    replace: list[tuple[str, str]] = []
    swallow = ""  # the first token loses all of these (Metaspace)
    strip = b""  # the text loses one of these at its start
    fallback = fused = False
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"] and not fused and not fallback:
            replace.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace" and not fused and not fallback and not replace:
            replace.append((step["replacement"], " "))
            swallow = "" if step["prepend_scheme"] == "never" else step["replacement"]
        elif kind == "ByteFallback" and not fused:
            fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and step["start"] <= 1 and step["stop"] == 0:
            strip = step["content"].encode() if step["start"] else b""
        else:
            return None

    def decode_inside(token: str) -> bytes:
        if fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for old, new in replace:
            token = token.replace(old, new)
        return token.encode()

    def decode_first(token: str) -> bytes:
        return decode_inside(token.replace(swallow, "") if swallow else token).removeprefix(strip)

    return decode_inside, decode_first
