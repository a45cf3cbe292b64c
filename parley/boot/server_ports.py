"""The ports of one server process: HTTP for clients and administrators, gRPC, and the port for other instances."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from ssl import SSLContext
from typing import TYPE_CHECKING

from parley.boot.api_processes import ApiProcessPool, with_refresh
from parley.boot.listening_places import listening_places
from parley.boot.server_parts import ServerParts
from parley.dialects.route import RouteKind
from parley.serving.api_processes.passing import PassedApp
from parley.serving.records.background import tenant_records
from parley.serving.records.batch_resumption import BatchResumption
from parley.serving.server_options import ServerOptions
from parley.web import banner
from parley.web.auth import is_loopback, port_reach
from parley.web.connection_limit import ConnectionLimit, admin_limit
from parley.web.http_client import IDLE_SECONDS
from parley.web.port import CorsByPath, HttpServer, port_number, remove_unix_socket, uvicorn_config
from parley.web.tls.contexts import LoadedTls, reload_certificates
from parley.web.tls.files import list_tls_files

if TYPE_CHECKING:
    from parley.serving.grpc.grpc_port import TritonGrpcPort

log = logging.getLogger("parley.server")

GRPC_STOP_SECONDS = 0.5  # seconds for the last gRPC messages while closing
# Routes that report metrics of API processes.
REPORTING_KINDS: tuple[RouteKind, ...] = ("metrics", "activity", "info", "summed_info")
PASSED_HEADER_BYTES = 4096
PASSED_KEEP_ALIVE = 1.5 * IDLE_SECONDS  # longer than API processes keep an idle connection


def passed_options(options: ServerOptions) -> ServerOptions:
    """Return the options for connections of API processes, which add a header to the requests that they pass."""
    return replace(
        options,
        connection_limit=ConnectionLimit(),
        header_limit=options.header_limit + PASSED_HEADER_BYTES,
        header_count=options.header_count + 1,
        keep_alive=PASSED_KEEP_ALIVE,
    )


class ServerPorts:
    """All ports of a server, and the API processes that share those for clients.

    ``sockets`` and ``tls_contexts``: listening sockets and TLS contexts (None: unencrypted), one per item of
    ``listening_places``. ``peer_tls``: the contexts for connections between instances, as server and as client.
    """

    def __init__(
        self,
        parts: ServerParts,
        options: ServerOptions,
        sockets: Sequence[socket.socket],
        tls_contexts: Sequence[SSLContext | None] = (),
        peer_tls: Sequence[SSLContext] = (),
    ):
        self.places = listening_places(options)
        self._parts, self._options, self._sockets = parts, options, sockets
        self._loaded_tls = [
            LoadedTls(context, options.peer_tls) for context in peer_tls if options.peer_tls is not None
        ]
        self._loaded_tls += [
            LoadedTls(context, place.tls)
            for place, context in zip(self.places, tls_contexts, strict=False)
            if context is not None and place.tls is not None
        ]
        self._apps = [
            parts.make_port_app(place.mounts, place.host, certified=place.is_certified, serves_route=place.serves_route)
            for place in self.places
        ]
        cors_apps = [CorsByPath(app, options.cors, app.web_origins) for app in self._apps]
        place_options = [
            replace(options, connection_limit=admin_limit()) if place.is_admin else options for place in self.places
        ]
        self._servers = [
            HttpServer(uvicorn_config(*arguments)) for arguments in zip_longest(place_options, cors_apps, tls_contexts)
        ]
        self._api_processes = None if options.api_processes == 1 else self._make_api_processes()
        self._grpc_port: TritonGrpcPort | None = None

    def _make_api_processes(self) -> ApiProcessPool:
        """Return the API processes, which share the ports for clients."""
        numbers = [number for number, place in enumerate(self.places) if not place.is_admin]
        pool = ApiProcessPool(
            self._parts.registry,
            {number: self._sockets[number] for number in numbers},
            {number: self._servers[number] for number in numbers},
            HttpServer(uvicorn_config(passed_options(self._options), PassedApp(dict(enumerate(self._apps))))),
        )
        for kind in REPORTING_KINDS:
            self._parts.handlers[kind] = with_refresh(pool.refresh_metrics, self._parts.handlers[kind])
        return pool

    def local_urls(self) -> list[str]:
        """Return the URL of each HTTP port, in the order of ``places``."""
        return [
            banner.local_url(place.host, port_number(sock), place.tls is not None)
            for place, sock in zip(self.places, self._sockets, strict=True)
        ]

    def tls_files(self) -> tuple[Path, ...]:
        """Return the files of all certificates and keys in use."""
        return list_tls_files((self._options.tls, *(tls.files for tls in self._loaded_tls)))

    async def listen_for_peers_and_grpc(self) -> list[str]:
        """Listen for other instances and for gRPC if configured. Return the gRPC addresses.

        Raises OSError, TlsFileError.
        """
        options = self._options
        if options.peer_port is not None:
            await self._listen_for_peers(self.places[0].host, options.peer_port)
        if not options.grpc:
            return []
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its output to standard error does not have our log format
        from parley.serving.grpc.grpc_port import TritonGrpcPort  # its packages are optional

        tls = options.tls
        certified = tls is not None and bool(tls.client_authorities)
        host = next((listener.host for listener in options.grpc if not is_loopback(listener.host)), "127.0.0.1")
        check_client = partial(self._parts.instance_state.check_client, reach=port_reach(host, certified=certified))
        self._grpc_port = TritonGrpcPort(self._parts.registry, check_client)
        addresses = [(listener.host, listener.port) for listener in options.grpc]
        return await self._grpc_port.start_server(addresses, tls)

    async def _listen_for_peers(self, host: str, first_port: int) -> None:
        """Listen for other instances, at the first free port of those that may be tried. Raises OSError."""
        last_port = first_port + self._options.peer_port_attempts - 1
        for port in range(first_port, last_port + 1):
            try:
                await self._parts.listen_for_handovers(host, port, self._apps)
                break
            except OSError as error:
                if error.errno == errno.EADDRINUSE and port < last_port:
                    continue
                reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
                raise OSError(
                    f"cannot listen on {host} port {port} for handovers: {reason}. Choose another with --peer-port."
                ) from None
        if port != first_port:
            log.info("Port %d is in use, so handovers are taken at port %d.", first_port, port)

    def start_api_processes(self) -> None:
        """Start the API processes, if there are several."""
        if self._api_processes is not None:
            self._api_processes.start()

    async def wait_api_processes(self) -> None:
        """Wait until an API process can serve, if there are several. Raises ApiProcessFailed."""
        if self._api_processes is not None:
            await self._api_processes.wait_until_ready()

    async def serve_http(self) -> None:
        """Answer HTTP requests until ``stop_listening``."""
        pairs, pool = zip(self._servers, self._sockets, strict=True), self._api_processes
        if pool is None:
            await asyncio.gather(*(server.serve(sockets=[sock]) for server, sock in pairs))
        else:  # which may take the sockets over
            serving = [server.serve(sockets=[sock.dup()]) for server, sock in pairs]
            await asyncio.gather(*serving, pool.passed_server.serve(sockets=[]))

    def use_options(self, options: ServerOptions) -> None:
        """Use other keys, limits and times from now on."""
        self._options = options
        for app in self._apps:
            app.use_options(options)
        for server in self._servers:
            server.use_options(options)
        if self._api_processes is not None:
            self._api_processes.use_options(options)
            self._api_processes.passed_server.use_options(passed_options(options))
        if self._grpc_port is not None:
            self._grpc_port.use_options(options)

    def reload_certificates(self) -> None:
        """Read all certificates again, for connections from now on. Raises TlsFileError before anything has changed."""
        reload_certificates(self._loaded_tls)
        if self._api_processes is not None:
            self._api_processes.use_options(self._options)
        if self._grpc_port is not None:
            self._grpc_port.listener.reload_certificate()

    def announce_shutdown(self) -> None:
        """Ask clients of HTTP/2 to send further requests elsewhere: the server will stop soon."""
        for server in self._servers:
            server.announce_shutdown()
        if self._api_processes is not None:
            self._api_processes.announce_shutdown()

    def stop_waiting_for_clients(self) -> None:
        """End open connections at once when the ports stop listening."""
        for server in self._servers:
            server.force_exit = True

    async def close_api_processes(self) -> None:
        """End the API processes, which report the usage of their last requests before."""
        if self._api_processes is not None:
            await self._api_processes.close()

    async def resume_batches(self) -> None:
        """Resume the batches of servers that have ended, until this one ends."""
        registry = self._parts.registry
        records_of = partial(tenant_records, registry.record_store, registry.background_runs)
        await BatchResumption(registry.batch_runner, self._apps, records_of).keep_resuming()

    async def stop_listening(self) -> None:
        """Stop the gRPC server, and let ``serve_http`` end."""
        if self._grpc_port is not None:
            await self._grpc_port.stop_server(GRPC_STOP_SECONDS)
        for listener in self._sockets:
            remove_unix_socket(listener)
        for server in (*self._servers, *([self._api_processes.passed_server] if self._api_processes else ())):
            server.should_exit = True
