"""Writes the tables of docs/coming-from/*.md from the flags of other servers: ``python docs/coming_from.py``.

What stands above the line MARK is written by hand.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from parley.cli.migrate import format_report
from parley.cli.peers.tables import PeerFlag, PeerServer, read_peers
from parley.cli.peers.translate import describe_counterpart, has_counterpart, translate_command

FOLDER = Path(__file__).with_name("coming-from")
MARK = "<!-- What follows is made by docs/coming_from.py from parley/cli/peers/*.toml; change it there. -->"


def page_path(peer: PeerServer) -> Path:
    """Return the page of a server."""
    return FOLDER / f"{peer.name.replace('.', '-')}.md"


def code(text: str) -> str:
    return f"`{text}`"


def flag_row(peer: PeerServer, row: PeerFlag) -> str:
    """Return a row of the table: a flag with its other names, ours, and the difference."""
    ours = code(row.counterpart) if has_counterpart(row) else ""
    if has_counterpart(row):
        values = ", ".join(value or "an empty value" for value in row.needless_values)
        remarks = [
            row.note,
            row.needless_reason and f"not needed for {values}: {row.needless_reason}",
            row.unlisted_reason,
        ]
        rest = "; ".join(filter(None, remarks))
    else:
        ours = "not needed" if row.needless_reason and not row.missing_reason else "none"
        rest = describe_counterpart(row).removeprefix("nothing is needed here: ")
    also = " ".join(map(code, (row.name, *row.aliases)))
    return f"| {also} | {ours} | {rest} |".replace("|TEXT", r"\|TEXT")


def flag_tables(peer: PeerServer) -> str:
    """Return the generated part of a page: an example, and every flag with its counterpart."""
    translation = translate_command(peer, shlex.split(peer.example))
    kind = "flags" if all(row.name.startswith("-") for row in peer.rows) else "variables and flags"
    lines = [MARK, "", "## An example", "", "```sh", f"$ parley migrate {peer.name} -- {peer.example}"]
    lines += [shlex.join(translation.command()), *format_report(translation).splitlines(), "```", ""]
    lines += [f"## Its {kind}", "", f"| {peer.title} | parley | |", "|---|---|---|"]
    lines += [flag_row(peer, row) for row in peer.rows]
    return "\n".join(lines) + "\n"


def renewed_page(peer: PeerServer) -> str:
    """Return the text of a page with its tables made anew."""
    return page_path(peer).read_text("utf-8").partition(MARK)[0] + flag_tables(peer)


if __name__ == "__main__":
    for peer in read_peers():
        page_path(peer).write_text(renewed_page(peer), "utf-8")
