"""The markup of one model: finds its family, by chat template or by name, and derives how its answers are marked.

Handles texts only, no tokens.
"""

from __future__ import annotations

import os
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import count
from typing import Any

from parley.text.parsing.calls import Form
from parley.text.parsing.families import CALLS, THOUGHTS, Calls, Signs, Thoughts

ALPHABET = string.ascii_letters + string.digits
AUTO, NONE = "auto", "none"  # option values other than a family's name


@dataclass(frozen=True)
class Markup:
    """How the answers of one model are marked: the pair around reasoning, and the forms of tool calls, best first.

    None or empty if the model has none. The other fields have the meaning they have in ``families``.
    """

    think: tuple[str, str] | None = None
    calls: tuple[Form, ...] = ()
    around: tuple[str, str] | None = None
    short: bool = False
    channels: bool = False
    again: bool = False
    begun: bool = False
    silent: tuple[str, ...] = ()
    leads: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def __bool__(self) -> bool:
        """Whether the answer has any marked parts."""
        return self.think is not None or bool(self.calls)

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """Return all marks. A special token in one of them must not be hidden from the text that is parsed."""
        found = [*(self.think or ()), *self.silent, *(mark for form in self.calls for mark in form.marks)]
        if self.channels:
            found.append("<|start|><|channel|><|constrain|><|message|><|end|><|call|><|return|>")
        return tuple(dict.fromkeys(found))

    def ids(self, source: str = "") -> Callable[[], str]:
        """Return a function that makes ids for the calls of one answer, in the family's format.

        The same ``source`` gives the same ids, so that another server can continue an answer. Without one the ids are
        random.
        """
        numbers = count()
        source = source or os.urandom(12).hex()

        def new() -> str:
            drawn = blake2b(f"{source} {next(numbers)}".encode(), digest_size=12).digest()
            if self.short:
                return "".join(ALPHABET[byte % len(ALPHABET)] for byte in drawn[:9])
            return "call_" + drawn.hex()

        return new


PLAIN = Markup()


def detect(template: str, tools: str = AUTO, reasoning: str = AUTO) -> Markup:
    """Return the markup of the family whose marks occur in a chat template.

    ``tools`` and ``reasoning``: family names to use instead, or "none" to parse no calls or no reasoning. Raises
    ValueError, which lists the known names, for an unknown one.
    """
    calls: Calls | None = _choose(CALLS, template, tools)
    thoughts: Thoughts | None = _choose(THOUGHTS, template, reasoning)
    return Markup(
        thoughts.marks if thoughts is not None else None,
        calls.forms if calls is not None else (),
        thoughts.around if thoughts is not None else None,
        calls is not None and calls.short,
        (calls is not None and calls.channels) or (thoughts is not None and "<|channel|>" in thoughts.marks[0]),
        thoughts is not None and thoughts.again,
        thoughts is not None and thoughts.begun,
        thoughts.silent if thoughts is not None else (),
        thoughts.leads if thoughts is not None else ((), ()),
    )


def names(rows: tuple[Any, ...]) -> list[str]:
    """Return all names and aliases in the rows of a table, sorted."""
    return sorted({name for row in rows for name in (row.name, *row.aliases)})


def plain(name: str) -> str:
    """Return a name in the form used to compare names: lower case, "_" for "-"."""
    return name.lower().replace("-", "_")


def _choose(rows: tuple[Any, ...], template: str, name: str) -> Any:
    if name == NONE:
        return None
    if name == AUTO:
        return next((row for row in rows if _fits(row.signs, template)), None)
    for row in rows:
        if plain(name) in map(plain, (row.name, *row.aliases)):
            return row
    raise ValueError(f"Unknown model family {name!r}. It must be one of: {', '.join([AUTO, NONE, *names(rows)])}.")


def _fits(signs: Signs, template: str) -> bool:
    return any(all(sign in template for sign in each) for each in signs)


def begins_thinking(markup: Markup, prompt: str, continued: bool) -> bool:
    """Whether the answer starts inside reasoning: the prompt leaves a block open, or the model always starts with one.

    ``continued``: the prompt ends inside a turn that the client began, so the block may hold text already.
    """
    if markup.think is None:
        return False
    opening, closing = markup.think
    if prompt.rstrip().endswith(opening):
        return True
    if markup.begun and not continued:
        return not prompt.rstrip().endswith(closing)
    return continued and prompt.rfind(opening) > prompt.rfind(closing)


# Names of the template variables that switch reasoning on and set how much of it there is.
SWITCHES = ("enable_thinking", "thinking")
EFFORT = "reasoning_effort"
BUDGET = "thinking_budget"  # in tokens; 0 is off
LEVELS = {"minimal": "low", "xhigh": "high", "max": "high"}  # to the nearest of the three levels every model has


def switch(
    variables: Collection[str], options: Mapping[str, Any], thinking: bool | None, effort: str | None
) -> dict[str, Any]:
    """Return the template's options with a request's reasoning settings added; options that are set already stay.

    ``variables``: names that the template reads. ``thinking`` None: derived from ``effort``, else the model's default.
    """
    if thinking is None and effort is not None:
        thinking = effort != "none"
    said: dict[str, Any] = {}
    if thinking is not None:
        said = {name: thinking for name in SWITCHES if name in variables}
        if not thinking and BUDGET in variables:
            said[BUDGET] = 0
    if EFFORT in variables:
        if effort not in (None, "none"):
            said[EFFORT] = LEVELS.get(str(effort), effort)
        elif thinking is False and not said:
            said[EFFORT] = "low"
    return {**said, **options}
