"""Links within the documentation lead to files and headings that exist, and every page is reachable from an index."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "parley/demo/README.md"])
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?\)")
CODE = re.compile(r"^```.*?^```|^~~~.*?^~~~|`[^`\n]*`", re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    names: dict[str, int] = {}
    found = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for heading in re.findall(r"^#{1,6} (.+?)\s*$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = names[name] = names.get(name, -1) + 1
        found.add(f"{name}-{count}" if count else name)
    return found


def local_links(page: Path) -> list[str]:
    targets = LINK.findall(CODE.sub("", page.read_text("utf-8")))
    return [target for target in targets if not re.match(r"[a-z][a-z0-9+.-]*:", target)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_local_links_lead_to_files_and_headings(page):
    wrong = []
    for target in local_links(page):
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        if not linked.exists() or (anchor and linked.suffix == ".md" and anchor not in anchors(linked)):
            wrong.append(target)
    assert wrong == []


def test_index_of_the_documentation_reaches_every_page():
    reached, new = set(), [ROOT / "docs" / "README.md", ROOT / "README.md"]
    while new:
        page = new.pop()
        reached.add(page)
        linked = {(page.parent / target.partition("#")[0]).resolve() for target in local_links(page)}
        new += [path for path in linked if path.suffix == ".md" and path.exists() and path not in reached]
    assert {page for page in PAGES if page.parent.is_relative_to(ROOT / "docs")} <= reached
