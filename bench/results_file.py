"""The results file: lines of JSON that are only ever appended. Reads them, plans the remaining work, computes medians.

A line has a ``kind``: ``machine``, ``ready``, ``load``, ``end``, ``failed`` or ``quality``. An interrupted run resumes
at the end of the file. This module knows nothing of servers.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """Return all complete lines; the last one may be cut off."""
    records = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def append_record(path: Path, record: Record) -> None:
    """Append a line, which is on the disk on return. If the file ends in a partial line, that is terminated first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(record).encode() + b"\n")


@dataclass(frozen=True)
class Turn:
    """One start of one contestant, and its remaining loads."""

    number: int
    peer: str
    loads: tuple[str, ...]


def plan_turns(records: Sequence[Record], loads_by_peer: Mapping[str, Sequence[str]], turns: int) -> list[Turn]:
    """Return the remaining turns in order. Turns start at different places of the list, so no name is always last."""
    done = {(r["turn"], r["peer"], r["load"]) for r in records if r["kind"] == "load" and not r["result"]["errors"]}
    names = list(loads_by_peer)
    todo = []
    for turn in range(turns):
        start = turn * len(names) // turns
        for name in names[start:] + names[:start]:
            loads = tuple(load for load in loads_by_peer[name] if (turn, name, load) not in done)
            if loads:
                todo.append(Turn(turn, name, loads))
    return todo


class Results:
    """Medians over the turns. Failed loads do not count. A path such as ``ttft_ms.p50`` names a number of a result."""

    def __init__(self, records: Sequence[Record]):
        self.records = records
        self.loads = [r for r in records if r["kind"] == "load" and not r["result"]["errors"]]

    def runs(self, peer: str, load: str) -> list[Record]:
        """Return the last result of every turn."""
        return list({r["turn"]: r for r in self.loads if (r["peer"], r["load"]) == (peer, load)}.values())

    def values(self, peer: str, load: str, path: str) -> list[float]:
        """Return a number of a load, from every turn that has it."""
        numbers = [nested_number(run["result"], path) for run in self.runs(peer, load)]
        return [value for value in numbers if value is not None]

    def median(self, peer: str, load: str, path: str) -> float | None:
        """Return the median of ``values``."""
        return median_or_none(self.values(peer, load, path))

    def record_median(self, kind: str, peer: str, key: str) -> float | None:
        """Return the median of a number in records other than loads, such as the seconds of ``ready``."""
        return median_or_none([r[key] for r in self.records if r["kind"] == kind and r["peer"] == peer])

    def limits(self, runs: Sequence[Record]) -> dict[str, float] | None:
        """Return the machine's limits around these runs: medians of the measurements before and after each."""
        around = [limits for run in runs for limits in (run["before"], run["after"])]
        return {key: statistics.median(limits[key] for limits in around) for key in around[0]} if around else None


def nested_number(result: Record, path: str) -> float | None:
    """Return a number inside nested objects, or None."""
    value: Any = result
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def median_or_none(values: Sequence[float]) -> float | None:
    """Return the median, or None if there are no values."""
    return statistics.median(values) if values else None


def ratio(a: float | None, b: float | None) -> float | None:
    """Return a / b, or None if one is missing."""
    return a / b if a is not None and b else None
