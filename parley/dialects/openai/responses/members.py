"""The members of a body other than input and tools. Each is applied, repeated in the answer, or refused by name."""

from __future__ import annotations

from typing import Any

import msgspec

from parley.dialects.fields import Fields
from parley.dialects.openai import strict_mode
from parley.dialects.openai.common_members import MAX_TOKENS, read_identifier
from parley.dialects.openai.labels import MAX_LABEL, VERBOSITIES, read_labels
from parley.dialects.openai.messages import EFFORTS
from parley.dialects.openai.responses.response_rules import ResponsesRules, refuse_member, unserved_error
from parley.dialects.output_constraints import ANY_OBJECT_SCHEMA
from parley.dialects.request_context import RequestContext
from parley.dialects.sampling_members import MAX_ALTERNATIVES
from parley.dialects.summary_request import ANSWERED_SUMMARY_REQUEST, SUMMARY_HEADING
from parley.errors import InvalidValue, Unsupported
from parley.types import ContextEdit, Grammar, SummarizeContext

SUMMARIES = ("auto", "concise", "detailed")
LOGPROBS_INCLUDED, SEALED_INCLUDED = "message.output_text.logprobs", "reasoning.encrypted_content"
INCLUDABLE = frozenset(
    (SEALED_INCLUDED, LOGPROBS_INCLUDED, "message.input_image.image_url", "file_search_call.results",
     "web_search_call.results", "web_search_call.action.sources", "code_interpreter_call.outputs",
     "computer_call_output.output.image_url")
)  # fmt: skip
MAX_INCLUDED = 64
MIN_COMPACT_THRESHOLD = 1000  # tokens
SERVED_MEMBERS = frozenset(
    ("model", "input", "instructions", "previous_response_id", "conversation", "store", "background", "stream",
     "stream_options", "include", "max_output_tokens", "max_tool_calls", "temperature", "top_p", "top_logprobs",
     "presence_penalty", "frequency_penalty", "reasoning", "text", "tools", "tool_choice", "parallel_tool_calls",
     "truncation", "metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
     "prompt_cache_options", "service_tier", "client_metadata", "background_options", "prompt", "context_management",
     "moderation", "image", "access_programs", "generate")
)  # fmt: skip


MOVED_MEMBERS = {  # of chat completions, and their places here
    "messages": "input",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}


class TextForm(msgspec.Struct, frozen=True):
    """The form of the answer's text: ``grammar`` that constrains it, ``shown`` as the answer shows it."""

    grammar: Grammar | None
    shown: dict[str, Any]


class ReasoningMembers(msgspec.Struct, frozen=True):
    """``effort`` as in ``ChatPrompt``; ``as_summary``: the client wants a summary; ``shown`` as the answer shows it."""

    effort: str | None
    as_summary: bool
    shown: dict[str, Any]


def check_members(body: Fields, rules: ResponsesRules) -> None:
    """Refuse members that ask for something that this server does not do, and in strict mode unknown ones."""
    if rules.strict:
        unknown = [name for name in body.member_names if name not in SERVED_MEMBERS]
        if unknown and unknown[0] in MOVED_MEMBERS:
            raise _moved_member(unknown[0])
        if unknown:
            path = body.member_path(unknown[0])
            raise InvalidValue(f"Unknown parameter: '{path[:60]}'.", field=path, code="unknown_parameter")
    if body.has_value("response_format"):
        raise _moved_member("response_format")
    refuse_member(body, "prompt", "Prompt templates of the server are")
    if not rules.compacts:
        refuse_member(body, "context_management", "Compaction by the server is")
    refuse_member(body, "moderation", "Moderation is")
    refuse_member(body, "image", "Output of images is")
    refuse_member(body, "access_programs", "Access programs are")
    options = body.object("background_options")
    if options is not None and options.string("completion_window", "soonest", cap=MAX_LABEL) != "soonest":
        raise unserved_error(
            "The completion window is 'soonest' on this server.", options.member_path("completion_window")
        )


def _moved_member(name: str) -> Unsupported:
    """Return the refusal of a member of chat completions that has another place here."""
    return Unsupported(
        f"Unsupported parameter: '{name}'. In the Responses API, this parameter has moved to '{MOVED_MEMBERS[name]}'.",
        field=name,
    )


def read_text_form(body: Fields, rules: ResponsesRules) -> TextForm:
    """Read ``text``. Raises BadRequest."""
    text = body.object("text")
    if text is None:
        return TextForm(None, {"format": {"type": "text"}, "verbosity": "medium"})
    verbosity = text.string("verbosity", "medium", allowed=VERBOSITIES)
    form = text.object("format")
    grammar, shown = (None, {"type": "text"}) if form is None else _read_format(form, rules)
    return TextForm(grammar, {"format": shown, "verbosity": verbosity})


def _read_format(form: Fields, rules: ResponsesRules) -> tuple[Grammar | None, dict[str, Any]]:
    kind = form.string("type", None, allowed=("text", "json_object", "json_schema"))
    path = form.member_path("schema")
    match kind:
        case None:
            raise form.missing_member("type")
        case "text":
            return None, {"type": kind}
        case "json_object":
            return Grammar("json", ANY_OBJECT_SCHEMA, field="text.format"), {"type": kind}
    name = read_identifier(form)  # names it as missing if the members are nested, as in chat completions
    description, is_strict = form.string("description", None), form.boolean("strict", None)
    schema = form.free_object("schema")
    if not form.has_value("schema"):
        raise form.missing_member("schema")
    if is_strict and rules.reading.strict_schemas:
        strict_mode.check_strict_schema(schema, f"text.format '{name}'", path)
    format_object = {
        "type": kind,
        "description": description,
        "name": name,
        "schema": schema,
        "strict": bool(is_strict),
    }
    return Grammar("json", schema, field="text.format"), format_object


