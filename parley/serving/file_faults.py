"""Explains to operators why a file cannot be used, and names the remedy."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

LITTLE_SPACE = 256 << 10  # bytes; SQLite needs about 190 KB for a new database, its log and the log's index
FULL_DISK = "the disk is full"
# SQLite's codes for a write that the system refused; they do not tell the reason.
REFUSED_WRITES = ("SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE", "SQLITE_IOERR_FSYNC", "SQLITE_IOERR_TRUNCATE")
REMEDIES = {
    FULL_DISK: "Make room there, or name a file on another disk",
    os.strerror(errno.EDQUOT): "Make room, or name a file that counts to another quota",
    os.strerror(errno.EROFS): "Name a file in a folder that can be written",
    os.strerror(errno.EACCES): "Let this user write the file and its folder, or name another file",
    os.strerror(errno.EPERM): "Let this user write the file and its folder, or name another file",
    os.strerror(errno.ENOENT): "Make its folder, or name another file",
}


def fault_reason(file: str | Path, error: OSError | sqlite3.Error) -> str:
    """Return why a file, or one in a folder, cannot be used, as a clause without the file's name."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorname", "")  # not there if Python raised the error
        is_full = code == "SQLITE_FULL" or (code in REFUSED_WRITES and _free_space(file) < LITTLE_SPACE)
        return FULL_DISK if is_full else str(error)
    return FULL_DISK if error.errno == errno.ENOSPC else error.strerror or type(error).__name__


def describe_fault(file: str | Path, error: OSError | sqlite3.Error) -> str:
    """Return why a file cannot be used, with the remedy, as the end of a sentence that names the file."""
    reason = fault_reason(file, error)
    remedy = REMEDIES.get(reason)
    return f"{reason}. {remedy}." if remedy else f"{reason}."


def _free_space(file: str | Path) -> int:
    """Return the bytes that are free for this user on the disk of a file, or LITTLE_SPACE if the disk does not say."""
    try:
        disk = os.statvfs(Path(file).absolute().parent)
    except OSError:  # the disk itself has failed, as an NFS server that is gone
        return LITTLE_SPACE
    return disk.f_bavail * disk.f_frsize
