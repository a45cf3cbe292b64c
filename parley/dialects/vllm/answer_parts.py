"""Parts of vLLM's answers: the first members, ids of calls, and ends of choices."""

from __future__ import annotations

from typing import Any

from parley.dialects.request_context import RequestContext
from parley.types import ChoiceDelta, ChoiceDone, Request


def vllm_envelope(
    answer_id: str, object_name: str, context: RequestContext, request: Request, choices: list[Any]
) -> dict[str, Any]:
    """Return the common first members of every answer and chunk."""
    return {
        "id": answer_id,
        "object": object_name,
        "created": context.created,
        "model": request.model,
        "choices": choices,
    }


def vllm_call_id(call_id: str | None) -> str:
    """Return the id of a call in vLLM's form, from the part that distinguishes calls here."""
    return f"chatcmpl-tool-{(call_id or '')[-16:]}"


def attach_done(pieces: list[tuple[ChoiceDelta | None, ChoiceDone | None]], done: ChoiceDone) -> None:
    """Attach the end of a choice to its last text, if that is among the pieces; not to the last piece of a call."""
    for index in range(len(pieces) - 1, -1, -1):
        delta, _ = pieces[index]
        if delta is not None and delta.index == done.index:
            if delta.output_part != "tool":
                pieces[index] = (delta, done)
                return
            break
    pieces.append((None, done))
