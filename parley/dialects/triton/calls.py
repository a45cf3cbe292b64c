"""gRPC's calls that generate, as routes: what a coordinator asks of its instances for its clients' calls.

The body is the call's message. The answer to ``ModelInfer`` is one as well, that to ``ModelStreamInfer`` a series of
frames (``rpc/frames``). Errors are those of the API over HTTP. Who lacks the packages that read messages refuses.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from parley.dialects.dialect import Head, Reply, Route
from parley.dialects.triton import DIALECT, glance
from parley.errors import Unsupported

SERVICE = "/inference.GRPCInferenceService"
INFER, STREAM = f"{SERVICE}/ModelInfer", f"{SERVICE}/ModelStreamInfer"


def _infer(body: bytes, head: Head) -> Reply:
    return _read(body, head, stream=False)


def _stream(body: bytes, head: Head) -> Reply:
    return _read(body, head, stream=True)


def _read(body: bytes, head: Head, *, stream: bool) -> Reply:
    """Raises BadRequest, NotFound."""
    if find_spec("google") is None or find_spec("google.protobuf") is None:
        error = Unsupported("Packages for gRPC are missing on this server: pip install 'parley[grpc]'.")
        error.status = 501
        raise error
    from parley.dialects.triton.rpc import reply

    return reply.read(body, head, stream=stream)


CALLS = replace(
    DIALECT,
    base=SERVICE,
    routes=(
        Route("POST", INFER, "generate", read=_infer, model=glance.model, first=True),
        Route("POST", STREAM, "generate", read=_stream, model=glance.model, first=True),
    ),
)
