"""Writes docs/compatibility.md and a page for each API from the readers: ``make docs``."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from math import inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from survey import EngineNeeds, Member, Members, survey_dialect

from parley.dialects.dialect import Dialect
from parley.dialects.mounts import API_MOUNTS
from parley.types import EngineBound
from parley.worker.vllm.capabilities import BOUNDS, vllm_features

VLLM_FEATURES: frozenset[str] = vllm_features(adapters=True, plugin=True)
ROOT = Path(__file__).resolve().parents[1]
INDEX_PAGE = ROOT / "docs" / "compatibility.md"
API_PAGES = ROOT / "docs" / "compatibility"
INTRODUCTION = """\
# Members of each API

<!-- Made by docs/compatibility.py from the readers of parley/dialects; change it there. -->

One page for each API lists its routes and every member that a route reads in a body. Other members are ignored, as by
the originals.

* The column `/` is the root, which all APIs share. It drops refusals that only get in a client's way.
* The other columns are prefixes. There an API is as strict as its original, or as one version of it.
* These columns hold for parley's own engine. With vLLM as the engine, members that need a missing feature are refused
  before they are queued; the column vLLM lists them. [Engines](engines.md) lists vLLM's features and bounds, and what a
  running vLLM server lacks in addition.

"""
LEGEND = """
* **yes**: accepted.
* **in part**: some values are refused with the member's name, because parley does not have their feature yet.
* **refused**: read and checked in full, then refused with the member's name, because parley does not have the feature
  yet.
* **not alone**: a body with only this member added is refused, because the member needs others, or because the original
  refuses it.
* **-**: not read. In the column vLLM: irrelevant to the engine, or part of a list.
* **no**: with vLLM, values that have an effect are refused.
* **0..2**, **at most 128**: with vLLM, values out of this range, or more elements, are refused.

*Tested by* names one of the tests that send the member or check how it is refused.
"""
API_INTRODUCTION = """\
# {title}: routes and members

<!-- Made by docs/compatibility.py from the readers of parley/dialects; change it there. -->

[All APIs, and the meaning of the words in these tables](../compatibility.md).

"""


def dialects_by_api() -> dict[str, list[tuple[str, Dialect]]]:
    """Return each API with its surfaces, the shared one first. A version of an API belongs to that API."""
    surfaces_by_api: dict[str, list[tuple[str, Dialect]]] = {}
    for surface in sorted(API_MOUNTS, key=lambda surface: bool(surface.prefix)):
        api = re.sub(r"-[\d.]+$", "", surface.dialect.name)
        columns = surfaces_by_api.setdefault(api, [])
        if not any(surface.dialect is dialect for _, dialect in columns):
            columns.append((surface.prefix or "/", surface.dialect))
    return surfaces_by_api


Surveyed = dict[tuple[str, str], Members]


@cache
def survey_api(api: str) -> dict[str, Surveyed]:
    """Return the members of every route of an API, by prefix."""
    return {prefix: survey_dialect(dialect) for prefix, dialect in dialects_by_api()[api]}


def group_routes(by_prefix: dict[str, Surveyed]) -> Iterator[tuple[list[tuple[str, str]], list[str]]]:
    """Yield routes whose members have the same states at all prefixes, with the paths of these members."""
    by_signature: dict[str, tuple[list[tuple[str, str]], list[str]]] = {}
    for route in dict.fromkeys(route for surveyed in by_prefix.values() for route in surveyed):
        columns = [surveyed.get(route) for surveyed in by_prefix.values()]
        paths = list(dict.fromkeys(path for members in columns for path in members or ()))
        signature = repr([(path, [state_of_member(members, path) for members in columns]) for path in paths])
        by_signature.setdefault(signature if paths else repr(route), ([], paths))[0].append(route)
    yield from by_signature.values()


def state_of_member(members: Members | None, path: str) -> str:
    """Return the state of a member in one column."""
    return members[path].state if members and path in members else "-"


def state_with_vllm(needs: list[EngineNeeds]) -> str:
    """Return what vLLM as the engine makes of a member. ``needs``: of the requests with it, for its sake."""
    if not needs:
        return "-"
    refused = [bool(need.features - VLLM_FEATURES) for need in needs if need.features]
    if any(refused):
        return "no" if all(refused) else "in part"
    bounds = sorted({bound for need in needs for bound in need.values} & BOUNDS.keys())
    return " and ".join(map(describe_bound, bounds)) or "yes"


def describe_bound(bound: EngineBound) -> str:
    """Return a bound of vLLM."""
    least, most = BOUNDS[bound]
    return f"at most {most:g}" if least == -inf else f"{least:g}..{most:g}"


@cache
def list_tests(api: str) -> list[tuple[str, str]]:
    """Return the names of an API's tests and their sources, the tests of the dialect first."""
    sources = []
    for file in sorted(ROOT.glob(f"tests/dialects/test_{api}*.py")) + sorted(ROOT.glob(f"tests/apis/test_{api}*.py")):
        text = file.read_text("utf-8")
        lines, nodes = text.splitlines(), ast.parse(text).body
        tables = dict(_tables(text, nodes))
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                source = "\n".join(lines[first - 1 : node.end_lineno])
                used_tables = [table for name, table in tables.items() if re.search(rf"\b{name}\b", source)]
                sources.append((f"{file.stem}.{node.name}", "\n".join([source, *used_tables])))
    return sources


