"""``context_management``: what leaves a conversation before the model reads it, and what an answer tells about that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from parley.dialects.anthropic.api_rules import AnthropicRules
from parley.dialects.anthropic.refusal_wording import check_anthropic_members, dotted_path
from parley.dialects.fields import Fields
from parley.dialects.summary_request import ANSWERED_SUMMARY_REQUEST, SUMMARY_HEADING, SUMMARY_REQUEST
from parley.errors import InvalidValue
from parley.types import AppliedEdit, ClearReasoning, ClearToolUses, ContextEdit, SummarizeContext

CLEAR_THINKING, CLEAR_TOOL_USES, COMPACT = "clear_thinking_20251015", "clear_tool_uses_20250919", "compact_20260112"
EDIT_MEMBERS = {
    CLEAR_THINKING: {"type", "keep"},
    CLEAR_TOOL_USES: {"type", "trigger", "keep", "clear_at_least", "exclude_tools", "clear_tool_inputs"},
    COMPACT: {"type", "trigger", "instructions", "pause_after_compaction"},
}
AMOUNT_MEMBERS = {"type", "value"}
MAX_EDITS = 16
MAX_AMOUNT = 2**31 - 1
MAX_TOOL_NAMES, MAX_NAME_CHARACTERS = 1000, 1 << 18
# The original's defaults.
TOOL_TRIGGER, COMPACT_TRIGGER = 100_000, 150_000  # tokens
KEPT_TOOL_USES = 3
KEPT_THINKING_TURNS = 1
MAX_INSTRUCTIONS = 1 << 16  # characters
COMPACTION_MEMBERS = {"type", "instructions"}
# Members that the original refuses in a request for a summary; counts of tokens read only PROMPT_MEMBERS.
PROMPT_MEMBERS = ("context_management", "output_format")
REPLY_MEMBERS = (*PROMPT_MEMBERS, "stop_sequences")
NOT_FIRST = f"context_management.edits: `{CLEAR_THINKING}` must be the first edit"
NOT_THINKING = f"`{CLEAR_THINKING}` strategy requires `thinking` to be enabled or adaptive"


def read_context_edits(body: Fields, rules: AnthropicRules, context_length: int, *, thinks: bool) -> list[ContextEdit]:
    """Return the edits that may change the conversation, in order. ``thinks``: thinking is on. Raises BadRequest."""
    management = body.object("context_management")
    if management is None:
        return []
    check_anthropic_members(management, {"edits"}, rules)
    return list(_read_edits(management, rules, context_length, thinks=thinks))


def applied_edits_object(applied: Sequence[AppliedEdit]) -> dict[str, Any]:
    """Return what an answer tells about the edits of its conversation."""
    cleared = [edit for edit in applied if not isinstance(edit.edit, SummarizeContext)]  # a summary is a block
    return {"applied_edits": [_applied_object(edit) for edit in cleared]}


def _applied_object(applied: AppliedEdit) -> dict[str, Any]:
    kind, count_name = (
        (CLEAR_THINKING, "cleared_thinking_turns")
        if isinstance(applied.edit, ClearReasoning)
        else (CLEAR_TOOL_USES, "cleared_tool_uses")
    )
    return {"type": kind, count_name: applied.cleared, "cleared_input_tokens": applied.cleared_tokens}


def _read_edits(
    management: Fields, rules: AnthropicRules, context_length: int, *, thinks: bool
) -> Iterator[ContextEdit]:
    seen_kinds: set[str] = set()
    for number, edit in enumerate(management.objects("edits", cap=MAX_EDITS)):
        kind = edit.string("type", None, allowed=tuple(EDIT_MEMBERS))
        if kind is None:
            raise edit.missing_member("type")
        check_anthropic_members(edit, EDIT_MEMBERS[kind], rules, kind)
        if kind in seen_kinds:  # each edit may tokenize the whole conversation again
            raise InvalidValue(
                f"{dotted_path(edit.member_path('type'))}: '{kind}' may occur only once", field=edit.member_path("type")
            )
        seen_kinds.add(kind)
        if kind == CLEAR_TOOL_USES:
            yield _read_tool_edit(edit, rules)
        elif kind == CLEAR_THINKING:
            if rules.strict and number:
                raise InvalidValue(NOT_FIRST, field=edit.member_path("type"))
            if rules.strict and not thinks:
                raise InvalidValue(NOT_THINKING, field=edit.member_path("type"))
            if (kept_turns := _read_kept_turns(edit, rules)) is not None:
                yield ClearReasoning(kept_turns)
        elif (summary := _read_summary_edit(edit, rules, context_length)) is not None:
            yield summary


def _read_tool_edit(edit: Fields, rules: AnthropicRules) -> ClearToolUses:
    trigger = edit.object("trigger")
    by_uses = trigger is not None and trigger.raw_value("type") == "tool_uses"
    return ClearToolUses(
        "tool_uses" if by_uses else "tokens",
        _read_amount(edit, "trigger", rules, TOOL_TRIGGER, ("input_tokens", "tool_uses"), least=1),
        _read_amount(edit, "keep", rules, KEPT_TOOL_USES, ("tool_uses",)),
        _read_amount(edit, "clear_at_least", rules, 0, ("input_tokens",)),
        _read_tool_names(edit, "exclude_tools"),
        _read_tool_names(edit, "clear_tool_inputs")
        if isinstance(edit.raw_value("clear_tool_inputs"), list)
        else edit.boolean("clear_tool_inputs", False),
    )


def _read_summary_edit(edit: Fields, rules: AnthropicRules, context_length: int) -> SummarizeContext | None:
    """Return the edit; None if no prompt is as long as its trigger."""
    trigger = _read_amount(edit, "trigger", rules, COMPACT_TRIGGER, ("input_tokens",), least=1)
    instructions = edit.string("instructions", "", cap=MAX_INSTRUCTIONS)
    pauses = edit.boolean("pause_after_compaction", False)
    if 0 < context_length <= trigger:
        return None
    question = SUMMARY_REQUEST if pauses else ANSWERED_SUMMARY_REQUEST
    return SummarizeContext(
        trigger,
        f"{question}\n\n{instructions}" if instructions.strip() else question,
        answer_heading=None if pauses else SUMMARY_HEADING,
    )


def read_compaction(
    body: Fields, rules: AnthropicRules, *, must_call: bool, only_counts: bool
) -> SummarizeContext | None:
    """Read ``compaction``, which asks for a summary in place of a reply. Raises BadRequest.

    ``must_call``: the reply would have to call a tool. ``only_counts``: tokens are counted, which reads no
    ``stop_sequences``.
    """
    compaction = body.object("compaction")
    if compaction is None:
        return None
    check_anthropic_members(compaction, COMPACTION_MEMBERS, rules)
    if compaction.string("type", None, allowed=("summarize",)) is None:
        raise compaction.missing_member("type")
    output_config = body.object("output_config")
    shaping = body.present_names(PROMPT_MEMBERS if only_counts else REPLY_MEMBERS)
    shaping += ["tool_choice"] if must_call else []
    shaping += ["output_config.format"] if output_config is not None and output_config.has_value("format") else []
    if shaping:
        raise InvalidValue(f"{shaping[0]}: cannot be used together with `compaction`", field=shaping[0])
    instructions = compaction.string("instructions", "", cap=MAX_INSTRUCTIONS)
    return SummarizeContext(0, instructions if instructions.strip() else SUMMARY_REQUEST)


def _read_kept_turns(edit: Fields, rules: AnthropicRules) -> int | None:
    """Return how many turns keep their thinking; None: all."""
    if edit.raw_value("keep") == "all":
        return None
    keep = edit.object("keep")
    if keep is not None and keep.raw_value("type") == "all":
        check_anthropic_members(keep, {"type"}, rules)
        return None
    return _read_amount(edit, "keep", rules, KEPT_THINKING_TURNS, ("thinking_turns", "all"), least=1)


def _read_amount(
    edit: Fields, name: str, rules: AnthropicRules, default: int, units: Sequence[str], least: int = 0
) -> int:
    """Return the value of an object that has a unit and a value. Raises BadRequest."""
    amount = edit.object(name)
    if amount is None:
        return default
    check_anthropic_members(amount, AMOUNT_MEMBERS, rules)
    if amount.string("type", None, allowed=units) is None:
        raise amount.missing_member("type")
    value = amount.integer("value", None, least, MAX_AMOUNT)
    if value is None:
        raise amount.missing_member("value")
    return value


def _read_tool_names(edit: Fields, name: str) -> list[str]:
    edit.array(name, cap=MAX_TOOL_NAMES)  # one text alone is no list
    return edit.strings(name, cap=MAX_TOOL_NAMES, total=MAX_NAME_CHARACTERS)
