"""TLS contexts of ports and of connections between instances: certificates, and the accepted client authorities."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from parley.web.framing import HAS_HTTP2
from parley.web.tls.files import TlsFiles, blaming_file, check_tls_file, list_tls_files

Copies = Mapping[Path, Path]  # files to read in place of others


def server_tls_context(tls: TlsFiles, *, http2: bool = False) -> ssl.SSLContext:
    """Return the TLS context of a port. An encrypted key without a password file is asked for at the terminal.

    ``http2``: offer HTTP/2 as well, if its package is installed. Raises TlsFileError.
    """
    tls_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls_context.set_alpn_protocols(["h2", "http/1.1"] if http2 and HAS_HTTP2 else ["http/1.1"])
    return _load_tls_files(tls_context, tls)


class LoadedTls(NamedTuple):
    """A TLS context in use, and the files that it was loaded from."""

    context: ssl.SSLContext
    files: TlsFiles


def reload_certificates(loaded: Iterable[LoadedTls]) -> None:
    """Load the files of contexts again, for connections from now on.

    Raises TlsFileError before anything has changed. Authorities that a file holds no more stay accepted. An encrypted
    key needs a password file.
    """
    loaded = tuple(loaded)
    with ExitStack() as stack:
        # Copies, so that the bytes that were tried are used, even if the files are replaced meanwhile: a context that
        # gets a certificate which does not belong to its key is left without a key.
        paths = list_tls_files(tls.files for tls in loaded)
        copies = {path: stack.enter_context(_memory_copy(path)) for path in paths}
        for tls in loaded:
            _load_tls_files(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), tls.files, copies, ask_password=False)
        for tls in loaded:
            _load_tls_files(tls.context, tls.files, copies, ask_password=False)


@contextmanager
def _memory_copy(path: Path) -> Iterator[Path]:
    """Yield the path of a copy in memory, which no other process can change. Raises TlsFileError."""
    if not hasattr(os, "memfd_create"):  # not Linux
        yield path
        return
    with blaming_file(path):
        content = check_tls_file(path).read_bytes()
    with os.fdopen(os.memfd_create("tls"), "wb") as copy:
        copy.write(content)
        copy.flush()
        yield Path(f"/proc/self/fd/{copy.fileno()}")


def _load_tls_files(
    tls_context: ssl.SSLContext, tls: TlsFiles, copies: Copies | None = None, *, ask_password: bool = True
) -> ssl.SSLContext:
    """Load the files of ``tls``, or their copies, into a context and return it. Raises TlsFileError."""
    copies = copies or {}
    tls_context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(tls_context, tls.certificate, tls.key, tls.password_file, copies, ask_password=ask_password)
    for path in tls.client_authorities:
        with blaming_file(path):
            tls_context.load_verify_locations(_readable_path(path, copies))
        tls_context.verify_mode = ssl.CERT_REQUIRED
    for path in tls.revocation_lists:
        with blaming_file(path):
            tls_context.load_verify_locations(_readable_path(path, copies))
        tls_context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    return tls_context


def _readable_path(path: Path, copies: Copies) -> Path:
    """Return the copy of a file, or else the path itself. Raises OSError, ValueError."""
    return copies[path] if path in copies else check_tls_file(path)


def load_certificate(
    tls_context: ssl.SSLContext,
    certificate: Path,
    key: Path,
    password_file: Path | None,
    copies: Copies | None = None,
    *,
    ask_password: bool = True,
) -> None:
    """Load a certificate into a context. ``password_file``: file with the password of its key. Raises TlsFileError."""
    copies = copies or {}
    key_password = None if ask_password else ""  # with None, OpenSSL asks for it at the terminal
    if password_file is not None:
        with blaming_file(password_file):
            key_password = _readable_path(password_file, copies).read_text("utf-8").strip()
    for path in (certificate, key):
        with blaming_file(path):
            _readable_path(path, copies).read_bytes()  # load_cert_chain does not say which of the two files is at fault
    with blaming_file(key):
        tls_context.load_cert_chain(copies.get(certificate, certificate), copies.get(key, key), key_password)


def client_tls_context(tls: TlsFiles) -> ssl.SSLContext:
    """Return the TLS context for connections to instances with the same authorities. Raises TlsFileError.

    They are identified by their certificates alone; host names are not checked, since addresses are chosen elsewhere.
    """
    tls_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls_context.check_hostname = False
    return _load_tls_files(tls_context, tls)
