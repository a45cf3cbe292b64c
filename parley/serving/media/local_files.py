"""Reads images, videos and audio from files below one folder, which the operator allows clients to name.

Each component of a path is opened beneath the one before it, and symbolic links are not followed, so no change of the
folder in between leads out of it. A file is looked at before it is opened for reading: devices and pipes are never
opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote, urlsplit

from parley.errors import BadMedia, MediaFault
from parley.serving.server_options import MediaOptions
from parley.types.media import KIND_NAMES, MediaKind

MAX_PATH_LENGTH = 4096
LOOK_AT = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC  # such a descriptor refers to a file without opening it


class LocalMediaFolder:
    """The folder of ``--media-path``. Without one, every file is refused."""

    def __init__(self, options: MediaOptions):
        self._folder = Path(os.path.abspath(options.folder)) if options.folder is not None else None
        self._sizes = options.sizes

    def read_file(self, path: str, kind: MediaKind, field: str) -> bytes:
        """Return the content of a file, by an absolute path or a ``file:`` URL. Raises BadMedia.

        Blocks while it reads; call it in a thread.
        """
        item = FileRequest(kind, field, self._sizes[kind])
        if self._folder is None:
            item.fail("forbidden_address", "This server reads no files for clients: it has no --media-path.")
        parts = self._parts_below(path)
        if parts is None:
            item.fail("forbidden_address", f"The {item.name} is not in the folder that clients may name files of.")
        try:
            with open_beneath(self._folder, parts) as file_number:
                return item.read_open_file(file_number)
        except (OSError, UnicodeError):  # UnicodeError: no file can have this name
            item.fail("not_found", f"There is no such {item.name} file that the server may read.")

    def _parts_below(self, path: str) -> list[str] | None:
        """Return the components of a path below the folder; None if it is not, or may not be, below it."""
        assert self._folder is not None
        if len(path) > MAX_PATH_LENGTH:
            return None
        if path[:5].lower() == "file:":
            url = urlsplit(path)
            if url.netloc not in ("", "localhost"):
                return None
            path = unquote(url.path)
        parts, folder_parts = [part for part in path.split("/") if part not in ("", ".")], self._folder.parts[1:]
        count = len(folder_parts)
        if not path.startswith("/") or "\0" in path or ".." in parts or tuple(parts[:count]) != folder_parts:
            return None
        return parts[count:] or None


class FileRequest:
    """One item that is read from a file: its limit, and its name in errors."""

    def __init__(self, kind: MediaKind, field: str, size_limit: int):
        self.name = KIND_NAMES[kind]
        self._kind, self._field, self._size_limit = kind, field, size_limit

    def read_open_file(self, file_number: int) -> bytes:
        """Return the content of a file that ``open_beneath`` refers to. Raises BadMedia, OSError."""
        status = os.fstat(file_number)
        if not stat.S_ISREG(status.st_mode):
            self.fail("forbidden_address", f"The path of the {self.name} is not that of a regular file.")
        if status.st_size > self._size_limit:
            self._refuse_size(size=status.st_size)
        with open(f"/proc/self/fd/{file_number}", "rb") as file:
            return file.read(status.st_size)  # bytes that are appended meanwhile are left out

    def _refuse_size(self, **detail: int) -> NoReturn:
        limit = self._size_limit
        self.fail("too_large", f"The {self.name} is larger than the limit of {limit} bytes.", limit=limit, **detail)

    def fail(self, reason: MediaFault, message: str, **detail: int) -> NoReturn:
        """Raise BadMedia."""
        raise BadMedia(message, reason=reason, kind=self._kind, field=self._field, **detail) from None


@contextmanager
def open_beneath(folder: Path, parts: list[str]) -> Iterator[int]:
    """Yield a descriptor that refers to the file at ``parts`` below a folder, without having opened it.

    Raises OSError, also for a symbolic link in place of a folder; one in place of the file is referred to as it is.
    """
    number = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts:
            parent, number = number, os.open(part, LOOK_AT, dir_fd=number)
            os.close(parent)
        yield number
    finally:
        os.close(number)
