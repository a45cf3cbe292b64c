"""Edits of a conversation before it is tokenized: old results of tools or old reasoning leave it, or a summary of it
is asked for."""

from __future__ import annotations

from typing import Literal

import msgspec


class ClearToolUses(msgspec.Struct, frozen=True):
    """Replace the results of the oldest tool calls by a short text.

    It happens when the conversation has more than ``threshold`` tokens ("tokens") or calls ("tool_uses"), and removes
    ``min_cleared_tokens`` or more. The last ``kept_uses`` calls keep their results, and so do those of
    ``excluded_tools``. ``cleared_inputs``: the arguments of the calls go as well: of all of them, or those to the named
    tools. A call counts once it has a result.
    """

    trigger: Literal["tokens", "tool_uses"]
    threshold: int
    kept_uses: int
    min_cleared_tokens: int = 0
    excluded_tools: list[str] = []
    cleared_inputs: bool | list[str] = False


class ClearReasoning(msgspec.Struct, frozen=True):
    """Remove the reasoning of all but the last ``kept_turns`` turns of the assistant that have some.

    A turn goes from one message of the user to the next: with calls in it, it has several messages. What the user says
    together with results of calls does not end it.
    """

    kept_turns: int


class SummarizeContext(msgspec.Struct, frozen=True):
    """Ask for a summary instead of an answer, or before it, if the conversation has more than ``threshold`` tokens.

    ``question``: the text that asks the model for it. The summary follows no response format and calls no tools.
    ``answer_heading``: None: the summary is the answer. Else the answer follows: to a conversation where the summary
    stands for all turns, in a message of the user that begins with this text.
    """

    threshold: int
    question: str
    answer_heading: str | None = None


ContextEdit = ClearToolUses | ClearReasoning | SummarizeContext


class AppliedEdit(msgspec.Struct, frozen=True):
    """An edit that changed a conversation: ``cleared`` calls or turns, and ``cleared_tokens`` fewer in the prompt."""

    edit: ContextEdit
    cleared: int = 0
    cleared_tokens: int = 0
