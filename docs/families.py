"""Writes docs/families.md from the tables of model families: ``python docs/families.py`` (or ``make docs``)."""

from __future__ import annotations

from pathlib import Path

from parley.text.calls import Form
from parley.text.families import CALLS, THOUGHTS, Signs

PAGE = Path(__file__).with_name("families.md")

INTRODUCTION = """\
# Families of models

<!-- Made by docs/families.py from parley/text/families.py; change it there. -->

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
* Calls inside reasoning are no calls. Marks inside JSON strings are text.
* Some models that do not reason begin their answer with the mark that ends reasoning; it is dropped.
* Arguments that are not JSON (XML, Python, Gemma's notation) become JSON by the types that the tool's schema declares.
* Where models slip, reading goes on: a value whose end is missing, a quote within a string without a backslash, all
  arguments as one object in a parameter that the tool does not have, marks left out around a block of calls.
* Calls without any mark of their own (Llama's JSON, Python lists) count only where an answer begins, and only if they
  name a tool of the request.
* A grammar holds JSON arguments to the whole schema. Where arguments stand one by one it holds to which there are,
  which must be there, their types, lists of values, lengths and plain patterns; `format` of bare text, and what a
  schema says of several arguments together, are not enforced there.
"""


def written(form: Form) -> str:
    """A call of the form, as a model writes it."""
    before, after = "".join((*form.open, *form.each)), "".join((*form.after, *form.close))
    name = "functions.f:0" if form.numbered else f"id{form.first}f" if form.first else "f"
    head = "".join(form.head)
    body = {
        "object": f'{{"{form.keys[0]}": "f", "{form.keys[1]}": {{"a": 1}}}}',
        "keyed": '{"f": {"a": 1}}',
        "named": f'{name}{head}{{"a": 1}}',
        "tags": f"f{head}{f'1{form.count}' if form.count else ''}{form.key[0]}a{form.key[1]}"
        + (f"{form.kind[0]}number{form.kind[1]}" if form.stated else "")
        + (' string="false">' if form.typed else "")
        + f"{form.value[0]}1{form.value[1]}",
        "elements": f"f{head}{form.key[0]}a{form.key[1]}1{form.value[1]}a{form.key[1]}",
        "python": "f(a=1)",
        "loose": "f{a:1}",
    }[form.shape]
    return before + body + after


def cell(text: str) -> str:
    text = text.strip().replace("\n", "↵").replace("|", r"\|")
    return f"````` {text} `````" if "`" in text else f"`{text}`"


def told(signs: Signs) -> str:
    return " or ".join(" and ".join(map(cell, each)) for each in signs)


def page() -> str:
    rows = [INTRODUCTION, "## Tool calls\n", "| Name | A call | Told by |", "|---|---|---|"]
    for row in CALLS:
        names = ", ".join(f"`{name}`" for name in (row.name, *row.aliases))
        rows.append(f"| {names} | {'<br>'.join(cell(written(form)) for form in row.forms)} | {told(row.signs)} |")
    rows += ["\n(↵ stands for a line break. Of several forms all are read and the first is written.)\n"]
    rows += ["## Reasoning\n", "| Name | Marks | Told by |", "|---|---|---|"]
    for thoughts in THOUGHTS:
        names = ", ".join(f"`{name}`" for name in (thoughts.name, *thoughts.aliases))
        marks = " … ".join(map(cell, (*thoughts.marks, *(thoughts.around or ()))))
        rows.append(f"| {names} | {marks} | {told(thoughts.signs) or 'its name; an answer begins with reasoning'} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
