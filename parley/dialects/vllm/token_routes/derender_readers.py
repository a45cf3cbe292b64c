"""Reads requests to derender, whole or by chunks: ``stream`` says which."""

from __future__ import annotations

from parley.dialects.request_context import RequestContext
from parley.dialects.vllm import requests
from parley.dialects.vllm.token_routes.derender import ChatDerendering, CompletionDerendering
from parley.dialects.vllm.token_routes.derender_chunk import ChatChunkDerendering, CompletionChunkDerendering


def read_chat_derendering(body: bytes, context: RequestContext) -> ChatDerendering | ChatChunkDerendering:
    """Read a generated answer to a conversation, or a chunk of one. Raises BadRequest."""
    fields = requests.decode_generation_body(body, context)
    return (ChatChunkDerendering if fields.boolean("stream", False) else ChatDerendering)(fields, context)


def read_completion_derendering(
    body: bytes, context: RequestContext
) -> CompletionDerendering | CompletionChunkDerendering:
    """Read generated answers to plain prompts, or a chunk of one. Raises BadRequest."""
    fields = requests.decode_generation_body(body, context)
    return (CompletionChunkDerendering if fields.boolean("stream", False) else CompletionDerendering)(fields, context)
