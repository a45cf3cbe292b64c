"""Writes docs/composition.md from the features that the tests compose: ``python docs/composition.py``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_name("composition.md")

INTRODUCTION = """\
# What composes with what

<!-- Made by docs/composition.py from tests/support/request_features.py; change it there. -->

Every feature with every other, at once and in one request. A dot means: the answer is, token by token and
log-probability by log-probability, the one that the same request gets alone, from an engine without prefix cache
and drafts. A number means that the two have no meaning together, and that the request is
refused with a sentence that names both members.

`tests/system/test_composition.py` asks for all these pairs over HTTP: all at the same time and twice, from a server
whose pages are so few that requests take them from each other, with drafts; then one by one from the other server.
`make test-nightly` goes on with larger sets of features, drawn at random.
"""


def page() -> str:
    """The whole page."""
    from features import FEATURES, REFUSED

    notes = list(dict.fromkeys(REFUSED.values()))
    lines = [INTRODUCTION, "| | |", "|---|---|"]
    lines += [f"| {name.replace('_', ' ')} | {feature.about} |" for name, feature in FEATURES.items()]
    lines += ["", "| | " + " | ".join(map(_title, FEATURES)) + " |", "|---" + "|:-:" * len(FEATURES) + "|"]
    for name in FEATURES:
        cells = []
        for other in FEATURES:
            members = REFUSED.get(frozenset((name, other))) if name != other else None
            cells.append("" if name == other else "·" if members is None else str(1 + notes.index(members)))
        lines.append(f"| {_title(name)} | " + " | ".join(cells) + " |")
    lines.append("")
    lines += [f"{number}. `{one}` and `{other}`" for number, (one, other) in enumerate(notes, 1)]
    return "\n".join(lines) + "\n"


def _title(name: str) -> str:
    return name.replace("_", " ")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests" / "system"), str(ROOT)]
    PAGE.write_text(page(), "utf-8")
