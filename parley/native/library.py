"""Loads the compiled kernels for this CPU. Compiles them if they are missing, and logs a warning if that fails.

``PARLEY_NATIVE`` selects a level of ``build.LEVELS``, or ``off`` for the torch kernels. The default is the best level
that the CPU supports. Libraries are searched in the package folder, then in the user's cache folder.
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
    """Return the compiled kernels, or None. The first call may compile them, which takes seconds."""
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
            raise build.BuildError(f"PARLEY_NATIVE is {wish}, but this machine supports {', '.join(usable)} or off")
        return open_level(wish or usable[0])
    except (build.BuildError, OSError) as error:
        log.warning("Using torch's kernels, which are slower: %s.", error)
        return None


@functools.cache
def open_level(level: str) -> ctypes.CDLL:
    """Return the library of one level, which this CPU must support. Raises BuildError or OSError.

    torch must be imported before, so that the library shares torch's OpenMP runtime.
    """
    path = build.HERE / build.name(level)
    if not path.exists():
        path = cache() / path.name
    if not path.exists():
        log.info("Compiling the kernels for %s. This happens once and takes some seconds.", level)
        own = os.access(build.HERE, os.W_OK)
        path = build.install(build.HERE, [level])[0] if own else build.compile(level, path.parent)
    return ctypes.CDLL(str(path))


def cache() -> Path:
    """Return the user's cache folder for parley, which may not exist. Raises OSError if the user has no home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parley"
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, "The user has no home folder") from error
