"""gRPC calls as HTTP routes: a coordinator forwards its clients' calls to instances this way.

Request and answer bodies are the call's protobuf messages; the answer to ``ModelStreamInfer`` is a series of frames
(``rpc/frames``). Errors are those of the HTTP API. Without the protobuf package all calls are refused.
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
    """Read a ``ModelInfer`` message, or one message of ``ModelStreamInfer``. Raises BadRequest, NotFound."""
    _require()
    from parley.dialects.triton.rpc import reply

    return reply.read(body, head, stream=stream)


def _ask(body: bytes, head: Head, facts: Facts) -> Answer:
    """Answer any other method. Raises ParleyError."""
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
