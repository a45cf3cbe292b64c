"""Observes this machine during a measurement (Linux): CPU time of other programs, memory of a process tree.

Machines are shared. A load that ran while other programs computed is not comparable, so each load waits until they do
little, and their usage during the load is recorded with its result.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
QUIET = 0.06  # of one core


def process_tree(pid: int) -> list[int]:
    """Return a process and its living descendants."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return [pid]
    return [pid, *(below for child in children for below in process_tree(child))]


def tree_memory(pid: int) -> int:
    """Return the bytes of a process tree, with shared pages counted once (PSS)."""
    total = 0
    for process in process_tree(pid):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def process_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its finished children so far; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICK  # user, system, and the same of finished children


@dataclass
class CpuClock:
    """CPU seconds so far: of all programs, of ours, and those that the host took away."""

    wall: float
    busy: float
    ours: float
    stolen: float

    @classmethod
    def read_clock(cls, pid: int | None) -> CpuClock:
        """Read the clock. ``pid``: a tree that also counts as ours, besides this process and its finished children."""
        user, nice, system, _, _, irq, softirq, stolen, *_ = (
            Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        )
        busy = sum(map(int, (user, nice, system, irq, softirq))) / TICK
        mine = os.times()
        ours = mine.user + mine.system + mine.children_user + mine.children_system
        ours += sum(map(process_seconds, process_tree(pid) if pid else []))
        return cls(time.perf_counter(), busy, ours, int(stolen) / TICK)

    def others_cores(self, later: CpuClock) -> float:
        """Return the cores that others used between this reading and a later one."""
        return (later.busy - self.busy - later.ours + self.ours) / (later.wall - self.wall)

    def stolen_cores(self, later: CpuClock) -> float:
        """Return the cores that the host gave to other guests."""
        return (later.stolen - self.stolen) / (later.wall - self.wall)


def wait_quiet(pid: int | None, patience: float, interval: float = 1.0) -> float:
    """Wait at most ``patience`` seconds until others use less than ``QUIET`` cores. Return their last usage."""
    end = time.perf_counter() + patience
    while True:
        before = CpuClock.read_clock(pid)
        time.sleep(interval)
        used = before.others_cores(CpuClock.read_clock(pid))
        if used < QUIET or time.perf_counter() >= end:
            return used


def describe_machine() -> dict[str, str | int]:
    """Return the properties of the machine that a report needs."""
    lines = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line]
    properties = {key.strip(): value.strip() for key, value in lines}
    flags = properties.get("flags", "").split()
    wide = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8") if flag in flags]
    return {
        "cpu": properties.get("model name", platform.machine()),
        "family": f"{properties.get('cpu family', '?')}/{properties.get('model', '?')}",
        "cores": os.cpu_count() or 1,
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "instructions": " ".join(wide),
        "python": platform.python_version(),
    }
