"""Loads the compiled kernels for this CPU. Compiles them if they are missing, and logs a warning if that fails.

``PARLEY_NATIVE`` selects a level of ``build.LEVELS``, or ``off`` for the torch kernels. The default is the best level
that the CPU supports and whose library exists or can be compiled. Libraries are searched for in the package folder,
then in the user's cache folder.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from contextlib import suppress

from parley.cache_folders import user_cache_folder
from parley.native import build

log = logging.getLogger("parley.engine")

# Linux lets a process use the registers of AMX only after a request: arch_prctl(2), numbers of <asm/prctl.h>
SYS_ARCH_PRCTL = 158
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_XTILEDATA = 18

_lock = threading.Lock()


def load_kernels() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None. The first call may compile them, which takes seconds."""
    with _lock:
        return _open_requested_level_once()


def open_requested_level() -> ctypes.CDLL | None:
    """Return the library of the level that ``PARLEY_NATIVE`` asks for; None, with a warning, if there is none."""
    requested_level = os.environ.get("PARLEY_NATIVE", "")
    if requested_level == "off":
        return None
    try:
        supported_levels = build.usable_levels()
        if requested_level and requested_level not in supported_levels:
            raise build.BuildError(
                f"PARLEY_NATIVE is {requested_level}, but this machine supports {', '.join(supported_levels)} or off"
            )
        return open_level(requested_level) if requested_level else _open_best_level(supported_levels)
    except (build.BuildError, OSError) as error:
        log.warning("Using torch's kernels, which are slower: %s.", error)
        return None


def _open_best_level(levels: list[str]) -> ctypes.CDLL:
    """Return the first of these levels that can be opened, and log a warning if it is not the best one.

    Raises BuildError or OSError: the reason why the first cannot be opened.
    """
    first_error: build.BuildError | OSError | None = None
    for level in levels:
        try:
            kernel_library = open_level(level)
        except (build.BuildError, OSError) as error:
            first_error = first_error or error
            continue
        if first_error is not None:
            log.warning("Using the kernels for %s, not the faster ones for %s: %s.", level, levels[0], first_error)
        return kernel_library
    raise first_error or build.BuildError("there are no kernels for this machine")


_open_requested_level_once = functools.cache(open_requested_level)


@functools.cache
def open_level(level: str) -> ctypes.CDLL:
    """Return the library of one level, which this CPU must support. Raises BuildError or OSError.

    torch must be imported before, so that the library shares torch's OpenMP runtime.
    """
    path = build.HERE / build.library_name(level)
    if not build.is_whole(path):
        path = user_cache_folder() / path.name
    if not build.is_whole(path):
        log.info("Compiling the kernels for %s. This happens once and takes some seconds.", level)
        is_writable = os.access(build.HERE, os.W_OK)
        path = (build.HERE if is_writable else path.parent) / path.name
        build.remove_unfinished_builds(path.parent)
        if is_writable:
            build.install_levels(build.HERE, [level])
        else:
            build.compile_level(level, path.parent)
    if set(build.AMX) <= set(build.LEVELS[level]):
        _request_matrix_registers()
    return ctypes.CDLL(str(path))


def _request_matrix_registers() -> None:
    """Ask Linux to let this process, with all its threads, use the registers of AMX. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA):
        code = ctypes.get_errno()
        raise OSError(code, f"the system does not allow AMX ({os.strerror(code)})")


def wanted_levels() -> list[str]:
    """Return the levels that this CPU supports and ``PARLEY_NATIVE`` allows, best first."""
    requested_level = os.environ.get("PARLEY_NATIVE", "")
    return [level for level in build.usable_levels() if requested_level in ("", level)]


def installed_level() -> str:
    """Return the level that is used without compiling anything: "" if there is none, "off" if that was asked for."""
    if os.environ.get("PARLEY_NATIVE") == "off":
        return "off"
    folders = [build.HERE]
    with suppress(OSError):  # a user without a home folder
        folders.append(user_cache_folder())
    for level in wanted_levels():
        if any(build.is_whole(folder / build.library_name(level)) for folder in folders):
            return level
    return ""


def must_compile() -> bool:
    """Whether ``load_kernels`` will compile the kernels, or try to."""
    levels = wanted_levels()
    return bool(levels) and installed_level() not in ("off", levels[0])
