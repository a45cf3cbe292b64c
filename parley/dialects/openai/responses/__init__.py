"""OpenAI's Responses API: the routes of its universal and its strict surface."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from parley.dialects.dialect import Route, model_in_body
from parley.dialects.openai.responses.reply import read_response_request
from parley.dialects.openai.responses.rules import LENIENT, STRICT, ResponsesRules


def response_routes(rules: ResponsesRules) -> Sequence[Route]:
    """Return the routes of one surface."""
    return (
        Route(
            "POST",
            "/v1/responses",
            "generate",
            reader=partial(read_response_request, rules=rules),
            model_reader=model_in_body,
        ),
    )


ROUTES, STRICT_ROUTES = response_routes(LENIENT), response_routes(STRICT)
