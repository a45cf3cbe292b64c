"""Writes docs/composition.md from the features that the tests combine: ``python docs/composition.py``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_name("composition.md")

INTRODUCTION = """\
# Features in one request

<!-- Made by docs/composition.py from tests/support/request_features.py; change it there. -->

The table combines every feature with every other in one request. A dot means that the answer equals, in every token and
every log-probability, the answer to the same request alone from an engine without prefix cache and drafts. A number
refers to a note below: the pair contradicts itself, and the request is refused with an error that names both members.

`tests/system/test_composition.py` sends all these pairs over HTTP. One server gets all of them at the same time, twice,
with drafts and with so few pages that requests preempt each other. A second server gets them one by one.
`make test-nightly` continues with larger sets of features, drawn at random.

The requests are chat completions. Requests of other APIs run among them. Their texts, reasoning, calls, counts of
tokens and log-probabilities must equal those of chat completions with the same features: each feature that the API has
alone, a sample of the pairs, and in `make test-nightly` all of them. The last table lists these features.
"""


def composition_page() -> str:
    """Return the text of the page."""
    from support.composed_routes import COMPOSED_ROUTES
    from support.request_features import FEATURES, REFUSED, REQUEST_FEATURES

    notes = list(dict.fromkeys(REFUSED.values()))
    lines = [INTRODUCTION, "| Feature | Meaning |", "|---|---|"]
    lines += [f"| {_title(name)} | {feature.description} |" for name, feature in FEATURES.items()]
    lines += ["", "| | " + " | ".join(map(_title, FEATURES)) + " |", "|---" + "|:-:" * len(FEATURES) + "|"]
    for name in FEATURES:
        cells = []
        for other in FEATURES:
            members = REFUSED.get(frozenset((name, other))) if name != other else None
            cells.append("" if name == other else "·" if members is None else str(1 + notes.index(members)))
        lines.append(f"| {_title(name)} | " + " | ".join(cells) + " |")
    lines.append("")
    lines += [f"{number}. `{one}` and `{other}`" for number, (one, other) in enumerate(notes, 1)]
    lines += ["", "| | " + " | ".join(f"{route.title}, `{route.path}`" for route in COMPOSED_ROUTES) + " |"]
    lines.append("|---" + "|:-:" * len(COMPOSED_ROUTES) + "|")
    for name in REQUEST_FEATURES:
        cells = ["·" if name in route.members else "" for route in COMPOSED_ROUTES]
        lines.append(f"| {_title(name)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _title(name: str) -> str:
    return name.replace("_", " ")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    PAGE.write_text(composition_page(), "utf-8")