def read_reasoning(body: Fields) -> ReasoningMembers:
    """Read ``reasoning``. Raises BadRequest."""
    reasoning = body.object("reasoning")
    if reasoning is None:
        return ReasoningMembers(None, False, {"effort": None, "summary": None})
    effort = reasoning.string("effort", None, allowed=EFFORTS)
    older = reasoning.string("generate_summary", None, allowed=SUMMARIES)
    summary = reasoning.string("summary", older, allowed=SUMMARIES)
    reasoning_object: dict[str, Any] = {}
    if (context := reasoning.string("context", None, allowed=("auto", "current_turn", "all_turns"))) is not None:
        reasoning_object["context"] = context
    reasoning_object["effort"] = effort
    if (mode := reasoning.string("mode", None, allowed=("standard", "pro"))) is not None:
        if mode == "pro":
            raise unserved_error("The mode 'pro' is not available on this server.", reasoning.member_path("mode"))
        reasoning_object["mode"] = mode
    return ReasoningMembers(effort, summary is not None, reasoning_object | {"summary": summary})


def read_include(body: Fields) -> set[str]:
    """Return the additional output that the client wants. Raises BadRequest."""
    included: set[str] = set()
    for number, value in enumerate(body.array("include", cap=MAX_INCLUDED)):
        path = f"{body.member_path('include')}[{number}]"
        if not isinstance(value, str) or value not in INCLUDABLE:
            names = ", ".join(f"'{name}'" for name in sorted(INCLUDABLE))
            raise InvalidValue(f"Invalid value for '{path}'. Supported values are: {names}.", field=path)
        included.add(value)
    return included


def read_responses_logprobs(body: Fields, included: set[str], context: RequestContext) -> tuple[int, int | None]:
    """Return ``top_logprobs``, and the number of alternatives whose log-probabilities are wanted, or None."""
    limit = context.api_options.max_logprobs
    top = body.integer("top_logprobs", 0, 0, MAX_ALTERNATIVES if limit is None or limit < 0 else limit)
    return top, top if top or LOGPROBS_INCLUDED in included else None


class StorageMembers(msgspec.Struct, frozen=True):
    """``is_stored``: the response is kept. ``previous``, ``conversation``: ids of the response or conversation that
    precedes its input."""

    is_stored: bool
    in_background: bool
    previous: str | None
    conversation: str | None


def read_context_edits(body: Fields, context_length: int) -> list[ContextEdit]:
    """Read ``context_management``: a summary stands before the answer to a conversation that is too long. Raises
    BadRequest."""
    edits: list[ContextEdit] = []
    for entry in body.objects("context_management", cap=1):
        if entry.string("type", None, allowed=("compaction",)) is None:
            raise entry.missing_member("type")
        default = max(MIN_COMPACT_THRESHOLD, context_length * 4 // 5)
        threshold = entry.integer("compact_threshold", default, MIN_COMPACT_THRESHOLD, MAX_TOKENS)
        if not 0 < context_length <= threshold:
            edits.append(SummarizeContext(threshold, ANSWERED_SUMMARY_REQUEST, answer_heading=SUMMARY_HEADING))
    return edits


def read_storage(body: Fields, context: RequestContext) -> StorageMembers:
    """Read the members about storage and about the responses that precede the input. Raises BadRequest."""
    wants_storage = body.boolean("store", True)
    in_background = body.boolean("background", False)
    previous = body.string("previous_response_id", None, cap=MAX_LABEL)
    conversation = _read_conversation_id(body)
    if in_background and not wants_storage:
        raise body.member_error("background", "can only be used when `store` is true.")
    if conversation is not None and not wants_storage:
        raise body.member_error("conversation", "can only be used when `store` is true.")
    if (in_background or conversation is not None) and not context.records.are_kept:
        name = "background" if in_background else "conversation"
        raise Unsupported(f"Unsupported parameter: '{name}'. This server stores no responses.", field=name)
    if previous is not None and conversation is not None:
        raise InvalidValue(
            "'previous_response_id' and 'conversation' cannot be used together.",
            field="previous_response_id",
            code="mutually_exclusive_parameters",
        )
    return StorageMembers(wants_storage and context.records.are_kept, in_background, previous, conversation)


def _read_conversation_id(body: Fields) -> str | None:
    if isinstance(body.raw_value("conversation"), str):
        return body.string("conversation", None, cap=MAX_LABEL)
    conversation = body.object("conversation")
    if conversation is None:
        return None
    if (conversation_id := conversation.string("id", None, cap=MAX_LABEL)) is None:
        raise conversation.missing_member("id")
    return conversation_id


def read_shown_labels(body: Fields) -> dict[str, Any]:
    """Return the members that have no effect here and come back in the answer. Raises BadRequest."""
    body.object("client_metadata")
    stream_options = body.object("stream_options")
    if stream_options is not None:
        stream_options.boolean("include_obfuscation", True)
    return {"max_tool_calls": body.integer("max_tool_calls", None, 1), **read_labels(body)}
