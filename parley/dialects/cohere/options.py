"""The members of a request other than its conversation: tools, sampling, form of the answer, thinking, safety."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from parley.dialects import sampling_members
from parley.dialects.cohere.api_rules import CohereRules
from parley.dialects.cohere.refusal_wording import check_cohere_members, cohere_value_error
from parley.dialects.fields import Fields
from parley.dialects.output_constraints import ANY_OBJECT_SCHEMA, read_json_schema
from parley.dialects.request_context import RequestContext
from parley.dialects.sampling_members import MAX_STOP_CHARACTERS, MAX_STOPS
from parley.errors import InvalidValue, excerpt
from parley.types import Grammar, SamplingOptions, StopConditions

MAX_TOKENS = 2**31 - 1
MAX_TOOLS = 512
MAX_TOP_K = 500
MAX_SEED = 2**64 - 1
MAX_PRIORITY = 999
STRICT_STOPS = 5
DEFAULT_TEMPERATURE = 0.3
DEFAULT_TOP_P = 0.75
STRICT_TOP_P = (0.01, 0.99)
STRICT_TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,256}")
TOOL_MEMBERS = {"type", "function"}
FUNCTION_MEMBERS = {"name", "description", "parameters"}
THINKING_MEMBERS = {"type", "token_budget"}
CITATION_MEMBERS = {"mode"}
CITATION_MODES = ("ENABLED", "DISABLED", "FAST", "ACCURATE", "OFF")
SAFETY_MODES = ("CONTEXTUAL", "STRICT", "OFF")
CHOICES: dict[str, Literal["required", "none"]] = {"REQUIRED": "required", "NONE": "none"}
BOTH_PENALTIES = "invalid request: cannot specify both frequency_penalty and presence_penalty."
FORMAT_WITH = "invalid request: response_format is not supported with {}."


class CohereToolMembers(msgspec.Struct, frozen=True):
    """The tool members of a request, as in ``ChatPrompt``."""

    tools: list[dict[str, Any]] = []
    choice: Literal["auto", "none", "required"] = "auto"
    schema_fields: dict[str, str] = {}


def read_cohere_tools(body: Fields, rules: CohereRules) -> CohereToolMembers:
    """Read the tools and whether one must be called. Raises BadRequest."""
    are_strict = body.boolean("strict_tools", False)
    tools: list[dict[str, Any]] = []
    schema_fields: dict[str, str] = {}
    for item in body.objects("tools", cap=MAX_TOOLS):
        check_cohere_members(item, TOOL_MEMBERS, rules)
        if item.string("type", None, allowed=("function",)) is None:
            raise item.missing_member("type")
        function = item.object("function")
        if function is None:
            raise item.missing_member("function")
        signature = _read_function(function, rules) | ({"strict": True} if are_strict else {})
        name = signature["name"]
        if name in schema_fields:
            raise function.member_error("name", f"two tools are called {excerpt(name)}.")
        schema_fields[name] = function.member_path("parameters")
        tools.append({"type": "function", "function": signature})
    choice = body.string("tool_choice", None, allowed=tuple(CHOICES))
    if choice == "REQUIRED" and not tools:
        raise body.member_error("tool_choice", "REQUIRED is only allowed with tools.")
    return CohereToolMembers(tools, "auto" if choice is None else CHOICES[choice], schema_fields)


def _read_function(function: Fields, rules: CohereRules) -> dict[str, Any]:
    check_cohere_members(function, FUNCTION_MEMBERS, rules)
    name = function.string("name", None)
    if name is None:
        raise function.missing_member("name")
    check_tool_name(function, name, rules)
    if rules.strict and not function.has_value("parameters"):
        raise function.missing_member("parameters")
    parameters = function.free_object("parameters") or {"type": "object", "properties": {}}
    if parameters.get("type", "object") != "object":
        actual = excerpt(parameters["type"])
        raise function.member_error("parameters", f"schema must be an object, but it is of type {actual}.")
    description = function.string("description", None)
    signature = {"name": name} if description is None else {"name": name, "description": description}
    return signature | {"parameters": parameters}


def check_tool_name(function: Fields, name: str, rules: CohereRules) -> None:
    """Refuse the name of a tool that has other characters than the rules allow. Raises InvalidValue."""
    if not (STRICT_TOOL_NAME if rules.strict else TOOL_NAME).fullmatch(name):
        path = function.member_path("name")
        raise InvalidValue(
            "invalid request: tool names can only contain certain characters (A-Za-z0-9_) and can't begin with a "
            f"digit (provided name: {excerpt(name)}): '{path}'",
            field=path,
        )


def read_cohere_sampling(body: Fields, rules: CohereRules) -> SamplingOptions:
    """Read how tokens are drawn; the lenient rules also know the members of the other APIs. Raises BadRequest."""
    if rules.strict:
        if body.raw_value("frequency_penalty") and body.raw_value("presence_penalty"):
            raise InvalidValue(BOTH_PENALTIES, field="presence_penalty")
        return SamplingOptions(
            temperature=body.number("temperature", DEFAULT_TEMPERATURE, 0, 1),
            top_p=body.number("p", DEFAULT_TOP_P, *STRICT_TOP_P),
            top_k=body.integer("k", 0, 0, MAX_TOP_K),
            seed=body.integer("seed", None, 0, MAX_SEED),
            presence_penalty=body.number("presence_penalty", 0.0, 0, 1),
            frequency_penalty=body.number("frequency_penalty", 0.0, 0, 1),
        )
    defaults = {"temperature": DEFAULT_TEMPERATURE, "top_p": DEFAULT_TOP_P}
    sampling = sampling_members.read_sampling(body.with_defaults(defaults), max_temperature=2)
    return msgspec.structs.replace(
        sampling,
        top_p=body.number("p", sampling.top_p, 0, 1),
        top_k=max(0, body.integer("k", sampling.top_k, -1, sampling_members.MAX_TOKEN_ID)),
    )


def read_cohere_stops(body: Fields, rules: CohereRules) -> StopConditions:
    """Read when the answer stops. It may be shorter than ``max_tokens`` if the context has no room. Raises BadRequest.

    A larger ``max_tokens`` than the model can generate means as many as it can.
    """
    cap = STRICT_STOPS if rules.strict else MAX_STOPS
    if rules.strict:
        body.array("stop_sequences", cap=cap)  # one text alone is no list
    max_tokens = body.integer("max_tokens", None, 1, MAX_TOKENS)
    least = 0 if rules.strict else body.integer("min_tokens", 0, 0, MAX_TOKENS)
    return StopConditions(
        strings=body.strings("stop_sequences", cap=cap, total=MAX_STOP_CHARACTERS),
        max_tokens=max_tokens,
        min_tokens=least if max_tokens is None else min(max_tokens, least),
        ignore_eos=not rules.strict and body.boolean("ignore_eos", False),
        reserved_tokens=1,
    )


def read_cohere_format(
    body: Fields, rules: CohereRules, own_name: str = "json_schema", other_name: str = "schema"
) -> Grammar | None:
    """Return the form of the answer: any JSON object, or one that follows a schema; None for text. Raises BadRequest.

    ``own_name``: of the member with the schema in this version of the API; ``other_name``: in the other version. The
    original takes no form together with tools or documents.
    """
    form = body.object("response_format")
    if form is None:
        return None
    check_cohere_members(form, {"type", own_name}, rules)
    form_type = form.string("type", None, allowed=("text", "json_object"))
    if form_type is None:
        raise form.missing_member("type")
    member = own_name if rules.strict or not form.has_value(other_name) else other_name
    schema = read_json_schema(form, member)
    if form_type == "text":
        if schema is not None:
            raise form.member_error(member, "only allowed with type 'json_object'.")
        return None
    for name, feature in (("documents", "RAG"), ("tools", "tools")):
        if rules.strict and body.raw_value(name):
            raise InvalidValue(FORMAT_WITH.format(feature), field="response_format")
    return Grammar("json", ANY_OBJECT_SCHEMA if schema is None else schema, field=form.member_path(member))


class CohereThinking(msgspec.Struct, frozen=True):
    """Whether the model thinks (None: as it does by default), and with how many tokens at most."""

    enabled: bool | None = None
    budget: int | None = None


def read_cohere_thinking(body: Fields, rules: CohereRules) -> CohereThinking:
    """Return how the model thinks. Raises BadRequest."""
    config = body.object("thinking")
    if config is None:
        return CohereThinking()
    check_cohere_members(config, THINKING_MEMBERS, rules)
    kind = config.string("type", None, allowed=("enabled", "disabled"))
    if kind is None:
        raise config.missing_member("type")
    budget = config.integer("token_budget", None, 1, MAX_TOKENS)
    return CohereThinking(True, budget) if kind == "enabled" else CohereThinking(False)


def check_citations(body: Fields, rules: CohereRules) -> None:
    """Refuse to cite, because answers have no citations. Without the member there are none. Raises BadRequest."""
    options = body.object("citation_options")
    if options is None:
        return
    check_cohere_members(options, CITATION_MEMBERS, rules)
    if options.string("mode", "OFF", allowed=CITATION_MODES) not in ("OFF", "DISABLED"):
        raise cohere_value_error(options, "mode", "is not supported by this server, whose answers have no citations.")


def read_safety_mode(body: Fields, context: RequestContext, modes: Sequence[str] = SAFETY_MODES) -> dict[str, Any]:
    """Return the variable of the chat template for the safety mode, where it has one. Raises BadRequest.

    ``modes``: those of this version of the API. Without the variable the model reads no safety instruction, which is
    the last mode; CONTEXTUAL is taken too, as clients send the default.
    """
    mode = body.string("safety_mode", None, allowed=modes)
    if mode is None:
        return {}
    if "safety_mode" in context.abilities:
        return {"safety_mode": mode}
    if mode == "STRICT":
        raise cohere_value_error(
            body, "safety_mode", "is not supported by this model, whose template has no such mode."
        )
    return {}
