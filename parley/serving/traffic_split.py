"""Endpoints: names behind which several models share the requests, kept in a small file if the server has one.

The file is replaced as a whole: whoever reads it, also after the process or the machine died at any moment, finds what
was there before a change or what is there after it. A change is answered when it is on the disk. Knows no API; what one
keeps with an endpoint is handed through.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from parley.dialects.dialect import Answer
from parley.dialects.facts import Endpoint, Share
from parley.dialects.wishes import Change
from parley.errors import NotFound, NotReady, ParleyError, UnknownModel, excerpt


class Kept(msgspec.Struct):
    """What the file holds."""

    endpoints: list[Endpoint] = []


class BadFile(Exception):
    """The file cannot be used; one sentence for a person."""


class Endpoints:
    """All that were made, by name. Without a ``file`` they last as long as the process.

    Raises BadFile when the file is there but cannot be read, is none of these, or belongs to a server that runs.
    """

    def __init__(self, file: str | None = None):
        self.made: Mapping[str, Endpoint] = {}
        self._file = None if file is None else Path(file).absolute()
        self._lock: int | None = None
        self._one = asyncio.Lock()
        self._changes: set[asyncio.Task[Answer]] = set()
        if self._file is not None:
            self._lock = _claim(self._file)
            try:
                self.made = {endpoint.name: endpoint for endpoint in _read(self._file)}
            except BadFile:
                self.close()
                raise

    def close(self) -> None:
        """Let another server have the file."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def choose(self, name: str, served: str = "", draw: Callable[[], float] = random.random) -> Share:
        """Which of an endpoint's models answers a request: ``served``, or one by chance, as their shares say.

        A name that nobody gave to an endpoint is that of a model. ``draw`` gives numbers in [0, 1). Raises NotFound.
        """
        endpoint = self.made.get(name)
        shares = [Share(name, name, 100)] if endpoint is None else endpoint.shares
        if served:
            found = next((share for share in shares if share.name == served), None)
            if found is None:
                raise NotFound(f"Endpoint {excerpt(name)} serves no {excerpt(served)}.", code="RESOURCE_DOES_NOT_EXIST")
            return found
        mark = draw() * 100
        for share in shares:
            mark -= share.percent
            if mark < 0:
                return share
        raise UnknownModel(f"Endpoint {excerpt(name)} serves nothing.", name=name)

    async def change(self, decide: Callable[[Mapping[str, Endpoint]], Answer | Change]) -> Answer:
        """Do what ``decide`` says, which is given all endpoints; one change at a time.

        Once begun it ends, also when nobody waits for it any more. Raises what ``decide`` raises, and ParleyError when
        the disk does not take the change, which then is not made.
        """
        task = asyncio.ensure_future(self._change(decide))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _change(self, decide: Callable[[Mapping[str, Endpoint]], Answer | Change]) -> Answer:
        async with self._one:
            decided = decide(self.made)
            if isinstance(decided, Answer):
                return decided
            made = {name: endpoint for name, endpoint in self.made.items() if name != decided.drop}
            if decided.put is not None:
                made[decided.put.name] = decided.put
            if self._file is not None:
                if self._lock is None:
                    raise NotReady("The server is shutting down.")
                content = msgspec.json.format(msgspec.json.encode(Kept(list(made.values())))) + b"\n"
                try:
                    await asyncio.to_thread(replace, self._file, content)
                except OSError as error:
                    raise ParleyError(f"The endpoints could not be written: {error.strerror}.") from None
            self.made = made
            return decided.answer


def replace(file: Path, content: bytes) -> None:
    """Put ``content`` in the place of a file, which is never seen half written. Raises OSError.

    The new content reaches the disk before its name does, and the name before this returns.
    """
    fresh = file.with_name(file.name + ".new")
    with fresh.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(fresh, file)
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _read(file: Path) -> list[Endpoint]:
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadFile(f"The file of endpoints, {file}, cannot be read: {error.strerror}.") from None
    try:
        endpoints = msgspec.json.decode(content, type=Kept).endpoints
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadFile(f"The file of endpoints, {file}, holds none: {error}.") from None
    for endpoint in endpoints:
        if sum(share.percent for share in endpoint.shares) != 100 or min(s.percent for s in endpoint.shares) < 0:
            raise BadFile(f"The file of endpoints, {file}, is wrong: the shares of {endpoint.name} do not make 100.")
    return endpoints


def _claim(file: Path) -> int:
    """A lock that goes with the process: two servers that write one file would lose each other's changes."""
    try:
        lock = os.open(file.with_name(file.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadFile(f"The file of endpoints, {file}, cannot be written beside: {error.strerror}.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise BadFile(f"The file of endpoints, {file}, is in use by another server.") from None
    return lock
