"""The certificate of a gRPC port, which may be read again while the port is open."""

from __future__ import annotations

from typing import Any

import grpc

from parley.web.tls.contexts import server_tls_context
from parley.web.tls.files import TlsFileError, TlsFiles, blaming_file


class GrpcCertificate:
    """Certificate, key and client authorities for gRPC. Raises TlsFileError for files that gRPC cannot use."""

    def __init__(self, files: TlsFiles):
        self._files = files
        self._configuration = self._read_files()

    def make_credentials(self) -> Any:
        """Return the credentials of a port. Each handshake uses the files as last read."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            lambda: self._configuration,
            require_client_authentication=bool(self._files.client_authorities),
        )

    def reload(self) -> None:
        """Read the files again, for clients that connect from now on. Raises TlsFileError; the old ones then stay."""
        self._configuration = self._read_files()

    def _read_files(self) -> Any:
        files = self._files
        for option, setting in (("a password", files.password_file), ("a revocation list", files.revocation_lists)):
            if setting:
                raise TlsFileError(f"{files.key} is used with {option}, which gRPC does not support")
        server_tls_context(files)  # gRPC itself takes any bytes, and then fails every handshake
        contents = []
        for path in (files.key, files.certificate, *files.client_authorities):
            with blaming_file(path):
                contents.append(path.read_bytes())
        key, certificate, *authorities = contents
        return grpc.ssl_server_certificate_configuration([(key, certificate)], b"\n".join(authorities) or None)
