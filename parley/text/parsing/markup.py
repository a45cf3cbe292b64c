"""The markup of one model: finds its family, by chat template or by name, and derives how its answers are marked.

Handles texts only, no tokens.
"""

from __future__ import annotations

import os
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import count
from typing import Any

from parley.text.parsing.call_families import CALLS
from parley.text.parsing.call_forms import CallFamily, TemplateSigns
from parley.text.parsing.calls import CallForm
from parley.text.parsing.reasoning_families import THOUGHTS, ReasoningFamily

ID_ALPHABET = string.ascii_letters + string.digits
AUTO_FAMILY, NO_FAMILY = "auto", "none"  # option values other than a family's name


@dataclass(frozen=True)
class Markup:
    """How the answers of one model are marked: the pair around reasoning, and the forms of tool calls, best first.

    None or empty if the model has none. The other fields are those of ``CallFamily`` and ``ReasoningFamily``.
    """

    reasoning_marks: tuple[str, str] | None = None
    call_forms: tuple[CallForm, ...] = ()
    answer_wrapper: tuple[str, str] | None = None
    short_call_ids: bool = False
    uses_channels: bool = False
    may_reopen: bool = False
    always_reasons: bool = False
    dropped_marks: tuple[str, ...] = ()
    lead_marks: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def __bool__(self) -> bool:
        """Whether the answer has any marked parts."""
        return self.reasoning_marks is not None or bool(self.call_forms)

    @cached_property
    def without_calls(self) -> Markup:
        """The markup without tool calls."""
        return replace(self, call_forms=())

    @cached_property
    def all_marks(self) -> tuple[str, ...]:
        """Return all marks. A special token in one of them must not be hidden from the text that is parsed."""
        marks = [
            *(self.reasoning_marks or ()),
            *self.dropped_marks,
            *(mark for form in self.call_forms for mark in form.all_marks),
        ]
        if self.uses_channels:
            marks.append("<|start|><|channel|><|constrain|><|message|><|end|><|call|><|return|>")
        return tuple(dict.fromkeys(marks))

    def call_id_source(self, source: str = "") -> Callable[[], str]:
        """Return a function that makes ids for the calls of one answer, in the family's format.

        The same ``source`` gives the same ids, so that another server can continue an answer. Without one the ids are
        random.
        """
        numbers = count()
        source = source or os.urandom(12).hex()

        def new_call_id() -> str:
            digest = blake2b(f"{source} {next(numbers)}".encode(), digest_size=12).digest()
            if self.short_call_ids:
                return "".join(ID_ALPHABET[byte % len(ID_ALPHABET)] for byte in digest[:9])
            return "call_" + digest.hex()

        return new_call_id


UNMARKED = Markup()


def detect_markup(template: str, tools: str = AUTO_FAMILY, reasoning: str = AUTO_FAMILY) -> Markup:
    """Return the markup of the family whose marks occur in a chat template.

    ``tools`` and ``reasoning``: family names to use instead, or "none" to parse no calls or no reasoning. Raises
    ValueError, which lists the known names, for an unknown one.
    """
    calls: CallFamily | None = _find_family(CALLS, template, tools)
    thoughts: ReasoningFamily | None = _find_family(THOUGHTS, template, reasoning)
    return Markup(
        thoughts.marks if thoughts is not None else None,
        calls.forms if calls is not None else (),
        thoughts.answer_wrapper if thoughts is not None else None,
        calls is not None and calls.short_call_ids,
        (calls is not None and calls.uses_channels) or (thoughts is not None and "<|channel|>" in thoughts.marks[0]),
        thoughts is not None and thoughts.may_reopen,
        thoughts is not None and thoughts.always_reasons,
        thoughts.dropped_marks if thoughts is not None else (),
        thoughts.lead_marks if thoughts is not None else ((), ()),
    )


def family_names(rows: tuple[Any, ...]) -> list[str]:
    """Return all names and aliases in the rows of a table, sorted."""
    return sorted({name for row in rows for name in (row.name, *row.aliases)})


def normalize_family_name(name: str) -> str:
    """Return a name in the form used to compare names: lower case, "_" for "-"."""
    return name.lower().replace("-", "_")


def _find_family(rows: tuple[Any, ...], template: str, name: str) -> Any:
    if name == NO_FAMILY:
        return None
    if name == AUTO_FAMILY:
        return next((row for row in rows if _signs_match(row.signs, template)), None)
    for row in rows:
        if normalize_family_name(name) in map(normalize_family_name, (row.name, *row.aliases)):
            return row
    raise ValueError(
        f"Unknown model family {name!r}. It must be one of: {', '.join([AUTO_FAMILY, NO_FAMILY, *family_names(rows)])}."
    )


def _signs_match(signs: TemplateSigns, template: str) -> bool:
    return any(all(sign in template for sign in alternative) for alternative in signs)


def starts_in_reasoning(markup: Markup, prompt: str, continued: bool) -> bool:
    """Whether the answer starts inside reasoning: the prompt leaves a block open, or the model always starts with one.

    ``continued``: the prompt ends inside a turn that the client began, so the block may hold text already.
    """
    if markup.reasoning_marks is None:
        return False
    opening, closing = markup.reasoning_marks
    if prompt.rstrip().endswith(opening):
        return True
    if markup.always_reasons and not continued:
        return not prompt.rstrip().endswith(closing)
    return continued and prompt.rfind(opening) > prompt.rfind(closing)


# Names of the template variables that switch reasoning on and set how much of it there is.
THINKING_SWITCHES = ("enable_thinking", "thinking")
EFFORT_VARIABLE = "reasoning_effort"
BUDGET_VARIABLE = "thinking_budget"  # in tokens; 0 is off
EFFORT_LEVELS = {"minimal": "low", "xhigh": "high", "max": "high"}  # to the nearest of the three levels every model has


def reasoning_options(
    variables: Collection[str], options: Mapping[str, Any], thinking: bool | None, effort: str | None
) -> dict[str, Any]:
    """Return the template's options with a request's reasoning settings added; options that are set already stay.

    ``variables``: names that the template reads. ``thinking`` None: derived from ``effort``, else the model's default.
    """
    if thinking is None and effort is not None:
        thinking = effort != "none"
    settings: dict[str, Any] = {}
    if thinking is not None:
        settings = {name: thinking for name in THINKING_SWITCHES if name in variables}
        if not thinking and BUDGET_VARIABLE in variables:
            settings[BUDGET_VARIABLE] = 0
    if EFFORT_VARIABLE in variables:
        if effort not in (None, "none"):
            settings[EFFORT_VARIABLE] = EFFORT_LEVELS.get(str(effort), effort)
        elif thinking is False and not settings:
            settings[EFFORT_VARIABLE] = "low"
    return {**settings, **options}
