"""TLS contexts of ports and of connections between instances: certificates, and the accepted client authorities."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parley.web.options import Tls


class BadTls(Exception):
    """A TLS file cannot be used. The message names it."""


def context(tls: Tls) -> ssl.SSLContext:
    """Return the TLS context of a port. An encrypted key without a password file is asked for at the terminal.

    Raises BadTls.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.set_alpn_protocols(["http/1.1"])
    return _with(made, tls)


def _with(made: ssl.SSLContext, tls: Tls) -> ssl.SSLContext:
    """Load the files of ``tls`` into a context and return it. Raises BadTls."""
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
    """Load a certificate into a context. ``password_file``: file with the password of its key. Raises BadTls."""
    said = None
    if password is not None:
        with using(password):
            said = password.read_text("utf-8").strip()
    for path in (certificate, key):
        with using(path):
            path.read_bytes()  # load_cert_chain does not say which of the two files is at fault
    with using(key):
        made.load_cert_chain(certificate, key, said)


def calling(tls: Tls) -> ssl.SSLContext:
    """Return the TLS context for connections to instances with the same authorities. Raises BadTls.

    They are identified by their certificates alone; host names are not checked, since addresses are chosen elsewhere.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    return _with(made, tls)


@contextmanager
def using(path: Path) -> Iterator[None]:
    """Raise every error in the block as BadTls that names this file."""
    try:
        yield
    except ssl.SSLError as error:
        raise BadTls(f"{path} cannot be used: {error.reason or error}") from None
    except OSError as error:
        raise BadTls(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BadTls(f"{path} cannot be used: {error}") from None
