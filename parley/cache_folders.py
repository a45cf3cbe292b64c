"""The user's cache folder, and folders of caches that are written as a whole.

A process writes in a scratch folder, which it locks, and gives it its name at the end. The lock of a process that is
killed ends with it, so the next one that uses the cache knows which scratch folders nobody needs, and removes them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SCRATCH_PREFIX = "unfinished-"


def user_cache_folder() -> Path:
    """Return the user's cache folder for parley, which may not exist. Raises OSError if the user has no home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parley"
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, "the user has no home folder") from error


@contextmanager
def write_whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a scratch folder, and give it the name ``folder`` if the block ends without an error.

    Other processes see all of its files or none, also after a power failure. If another process was faster, its folder
    stays. Raises OSError.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked_scratch_folder(folder.parent) as scratch:
        yield scratch
        for path in scratch.rglob("*"):
            if path.is_file() and not path.is_symlink():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        with suppress(OSError):
            scratch.rename(folder)
    if not folder.is_dir():
        raise OSError(0, "it cannot be renamed")


@contextmanager
def locked_scratch_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder within ``folder``, which is removed at the end unless it was renamed.

    Until then it is locked, so that ``remove_scratch_folders`` of other processes leaves it. Raises OSError.
    """
    scratch, descriptor = _lock_new_folder(folder)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(descriptor)


def _lock_new_folder(folder: Path) -> tuple[Path, int]:
    """Return a new scratch folder, and a descriptor with its lock. Raises OSError."""
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=folder))
        try:
            descriptor = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # another process has removed it, because it was not locked yet
        with suppress(OSError):  # a file system that cannot lock folders, such as NFS
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_same_folder(descriptor, scratch):
            return scratch, descriptor
        os.close(descriptor)


def remove_scratch_folders(folder: Path) -> None:
    """Remove the scratch folders within ``folder`` of processes that were killed. It need not exist."""
    for path in folder.glob(f"{SCRATCH_PREFIX}*"):
        with suppress(OSError):  # another process removes it, too
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # without locks, nothing is removed
                shutil.rmtree(path)
            finally:
                os.close(descriptor)


def _is_same_folder(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
