"""Links within the documentation lead to files and headings that exist, every page is reachable from an index, and the
pages about the code name files and identifiers that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE_FOLDERS = ("parley", "tests", "bench", "tools")
PAGES_ABOUT_CODE = [ROOT / "docs" / name for name in ("architecture.md", "design.md", "glossary.md")]
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


@cache
def source_files() -> dict[str, Path]:
    """Returns the files of the code by their paths from the root."""
    kinds = {".py", ".cpp", ".h", ".js", ".mjs", ".toml"}
    files = (file for folder in SOURCE_FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in kinds)
    return {f"/{file.relative_to(ROOT)}": file for file in files}


def is_path(name: str) -> bool:
    return bool(re.fullmatch(r"[\w.*/-]+", name)) and ("/" in name or name.endswith((".py", ".cpp", ".h", ".js")))


def exists_as_path(path: str) -> bool:
    """Whether a file or folder has this path, or ends with it: pages name a folder once and then its files alone."""
    if path.startswith("docs/"):
        return (ROOT / path).exists()
    pattern = "[^/]*".join(map(re.escape, path.split("*")))
    return any(re.search(f"/{pattern}" if path.endswith("/") else f"/{pattern}$", name) for name in source_files())


@pytest.mark.parametrize("page", PAGES_ABOUT_CODE, ids=lambda page: page.stem)
def test_pages_about_the_code_name_files_and_identifiers_that_exist(page):
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    names = [name for name in re.findall(r"`([^`]+)`", text) if not name.startswith(("/", "-"))]
    assert [name for name in names if is_path(name) and not exists_as_path(name)] == []
    identifiers = {word for file in source_files().values() for word in re.findall(r"\w+", file.read_text("utf-8"))}
    words = {word for name in names if not is_path(name) for word in re.findall(r"[A-Za-z_]\w+", name)}
    assert sorted(words - identifiers) == []
