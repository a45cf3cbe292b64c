"""Prompt hashes for cache-affine routing: chained hashes of a body's prompt, and an estimate of its length.

The coordinator routes by them, and instances report the hashes of prompts that they computed. Both see the same bytes,
so both compute the same hashes. Bodies are not parsed beyond the members that hold the prompt, which each dialect
declares (``PromptMembers``). The hash covers the JSON text of tools and prompt as the client wrote it, or the prompt in
a gRPC message, salted with the model and the cache salt. Hashes are taken at marks whose distance grows with the
position, so that a megabyte has about sixty.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from parley.dialects.dialect import Dialect
from parley.dialects.mounts import INNER, SURFACES

RATE = 4.02  # characters per token
FIRST, STEP, GROWTH = 128, 128, 1.125
REPORTED = 4096  # most hashes in an instance's status report
LIMIT = 64 << 20  # bytes; bodies are never longer


def _marks() -> tuple[int, ...]:
    """Return the byte positions at which hashes are taken: every 128 at first, then each an eighth further."""
    marks = [FIRST]
    while marks[-1] < LIMIT:
        marks.append(max(marks[-1] + STEP, int(marks[-1] * GROWTH)))
    return tuple(marks)


MARKS = _marks()


_TEXT = msgspec.json.Decoder(str)
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


class Mark(msgspec.Struct, frozen=True, gc=False):
    """The first ``tokens`` tokens (estimated) of a prompt, with the hash of everything up to there."""

    tokens: int
    hash: int


class Turns(msgspec.Struct, frozen=True):
    """A conversation of ``count`` messages: a hash of all messages, and one of all but the last two."""

    count: int
    whole: int
    before: int


class Look(msgspec.Struct):
    """The prompt of a body. ``length``: estimated tokens; ``marks``: shortest first; ``messages``: their JSON text."""

    model: str = ""
    length: int = 0
    marks: Sequence[Mark] = ()
    messages: bytes = b""

    def turns(self) -> Turns | None:
        """Hash the messages of a conversation. None for other prompts."""
        try:
            each = [bytes(message) for message in _LIST.decode(self.messages)]
        except msgspec.MsgspecError:
            return None
        return Turns(len(each), hash_of(each), hash_of(each[:-2])) if each else None


def hash_of(parts: Iterable[bytes]) -> int:
    """Return a hash of 48 bits, which every JSON reader preserves. The length of each part is hashed as well."""
    digest = hashlib.blake2b(digest_size=6)
    for part in parts:
        digest.update(b"%d:" % len(part) + part)
    return int.from_bytes(digest.digest())


class PromptReader:
    """Finds the prompt in a body, in the members that the given dialects declare.

    The dialect of a body is unknown: a coordinator and an instance may serve several APIs at the same path, in
    different manners. Hence one reader for all dialects: the first member present that may hold a prompt is the prompt.
    """

    def __init__(self, dialects: Iterable[Dialect]):
        told = [dialect.members for dialect in dialects]
        self._conversations = _union(each.conversations for each in told)
        self._prompts = _union(each.prompts for each in told)
        self._before = _union(each.before for each in told)
        self._salts = ("model", *sorted(_union(each.salts for each in told)))  # independent of the order of the tables
        self._messages = list(dict.fromkeys(each.message for each in told if each.message is not None))
        names = _union((self._conversations, self._prompts, self._before, self._salts))
        self._fields = {name: f"member_{number}" for number, name in enumerate(names)}
        body = msgspec.defstruct(
            "Body",
            [(own, msgspec.Raw, msgspec.Raw()) for own in self._fields.values()],
            rename={own: name for name, own in self._fields.items()},
        )
        self._decoder = msgspec.json.Decoder(body)

    def look(self, body: bytes, rate: float = RATE) -> Look:
        """Return a body's prompt. Any bytes are accepted: without a prompt, or in an unknown format, the result has no
        marks and length 0."""
        try:
            found = self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError):
            return self._message(body, rate)

        def written(names: Iterable[str]) -> list[bytes]:
            return [bytes(getattr(found, self._fields[name])) for name in names]

        conversation = _first(written(self._conversations))
        prompt = conversation or _first(written(self._prompts))
        before, salts = b"".join(written(self._before)), written(self._salts)
        text = before + prompt.rstrip(b']}" \t\r\n')  # without its end, a prompt is a prefix of its own continuation
        length = _length(prompt, rate) + int(len(before) / rate)
        return Look(_name(salts[0]), length, _marked(text, b"\0".join(salts), length), conversation)

    def _message(self, body: bytes, rate: float) -> Look:
        for read in self._messages:
            model, prompt = read(body)
            if model or prompt:
                length = _length(prompt, rate)
                return Look(model, length, _marked(prompt, model.encode(), length))
        return Look()


def _union(several: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Return all names once, in order of first occurrence."""
    return tuple(dict.fromkeys(name for names in several for name in names))


def _first(members: Iterable[bytes]) -> bytes:
    """Return the first member that is present and not null, or nothing."""
    return next((member for member in members if member not in (b"", b"null")), b"")


def _marked(text: bytes, salt: bytes, length: int) -> list[Mark]:
    """Return the marks of a text that has ``length`` tokens."""
    digest = hashlib.blake2b(salt, digest_size=6)
    marks, at, each = [], 0, length / len(text) if text else 0.0
    view = memoryview(text)
    for mark in MARKS[: bisect_right(MARKS, len(text))]:
        digest.update(view[at:mark])
        marks.append(Mark(int(mark * each), int.from_bytes(digest.digest())))
        at = mark
    return marks


def _length(prompt: bytes, rate: float) -> int:
    if prompt[:1] == b"[" and prompt[1:].lstrip(b" [\r\n\t")[:1].isdigit():
        return prompt.count(b",") + 1  # token ids
    return max(1, int(len(prompt.decode("utf-8", "replace")) / rate)) if prompt else 0


def _name(raw: bytes) -> str:
    try:
        return _TEXT.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


look = PromptReader(surface.dialect for surface in (*SURFACES, *INNER)).look


class Known:
    """Hashes of recently computed prompts, up to ``capacity`` tokens (the size of the cache); the oldest are forgotten.

    It follows the requests and does not look into the cache. A reported prefix may therefore have been evicted, which
    costs only its recomputation.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._held: OrderedDict[int, int] = OrderedDict()  # tokens between a mark and the mark before it
        self._tokens = 0

    def add(self, marks: Sequence[Mark]) -> None:
        """Record a computed prompt. Its beginning counts as newer than its end, as other prompts may share it."""
        befores = [0, *(mark.tokens for mark in marks)]
        for mark, before in zip(reversed(marks), reversed(befores[:-1]), strict=True):
            self._tokens += mark.tokens - before - self._held.pop(mark.hash, 0)
            self._held[mark.hash] = mark.tokens - before
        while self._held and self._tokens > self._capacity:
            self._tokens -= self._held.popitem(last=False)[1]

    def hashes(self, limit: int = REPORTED) -> list[int]:
        """Return the newest hashes, newest first, for ``prefix_hash`` of /v1/status."""
        newest = reversed(self._held)
        return [hash for hash, _ in zip(newest, range(limit), strict=False)]
