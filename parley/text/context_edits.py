"""Applies the edits that a conversation carries, before the model reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from parley.text.prepared_prompt import AnswerAfterSummary, PreparedPrompt
from parley.types import (
    AppliedEdit,
    ChatPrompt,
    ClearReasoning,
    ClearToolUses,
    Message,
    PlacedMedia,
    ProcessedMedia,
    SummarizeContext,
)

# Stands in place of a result, so that the model knows that there was one.
CLEARED_RESULT = "[Old tool result cleared]"
NO_ARGUMENTS = "{}"

PrepareChat = Callable[[ChatPrompt, Sequence[ProcessedMedia]], PreparedPrompt]


class EditedPrompt(NamedTuple):
    """A prompt after its edits. ``original_tokens``: what it had before them."""

    prepared: PreparedPrompt
    original_tokens: int
    applied: list[AppliedEdit]


class ToolUse(NamedTuple):
    """A call and its result, by their positions: messages, and the call within its message."""

    name: str
    message: int
    call: int
    result: int


def prepare_edited(chat: ChatPrompt, media: Sequence[ProcessedMedia], prepare: PrepareChat) -> EditedPrompt:
    """Apply the edits of a conversation in their order, each to the result of those before it. A summary comes last.

    ``prepare`` tokenizes a conversation with its media. It is called once, and again for each edit that has something
    to clear, so that the numbers of tokens are those that the model reads.
    """
    item_of = {id(placed): item for placed, item in zip(_placed_media(chat), media, strict=True)}

    def prepare_version(messages: list[Message], **members: Any) -> PreparedPrompt:
        version = replace(chat, messages=messages, edits=[], **members)
        return prepare(version, [item_of[id(placed)] for placed in _placed_media(version)])

    messages, prepared, applied = chat.messages, prepare_version(chat.messages), []
    original_tokens = len(prepared.token_ids)
    for edit in chat.edits:
        tokens = len(prepared.token_ids)
        if isinstance(edit, SummarizeContext):
            if tokens > edit.threshold:
                answer = None
                if edit.answer_heading is not None:
                    unedited = replace(chat, messages=messages, edits=[])
                    without_turns = prepare_version(summarized_messages(unedited, edit.answer_heading, ""))
                    spared_tokens = tokens - len(without_turns.token_ids)
                    if spared_tokens < 1:
                        break
                    answer = AnswerAfterSummary(unedited, edit.answer_heading, prepared, spared_tokens)
                asking = prepare_version(**question_members(messages, edit))
                prepared = dataclasses.replace(asking, answer=answer)
                applied.append(AppliedEdit(edit))
            break
        if isinstance(edit, ClearReasoning):
            edited_messages, cleared, least = *clear_reasoning(messages, edit), 0
        else:
            edited_messages, cleared, least = *clear_tool_uses(messages, edit, tokens), edit.min_cleared_tokens
        if not cleared:
            continue
        edited = prepare_version(edited_messages)
        cleared_tokens = tokens - len(edited.token_ids)
        if cleared_tokens >= least:
            messages, prepared = edited_messages, edited
            applied.append(AppliedEdit(edit, cleared, max(0, cleared_tokens)))
    return EditedPrompt(prepared, original_tokens, applied)


def asks_for_summary(applied: Sequence[AppliedEdit]) -> bool:
    """Whether the prompt asks for a summary after these edits."""
    return any(isinstance(edit.edit, SummarizeContext) for edit in applied)


def question_members(messages: Sequence[Message], edit: SummarizeContext) -> dict[str, Any]:
    """Return the members of a conversation that ends with the question for its summary. Its tools stay visible, so that
    its beginning is that of the conversation itself."""
    question, last = Message("user", edit.question), messages[-1] if messages else None
    if last is not None and last.role == "user":
        question = replace(last, content=f"{last.content}\n\n{edit.question}" if last.content else edit.question)
        messages = messages[:-1]
    return {
        "messages": [*messages, question],
        "tool_choice": "none",
        "forced_tool": None,
        "add_generation_prompt": True,
        "continue_final": False,
    }


def summarized_messages(chat: ChatPrompt, heading: str, summary: str) -> list[Message]:
    """Return the messages of a conversation with a summary in place of its turns. It keeps the system prompt, and the
    assistant's turn that the model is to continue."""
    system = chat.messages[:1] if chat.messages and chat.messages[0].role == "system" else []
    continued = chat.messages[-1:] if chat.continue_final else []
    return [*system, Message("user", f"{heading}\n{summary}"), *continued]


