"""The processor and the memory of this machine, as Linux counts them."""

from __future__ import annotations

from pathlib import Path

_last_times = (0, 0)  # busy and all jiffies at the last call


def cpu_utilization() -> float | None:
    """Return the share of all processors' time that was used since the last call, 0 to 1; None if it is unknown."""
    global _last_times
    try:
        fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, fields)
    except (OSError, ValueError):  # not Linux
        return None
    busy = user + nice + system + irq + softirq + steal
    times = (busy, busy + idle + iowait)
    used, passed = times[0] - _last_times[0], times[1] - _last_times[1]
    _last_times = times
    return min(1.0, max(0.0, used / passed)) if passed > 0 else 0.0


def memory_bytes() -> tuple[int, int] | None:
    """Return the machine's memory and how much of it is in use, in bytes; None if it is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kilobytes = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
        total = kilobytes["MemTotal"]
        return 1024 * total, 1024 * (total - kilobytes["MemAvailable"])
    except (OSError, ValueError, LookupError):  # not Linux
        return None
