"""Writes two files from the tables of model families: ``python docs/families.py`` (or ``make docs``).

They are the page docs/families.md and parley/settings/families.json, which has the names that options accept.
"""

from __future__ import annotations

import json
from pathlib import Path

from parley.text.parsing.call_families import CALLS
from parley.text.parsing.call_forms import TemplateSigns
from parley.text.parsing.calls import write_calls
from parley.text.parsing.markup import family_names
from parley.text.parsing.reasoning_families import THOUGHTS

CALL = ("id", "f", {"a": 1})  # the page shows this call in each form

PAGE = Path(__file__).with_name("families.md")
NAMES = Path(__file__).parents[1] / "parley" / "settings" / "families.json"

INTRODUCTION = """\
# Model families

<!-- Made by docs/families.py from parley/text/parsing/call_families.py and reasoning_families.py; change
it there. -->

Each model family writes reasoning and tool calls in its own form. parley reads these forms while the tokens arrive and
returns them in the form of the client's API: reasoning separate from content, and calls with names and JSON arguments,
piece by piece. If a request forces a call, or a tool is `strict`, a grammar in the model's own form constrains the
model.

The chat template determines a model's family: parley takes the first row of each table whose signs the template
contains. If that fails, give `--tool-parser` and `--reasoning-parser` any name below; `none` leaves everything as text.
A row lists several names if servers use different names for the same form.

This page is about texts. Which networks run is in [models.md](models.md), and
[architecture.md](architecture.md#adding-things) says how to add a family of either kind.

These rules hold for all families:

* The events are the same no matter how tokens divide an answer. Arguments arrive while the model writes them.
* Text that only looks like a call stays content, with its marks. A call is announced once its name is known; everything
  after the name is passed on as arguments, even if it is malformed or cut off.
* A call inside reasoning does not count, unless the answer ends with it and nothing has ended the reasoning: some
  models call without ending it. Such calls are held back until that is clear. Marks inside JSON strings are text.
* Some models that do not reason start their answer with the mark that ends reasoning; that mark is dropped.
* Arguments that are not JSON (XML, Python, Gemma's notation) become JSON by the types in the tool's schema.
* The reader tolerates a model's mistakes: a value without its end, a quote without a backslash within a string, all
  arguments as one object (or its text) in a parameter that the tool does not have, missing marks around a block of
  calls.
* Calls without marks of their own (Llama's JSON, Python lists) count only at the start of an answer, and only if they
  name a tool of the request.
* A grammar constrains JSON arguments to the whole schema. In forms that write each argument separately, it constrains
  their names, the required ones, their types, enumerations, lengths and plain patterns. There it enforces neither the
  `format` of bare text nor rules of a schema about several arguments together.
"""


def code_cell(text: str) -> str:
    """Return a text as code in a cell of a table."""
    text = text.strip().replace("\n", "↵").replace("|", r"\|")
    return f"````` {text} `````" if "`" in text else f"`{text}`"


def describe_signs(signs: TemplateSigns) -> str:
    """Return the texts by which a template is recognized."""
    return " or ".join(" and ".join(map(code_cell, texts)) for texts in signs)


def families_page() -> str:
    """Return the text of the page."""
    rows = [INTRODUCTION, "## Tool calls\n", "| Name | A call | Template contains |", "|---|---|---|"]
    for family in CALLS:
        names = ", ".join(f"`{name}`" for name in (family.name, *family.aliases))
        forms = "<br>".join(code_cell(write_calls(form, [CALL])) for form in family.forms)
        rows.append(f"| {names} | {forms} | {describe_signs(family.signs)} |")
    rows += ["\n(↵ stands for a line break. parley reads all forms of a family and writes the first.)\n"]
    rows += ["## Reasoning\n", "| Name | Marks | Template contains |", "|---|---|---|"]
    for family in THOUGHTS:
        names = ", ".join(f"`{name}`" for name in (family.name, *family.aliases))
        marks = " … ".join(map(code_cell, (*family.marks, *(family.answer_wrapper or ()))))
        signs = describe_signs(family.signs) or "(chosen by name only; an answer starts with reasoning)"
        rows.append(f"| {names} | {marks} | {signs} |")
    return "\n".join(rows) + "\n"


def family_names_json() -> str:
    """Return the names of all families as the JSON that ``parley.settings.families`` reads."""
    return json.dumps({"calls": family_names(CALLS), "thoughts": family_names(THOUGHTS)}, indent=1) + "\n"


if __name__ == "__main__":
    PAGE.write_text(families_page(), "utf-8")
    NAMES.write_text(family_names_json(), "utf-8")
