"""Families of models: how each writes reasoning and tool calls, as data, and how a chat template tells which it is.

A model has one row of ``CALLS`` and one of ``THOUGHTS``, found apart from each other. Names that other servers have for
the same thing are listed with each. Knows texts only, no tokens.
"""

from __future__ import annotations

import os
import string
from dataclasses import dataclass
from functools import cached_property

from .calls import Form

FIRST = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Markup:
    """How the answers of one model are marked: the pair around reasoning, and the forms of tool calls, best first.

    None and empty for what the model cannot do. Of forms with the same trigger the first that fits is read; the first
    of all is the one that grammars make a model write. ``short``: ids of calls have nine letters and digits.
    """

    think: tuple[str, str] | None = None
    calls: tuple[Form, ...] = ()
    short: bool = False

    def __bool__(self) -> bool:
        """Is there anything to tell apart?"""
        return self.think is not None or bool(self.calls)

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """All marks. Where special tokens are in them, the text to be parsed must not hide these."""
        found = [*(self.think or ()), *(mark for form in self.calls for mark in form.marks)]
        return tuple(dict.fromkeys(found))

    def new_id(self) -> str:
        """An id for a call, in the family's form."""
        if self.short:
            return "".join(FIRST[byte % len(FIRST)] for byte in os.urandom(9))
        return "call_" + os.urandom(12).hex()


PLAIN = Markup()


@dataclass(frozen=True)
class Calls:
    """A way of writing calls. ``signs``: a template that has all the texts of one of them belongs to it."""

    name: str
    forms: tuple[Form, ...]
    signs: tuple[tuple[str, ...], ...]
    aliases: tuple[str, ...] = ()
    short: bool = False


@dataclass(frozen=True)
class Thoughts:
    """A way of marking reasoning. ``signs`` as in ``Calls``."""

    name: str
    marks: tuple[str, str]
    signs: tuple[tuple[str, ...], ...]
    aliases: tuple[str, ...] = ()


HERMES = (Form(each=("<tool_call>\n",), after=("\n</tool_call>",), between="\n"),)
LLAMA = (
    Form(keys=("name", "parameters"), between="; ", bare=True),
    Form(open=("<|python_tag|>",), keys=("name", "parameters"), between="; "),
)
MISTRAL_LIST = Form(open=("[TOOL_CALLS]", "["), between=", ", close=("]",))
MISTRAL_ARGS = Form("named", each=("[TOOL_CALLS]",), id="[CALL_ID]", head=("[ARGS]",))
MISTRAL_BASE = Form(open=("[TOOL_CALLS]",))
DEEPSEEK_BEGIN, DEEPSEEK_END = ("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁end｜>",)
DEEPSEEK_V3 = Form(
    "named",
    open=DEEPSEEK_BEGIN,
    each=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>",),
    head=("\n```json\n",),
    after=("\n```", "<｜tool▁call▁end｜>"),
    between="\n",
    close=DEEPSEEK_END,
)
DEEPSEEK_V31 = Form(
    "named",
    open=DEEPSEEK_BEGIN,
    each=("<｜tool▁call▁begin｜>",),
    head=("<｜tool▁sep｜>",),
    after=("<｜tool▁call▁end｜>",),
    close=DEEPSEEK_END,
)

# The first row whose signs a template has is taken.
CALLS = (
    Calls(
        "deepseek_v3",
        (DEEPSEEK_V3, DEEPSEEK_V31),
        (("<｜tool▁calls▁begin｜>", "```json"),),
        aliases=("deepseek-v3", "deepseekv3", "deepseek_r1"),
    ),
    Calls(
        "deepseek_v31",
        (DEEPSEEK_V31, DEEPSEEK_V3),
        (("<｜tool▁calls▁begin｜>",),),
        aliases=("deepseekv31",),
    ),
    Calls(
        "mistral",
        (MISTRAL_ARGS, MISTRAL_LIST, MISTRAL_BASE),
        (("[TOOL_CALLS]", "[ARGS]"),),
        short=True,
    ),
    Calls(
        "mistral_v3",
        (MISTRAL_LIST, MISTRAL_BASE, MISTRAL_ARGS),
        (("[TOOL_CALLS]",),),
        aliases=("mistral_old",),
        short=True,
    ),
    Calls(
        "llama3_json",
        LLAMA,
        (("<|python_tag|>", "<|start_header_id|>"), ("<|start_header_id|>", '"parameters"', "ipython")),
        aliases=("llama3", "llama_3", "llama3.1", "llama4_json"),
    ),
    Calls("hermes", HERMES, (("<tool_call>",),), aliases=("qwen", "qwen25", "qwen2_5", "qwen3")),
)

THOUGHTS = (
    Thoughts("mistral", ("[THINK]", "[/THINK]"), (("[THINK]",),)),
    Thoughts(
        "qwen3",
        ("<think>", "</think>"),
        (("<think>",), ("</think>",)),
        aliases=("deepseek_r1", "deepseek-r1", "deepseek_v3", "think"),
    ),
)

UNKNOWN = ("<function=", "<arg_key>")  # marks of forms that are not known, within those of a form that is


def detect(template: str) -> Markup:
    """The markup of the family that a chat template belongs to, told by the marks in it."""
    calls = next((row for row in CALLS if _fits(row.signs, template)), None)
    if calls is not None and calls.name == "hermes" and any(mark in template for mark in UNKNOWN):
        calls = None
    thoughts = next((row for row in THOUGHTS if _fits(row.signs, template)), None)
    return Markup(
        thoughts.marks if thoughts is not None else None,
        calls.forms if calls is not None else (),
        calls.short if calls is not None else False,
    )


def _fits(signs: tuple[tuple[str, ...], ...], template: str) -> bool:
    return any(all(sign in template for sign in each) for each in signs)


def begins_thinking(markup: Markup, prompt: str, continued: bool) -> bool:
    """Whether the rendered prompt leaves a reasoning block open for the model to go on in.

    ``continued``: the prompt ends inside a turn begun by the client, so the block may hold text already.
    """
    if markup.think is None:
        return False
    opening, closing = markup.think
    if prompt.rstrip().endswith(opening):
        return True
    return continued and prompt.rfind(opening) > prompt.rfind(closing)
