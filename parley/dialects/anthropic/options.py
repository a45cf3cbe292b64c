"""Members other than the conversation: thinking, form of the answer, sampling, and those without effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from parley.dialects import sampling_members
from parley.dialects.anthropic.api_rules import AnthropicRules
from parley.dialects.anthropic.blocks import BlockReader
from parley.dialects.anthropic.error_answers import UNSUPPORTED_THREAD
from parley.dialects.anthropic.refusal_wording import anthropic_value_error, check_anthropic_members, dotted_path
from parley.dialects.fields import Fields
from parley.dialects.output_constraints import read_json_schema
from parley.dialects.sampling_members import MAX_STOP_CHARACTERS, MAX_STOPS, MAX_TOKEN_ID
from parley.errors import InvalidValue, Unsupported
from parley.types import Grammar, SamplingOptions, StopConditions

MAX_TOKENS = 2**31 - 1
MAX_USER_ID = 256  # characters; strict only, because Claude Code's is longer
MIN_BUDGET = 1024  # tokens of thinking that the original takes
EFFORTS = ("low", "medium", "high", "xhigh", "max")
THINKING_TYPES = ("enabled", "disabled", "adaptive", "between_tools")
THINKING_DISPLAYS = ("summarized", "omitted", "updates")  # updates: Claude Code's; it gets the thinking
THINKING_MEMBERS = {"type", "budget_tokens", "display"}
OUTPUT_MEMBERS = {"effort", "format", "task_budget"}
FORMAT_MEMBERS = {"type", "schema"}
FORCED_THINKING = "Thinking may not be enabled when tool_choice forces tool use."
SHARED_MEMBERS = {  # of the body, also where only tokens are counted
    "model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format",
    "cache_control", "context_management", "mcp_servers", "speed", "compaction", "billing_policy", "user_profile_id",
    "workspace_id", "betas",
}  # fmt: skip
CREATE_MEMBERS = SHARED_MEMBERS | {
    "max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k", "metadata", "service_tier",
    "inference_geo", "container", "diagnostics", "fallbacks", "fallback_credit_token", "thread",
}  # fmt: skip


class AnthropicThinking(msgspec.Struct, frozen=True):
    """Whether the model thinks, with how many tokens at most, and whether the client sees it."""

    enabled: bool = False
    budget: int | None = None
    omitted: bool = False


def read_anthropic_thinking(
    body: Fields, rules: AnthropicRules, max_tokens: int | None, *, forced_call: bool
) -> AnthropicThinking:
    """Return how the model thinks. ``forced_call``: the answer must call a tool, so it does not. Raises BadRequest."""
    config = body.object("thinking")
    if config is None:
        return AnthropicThinking()
    kind = config.string("type", None, allowed=THINKING_TYPES)
    if kind is None:
        raise config.missing_member("type")
    check_anthropic_members(config, THINKING_MEMBERS, rules, kind)
    omitted = config.string("display", "summarized", allowed=THINKING_DISPLAYS) == "omitted"
    budget = config.integer("budget_tokens", None, MIN_BUDGET if rules.strict else 1, MAX_TOKENS)
    if kind == "disabled":
        return AnthropicThinking()
    if kind == "enabled" and budget is None:
        raise config.missing_member("budget_tokens")
    if rules.strict and budget is not None and max_tokens is not None and budget >= max_tokens:
        raise InvalidValue("`max_tokens` must be greater than `thinking.budget_tokens`.", field="max_tokens")
    if forced_call and rules.strict:
        raise InvalidValue(FORCED_THINKING, field="thinking")
    return (
        AnthropicThinking() if forced_call else AnthropicThinking(True, budget if kind == "enabled" else None, omitted)
    )


class AnthropicOutputForm(msgspec.Struct, frozen=True):
    """The effort of the answer, and the grammar that it follows."""

    effort: str | None = None
    grammar: Grammar | None = None


def read_output_form(body: Fields, rules: AnthropicRules) -> AnthropicOutputForm:
    """Read ``output_config``, and ``output_format``, its older spelling. Raises BadRequest."""
    old_format = _read_format(body, "output_format", rules)
    config = body.object("output_config")
    if config is None:
        return AnthropicOutputForm(grammar=old_format)
    check_anthropic_members(config, OUTPUT_MEMBERS, rules)
    config.free_object("task_budget")  # advice to models that know it
    return AnthropicOutputForm(
        config.string("effort", None, allowed=EFFORTS), _read_format(config, "format", rules) or old_format
    )


def _read_format(fields: Fields, name: str, rules: AnthropicRules) -> Grammar | None:
    form = fields.object(name)
    if form is None:
        return None
    check_anthropic_members(form, FORMAT_MEMBERS, rules)
    if form.string("type", None, allowed=("json_schema",)) is None:
        raise form.missing_member("type")
    schema = read_json_schema(form, "schema")
    if schema is None:
        raise form.missing_member("schema")
    return Grammar("json", schema, field=form.member_path("schema"))


def read_anthropic_sampling(body: Fields, rules: AnthropicRules) -> SamplingOptions:
    """Read how tokens are drawn; the lenient rules also know the members of the other APIs. Raises BadRequest."""
    if not rules.strict:
        return sampling_members.read_sampling(body, max_temperature=2)
    return SamplingOptions(
        temperature=body.number("temperature", 1.0, 0, 1),
        top_p=body.number("top_p", 1.0, 0, 1),
        top_k=body.integer("top_k", 0, 0, MAX_TOKEN_ID),
    )


def read_anthropic_stops(body: Fields, rules: AnthropicRules, max_tokens: int) -> StopConditions:
    """Read when the answer stops. It may be shorter than ``max_tokens`` if the context has no room. Raises BadRequest.

    Clients send the same ``max_tokens`` to every model, even above its context length.
    """
    if rules.strict:
        body.array("stop_sequences", cap=MAX_STOPS)  # one text alone is no list
    sequences = body.strings("stop_sequences", cap=MAX_STOPS, total=MAX_STOP_CHARACTERS)
    if rules.strict and not all(map(str.strip, sequences)):
        raise body.member_error("stop_sequences", "each stop sequence must contain non-whitespace")
    return StopConditions(
        strings=sequences,
        max_tokens=max_tokens,
        min_tokens=0 if rules.strict else min(max_tokens, body.integer("min_tokens", 0, 0, MAX_TOKENS)),
        ignore_eos=not rules.strict and body.boolean("ignore_eos", False),
        reserved_tokens=1,
    )


# -- members for features that only the original has


def _refuse_content(body: Fields, name: str) -> None:
    """Refuse a member that would change the answer, unless it is empty. Raises Unsupported."""
    if body.raw_value(name):
        raise Unsupported(f"{dotted_path(name)}: not supported by this server", field=body.member_path(name))


def _refuse_thread(body: Fields, name: str) -> None:
    """Refuse to hold a conversation between requests, so that Anthropic's SDKs send it whole. Raises Unsupported."""
    if body.raw_value(name):
        message = f"{name}: not supported by this server; send the whole conversation"
        raise Unsupported(message, field=name, code=UNSUPPORTED_THREAD)


def _check_text(body: Fields, name: str) -> None:
    body.string(name, None, cap=4096)


def _check_object(body: Fields, name: str) -> None:
    body.free_object(name)


OTHER_MEMBERS: dict[str, Callable[[Fields, str], Any]] = {
    "container": _refuse_content,
    "mcp_servers": _refuse_content,
    "thread": _refuse_thread,
    "diagnostics": _check_object,
    "billing_policy": _check_object,
    "inference_geo": _check_text,
    "service_tier": lambda body, name: body.string(name, None, allowed=("auto", "standard_only")),
}


def check_other_members(body: Fields, blocks: BlockReader) -> None:
    """Check the members that do nothing here, and refuse those that would change the answer. Raises BadRequest."""
    rules = blocks.rules
    for name in body.present_names(OTHER_MEMBERS):
        OTHER_MEMBERS[name](body, name)
    if body.string("speed", "standard", allowed=("standard", "fast")) == "fast" and rules.strict:
        raise anthropic_value_error(body, "speed", "fast")
    blocks.read_cache_control(body)
    metadata = body.object("metadata")
    if metadata is not None:
        check_anthropic_members(metadata, {"user_id"}, rules)
        metadata.string("user_id", None, cap=MAX_USER_ID if rules.strict else None)
