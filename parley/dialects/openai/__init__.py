"""The OpenAI API with the extras that vLLM's server made common: its table of routes.

The published API is the reference for every member, default, range and error. Unknown members are ignored; known
members that are not supported are refused by name.
"""

from __future__ import annotations

from parley.dialects.dialect import Dialect, PromptMembers, Route, named
from parley.dialects.openai import bench, chat, completions, embeddings, shared, tokens

MEMBERS = PromptMembers(conversations=("messages",), prompts=("prompt",), before=("tools",), salts=("cache_salt",))
DIALECT = Dialect(
    name="openai",
    title="OpenAI",
    base="/v1",
    error=shared.error,
    members=MEMBERS,
    headers=shared.headers,
    bench=bench.APIS,
    no_memory=shared.NO_MEMORY,
    routes=(
        Route("POST", "/v1/chat/completions", "generate", read=chat.read, model=named),
        Route("POST", "/v1/completions", "generate", read=completions.read, model=named),
        Route("POST", "/v1/embeddings", "embed", read=embeddings.read, model=named),
        Route("GET", "/v1/models", "models", write=tokens.models),
        Route("GET", "/v1/models/{model:path}", "model", write=tokens.model),
        Route(
            "POST", "/tokenize", "tokenize", read=tokens.tokenize, write=tokens.tokenized, claims=("prompt", "messages")
        ),
        Route("POST", "/detokenize", "detokenize", read=tokens.detokenize, write=tokens.detokenized),
        Route("GET", "/tokenizer_info", "tokenizer", write=shared.encode),
        Route("GET", "/version", "version", write=tokens.version),
        Route("GET", "/load", "load", write=tokens.load),
        Route("GET", "/ping", "health"),
        Route("POST", "/ping", "health"),
    ),
)
