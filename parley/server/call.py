"""One call over gRPC, or one request of a stream: who sent it, and how it ended. What ``respond`` is to HTTP.

Knows nothing of what calls ask for. Imported only by those who serve gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import grpc
import msgspec

from parley.dialects.dialect import Head
from parley.dialects.triton import errors
from parley.errors import ParleyError
from parley.server.logs import served
from parley.server.model import Model
from parley.server.respond import REQUEST_ID
from parley.server.service import Service
from parley.server.tally import Note

log = logging.getLogger("parley.server")

STATUSES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class Refused(Exception):
    """What did not succeed, as gRPC says it. ``fatal``: a stream does not go on after it."""

    def __init__(self, code: grpc.StatusCode, message: str, *, fatal: bool = False):
        super().__init__(message)
        self.code, self.message, self.fatal = code, message, fatal


def refused(error: ParleyError) -> Refused:
    answer = errors.error(error)
    return Refused(STATUSES.get(answer.status, grpc.StatusCode.INTERNAL), msgspec.json.decode(answer.body)["error"])


class Call:
    """``method``: its path. ``headers``: its metadata, names in lower case as HTTP/2 has them."""

    def __init__(self, service: Service, method: str, headers: Mapping[bytes, bytes]):
        self.method, self.headers = method, headers
        self.note = Note()
        self.arrived = time.perf_counter()
        self.tenant = ""  # on whose behalf, by the key
        self.unique = secrets.token_hex(16)
        given = headers.get(b"x-request-id", b"")
        self.id = given.decode() if REQUEST_ID.fullmatch(given) else f"req_{self.unique}"
        self._service = service

    def head(self, model: Model, path: Mapping[str, str]) -> Head:
        return model.head(self.unique, path, self.headers)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Whatever goes wrong within leaves as Refused; how it ended is counted and logged."""
        code = grpc.StatusCode.OK
        try:
            yield
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception as error:
            said = self._said(error)
            code = said.code
            raise said from None
        finally:
            self._service.calls.add(value=code.name)
            if self._service.options.access_log and not self.note.probe:
                served(self.id, "gRPC", self.method, code.name, self.arrived, self.note)

    def _said(self, error: Exception) -> Refused:
        if isinstance(error, Refused):
            return error
        if isinstance(error, ParleyError):
            return refused(error)
        log.exception("Call %s failed.", self.id)
        return refused(ParleyError("The server had an error while it processed the request."))
