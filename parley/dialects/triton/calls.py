"""gRPC calls as HTTP routes: a coordinator forwards its clients' calls to instances this way.

Request and answer bodies are the call's protobuf messages; the answer to ``ModelStreamInfer`` is a series of frames
(``rpc/frames``). Errors are those of the HTTP API. Without the protobuf package all calls are refused.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from parley.dialects.dialect import PromptMembers
from parley.dialects.facts import ServerFacts
from parley.dialects.reply import Answer, Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.route import Route
from parley.dialects.triton import DIALECT, error_answers, message_peek
from parley.errors import Unsupported
from parley.types import ALL_MODEL_TASKS

SERVICE_PATH = "/inference.GRPCInferenceService"
INFER_PATH, STREAM_PATH = f"{SERVICE_PATH}/ModelInfer", f"{SERVICE_PATH}/ModelStreamInfer"


def _read_infer_call(body: bytes, context: RequestContext) -> Reply:
    return _read_call(body, context, stream=False)


def _read_stream_call(body: bytes, context: RequestContext) -> Reply:
    return _read_call(body, context, stream=True)


def _read_call(body: bytes, context: RequestContext, *, stream: bool) -> Reply:
    """Read a ``ModelInfer`` message, or one message of ``ModelStreamInfer``. Raises BadRequest, NotFound."""
    _require_protobuf()
    from parley.dialects.triton.rpc import reply

    return reply.read_infer_message(body, context, stream=stream)


def _answer_call(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Answer any other method. Raises ParleyError."""
    _require_protobuf()
    from parley.dialects.triton.rpc import reply

    return reply.answer_grpc_method(body, context, facts)


def _peek_model_and_prompt(body: bytes) -> tuple[str, bytes]:
    return message_peek.peek_model(body), message_peek.peek_prompt(body)


def _require_protobuf() -> None:
    if find_spec("google") is None or find_spec("google.protobuf") is None:
        error = Unsupported("Packages for gRPC are missing on this server: pip install 'parley-llm[grpc]'.")
        error.status = 501
        raise error


GRPC_CALLS = replace(
    DIALECT,
    base_path=SERVICE_PATH,
    framed_answers=True,
    render_error=error_answers.triton_error_answer,
    prompt_members=PromptMembers(read_non_json=_peek_model_and_prompt),
    routes=(
        Route(
            "POST",
            INFER_PATH,
            "generate",
            reader=_read_infer_call,
            model_reader=message_peek.peek_model,
            resolve_model_first=True,
            tasks=ALL_MODEL_TASKS,
        ),
        Route(
            "POST",
            STREAM_PATH,
            "generate",
            reader=_read_stream_call,
            model_reader=message_peek.peek_model,
            resolve_model_first=True,
            tasks=ALL_MODEL_TASKS,
        ),
        Route("POST", SERVICE_PATH + "/{method}", "info", reader=_answer_call),
    ),
)
