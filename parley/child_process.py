"""Python processes that parley starts: their command line, standard streams, and how they end with their parent.

Python looks for modules in the working directory first if it runs ``-m`` or ``-c``. That folder may be a downloaded
model with files of any name, such as ``torch.py``; so no process that parley starts looks there.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"  # keeps the working directory out of the paths of a process and its children
PR_SET_PDEATHSIG = 1


def python_command(*arguments: str, python: str = "") -> list[str]:
    """Return the command line of a Python process that does not import from the working directory.

    ``python``: the interpreter; "" for the one of this process.
    """
    return [python or sys.executable, "-P", *arguments]


def protect_children() -> None:
    """Keep the working directory also out of the Python processes that libraries start."""
    os.environ[SAFE_PATH_VARIABLE] = "1"


def keep_standard_streams() -> None:
    """Reopen closed descriptors among 0 to 2: a socket could get the number otherwise, and its other end the log.

    They are opened on the null device.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def ignore_group_signals() -> None:
    """Ignore Ctrl-C and the hang-up of a terminal and a service manager's SIGTERM, which reach a whole process group.

    The parent decides when to end, because it drains first. Its end is the end of this process.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def limit_resource(name: int, value: int) -> None:
    """Set a soft limit of this process, such as ``resource.RLIMIT_CPU``, at most to its hard limit."""
    _, hard_limit = resource.getrlimit(name)
    soft_limit = value if hard_limit == resource.RLIM_INFINITY else min(value, hard_limit)
    resource.setrlimit(name, (soft_limit, hard_limit))


def die_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Ask the kernel to send this process a signal when its parent is gone, for any reason."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal_number))
