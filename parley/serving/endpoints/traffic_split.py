"""Endpoints: names whose requests are split between several models, optionally kept in a small file.

The file is replaced as a whole. After a crash of the process or the machine it holds either the state before a change
or the state after it. A change is answered once it is on the disk. Knows no API; the data that an API keeps with an
endpoint is stored unread.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from parley.dialects.admin_requests import EndpointChange
from parley.dialects.facts import Endpoint, EndpointShare
from parley.dialects.reply import Answer
from parley.errors import NotFound, NotReady, ParleyError, UnknownModel, excerpt
from parley.serving.file_faults import describe_fault
from parley.types import Tenant
from parley.web.offload import to_thread_if_large

log = logging.getLogger("parley.server")


class EndpointFile(msgspec.Struct):
    """The content of the file."""

    endpoints: list[Endpoint] = []


class BadEndpointFile(Exception):
    """The endpoints file cannot be used. The message is one sentence for an operator."""


class EndpointStore:
    """All endpoints, by name. Without a ``file`` they last as long as the process.

    Raises BadEndpointFile if the file cannot be read, has invalid content, or is in use by another server.
    """

    def __init__(self, file: str | None = None):
        self.by_name: Mapping[str, Endpoint] = {}
        self._file = None if file is None else Path(file).absolute()
        self._file_lock: int | None = None
        self._change_lock = asyncio.Lock()
        self._changes: set[asyncio.Task[Answer]] = set()
        if self._file is not None:
            self._file_lock = _lock_endpoint_file(self._file)
            try:
                self.by_name = {endpoint.name: endpoint for endpoint in read_endpoint_file(self._file)}
            except BadEndpointFile:
                self.release_file()
                raise

    def release_file(self) -> None:
        """Release the file to other servers."""
        if self._file_lock is not None:
            os.close(self._file_lock)
            self._file_lock = None

    def choose_share(
        self, name: str, served_name: str = "", draw: Callable[[], float] = random.random
    ) -> EndpointShare:
        """Choose the model that answers a request: ``served_name`` if given, else one at random by the shares.

        A name without an endpoint is taken as a model's. ``draw`` returns numbers in [0, 1). Raises NotFound.
        """
        endpoint = self.by_name.get(name)
        shares = [EndpointShare(name, name, 100)] if endpoint is None else endpoint.shares
        if served_name:
            named_share = next((share for share in shares if share.name == served_name), None)
            if named_share is None:
                raise NotFound(
                    f"Endpoint {excerpt(name)} has no {excerpt(served_name)}.", code="RESOURCE_DOES_NOT_EXIST"
                )
            return named_share
        remaining = draw() * 100
        for share in shares:
            remaining -= share.percent
            if remaining < 0:
                return share
        raise UnknownModel(f"Endpoint {excerpt(name)} serves no model.", name=name)

    def check_query(self, name: str, client: Tenant) -> None:
        """Raise Forbidden if there is an endpoint of this name that a client may not query."""
        if (endpoint := self.by_name.get(name)) is not None:
            endpoint.check_client(client, "query")

    async def change_endpoints(
        self, decide: Callable[[Mapping[str, Endpoint]], Answer | EndpointChange], size: int = 0
    ) -> Answer:
        """Apply the change that ``decide`` returns for the current endpoints, one change at a time; return its answer.

        ``size``: bytes that ``decide`` has to read. Once begun, a change completes even if the caller is cancelled.
        Raises anything that ``decide`` raises, and ParleyError if the change cannot be written to disk; the change is
        then not made.
        """
        task = asyncio.ensure_future(self._apply_change(decide, size))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        try:
            return await asyncio.shield(task)
        finally:
            del task  # its exception refers to this frame: the cycle would keep the body that ``decide`` reads

    async def _apply_change(
        self, decide: Callable[[Mapping[str, Endpoint]], Answer | EndpointChange], size: int
    ) -> Answer:
        async with self._change_lock:
            change = await to_thread_if_large(size, partial(decide, self.by_name))
            if isinstance(change, Answer):
                return change
            endpoints = {name: endpoint for name, endpoint in self.by_name.items() if name != change.remove_endpoint}
            if change.put_endpoint is not None:
                endpoints[change.put_endpoint.name] = change.put_endpoint
            if self._file is not None:
                if self._file_lock is None:
                    raise NotReady("The server is shutting down.")
                content = msgspec.json.format(msgspec.json.encode(EndpointFile(list(endpoints.values())))) + b"\n"
                try:
                    await asyncio.to_thread(replace_file, self._file, content)
                except OSError as error:
                    log.error(
                        "The endpoints file %s cannot be written: %s", self._file, describe_fault(self._file, error)
                    )
                    raise ParleyError(f"The endpoints could not be written: {error.strerror}.") from None
            self.by_name = endpoints
            return change.answer


def replace_file(file: Path, content: bytes) -> None:
    """Replace a file atomically with ``content``. Raises OSError.

    The content is synced to disk before the rename, and the rename before this returns.
    """
    new_file = file.with_name(file.name + ".new")
    with new_file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new_file, file)
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_endpoint_file(file: Path) -> list[Endpoint]:
    """Read the endpoints file; a missing file has no endpoints. Raises BadEndpointFile."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadEndpointFile(f"The endpoints file {file} cannot be read: {error.strerror}.") from None
    try:
        endpoints = msgspec.json.decode(content, type=EndpointFile).endpoints
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadEndpointFile(f"The endpoints file {file} has invalid content: {error}.") from None
    for endpoint in endpoints:
        if (
            sum(share.percent for share in endpoint.shares) != 100
            or min(share.percent for share in endpoint.shares) < 0
        ):
            raise BadEndpointFile(
                f"The endpoints file {file} is invalid: the shares of {endpoint.name} do not add up to 100."
            )
    return endpoints


def _lock_endpoint_file(file: Path) -> int:
    """Lock the file until the process ends: two servers writing it would lose each other's changes.

    Raises BadEndpointFile.
    """
    try:
        lock = os.open(file.with_name(file.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadEndpointFile(
            f"The lock file next to the endpoints file {file} cannot be created: {error.strerror}."
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise BadEndpointFile(f"The endpoints file {file} is in use by another server.") from None
    return lock
