"""OpenAI's Responses API: the routes of its universal and its strict surface."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from parley.dialects.openai import object_lists
from parley.dialects.openai.responses import compact, inlined_request, reply, stored_routes
from parley.dialects.openai.responses.response_rules import LENIENT, STRICT, ResponsesRules
from parley.dialects.openai.responses.socket_session import ResponsesSession
from parley.dialects.route import QuerySchemas, Route, model_in_body


def generating_routes(rules: ResponsesRules) -> Sequence[Route]:
    """Return the routes of one surface that read input."""
    return (
        Route(
            "POST",
            "/v1/responses",
            "generate",
            reader=partial(reply.read_response_request, rules=rules),
            model_reader=model_in_body,
            inliner=inlined_request.inline_response,
        ),
        Route(
            "POST",
            "/v1/responses/compact",
            "generate",
            reader=partial(compact.read_compact_request, rules=rules),
            model_reader=model_in_body,
            inliner=inlined_request.inline_records,
        ),
        Route(
            "POST",
            "/v1/responses/input_tokens",
            "tokenize",
            reader=partial(reply.read_token_count, rules=rules),
            writer=reply.write_token_count,
            inliner=inlined_request.inline_records,
        ),
    )


REPLAY_QUERY: QuerySchemas = {
    "stream": {"type": "boolean"},
    "starting_after": {"type": "integer", "minimum": 0, "maximum": 10**9},
}
LIST_QUERY: QuerySchemas = {
    "limit": {"type": "integer", "minimum": 1, "maximum": object_lists.MAX_LISTED},
    "order": {"type": "string", "enum": ["asc", "desc"]},
    "after": {"type": "string", "minLength": 1, "maxLength": object_lists.MAX_ID},
}
STORED_ROUTES = (
    Route("GET", "/v1/responses", "socket", reader=ResponsesSession),
    Route("GET", "/v1/responses/{id}", "stored", reader=stored_routes.read_response, query=REPLAY_QUERY),
    Route("DELETE", "/v1/responses/{id}", "stored", reader=stored_routes.delete_response),
    Route("POST", "/v1/responses/{id}/cancel", "stored", reader=stored_routes.cancel_response),
    Route("GET", "/v1/responses/{id}/input_items", "stored", reader=stored_routes.list_input_items, query=LIST_QUERY),
    Route("POST", "/v1/conversations", "stored", reader=stored_routes.create_conversation),
    Route("GET", "/v1/conversations/{id}", "stored", reader=stored_routes.answer_stored_conversation),
    Route("POST", "/v1/conversations/{id}", "stored", reader=stored_routes.update_conversation),
    Route("DELETE", "/v1/conversations/{id}", "stored", reader=stored_routes.delete_conversation),
    Route("POST", "/v1/conversations/{id}/items", "stored", reader=stored_routes.add_items),
    Route("GET", "/v1/conversations/{id}/items", "stored", reader=stored_routes.list_items, query=LIST_QUERY),
    Route("GET", "/v1/conversations/{id}/items/{item}", "stored", reader=stored_routes.answer_conversation_item),
    Route("DELETE", "/v1/conversations/{id}/items/{item}", "stored", reader=stored_routes.delete_item),
)
ROUTES = (*generating_routes(LENIENT), *STORED_ROUTES)
STRICT_ROUTES = (*generating_routes(STRICT), *STORED_ROUTES)
