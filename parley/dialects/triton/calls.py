"""gRPC's calls as routes: what a coordinator asks of its instances for its clients' calls.

The body is the call's message, and so is the answer; that to ``ModelStreamInfer`` is a series of frames
(``rpc/frames``). Errors are those of the API over HTTP. Who lacks the packages that read messages refuses.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from parley.dialects.dialect import Answer, Head, PromptMembers, Reply, Route
from parley.dialects.facts import Facts
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
    _require()
    from parley.dialects.triton.rpc import reply

    return reply.read(body, head, stream=stream)


def _ask(body: bytes, head: Head, facts: Facts) -> Answer:
    """Raises ParleyError."""
    _require()
    from parley.dialects.triton.rpc import reply

    return reply.ask(body, head, facts)


def _glance(body: bytes) -> tuple[str, bytes]:
    return glance.model(body), glance.prompt(body)


def _require() -> None:
    if find_spec("google") is None or find_spec("google.protobuf") is None:
        error = Unsupported("Packages for gRPC are missing on this server: pip install 'parley[grpc]'.")
        error.status = 501
        raise error


CALLS = replace(
    DIALECT,
    base=SERVICE,
    framed=True,
    members=PromptMembers(message=_glance),
    routes=(
        Route("POST", INFER, "generate", read=_infer, model=glance.model, first=True),
        Route("POST", STREAM, "generate", read=_stream, model=glance.model, first=True),
        Route("POST", SERVICE + "/{method}", "ask", read=_ask),
    ),
)
