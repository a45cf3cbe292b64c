"""``parley routes``: every path that a server answers, and whose API it belongs to, from the server's own tables."""

from __future__ import annotations

import json

from parley.kinds import switch
from parley.options import Config, Option

USAGE = """\
usage: parley routes [options]

Lists the routes of a server: method, path, API, and the surface through which it is reached. "all" is the surface
that serves every API at once; the others serve one API alone, below their prefix."""

OPTIONS = [Option("json", switch(), "Print JSON, one line per route.", False)]


def table() -> list[dict[str, str]]:
    """One entry per method and path, with its api and surface; where several APIs answer, the body decides."""
    from parley.server import app

    rows = []
    for (method, path), answering in app.table().items():
        apis = [surface.dialect.name for _, surface in answering]
        surface = answering[0][1].prefix or "all"
        rows.append({"method": method, "path": path, "api": ", ".join(apis), "surface": surface})
    return rows


def run(config: Config) -> int:
    rows = table()
    if config["json"]:
        for row in rows:
            print(json.dumps(row))
        return 0
    head = {name: name.upper() for name in rows[0]}
    wide = {name: max(len(row[name]) for row in [head, *rows]) for name in head}
    for row in [head, *rows]:
        print("  ".join(row[name].ljust(wide[name]) for name in head).rstrip())
    return 0
