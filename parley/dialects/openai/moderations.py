"""Routes of the original that no model here can answer."""

from __future__ import annotations

from typing import NoReturn

from parley.dialects.facts import ServerFacts
from parley.dialects.request_context import RequestContext
from parley.errors import UnsuitableModel


def refuse_moderation(body: bytes, context: RequestContext, facts: ServerFacts) -> NoReturn:
    """Raise UnsuitableModel for ``POST /v1/moderations``: its categories belong to models of the original."""
    raise UnsuitableModel(
        "Moderation is not available on this server: no model here has OpenAI's categories. A classifier answers "
        "at /classify.",
        field="model",
    )
