"""The files of TLS: which ones a port uses, and errors that name the file at fault."""

from __future__ import annotations

import ssl
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

MAX_TLS_FILE = 16 << 20  # bytes; the authorities of the whole web take less than one


class TlsFileError(Exception):
    """A TLS file cannot be used. The message names it."""


class TlsFiles(NamedTuple):
    """TLS settings of a port: paths of files in PEM format.

    ``password_file``: file with the password of the key. With ``client_authorities``, files of certificate authorities,
    a client must present a certificate that one of them issued and that is on none of the ``revocation_lists``.
    """

    certificate: Path
    key: Path
    password_file: Path | None = None
    client_authorities: tuple[Path, ...] = ()
    revocation_lists: tuple[Path, ...] = ()


def list_tls_files(used: Iterable[TlsFiles | None]) -> tuple[Path, ...]:
    """Return every file that these settings name, once."""
    files = {
        path
        for tls in used
        if tls is not None
        for path in (tls.certificate, tls.key, tls.password_file, *tls.client_authorities, *tls.revocation_lists)
        if path is not None
    }
    return tuple(sorted(files))


def check_tls_file(path: Path) -> Path:
    """Return a path that can be read in one go. Raises OSError, and ValueError for a pipe, a device or a huge file."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise ValueError("it is no regular file")
    if status.st_size > MAX_TLS_FILE:
        raise ValueError(f"it has more than {MAX_TLS_FILE} bytes")
    return path


@contextmanager
def blaming_file(path: Path) -> Iterator[None]:
    """Raise every error in the block as TlsFileError that names this file."""
    try:
        yield
    except ssl.SSLError as error:
        raise TlsFileError(f"{path} cannot be used: {error.reason or error}") from None
    except OSError as error:
        raise TlsFileError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise TlsFileError(f"{path} cannot be used: {error}") from None
