"""Endpoints: names whose requests are split between several models, optionally kept in a small file.

The file is replaced as a whole. After a crash of the process or the machine it holds either the state before a change
or the state after it. A change is answered once it is on the disk. Knows no API; the data that an API keeps with an
endpoint is stored unread.
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
    """The content of the file."""

    endpoints: list[Endpoint] = []


class BadFile(Exception):
    """The endpoints file cannot be used. The message is one sentence for an operator."""


class Endpoints:
    """All endpoints, by name. Without a ``file`` they last as long as the process.

    Raises BadFile if the file cannot be read, has invalid content, or is in use by another server.
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
        """Release the file to other servers."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def choose(self, name: str, served: str = "", draw: Callable[[], float] = random.random) -> Share:
        """Choose the model that answers a request: ``served_name`` if given, else one at random by the shares.

        A name without an endpoint is taken as a model's. ``draw`` returns numbers in [0, 1). Raises NotFound.
        """
        endpoint = self.made.get(name)
        shares = [Share(name, name, 100)] if endpoint is None else endpoint.shares
        if served:
            found = next((share for share in shares if share.name == served), None)
            if found is None:
                raise NotFound(f"Endpoint {excerpt(name)} has no {excerpt(served)}.", code="RESOURCE_DOES_NOT_EXIST")
            return found
        mark = draw() * 100
        for share in shares:
            mark -= share.percent
            if mark < 0:
                return share
        raise UnknownModel(f"Endpoint {excerpt(name)} serves no model.", name=name)

    async def change(self, decide: Callable[[Mapping[str, Endpoint]], Answer | Change]) -> Answer:
        """Apply the change that ``decide`` returns for the current endpoints, one change at a time; return its answer.

        Once begun, a change completes even if the caller is cancelled. Raises anything that ``decide`` raises, and
        ParleyError if the change cannot be written to disk; the change is then not made.
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
    """Replace a file atomically with ``content``. Raises OSError.

    The content is synced to disk before the rename, and the rename before this returns.
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
    """Read the endpoints file; a missing file has no endpoints. Raises BadFile."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadFile(f"The endpoints file {file} cannot be read: {error.strerror}.") from None
    try:
        endpoints = msgspec.json.decode(content, type=Kept).endpoints
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadFile(f"The endpoints file {file} has invalid content: {error}.") from None
    for endpoint in endpoints:
        if sum(share.percent for share in endpoint.shares) != 100 or min(s.percent for s in endpoint.shares) < 0:
            raise BadFile(f"The endpoints file {file} is invalid: the shares of {endpoint.name} do not add up to 100.")
    return endpoints


def _claim(file: Path) -> int:
    """Lock the file until the process ends: two servers writing it would lose each other's changes. Raises BadFile."""
    try:
        lock = os.open(file.with_name(file.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadFile(f"The lock file next to the endpoints file {file} cannot be created: {error.strerror}.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise BadFile(f"The endpoints file {file} is in use by another server.") from None
    return lock
