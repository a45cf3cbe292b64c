"""Finds the compiled kernels for this CPU, compiles them if they are not there, and says so when it has to do without.

``PARLEY_NATIVE`` chooses a level of ``build.LEVELS``, or ``off`` for the torch forms. Without it the best level that
the CPU has is taken. A library is looked for beside the package, then in the user's cache folder.
"""

from __future__ import annotations

import ctypes
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
    except (build.BuildError, OSError, RuntimeError) as error:  # RuntimeError: no home folder
        log.warning("The kernels are torch's, so answers take longer: %s.", error)
        return None


@functools.cache
def open_level(level: str) -> ctypes.CDLL:
    """The library of one level, which this CPU must have. Raises BuildError or OSError.

    torch has been imported before, so the OpenMP runtime that the library finds is torch's own.
    """
    folders = [build.HERE, cache()]
    path = next((folder / build.name(level) for folder in folders if (folder / build.name(level)).exists()), None)
    if path is None:
        log.info("Compiling the kernels for %s, once; it takes some seconds.", level)
        own, users = folders
        path = build.install(own, [level])[0] if os.access(own, os.W_OK) else build.compile(level, users)
    return ctypes.CDLL(str(path))


def cache() -> Path:
    """The user's folder for what parley has made itself."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parley"
