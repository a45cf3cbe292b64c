"""A small real model in the test's own event loop, for tests that read the events of a generation."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from support.tiny_models import model_folder

from parley.dialects.fields import decode_fields
from parley.dialects.openai.completions import CompletionReply
from parley.dialects.request_context import RequestContext
from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.types import ParleySettings, Request
from parley.worker.thread_engine import ThreadEngine


@asynccontextmanager
async def loaded_model(**settings: Any) -> AsyncIterator[ServedModel]:
    """Load the tiny model with these settings, on one thread and with little memory for pages."""
    plan = ParleySettings(model=str(model_folder("qwen3")), threads=1, kv_memory=8 << 20, **settings)
    model = ServedModel(("tiny",), plan, ThreadEngine(plan), ServerOptions())
    try:
        await model.load_engine()
        yield model
    finally:
        await model.close_engine()


def completion_request(model: ServedModel, body: dict[str, Any]) -> Request:
    """Read the body of a completion as the server does."""
    context = RequestContext("1", 0, "", context_length=model.model_info.max_model_len)
    return CompletionReply(decode_fields(json.dumps(body).encode()), context).request
