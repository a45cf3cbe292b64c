"""Ollama's API: its table of routes.

``STRICT`` has the original's refusals, and ``/``, where it is mounted alone. ``DIALECT`` lifts those that only get in a
client's way. Lists show models with a tag, as ``m:latest``, and every route takes names with and without it.
"""

from __future__ import annotations

from functools import partial

from parley.dialects.dialect import Dialect, PromptMembers
from parley.dialects.ollama import bench, chat, embeddings, generate, models
from parley.dialects.ollama.api_rules import LENIENT_OLLAMA_RULES, STRICT_OLLAMA_RULES, OllamaRules
from parley.dialects.ollama.error_answers import NO_MEMORY_BODY, ollama_error_answer
from parley.dialects.ollama.go_encoding import JSON_TYPE
from parley.dialects.ollama.model_names import DEFAULT_TAG, NAME_PREFIXES
from parley.dialects.route import Route, model_in_body

# Origins that may call it without being configured: pages of this machine, and programs that show their own pages.
WEB_ORIGINS = r"https?://(localhost|127\.0\.0\.1|0\.0\.0\.0)(:\d+)?|(app|file|tauri|vscode-webview|vscode-file)://.*"
OLLAMA_PROMPT_MEMBERS = PromptMembers(
    conversations=("messages",), prompts=("prompt",), preceding=("tools", "system"), media=("images",)
)
REFUSED_CHANGES = {  # types of the bodies, subjects of the refusals, members with models, and which must be served
    ("POST", "/api/create"): ("CreateRequest", "Creating models", ("model",), None),
    ("POST", "/api/copy"): ("CopyRequest", "Copying models", ("source", "destination"), "source"),
    ("POST", "/api/push"): ("PushRequest", "Pushing models", ("model",), None),
    ("DELETE", "/api/delete"): ("DeleteRequest", "Deleting models", ("model",), "model"),
}
CHANGE_ERRORS = {"/api/copy": models.copy_error}
CHARSET_TYPES = (JSON_TYPE.decode(),)
ROOT_ROUTES = (Route("GET", "/", "probe", reader=models.answer_root, content_types=("text/plain",)),)


def _api_routes(rules: OllamaRules) -> tuple[Route, ...]:
    return (
        Route(
            "POST", "/api/chat", "generate", reader=partial(chat.read_ollama_chat, rules), model_reader=model_in_body
        ),
        Route(
            "POST",
            "/api/generate",
            "generate",
            reader=partial(generate.read_ollama_generate, rules),
            model_reader=model_in_body,
        ),
        Route(
            "POST",
            "/api/embed",
            "embed",
            reader=partial(embeddings.read_ollama_embed, rules),
            model_reader=model_in_body,
        ),
        Route(
            "POST",
            "/api/embeddings",
            "embed",
            reader=partial(embeddings.read_ollama_embeddings, rules),
            model_reader=model_in_body,
        ),
        Route("GET", "/api/tags", "models", writer=models.write_tags, content_types=CHARSET_TYPES),
        Route("GET", "/api/ps", "models", writer=models.write_running, content_types=CHARSET_TYPES),
        Route(
            "POST",
            "/api/show",
            "info",
            reader=partial(models.answer_show, rules),
            model_reader=models.read_shown_name,
        ),
        Route("GET", "/api/version", "version", writer=models.write_ollama_version, content_types=CHARSET_TYPES),
        Route(
            "POST",
            "/api/pull",
            "pull",
            reader=models.read_pull,
            content_types=("application/json", "application/x-ndjson"),
        ),
        *(
            Route(method, path, "info", reader=models.refuse_change(*change), render_error=CHANGE_ERRORS.get(path))
            for (method, path), change in REFUSED_CHANGES.items()
        ),
        Route("HEAD", "/api/blobs/{digest}", "info", reader=models.answer_no_blob),
        Route("POST", "/api/blobs/{digest}", "info", reader=models.refuse_blob),
    )


def _ollama_dialect(rules: OllamaRules) -> Dialect:
    return Dialect(
        name="ollama",
        body_schemas="ollama-strict" if rules.strict else "ollama",
        title="Ollama",
        base_path="",
        other_bases=("/api",),
        render_error=ollama_error_answer,
        prompt_members=OLLAMA_PROMPT_MEMBERS,
        retry_hints=not rules.strict,
        chunk_per_event=True,  # some clients read a chunk of HTTP as one object
        bench_apis=bench.BENCH_APIS,
        default_tag=DEFAULT_TAG,
        web_origins=WEB_ORIGINS,
        name_prefixes=NAME_PREFIXES,
        no_memory_body=NO_MEMORY_BODY,
        routes=(*_api_routes(rules), *(ROOT_ROUTES if rules.strict else ())),
    )


DIALECT = _ollama_dialect(LENIENT_OLLAMA_RULES)
STRICT = _ollama_dialect(STRICT_OLLAMA_RULES)
