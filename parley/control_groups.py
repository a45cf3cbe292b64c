"""The cores and the memory that this process may use, by the limits of Linux's control groups.

Containers and services of systemd are such groups. ``docker --cpus=2`` or a limit of Kubernetes leaves every core
visible, but pauses all threads of the group once they have used the time of two; more threads than that only wait for
each other. Both versions of control groups are read, and all groups above the process's own.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
UNLIMITED = 1 << 60  # bytes; version 1 writes a number near 2^63 where there is no limit
KILL_FILES = {1: "memory.oom_control", 2: "memory.events"}  # by the version of control groups


class _Group(NamedTuple):
    """A control group: its ``folder``, and the ``version`` of control groups, which decides the names of its files."""

    folder: Path
    version: int


def core_count(root: Path = ROOT) -> int:
    """Return how many threads can compute at once: the cores that this process may run on, or fewer if its control
    groups get less processor time. A part of a core does not count, since other threads of the process need it."""
    return max(1, int(min([_scheduled_cores(), *_processor_shares(root)])))


def describe_cores(root: Path = ROOT) -> str:
    """Return the cores of the machine that this process may use, for people: "8 of 64 cores, limited to 2.5"."""
    share = min(_processor_shares(root), default=float("inf"))
    cores = f"{_scheduled_cores()} of {os.cpu_count()} cores"
    return f"{cores}, limited to the time of {share:g}" if share < _scheduled_cores() else cores


def free_host_memory(root: Path = ROOT) -> int:
    """Return the bytes of memory that this process may still allocate: free on the machine, and not above the limit of
    a group."""
    free_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # not Linux
        if available := re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.M):
            free_bytes = int(available[1]) << 10
    return max(0, min([free_bytes, *(limit - used_bytes for limit, used_bytes in _memory_limits(root))]))


def memory_limit(root: Path = ROOT) -> int | None:
    """Return how many bytes this process's control groups may use before the kernel kills a process of theirs; None
    without a limit."""
    return min((limit for limit, _ in _memory_limits(root, hard=True)), default=None)


def count_memory_kills(root: Path = ROOT) -> int | None:
    """Return how many processes of this process's control group the kernel has killed so far because memory ran out,
    the group's or the machine's; None if it does not say."""
    files = [folder / KILL_FILES[version] for folder, version in _own_groups("memory", root)]
    for file in (*files, root / "proc/vmstat"):  # the last one counts kills of the whole machine
        with contextlib.suppress(OSError):
            if kills := re.search(r"^oom_kill (\d+)$", file.read_text(), re.M):
                return int(kills[1])
    return None


def _scheduled_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor_shares(root: Path) -> Iterator[float]:
    """Yield the limit of each group that has one, in cores."""
    for folder, version in _own_groups("cpu", root):
        with contextlib.suppress(OSError, ValueError):
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if quota != "max" and int(quota) > 0:
                yield int(quota) / int(period)


def _memory_limits(root: Path, *, hard: bool = False) -> Iterator[tuple[int, int]]:
    """Yield each limit of each group, and the memory that counts against it, in bytes. Cached files do not count, such
    as a model that was just read; the kernel drops them when memory is needed. ``hard``: without limits that only slow
    a group."""
    for folder, version in _own_groups("memory", root):
        limits, use, prefix = (
            (("memory.max", "memory.high"), "memory.current", "")
            if version == 2
            else (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")
        )
        with contextlib.suppress(OSError, ValueError):
            counts = dict(re.findall(r"^(\S+) (\d+)$", (folder / "memory.stat").read_text(), re.M))
            used_bytes = int((folder / use).read_text())
            used_bytes -= sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            for name in limits[:1] if hard else limits:
                limit = (folder / name).read_text().strip()
                if limit != "max" and int(limit) < UNLIMITED:
                    yield int(limit), used_bytes


def _own_groups(controller: str, root: Path) -> Iterator[_Group]:
    """Yield this process's group and those above it, as far as they are visible, in each hierarchy that may have
    limits of this ``controller``."""
    paths: dict[str, str] = {}  # paths of the process's group by controller; "" means version 2
    mounts = ""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths |= dict.fromkeys(controllers.split(","), path)
        mounts = (root / "proc/self/mountinfo").read_text()
    pattern = r"^\d+ \d+ \S+ (\S+) (\S+) .* - cgroup(2?) \S+ (\S+)$"
    for mounted, place, is_second, options in re.findall(pattern, mounts, re.M):
        group_path = paths.get("" if is_second else controller)
        if group_path is None or not (is_second or controller in options.split(",")):
            continue
        top = root / place.lstrip("/")
        inner = Path(group_path).relative_to(mounted) if Path(group_path).is_relative_to(mounted) else Path()
        for folder in (top / inner, *(top / above for above in inner.parents)):
            yield _Group(folder, 2 if is_second else 1)
