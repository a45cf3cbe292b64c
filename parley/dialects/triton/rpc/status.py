"""What did not succeed, as gRPC says it. Imported only by those who serve gRPC."""

from __future__ import annotations

import grpc
import msgspec

from parley.dialects.triton import errors
from parley.errors import ParleyError

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
    """``fatal``: a stream does not go on after it."""

    def __init__(self, code: grpc.StatusCode, message: str, *, fatal: bool = False):
        super().__init__(message)
        self.code, self.message, self.fatal = code, message, fatal


def status(number: int) -> grpc.StatusCode:
    """That of an HTTP status."""
    return STATUSES.get(number, grpc.StatusCode.INTERNAL)


def refused(error: ParleyError) -> Refused:
    answer = errors.error(error)
    return Refused(status(answer.status), msgspec.json.decode(answer.body)["error"])
