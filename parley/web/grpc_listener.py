"""Opens the ports of a gRPC server, with a certificate that may be read again while they are open."""

from __future__ import annotations

from typing import Any

from parley.web.banner import local_address
from parley.web.tls.files import TlsFiles
from parley.web.tls.grpc_certificate import GrpcCertificate


class GrpcListener:
    """The certificate of one gRPC server, and its ports, which use TLS if ``load_certificate`` was given files."""

    def __init__(self) -> None:
        self._certificate: GrpcCertificate | None = None

    def load_certificate(self, tls: TlsFiles | None) -> None:
        """Read the certificate of ports that are opened from now on; None: they have none. Raises TlsFileError."""
        self._certificate = None if tls is None else GrpcCertificate(tls)

    def open_port(self, server: Any, host: str, port: int) -> str:
        """Add a port (0: any free one) to a server of grpc.aio; return the address for clients. Raises OSError."""
        name = f"[{host}]" if ":" in host else host
        try:
            if self._certificate is None:
                bound = server.add_insecure_port(f"{name}:{port}")
            else:
                bound = server.add_secure_port(f"{name}:{port}", self._certificate.make_credentials())
        except RuntimeError as error:
            raise OSError(
                f"cannot listen on {host} port {port} for gRPC: the port is taken, or the address is unknown."
            ) from error
        return local_address(host, bound)

    def reload_certificate(self) -> None:
        """Read the certificate again, for clients that connect from now on. Raises TlsFileError."""
        if self._certificate is not None:
            self._certificate.reload()
