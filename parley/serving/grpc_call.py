"""One call over gRPC, or one request of a stream: its client, its id, and its outcome. The counterpart of ``Exchange``.

Knows nothing of the content of calls. Only the gRPC ports import it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import grpc

from parley.dialects.dialect import Head
from parley.dialects.triton.rpc.status import Refused, refused
from parley.errors import ParleyError
from parley.serving.registry import Service
from parley.serving.served_model import Model
from parley.web.exchange import REQUEST_ID
from parley.web.logs import Note, served
from parley.web.random_ids import draw

log = logging.getLogger("parley.server")


class Call:
    """A gRPC call. ``method``: its path. ``headers``: its metadata, with the lower-case names of HTTP/2."""

    def __init__(self, service: Service, method: str, headers: Mapping[bytes, bytes]):
        self.method, self.headers = method, headers
        self.note = Note()
        self.arrived = time.perf_counter()
        self.tenant = ""  # the client, by its API key
        self.unique = draw().hex()
        given = headers.get(b"x-request-id", b"")
        self.id = given.decode() if REQUEST_ID.fullmatch(given) else f"req_{self.unique}"
        self._service = service

    def head(self, model: Model, path: Mapping[str, str]) -> Head:
        """Return the server state that a dialect needs to read this call."""
        return model.head(self.unique, path, self.headers)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Turn every exception raised inside into GrpcError; count and log the outcome of the call."""
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
