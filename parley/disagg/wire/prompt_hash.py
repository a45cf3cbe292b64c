"""What of a request's body tells which cached prefixes it can use: chained hashes of its prompt, and how long that is.

Shared by the coordinator, which chooses by them, and by instances, which report those of what they computed; both see
the same bytes, so both find the same hashes. Nothing of the body is understood beyond where its prompt stands, which
each dialect says itself (``PromptMembers``). The hashes are of the JSON text of tools and prompt as the client wrote
it, or of the prompt in a message of gRPC, salted with model and cache salt. They are taken at marks that lie further
apart the longer the prompt is, so that a megabyte has some sixty of them.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from parley.dialects.dialect import Dialect
from parley.dialects.mounts import INNER, SURFACES

RATE = 4.02  # characters of a token
FIRST, STEP, GROWTH = 128, 128, 1.125
REPORTED = 4096  # hashes that are told of an instance
LIMIT = 64 << 20  # bytes; no body is longer


def _marks() -> tuple[int, ...]:
    """Where hashes are taken, in bytes: each 128 at first, then each eighth of what lies before."""
    marks = [FIRST]
    while marks[-1] < LIMIT:
        marks.append(max(marks[-1] + STEP, int(marks[-1] * GROWTH)))
    return tuple(marks)


MARKS = _marks()


_TEXT = msgspec.json.Decoder(str)
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


class Mark(msgspec.Struct, frozen=True, gc=False):
    """The first ``tokens`` tokens or so of a prompt, by the hash of all that stands before."""

    tokens: int
    hash: int


class Turns(msgspec.Struct, frozen=True):
    """A conversation of so many messages: hashes of all, and of all but the last two."""

    count: int
    whole: int
    before: int


class Look(msgspec.Struct):
    """``length`` in tokens, as far as characters tell; ``marks`` shortest first; ``messages`` as they are written."""

    model: str = ""
    length: int = 0
    marks: Sequence[Mark] = ()
    messages: bytes = b""

    def turns(self) -> Turns | None:
        """None if it is no conversation."""
        try:
            each = [bytes(message) for message in _LIST.decode(self.messages)]
        except msgspec.MsgspecError:
            return None
        return Turns(len(each), hash_of(each), hash_of(each[:-2])) if each else None


def hash_of(parts: Iterable[bytes]) -> int:
    """48 bits, which any JSON reader keeps; each part's length counts."""
    digest = hashlib.blake2b(digest_size=6)
    for part in parts:
        digest.update(b"%d:" % len(part) + part)
    return int.from_bytes(digest.digest())


class PromptReader:
    """Finds prompts where these dialects say that they stand.

    A body is not known to be one dialect's: a coordinator and an instance may have several APIs at the same path, in
    other manners. So all are one: the first that a body has of all members that may hold a prompt is its prompt.
    """

    def __init__(self, dialects: Iterable[Dialect]):
        told = [dialect.members for dialect in dialects]
        self._conversations = _union(each.conversations for each in told)
        self._prompts = _union(each.prompts for each in told)
        self._before = _union(each.before for each in told)
        self._salts = ("model", *sorted(_union(each.salts for each in told)))  # in an order that no table changes
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
        """A body's prompt. Anything may come: what is neither a JSON object nor a message, or has no prompt, gives no
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
        text = before + prompt.rstrip(b']}" \t\r\n')  # a conversation that goes on begins with what was before its end
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
    """All names, each once, in the order in which they come."""
    return tuple(dict.fromkeys(name for names in several for name in names))


def _first(members: Iterable[bytes]) -> bytes:
    """The first that is given and not null; else nothing."""
    return next((member for member in members if member not in (b"", b"null")), b"")


def _marked(text: bytes, salt: bytes, length: int) -> list[Mark]:
    """The marks of a text of so many tokens."""
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
    """Hashes of what was computed lately, as far as ``capacity`` tokens of cache reach: the oldest are forgotten.

    It judges by what was asked, not by looking into the cache: a hash that is told may have been evicted, which costs
    the prefix's computation and nothing else.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._held: OrderedDict[int, int] = OrderedDict()  # tokens between a mark and the one before it
        self._tokens = 0

    def add(self, marks: Sequence[Mark]) -> None:
        """A prompt was computed. Its beginning is newer than its end, for others may begin alike."""
        befores = [0, *(mark.tokens for mark in marks)]
        for mark, before in zip(reversed(marks), reversed(befores[:-1]), strict=True):
            self._tokens += mark.tokens - before - self._held.pop(mark.hash, 0)
            self._held[mark.hash] = mark.tokens - before
        while self._held and self._tokens > self._capacity:
            self._tokens -= self._held.popitem(last=False)[1]

    def hashes(self, limit: int = REPORTED) -> list[int]:
        """The newest, newest first: what ``prefix_hash`` of /v1/status tells."""
        newest = reversed(self._held)
        return [hash for hash, _ in zip(newest, range(limit), strict=False)]
