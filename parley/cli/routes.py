"""``parley routes``: lists every path of a server, its API and its scope, from the server's own tables."""

from __future__ import annotations

import json

from parley.cli.serve_config.server_options import api_listeners
from parley.settings.config import SERVE_OPTIONS
from parley.settings.option_kinds import endpoint_kind, switch_kind
from parley.settings.options import Option, ResolvedOptions

USAGE = """\
usage: parley routes [options]

Lists the routes of a server: method, path, API, scope, and the surface that serves it. "all" is the surface of the main
port, which serves every API; the others serve one API, under its prefix or on its own port. Routes of scope "open"
need no API key, those of scope "admin" need an admin key, and those of scope "cluster" the cluster secret."""

OPTIONS = [
    Option("json", switch_kind(), "Print JSON, one line per route.", False),
    *(option for option in SERVE_OPTIONS if option.name in ("listen", "strict", "tgi-compat", "ui")),
]


def route_table(config: ResolvedOptions) -> list[dict[str, str]]:
    """Return one entry per port, method and path, with api, scope and surface. If several APIs answer, the body
    decides, and all have the same scope."""
    from parley.dialects import mounts

    ports = [("all", mounts.universal_mounts(config["strict"], config["tgi-compat"], pages=config["ui"]))]
    ports += [
        (endpoint_kind().format_value(listener[:3]), mounts.dedicated_mounts(listener.api))
        for listener in api_listeners(config)
    ]
    rows = []
    for name, mounted in ports:
        for (method, path), answering in mounts.mount_table(mounted).items():
            apis = ", ".join(mount.dialect.name for _, mount in answering)
            surface = answering[0][1].prefix or name
            scope = mounts.route_scope(answering[0][0])
            rows.append({"method": method, "path": path, "api": apis, "scope": scope, "surface": surface})
    return rows


def run_command(config: ResolvedOptions) -> int:
    """Print the routes. Return the exit code."""
    rows = route_table(config)
    if config["json"]:
        for row in rows:
            print(json.dumps(row))
        return 0
    head = {name: name.upper() for name in rows[0]}
    wide = {name: max(len(row[name]) for row in [head, *rows]) for name in head}
    for row in [head, *rows]:
        print("  ".join(row[name].ljust(wide[name]) for name in head).rstrip())
    return 0
