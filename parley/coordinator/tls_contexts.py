"""The TLS of a coordinator: of the ports that clients connect to, and of its own connections to instances."""

from __future__ import annotations

import ssl
from pathlib import Path

from parley.coordinator.config import CoordinatorTls
from parley.web.tls.contexts import load_certificate, server_tls_context
from parley.web.tls.files import TlsFiles, blaming_file


def coordinator_tls_files(tls_config: CoordinatorTls) -> TlsFiles | None:
    """Return the files of the ports that clients connect to; None for plain HTTP."""
    if tls_config.certificate is None or tls_config.key is None:
        return None
    clients = (Path(tls_config.clients),) if tls_config.clients else ()
    return TlsFiles(Path(tls_config.certificate), Path(tls_config.key), _optional_path(tls_config.password), clients)


def port_tls_context(tls_config: CoordinatorTls, *, http2: bool) -> ssl.SSLContext | None:
    """Return the TLS context for clients' connections; None for plain HTTP. Raises TlsFileError."""
    files = coordinator_tls_files(tls_config)
    return None if files is None else server_tls_context(files, http2=http2)


def instance_tls_context(tls_config: CoordinatorTls, *, ask_password: bool = True) -> ssl.SSLContext | None:
    """Return the TLS context for https connections to instances; None for the default. Raises TlsFileError."""
    if tls_config.ca is None:
        return None
    with blaming_file(Path(tls_config.ca)):
        context = ssl.create_default_context(cafile=tls_config.ca)
    load_instance_tls(context, tls_config, ask_password=ask_password)
    return context


def load_instance_tls(context: ssl.SSLContext, tls_config: CoordinatorTls, *, ask_password: bool) -> None:
    """Load the files for connections to instances into a context. Raises TlsFileError."""
    assert tls_config.ca is not None
    with blaming_file(Path(tls_config.ca)):
        context.load_verify_locations(tls_config.ca)
    if tls_config.certificate is not None and tls_config.key is not None:
        password = _optional_path(tls_config.password)
        load_certificate(
            context, Path(tls_config.certificate), Path(tls_config.key), password, ask_password=ask_password
        )


def _optional_path(name: str | None) -> Path | None:
    return Path(name) if name else None
