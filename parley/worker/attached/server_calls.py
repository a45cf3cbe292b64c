"""Sends an attached server requests that have short answers: for its models, its health and its metrics."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import msgspec

from parley.types import AttachedSettings
from parley.web.http_client import (
    ConnectionBroken,
    HeaderPairs,
    InstanceAnswer,
    InstanceHttpClient,
    InstanceUnreachable,
)


class ServerAway(Exception):
    """The server does not answer, or says that it is not ready. The message is a clause with the reason."""


class ServerCalls:
    """The address of a server, the headers of each request, and the connections to it."""

    def __init__(self, settings: AttachedSettings):
        self.http_client = InstanceHttpClient(settings.url)
        self.headers: HeaderPairs = [(b"content-type", b"application/json")]
        if settings.key:
            self.headers = [*self.headers, (b"authorization", b"Bearer " + settings.key.encode())]
        self._prefix = urlsplit(settings.url).path.rstrip("/")
        self._timeout = settings.engine_timeout or None

    def target(self, path: str) -> bytes:
        """Return the target of a request for a path of the server."""
        return (self._prefix + path).encode()

    async def get(self, path: str) -> InstanceAnswer:
        """Return the answer to a GET request. Raises ServerAway if none comes in time, or if the server is not
        ready."""
        return await self._call_server(b"GET", path, b"")

    async def post(self, path: str, body: Any) -> InstanceAnswer:
        """Return the answer to a POST request. Raises ServerAway if none comes in time, or if the server is not
        ready."""
        return await self._call_server(b"POST", path, msgspec.json.encode(body))

    def close(self) -> None:
        """Close all connections."""
        self.http_client.fail_all("The engine was closed.")
        self.http_client.close_idle()

    async def _call_server(self, method: bytes, path: str, body: bytes) -> InstanceAnswer:
        parts = (body,) if body else ()
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self.http_client.request_answer(method, self.target(path), self.headers, parts)
        except TimeoutError:
            raise ServerAway(f"it did not answer for {self._timeout:g} s") from None
        except (InstanceUnreachable, ConnectionBroken) as error:
            raise ServerAway(as_clause(str(error))) from None
        if answer.status in (502, 503, 504):
            raise ServerAway(f"it is not ready (status {answer.status})")
        return answer


def as_clause(sentence: str) -> str:
    """Return a sentence as a clause: without its capital letter and full stop."""
    return sentence[:1].lower() + sentence[1:].rstrip(".")
