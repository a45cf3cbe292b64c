"""Anthropic's Messages API: its table of routes.

``STRICT`` has all refusals of the original; ``DIALECT`` drops refusals that only get in a client's way. Both refuse by
name features that would change the answer and are not available: hosted tools, PDF files.
"""

from __future__ import annotations

import re
from functools import partial

from parley.dialects.anthropic import batches, bench, file_sources, files, messages, models
from parley.dialects.anthropic.api_headers import VERSION_HEADER, anthropic_limit_headers
from parley.dialects.anthropic.api_rules import (
    LENIENT_ANTHROPIC_RULES,
    MAX_ANTHROPIC_BODY,
    STRICT_ANTHROPIC_RULES,
    AnthropicRules,
)
from parley.dialects.anthropic.error_answers import REQUEST_ID_PREFIX, anthropic_error_answer
from parley.dialects.dialect import Dialect, PromptMembers
from parley.dialects.facts import ServerFacts
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.route import Route, model_in_body
from parley.errors import NotFound

PROMPT_MEMBERS = PromptMembers(
    conversations=("messages",),
    preceding=("system", "tools"),
    dropped_texts=(re.compile(rb'"x-anthropic-billing-header:(?:[^"\\]|\\[^n])*'),),
)
DOUBLED_VERSION = "Not found. The base URL of this API's clients ends without /v1."


def refuse_path(sentence: str, body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Raise NotFound: a client built the path wrongly."""
    raise NotFound(sentence)


def _anthropic_dialect(rules: AnthropicRules) -> Dialect:
    return Dialect(
        name="anthropic",
        body_schemas="anthropic-strict" if rules.strict else "anthropic",
        title="Anthropic",
        base_path="",
        render_error=partial(anthropic_error_answer, rules),
        prompt_members=PROMPT_MEMBERS,
        body_limit=MAX_ANTHROPIC_BODY if rules.strict else None,
        other_bases=("/v1/messages",),
        limit_headers=anthropic_limit_headers,
        bench_apis=bench.BENCH_APIS,
        id_header=b"request-id",
        id_prefix=REQUEST_ID_PREFIX.encode(),
        routes=(
            Route(
                "POST",
                "/v1/messages",
                "generate",
                reader=partial(messages.read_messages_request, rules),
                model_reader=model_in_body,
                inliner=file_sources.inline_files,
                inliner_pattern=file_sources.FILE_PATTERN,
            ),
            Route(
                "POST",
                "/v1/messages/count_tokens",
                "tokenize",
                reader=partial(messages.read_count, rules),
                writer=messages.write_count,
                inliner=file_sources.inline_files,
                inliner_pattern=file_sources.FILE_PATTERN,
            ),
            Route(
                "GET",
                "/v1/models",
                "info",
                reader=models.answer_anthropic_models,
                claiming_header=VERSION_HEADER,
                query=models.PAGE_QUERY,
                model_list=models.MODEL_LIST,
            ),
            Route(
                "GET",
                "/v1/models/{model:path}",
                "info",
                reader=models.answer_anthropic_model,
                claiming_header=VERSION_HEADER,
            ),
            *((Route("GET", "/", "health"),) if rules.strict else ()),  # elsewhere it is another API's
            *batches.ROUTES,
            *files.ROUTES,
            Route("POST", "/v1/v1/messages", "info", reader=partial(refuse_path, DOUBLED_VERSION)),
        ),
    )


DIALECT = _anthropic_dialect(LENIENT_ANTHROPIC_RULES)
STRICT = _anthropic_dialect(STRICT_ANTHROPIC_RULES)
