"""The API of Hugging Face's Text Generation Inference, version 3: its table of routes.

``STRICT`` has the original's limits and refusals; ``DIALECT`` lifts those that only stand in a client's way; ``OLD`` is
version 0.9.4, whose framing and defaults many servers took after. Where APIs share a root, what is at ``/v1`` is
OpenAI's; TGI's flavour of it is where TGI is alone.
"""

from __future__ import annotations

from functools import partial

from parley.dialects.dialect import Dialect, Route
from parley.dialects.tgi import chat, completions, document, generate, shared, tokens, vertex
from parley.dialects.tgi.shared import EXTENDED, Rules

INPUTS = ("inputs",)


def _dialect(rules: Rules) -> Dialect:
    return Dialect(
        name="tgi",
        title="TGI",
        base="",
        error=shared.error,
        routes=(
            *_common(rules),
            Route("POST", "/vertex", "generate", read=partial(vertex.read, rules)),
            Route("POST", "/tokenize", "tokenize", read=tokens.tokenize, write=tokens.tokenized, claims=INPUTS),
            Route("POST", "/chat_tokenize", "tokenize", read=tokens.chat_tokenize, write=tokens.chat_tokenized),
            Route("POST", "/v1/chat/completions", "generate", read=partial(chat.read, rules)),
            Route("POST", "/v1/completions", "generate", read=partial(completions.read, rules)),
            Route("GET", "/v1/models", "models", write=tokens.models),
        ),
    )


def _common(rules: Rules) -> tuple[Route, ...]:
    """What every version has."""
    return (
        Route("POST", "/", "generate", read=partial(generate.either, rules), claims=INPUTS),
        Route("POST", "/generate", "generate", read=partial(generate.whole, rules), claims=INPUTS),
        Route("POST", "/generate_stream", "generate", read=partial(generate.stream, rules), claims=INPUTS),
        Route("POST", "/invocations", "generate", read=partial(generate.invoked, rules), claims=INPUTS),
        Route("GET", "/info", "info", write=partial(tokens.info, rules)),
        Route("GET", "/", "health"),
        Route("GET", "/health", "health"),
        Route("GET", "/ping", "health"),
        Route("GET", "/metrics", "metrics"),
        Route("GET", "/api-doc/openapi.json", "ask", read=document.openapi),
        Route("GET", "/docs", "ask", read=partial(document.page, "")),
        Route("GET", "/docs/", "ask", read=partial(document.page, "../")),
    )


DIALECT = _dialect(EXTENDED)
STRICT = _dialect(shared.STRICT)
OLD = Dialect(
    name=f"tgi-{tokens.OLD}", title=f"TGI {tokens.OLD}", base="", error=shared.error, routes=_common(shared.OLD)
)
