"""Read the tables of other servers' flags, which lie next to this file. Imports nothing heavy."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SUFFIX = ".toml"


@dataclass(frozen=True)
class PeerFlag:
    """A flag, or an environment variable, of another server. The package's docstring describes the fields."""

    name: str
    aliases: tuple[str, ...] = ()
    args: int | str = 1
    counterpart: str = ""
    conversion: str = "copy"
    value_map: Mapping[str, str] = field(default_factory=dict)
    needless_values: tuple[str, ...] = ()
    needless_reason: str = ""
    missing_reason: str = ""
    unlisted_reason: str = ""
    note: str = ""
    passed_to_engine: bool = False


@dataclass(frozen=True)
class PeerServer:
    """A server whose command line is translated. ``rows`` are its flags, each once."""

    name: str
    title: str
    rank: int
    command: str
    programs: tuple[str, ...]
    rows: tuple[PeerFlag, ...]
    example: str
    subcommands: tuple[str, ...] = ()
    positional: str = ""
    environment: str = ""
    engine: str = ""
    defaults: Mapping[str, str] = field(default_factory=dict)

    def find_flag(self, name: str) -> PeerFlag | None:
        """Return the flag or variable of this name, with hyphens or underscores; None if the server has none."""
        if not name.startswith("-"):
            return self._find_variable(name)
        spelled = name.replace("_", "-")
        row = next(
            (row for row in self.rows if spelled == row.name or name in row.aliases or spelled in row.aliases), None
        )
        return row or self._find_negation(spelled)

    def _find_negation(self, flag: str) -> PeerFlag | None:
        """Return a row for ``--no-SWITCH`` where the table has only ``--SWITCH``."""
        switch = "--" + flag.removeprefix("--no-")
        row = next((row for row in self.rows if switch in (row.name, *row.aliases) and row.args == 0), None)
        if row is None or not flag.startswith("--no-"):
            return None
        if row.needless_reason:
            return PeerFlag(
                flag,
                args=0,
                missing_reason=f"it cannot be switched off: {row.needless_reason}",
                passed_to_engine=row.passed_to_engine,
            )
        return PeerFlag(
            flag,
            args=0,
            needless_reason="it is off unless a flag switches it on",
            passed_to_engine=row.passed_to_engine,
        )

    def _find_variable(self, name: str) -> PeerFlag | None:
        flag = "--" + name.removeprefix("" if self.environment == "*" else self.environment).lower().replace("_", "-")
        is_own = self.environment == "*" or (self.environment and name.startswith(self.environment))
        return next((row for row in self.rows if row.name == name or (is_own and row.name == flag)), None)


def peer_names() -> list[str]:
    """Return the names of the servers that have a table."""
    return sorted(file.name.removesuffix(SUFFIX) for file in FOLDER.glob(f"*{SUFFIX}"))


def read_peers() -> list[PeerServer]:
    """Return all tables, that of the most common server first."""
    return sorted(map(read_peer, peer_names()), key=lambda peer: peer.rank)


def read_peer(name: str) -> PeerServer:
    """Return the table of a server, which must have one."""
    content: dict[str, Any] = tomllib.loads((FOLDER / f"{name}{SUFFIX}").read_text("utf-8"))
    rows = [_read_row(flag, row) for flag, row in content.pop("flags").items()]
    for group in content.pop("groups", []):
        rows += _read_group(group)
    content = {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}
    return PeerServer(name=name, rows=tuple(rows), **content)


def _read_row(name: str, row: dict[str, Any]) -> PeerFlag:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return PeerFlag(name, **fields)


def _read_group(group: dict[str, Any]) -> list[PeerFlag]:
    """Return the rows of a group of flags that share a reason. A list in it holds the names of one flag."""
    spellings = [(name, 1) for name in group.pop("flags", [])] + [(name, 0) for name in group.pop("switches", [])]
    rows = []
    for spelling, args in spellings:
        name, *aliases = [spelling] if isinstance(spelling, str) else spelling
        rows.append(PeerFlag(name, tuple(aliases), args, **group))
    return rows