def clear_tool_uses(messages: list[Message], edit: ClearToolUses, tokens: int) -> tuple[list[Message], int]:
    """Return the messages after the edit, and how many calls it cleared. ``tokens``: of the prompt before it."""
    uses = find_tool_uses(messages)
    if (tokens if edit.trigger == "tokens" else len(uses)) <= edit.threshold:
        return messages, 0
    old_uses = uses[: max(0, len(uses) - edit.kept_uses)]
    excluded_tools = set(edit.excluded_tools)
    cleared_uses = [use for use in old_uses if use.name not in excluded_tools]
    cleared_inputs = set() if isinstance(edit.cleared_inputs, bool) else set(edit.cleared_inputs)
    edited = list(messages)
    emptied_calls: dict[int, set[int]] = {}  # by message, which may have very many calls
    for use in cleared_uses:
        edited[use.result] = replace(messages[use.result], content=CLEARED_RESULT, media=[])
        if edit.cleared_inputs is True or use.name in cleared_inputs:
            emptied_calls.setdefault(use.message, set()).add(use.call)
    for number, emptied in emptied_calls.items():
        calls = [
            replace(call, arguments=NO_ARGUMENTS) if index in emptied else call
            for index, call in enumerate(messages[number].tool_calls)
        ]
        edited[number] = replace(messages[number], tool_calls=calls)
    return list(_without_result_media(edited, {use.result for use in cleared_uses})), len(cleared_uses)


def find_tool_uses(messages: Sequence[Message]) -> list[ToolUse]:
    """Return the calls with results, in the order of the results. A call that is answered twice counts once."""
    uses: list[ToolUse] = []
    open_calls: dict[str, tuple[str, int, int]] = {}
    for number, message in enumerate(messages):
        for index, call in enumerate(message.tool_calls):
            open_calls[call.id] = call.name, number, index
        call_id = message.tool_call_id if message.role == "tool" else None
        if call_id is not None and (call_place := open_calls.pop(call_id, None)) is not None:
            uses.append(ToolUse(*call_place, result=number))
    return uses


def clear_reasoning(messages: list[Message], edit: ClearReasoning) -> tuple[list[Message], int]:
    """Return the messages after the edit, and the number of turns that it cleared."""
    turns: list[list[int]] = []  # the messages with reasoning, by turns
    continues = follows_result = False
    for number, message in enumerate(messages):
        if message.role == "user":
            continues = continues and follows_result
        elif message.reasoning:
            if not continues:
                turns.append([])
            turns[-1].append(number)
            continues = True
        follows_result = message.role == "tool"
    cleared_turns = turns[: max(0, len(turns) - edit.kept_turns)]
    edited = list(messages)
    for number in (number for turn in cleared_turns for number in turn):
        edited[number] = replace(messages[number], reasoning=None)
    return edited, len(cleared_turns)


def _without_result_media(messages: Sequence[Message], cleared_results: set[int]) -> Iterator[Message]:
    """Yield the messages without media of cleared results, which stand in the message after them, and without messages
    that had nothing else."""
    cleared_by_id: dict[str | None, bool] = {None: False}  # an id may be ""; the user's own media have none
    for number, message in enumerate(messages):
        if message.role == "tool" and message.tool_call_id is not None:
            cleared_by_id[message.tool_call_id] = number in cleared_results
        elif any(cleared_by_id.get(placed.tool_call_id) for placed in message.media):
            kept = [placed for placed in message.media if not cleared_by_id.get(placed.tool_call_id)]
            if kept or message.content:
                yield replace(message, media=kept)
            continue
        yield message


def _placed_media(chat: ChatPrompt) -> list[PlacedMedia]:
    return [placed for message in chat.messages for placed in message.media]
