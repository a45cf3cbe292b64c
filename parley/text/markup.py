"""The markup of one model: which family it belongs to, by its chat template or by name, and what follows from that.

Knows texts only, no tokens.
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

from .calls import Form
from .families import CALLS, THOUGHTS, Calls, Signs, Thoughts

ALPHABET = string.ascii_letters + string.digits
AUTO, NONE = "auto", "none"  # what an option says instead of a family's name


@dataclass(frozen=True)
class Markup:
    """How the answers of one model are marked: the pair around reasoning, and the forms of tool calls, best first.

    None and empty for what the model cannot do. ``around``, ``again``, ``begun``, ``silent``, ``leads``, ``short`` and
    ``channels`` as in ``families``.
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
        """Is there anything to tell apart?"""
        return self.think is not None or bool(self.calls)

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """All marks. Where special tokens are in them, the text to be parsed must not hide these."""
        found = [*(self.think or ()), *self.silent, *(mark for form in self.calls for mark in form.marks)]
        if self.channels:
            found.append("<|start|><|channel|><|constrain|><|message|><|end|><|call|><|return|>")
        return tuple(dict.fromkeys(found))

    def ids(self, source: str = "") -> Callable[[], str]:
        """Gives ids for the calls of one answer, in the family's form; the same ``source`` gives the same ones, for
        another server may go on with an answer. Without one they are drawn."""
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
    """The markup of the family that a chat template belongs to, told by the marks in it.

    ``tools`` and ``reasoning``: names of families to take instead, "none" to tell nothing apart. Raises ValueError with
    the names that there are.
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
    """All names that rows of a table are known by."""
    return sorted({name for row in rows for name in (row.name, *row.aliases)})


def plain(name: str) -> str:
    """A name as names are compared: people write them with any hyphens and capitals."""
    return name.lower().replace("-", "_")


def _choose(rows: tuple[Any, ...], template: str, name: str) -> Any:
    if name == NONE:
        return None
    if name == AUTO:
        return next((row for row in rows if _fits(row.signs, template)), None)
    for row in rows:
        if plain(name) in map(plain, (row.name, *row.aliases)):
            return row
    raise ValueError(f"There is no family {name!r}; there are {', '.join([AUTO, NONE, *names(rows)])}.")


def _fits(signs: Signs, template: str) -> bool:
    return any(all(sign in template for sign in each) for each in signs)


def begins_thinking(markup: Markup, prompt: str, continued: bool) -> bool:
    """Whether the rendered prompt leaves a reasoning block open for the model to go on in, or one begins anyway.

    ``continued``: the prompt ends inside a turn begun by the client, so the block may hold text already.
    """
    if markup.think is None:
        return False
    opening, closing = markup.think
    if prompt.rstrip().endswith(opening):
        return True
    if markup.begun and not continued:
        return not prompt.rstrip().endswith(closing)
    return continued and prompt.rfind(opening) > prompt.rfind(closing)


# Names under which templates read whether to think, and how much.
SWITCHES = ("enable_thinking", "thinking")
EFFORT = "reasoning_effort"
BUDGET = "thinking_budget"  # in tokens; 0 is off
LEVELS = {"minimal": "low", "xhigh": "high", "max": "high"}  # the nearest of the three that every model with levels has


def switch(
    variables: Collection[str], options: Mapping[str, Any], thinking: bool | None, effort: str | None
) -> dict[str, Any]:
    """The template's options with what a request says of reasoning; what they say themselves stands.

    ``variables``: names that the template reads. ``thinking`` None: as ``effort`` says, else the model's default.
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
