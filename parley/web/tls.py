"""Encryption of a port: its certificate, and which clients are let in. Knows files, and nothing of what is served."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parley.web.options import Tls


class BadTls(Exception):
    """A file cannot be used. The message names it."""


def context(tls: Tls) -> ssl.SSLContext:
    """What connections are encrypted with. Without a password file that of a key is asked at the terminal.

    Raises BadTls.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.set_alpn_protocols(["http/1.1"])
    return _with(made, tls)


def _with(made: ssl.SSLContext, tls: Tls) -> ssl.SSLContext:
    """A context with the files. Raises BadTls."""
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    certify(made, tls.certificate, tls.key, tls.password)
    for path in tls.clients:
        with using(path):
            made.load_verify_locations(path)
        made.verify_mode = ssl.CERT_REQUIRED
    for path in tls.revoked:
        with using(path):
            made.load_verify_locations(path)
        made.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    return made


def certify(made: ssl.SSLContext, certificate: Path, key: Path, password: Path | None) -> None:
    """Have a context show a certificate. ``password``: the file with that of its key. Raises BadTls."""
    said = None
    if password is not None:
        with using(password):
            said = password.read_text("utf-8").strip()
    for path in (certificate, key):
        with using(path):
            path.read_bytes()  # what follows does not say which of the two is at fault
    with using(key):
        made.load_cert_chain(certificate, key, said)


def calling(tls: Tls) -> ssl.SSLContext:
    """The same files for connections to others of the same authorities. These are known by their certificates alone:
    where each is reached is decided elsewhere. Raises BadTls."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    return _with(made, tls)


@contextmanager
def using(path: Path) -> Iterator[None]:
    """What goes wrong inside is the file's fault. Raises BadTls."""
    try:
        yield
    except ssl.SSLError as error:
        raise BadTls(f"{path} cannot be used: {error.reason or error}") from None
    except OSError as error:
        raise BadTls(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BadTls(f"{path} cannot be used: {error}") from None
