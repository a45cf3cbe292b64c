"""Finds the compiled kernels for this CPU, compiles them if they are not there, and says so when it has to do without.

``PARLEY_NATIVE`` chooses a level of ``build.LEVELS``, or ``off`` for the torch forms. Without it the best level that
the CPU has is taken. A library is looked for beside the package, then in the user's cache folder.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import threading
from pathlib import Path

from parley.native import build

log = logging.getLogger("parley.engine")

_lock = threading.Lock()


def load() -> ctypes.CDLL | None:
    """The compiled kernels, or None. The first call may take the seconds that a compiler needs."""
    with _lock:
        return _load()


@functools.cache
def _load() -> ctypes.CDLL | None:
    wish = os.environ.get("PARLEY_NATIVE", "")
    if wish == "off":
        return None
    try:
        usable = build.usable()
        if wish and wish not in usable:
            raise build.BuildError(f"PARLEY_NATIVE is {wish}, and this machine can use {', '.join(usable)} or off")
        return open_level(wish or usable[0])
    except (build.BuildError, OSError) as error:
        log.warning("The kernels are torch's, so answers take longer: %s.", error)
        return None


@functools.cache
def open_level(level: str) -> ctypes.CDLL:
    """The library of one level, which this CPU must have. Raises BuildError or OSError.

    torch has been imported before, so the OpenMP runtime that the library finds is torch's own.
    """
    path = build.HERE / build.name(level)
    if not path.exists():
        path = cache() / path.name
    if not path.exists():
        log.info("Compiling the kernels for %s, once; it takes some seconds.", level)
        own = os.access(build.HERE, os.W_OK)
        path = build.install(build.HERE, [level])[0] if own else build.compile(level, path.parent)
    return ctypes.CDLL(str(path))


def cache() -> Path:
    """The user's folder for what parley has made itself; it need not be there. Raises OSError for who has no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parley"
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, "The user has no home folder") from error
