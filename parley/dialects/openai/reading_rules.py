"""How the servers of OpenAI's API differ in reading a request: OpenAI's own, vLLM's, Databricks' and others."""

from __future__ import annotations

from dataclasses import dataclass

from parley.dialects.request_context import DEFAULT_API_OPTIONS, ApiOptions, RequestContext
from parley.dialects.sampling_members import MAX_STOPS

OPENAI_ROLES = ("developer", "system", "user", "assistant", "tool", "function")


@dataclass(frozen=True, slots=True)
class ReadingRules:
    """The differences between the servers of this API in how they read a request.

    * ``roles``: the roles that a message may have; empty: any.
    * ``reserved_tokens``: the number of output tokens that must fit after the prompt; None: all that may be generated.
    * ``best_of``: whether requests may have this member.
    * ``min_alternatives``: the smallest valid number of alternatives; -1 asks for the whole vocabulary.
    * ``shows_unused_tools``: the model sees its tools even if ``tool_choice`` is none.
    * ``strict_schemas``: the schema of a ``strict`` tool or response format must be one that OpenAI's strict mode
      accepts.
    * ``lenient_messages``: messages are read ``loose`` and ``bare`` (see ``MessageRules``), parts with media need no
      type, and the last message may be continued regardless of its role.
    * ``media_roles``: those whose messages may have media; empty: any.
    * ``plain_urls``: the URL of a part may stand where its object is due.
    * ``follows_options``: the operator's ``ApiOptions`` apply.
    * ``custom_tools``: tools may be custom tools.
    * ``max_stops``: the most stop strings.
    * ``needs_tools``: members about tools are refused without any.
    * ``stores_chats``: ``store`` keeps chat completions.
    """

    roles: tuple[str, ...] = OPENAI_ROLES
    reserved_tokens: int | None = None
    best_of: bool = True
    min_alternatives: int = -1
    shows_unused_tools: bool = False
    strict_schemas: bool = False
    lenient_messages: bool = False
    media_roles: tuple[str, ...] = ("user",)
    plain_urls: bool = True
    follows_options: bool = True
    custom_tools: bool = True
    max_stops: int = MAX_STOPS
    needs_tools: bool = False
    stores_chats: bool = False


OPENAI_RULES = ReadingRules(stores_chats=True)
STRICT_OPENAI_RULES = ReadingRules(
    strict_schemas=True, min_alternatives=0, max_stops=4, needs_tools=True, stores_chats=True
)


def applied_options(context: RequestContext, rules: ReadingRules) -> ApiOptions:
    """Return the operator's options that apply to a request."""
    return context.api_options if rules.follows_options else DEFAULT_API_OPTIONS