def _tables(text: str, nodes: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield a module's constants, whose names are in capitals, with their sources."""
    for node in nodes:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id.isupper():
            yield target.id, ast.get_source_segment(text, node) or ""


def first_test_of(api: str, path: str) -> str:
    """Return the first test that names a member, or "" if no test does."""
    return _first_test_that_names(api, path.rpartition(".")[2].removesuffix("[]"))


@cache
def _first_test_that_names(api: str, leaf: str) -> str:
    mention = re.compile(rf"[\"\']{leaf}[\"\']|\b{leaf}=")
    for name in (api, "openai", "anthropic"):  # other APIs use their readers
        for test, source in list_tests(name):
            if leaf in source and mention.search(source):  # `in` is far quicker, and most sources lack the member
                return test
    return ""


def describe_type(member: Member) -> str:
    """Return the type of a member with its range or its allowed values."""
    listed = ", ".join(f"`{name}`" for name in member.allowed)
    return f"{member.type} {member.range}".strip() + (f": {listed}" if listed else "")


def api_page(api: str) -> str:
    """Return the page of one API: a table of members for each group of routes, then the routes without members."""
    by_prefix = survey_api(api)
    lines = []
    bare_routes = []
    for routes, paths in group_routes(by_prefix):
        if not paths:
            bare_routes += routes
            continue
        lines += ["## " + ", ".join(f"`{method} {path}`" for method, path in routes), ""]
        lines += [f"| Member | Type | {' | '.join(f'`{prefix}`' for prefix in by_prefix)} | vLLM | Tested by |"]
        lines += ["|---|---|" + "---|" * len(by_prefix) + "---|---|"]
        columns = [surveyed.get(routes[0]) for surveyed in by_prefix.values()]
        for path in paths:
            member = next(members[path] for members in columns if members and path in members)
            states = " | ".join(state_of_member(members, path) for members in columns)
            needs = [need for members in columns if members and path in members for need in members[path].needs]
            cells = (describe_type(member), states, state_with_vllm(needs), first_test_of(api, path))
            lines.append(f"| `{path}` | {' | '.join(cells)} |")
        lines.append("")
    if bare_routes:
        lines += ["## Routes without members", "", "| Route | On |", "|---|---|"]
        for route in bare_routes:
            prefixes = ", ".join(f"`{prefix}`" for prefix, surveyed in by_prefix.items() if route in surveyed)
            lines.append(f"| `{route[0]} {route[1]}` | {prefixes} |")
        lines.append("")
    return API_INTRODUCTION.format(title=_title(api)) + "\n".join(lines).rstrip("\n") + "\n"


def index_page() -> str:
    """Return the page that lists the APIs and explains the words of their tables."""
    lines = ["| API | Page | Prefixes | Routes | Members |", "|---|---|---|---|---|"]
    for api in dialects_by_api():
        by_prefix = survey_api(api)
        routes = {route for surveyed in by_prefix.values() for route in surveyed}
        members = {
            path for surveyed in by_prefix.values() for route_members in surveyed.values() for path in route_members
        }
        prefixes = ", ".join(f"`{prefix}`" for prefix in by_prefix)
        page = f"{API_PAGES.name}/{api}.md"
        lines.append(f"| {_title(api)} | [{page}]({page}) | {prefixes} | {len(routes)} | {len(members)} |")
    return INTRODUCTION + "\n".join(lines) + "\n" + LEGEND


def all_pages() -> dict[Path, str]:
    """Return the text of every page, by file."""
    return {INDEX_PAGE: index_page()} | {API_PAGES / f"{api}.md": api_page(api) for api in dialects_by_api()}


def _title(api: str) -> str:
    return dialects_by_api()[api][0][1].title


if __name__ == "__main__":
    API_PAGES.mkdir(exist_ok=True)
    for file, text in all_pages().items():
        file.write_text(text, "utf-8")
