"""The API of Hugging Face's Text Generation Inference (TGI), version 3: its table of routes.

``STRICT`` keeps the original's limits and refusals. ``DIALECT`` lifts those that only get in a client's way. ``OLD`` is
version 0.9.4, whose framing and defaults many servers copied. If several APIs share a root, ``/v1`` belongs to OpenAI;
TGI's variant of ``/v1`` is served only where TGI is alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from parley.dialects.dialect import Answer, Dialect, Head, PromptMembers, Reply, Route, named
from parley.dialects.tgi import bench, chat, completions, document, generate, metrics, shared, tokens, vertex
from parley.dialects.tgi.shared import EXTENDED, Rules

INPUTS = ("inputs",)
MEMBERS = PromptMembers(
    conversations=("messages",), prompts=("prompt", *INPUTS, "instances"), before=("tools",), salts=("adapter_id",)
)
Read = Callable[[Rules, bytes, Head], Reply | Answer]
Name = Callable[[bytes], str]


def _dialect(rules: Rules) -> Dialect:
    return Dialect(
        name="tgi",
        title="TGI",
        base="",
        error=partial(shared.error, rules),
        members=MEMBERS,
        body_limit=rules.max_body,
        hints=not rules.strict,
        no_memory=shared.NO_MEMORY,
        routes=(
            *_common(rules),
            _generate("/vertex", vertex.read, rules),
            Route("POST", "/tokenize", "tokenize", read=tokens.tokenize, write=tokens.tokenized, claims=INPUTS),
            Route("POST", "/chat_tokenize", "tokenize", read=tokens.chat_tokenize, write=tokens.chat_tokenized),
            _generate("/v1/chat/completions", chat.read, rules, model=named),
            _generate("/v1/completions", completions.read, rules, model=named),
            Route("GET", "/v1/models", "models", write=tokens.models),
        ),
        series=metrics.told,
        bench=bench.APIS,
    )


def _generate(path: str, read: Read, rules: Rules, claims: tuple[str, ...] = (), model: Name | None = None) -> Route:
    """Return a route that generates. Like the original, it checks the content type before anything else."""

    def typed(body: bytes, head: Head) -> Reply | Answer:
        if rules.strict and not shared.is_json(head.headers.get(b"content-type", b"")):
            return Answer(415, shared.MISLABELLED, shared.PLAIN)
        return read(rules, body, head)

    return Route("POST", path, "generate", read=typed, model=model, claims=claims)


def _common(rules: Rules) -> tuple[Route, ...]:
    """Return the routes that every version of TGI has."""
    return (
        _generate("/", generate.either, rules, INPUTS),
        _generate("/generate", generate.whole, rules, INPUTS),
        _generate("/generate_stream", generate.stream, rules, INPUTS),
        _generate("/invocations", generate.invoked, rules, INPUTS, named),
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
    name=f"tgi-{tokens.OLD}",
    title=f"TGI {tokens.OLD}",
    base="",
    error=partial(shared.error, shared.OLD),
    members=MEMBERS,
    body_limit=shared.OLD.max_body,
    hints=False,
    no_memory=shared.NO_MEMORY,
    routes=_common(shared.OLD),
)
