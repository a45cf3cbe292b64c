"""Errors as gRPC statuses. Needs grpc, so only code that serves gRPC imports it."""

from __future__ import annotations

import grpc
import msgspec

from parley.dialects.triton import error_answers
from parley.errors import ParleyError, RateLimited

GRPC_STATUSES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class GrpcError(Exception):
    """An error to answer a call with. ``fatal``: it also ends a stream. ``retry_after``: seconds to wait before a
    retry; None: unknown."""

    def __init__(self, code: grpc.StatusCode, message: str, *, fatal: bool = False, retry_after: float | None = None):
        super().__init__(message)
        self.code, self.message, self.fatal, self.retry_after = code, message, fatal, retry_after


def grpc_status(number: int) -> grpc.StatusCode:
    """Return the gRPC status code for an HTTP status."""
    return GRPC_STATUSES.get(number, grpc.StatusCode.INTERNAL)


def grpc_error(error: ParleyError) -> GrpcError:
    """Return an error as a gRPC error."""
    answer = error_answers.triton_error_answer(error)
    retry_after = error.retry_after if isinstance(error, RateLimited) else None
    return GrpcError(grpc_status(answer.status), msgspec.json.decode(answer.body)["error"], retry_after=retry_after)
