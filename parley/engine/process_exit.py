"""Describes how a child process of parley ended, for the log and for clients."""

from __future__ import annotations

import signal
from pathlib import Path

from parley import control_groups

_explained_kills: dict[Path, int] = {}  # kills by the kernel that were already reported, by root


def describe_exit(exit_code: int | None, memory_kills: int | None, root: Path = control_groups.ROOT) -> str:
    """Describe how a child process ended: "was killed by SIGTERM".

    ``exit_code``: as of ``Popen``; ``memory_kills``: the result of ``count_memory_kills`` when the process was started.
    """
    if exit_code is None or exit_code == 0:
        return "ended unexpectedly"
    if exit_code > 0:
        return f"ended with exit code {exit_code}"
    if exit_code == -signal.SIGKILL:
        kills = control_groups.count_memory_kills(root)
        if kills is None or memory_kills is None:
            return "was killed by SIGKILL, perhaps for lack of memory"
        explained = max(memory_kills, _explained_kills.get(root, 0))
        if kills > explained:
            _explained_kills[root] = explained + 1  # one kill ends one process
            limit = control_groups.memory_limit(root)
            group = "" if limit is None else f" (the limit of its control group is {limit >> 20} MiB)"
            return f"was killed by the kernel because memory ran out{group}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"was killed by {name}"
