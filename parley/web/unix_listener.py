"""Listening Unix sockets and their files, which a killed server leaves behind and two servers may claim at once."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator

LOCK_SECONDS = 2.0  # opening a Unix socket takes a server milliseconds
SOCKET_MODE = 0o660


class UnixListener(socket.socket):
    """A listening Unix socket. ``path``: of its file; ``file_id`` tells that file from another one at this path."""

    path = ""
    file_id = (0, 0, 0)

    def remove_file(self) -> None:
        """Remove the file, unless another server has put its own there meanwhile."""
        with contextlib.suppress(OSError):
            if _file_id(self.path) == self.file_id:
                os.unlink(self.path)


def _file_id(path: str) -> tuple[int, int, int]:
    """Return numbers that identify a file. The time is one of them, because inode numbers are soon used again."""
    status = os.lstat(path)
    return status.st_dev, status.st_ino, status.st_mtime_ns


def open_unix_listener(path: str, backlog: int) -> UnixListener:
    """Return a listening Unix socket for owner and group; a stale one is replaced. Raises OSError."""
    with _locked_folder(os.path.dirname(path) or "."):
        return _replace_unix_socket(path, backlog)


@contextlib.contextmanager
def _locked_folder(folder: str) -> Iterator[None]:
    """Keep other servers from opening a socket in this folder meanwhile: one that is bound, but does not listen yet,
    looks stale. Nothing is locked without the right to read the folder, or if another program keeps it locked."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield
        return
    try:
        _wait_for_lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int) -> None:
    """Lock a folder, unless its file system has no locks, or another program does not release it in time."""
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                return
            time.sleep(0.01)
        except OSError:
            return


def _replace_unix_socket(path: str, backlog: int) -> UnixListener:
    with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as probe:
        # A connection to a file that is no socket is refused as well.
        if stat.S_ISSOCK(os.stat(path).st_mode) and probe.connect_ex(path) == errno.ECONNREFUSED:
            os.unlink(path)
    listener = UnixListener(socket.AF_UNIX)
    try:
        listener.bind(path)
        listener.path, listener.file_id = path, _file_id(path)
        os.chmod(path, SOCKET_MODE)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener
