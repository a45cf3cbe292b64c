"""Writes what is made from the tables of model families: ``python docs/families.py`` (or ``make docs``).

It writes the page docs/families.md, and the names that options accept, parley/settings/families.json.
"""

from __future__ import annotations

import json
from pathlib import Path

from parley.text.parsing.calls import writer
from parley.text.parsing.families import CALLS, THOUGHTS, TemplateSigns
from parley.text.parsing.markup import family_names

CALL = ("id", "f", {"a": 1})  # how each form writes it is shown

PAGE = Path(__file__).with_name("families.md")
NAMES = Path(__file__).parents[1] / "parley" / "settings" / "families.json"

INTRODUCTION = """\
# Families of models

<!-- Made by docs/families.py from parley/text/parsing/families.py; change it there. -->

Models write reasoning and tool calls in ways of their own. parley reads each of these while it arrives and gives it
out in the form of whatever API is spoken: reasoning apart from content, calls with names and JSON arguments, piece by
piece. It writes them as well: where a call is forced, or a tool is `strict`, a grammar in the model's own form holds
the model to it.

Which family a model belongs to is told by its chat template: the first row of each table whose signs stand in it. Where
that is not enough, `--tool-parser` and `--reasoning-parser` take any name below; `none` leaves everything as text. A
row stands for several names where servers call the same form differently.

What holds for all of them:

* However tokens cut an answer, the events are the same, and arguments come while they are written.
* What looks like a call and is none stays content, marks and all. Once its name is known a call is announced; what
  comes then is passed on as arguments even if it is broken or cut off.
* Calls inside reasoning are no calls, unless the answer ends with them and nothing has ended the reasoning: some models
  call without having done so. Until that is clear they are held. Marks inside JSON strings are text.
* Some models that do not reason begin their answer with the mark that ends reasoning; it is dropped.
* Arguments that are not JSON (XML, Python, Gemma's notation) become JSON by the types that the tool's schema declares.
* Where models slip, reading goes on: a value whose end is missing, a quote within a string without a backslash, all
  arguments as one object in a parameter that the tool does not have, or as the text of one, marks left out around a
  block of calls.
* Calls without any mark of their own (Llama's JSON, Python lists) count only where an answer begins, and only if they
  name a tool of the request.
* A grammar holds JSON arguments to the whole schema. Where arguments stand one by one it holds to which there are,
  which must be there, their types, lists of values, lengths and plain patterns; `format` of bare text, and what a
  schema says of several arguments together, are not enforced there.
"""


def cell(text: str) -> str:
    text = text.strip().replace("\n", "↵").replace("|", r"\|")
    return f"````` {text} `````" if "`" in text else f"`{text}`"


def told(signs: TemplateSigns) -> str:
    return " or ".join(" and ".join(map(cell, each)) for each in signs)


def page() -> str:
    rows = [INTRODUCTION, "## Tool calls\n", "| Name | A call | Told by |", "|---|---|---|"]
    for row in CALLS:
        called = ", ".join(f"`{name}`" for name in (row.name, *row.aliases))
        forms = "<br>".join(cell(writer(form, [CALL])) for form in row.forms)
        rows.append(f"| {called} | {forms} | {told(row.signs)} |")
    rows += ["\n(↵ stands for a line break. Of several forms all are read and the first is written.)\n"]
    rows += ["## Reasoning\n", "| Name | Marks | Told by |", "|---|---|---|"]
    for thoughts in THOUGHTS:
        called = ", ".join(f"`{name}`" for name in (thoughts.name, *thoughts.aliases))
        marks = " … ".join(map(cell, (*thoughts.marks, *(thoughts.answer_wrapper or ()))))
        rows.append(f"| {called} | {marks} | {told(thoughts.signs) or 'its name; an answer begins with reasoning'} |")
    return "\n".join(rows) + "\n"


def known() -> str:
    """The names of all families as the JSON that ``parley.settings.families`` reads."""
    return json.dumps({"calls": family_names(CALLS), "thoughts": family_names(THOUGHTS)}, indent=1) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    NAMES.write_text(known(), "utf-8")
