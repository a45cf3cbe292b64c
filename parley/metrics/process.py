"""The operating system's figures of this process, under the names that Prometheus' client libraries export."""

from __future__ import annotations

import os
import platform
import resource
import time
from pathlib import Path

from parley.metrics.series import format_labels, scalar_lines
from parley.version import __version__

_start_time = time.time()  # the module is imported while the server starts


def process_lines() -> str:
    """Return processor time, memory, start time and file descriptors of this process, and parley's version."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    gauges = {"process_start_time_seconds": ("Start of the process, in seconds since 1970.", _start_time)}
    try:
        virtual_pages, resident_pages, *_ = map(int, Path("/proc/self/statm").read_text().split())
        open_files = len(os.listdir("/proc/self/fd"))
    except (OSError, ValueError):  # not Linux
        pass
    else:
        page = resource.getpagesize()
        gauges["process_virtual_memory_bytes"] = ("Virtual memory of the process.", virtual_pages * page)
        gauges["process_resident_memory_bytes"] = ("Resident memory of the process.", resident_pages * page)
        gauges["process_open_fds"] = ("Open file descriptors.", open_files)
    gauges["process_max_fds"] = ("File descriptors that it may open.", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    seconds = usage.ru_utime + usage.ru_stime
    build = format_labels({"version": __version__, "python_version": platform.python_version()})
    return (
        scalar_lines("counter", "process_cpu_seconds_total", "Processor time of the process.", [("", [("", seconds)])])
        + "".join(scalar_lines("gauge", name, text, [("", [("", value)])]) for name, (text, value) in gauges.items())
        + scalar_lines("gauge", "parley_build_info", "The version that runs.", [("", [(build, 1)])])
    )
