"""Runs a server from its options to its end: listen, load, serve, drain, close. No state outlives the process.

The ports listen before the models load, so that probes are answered from the start. The first signal drains, the second
stops at once; the engines are closed in either case.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from ssl import SSLContext
from typing import TYPE_CHECKING

import uvloop

from parley import hub
from parley.boot.api_processes import ApiProcessFailed, ApiProcessPool, with_refresh
from parley.boot.engines import make_engine
from parley.boot.opening import opening_lines
from parley.boot.parts import ServerParts
from parley.boot.places import find_open_plane, listening_places
from parley.boot.service_manager import ServiceManager
from parley.child_process import keep_standard_streams
from parley.dialects.dialect import RouteKind
from parley.dialects.mounts import is_api
from parley.disagg.kv.listener import MAX_UNAUTHENTICATED
from parley.disagg.kv.peer import KVPeer
from parley.disagg.wire.networks import TrustedNetworks
from parley.engine.messages import LoadProgress
from parley.engine.protocol import EngineFailed
from parley.serving.api_processes.passing import PassedApp
from parley.serving.endpoints.traffic_split import BadEndpointFile
from parley.serving.keys.usage_store import BadUsageFile
from parley.serving.options import OfferedModel, ServerOptions
from parley.serving.records.record_store import BadRecordFile
from parley.serving.served_model import ServedModel, divide_memory
from parley.settings.file_changes import file_changes
from parley.settings.options import ConfigError
from parley.settings.reload import ReloadedNames, take_over_fields
from parley.text.tokens.tokenizer import BadTokenizer
from parley.web import banner, logs
from parley.web.auth import is_loopback, port_reach
from parley.web.connection_limit import ADMIN_CONNECTIONS, ConnectionLimit, admin_limit, divide_descriptors
from parley.web.hangup import hang_up_handler
from parley.web.http_client import IDLE_SECONDS
from parley.web.port import (
    CorsByPath,
    HttpServer,
    describe_address,
    freeze_objects,
    listen_error_reason,
    open_listener,
    port_number,
    remove_unix_socket,
    uvicorn_config,
)
from parley.web.tls.certificate_watch import watch_certificates
from parley.web.tls.contexts import LoadedTls, client_tls_context, reload_certificates, server_tls_context
from parley.web.tls.files import TlsFileError, list_tls_files

if TYPE_CHECKING:
    from parley.serving.grpc.grpc_port import TritonGrpcPort

log = logging.getLogger("parley.server")

GRPC_STOP_SECONDS = 0.5  # seconds for the last gRPC messages while closing
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# The settings that SIGHUP and a changed key file change while the server runs.
KEY_OPTIONS = frozenset({"api_keys", "admin_keys", "priority_keys", "key_owners", "hashed_keys"})
# All settings that SIGHUP changes: keys, limits and times.
RELOADED_OPTIONS = frozenset(
    {
        "header_limit", "header_count", "header_timeout", "body_limit", "media_body_limit", "body_rate", "body_timeout",
        "write_timeout", "keep_alive", "ping_interval", "max_queue", "max_prompt", "max_output", "timeout",
        "token_timeout", "drain", "access_log", "log_bodies", *KEY_OPTIONS,
    }
)  # fmt: skip
# Routes that report metrics of API processes.
REPORTING_KINDS: tuple[RouteKind, ...] = ("metrics", "activity", "info", "summed_info")
PASSED_HEADER_BYTES = 4096
PASSED_KEEP_ALIVE = 1.5 * IDLE_SECONDS  # longer than API processes keep an idle connection
LOAD_FAILURES = (EngineFailed, BadTokenizer)


def run_server(
    offers: Sequence[OfferedModel], options: ServerOptions, read_options: Callable[[], ServerOptions] | None = None
) -> int:
    """Serve until a signal or a failure. Return 0 or 1, or after a second signal 128 + its number.

    ``read_options`` reads the options again at SIGHUP. Raises ConfigError; None: they stay.
    """
    keep_standard_streams()
    logs.set_up_logging(options.log_format, options.log_level)
    for notice in options.notes:
        log.warning(notice)
    options = with_connection_limits(options)
    if open_plane := find_open_plane(options, listening_places(options)):
        banner.print_failure(open_plane)
        return 1
    with contextlib.ExitStack() as stack:
        sockets, tls_contexts = [], []
        for host, port, _, tls, *_ in listening_places(options):
            try:
                tls_contexts.append(None if tls is None else server_tls_context(tls, http2=options.http2))
                sockets.append(stack.enter_context(open_listener(host, port)))
            except TlsFileError as error:
                banner.print_failure(f"cannot encrypt {describe_address(host, port)}: {error}.")
                return 1
            except OSError as error:
                banner.print_failure(f"cannot listen on {describe_address(host, port)}: {listen_error_reason(error)}.")
                return 1
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        try:
            server = ServerInstance(offers, options, sockets, tls_contexts, read_options)
        except (BadEndpointFile, BadRecordFile, BadUsageFile) as error:
            banner.print_failure(str(error))
            return 1
        except TlsFileError as error:
            banner.print_failure(f"the handovers between instances cannot be encrypted: {error}.")
            return 1
        return runner.run(server.serve_until_exit())


def with_connection_limits(options: ServerOptions) -> ServerOptions:
    """Return the options with limits on connections, which leave room for everything else that takes descriptors."""
    places = listening_places(options)
    shares = divide_descriptors(
        1 if options.role == "mixed" else 2,  # a handover takes one as well
        set_aside=sum(place.is_admin for place in places) * ADMIN_CONNECTIONS
        + (options.peer_port is not None) * MAX_UNAUTHENTICATED,
        grpc_ports=len(options.grpc),
        wanted=options.max_connections,
    )
    return replace(options, connection_limit=shares.clients, grpc_connections=shares.grpc)


def make_peer(
    options: ServerOptions, server_tls: SSLContext | None = None, client_tls: SSLContext | None = None
) -> KVPeer:
    """Return the peer that connects to other instances."""
    tls, networks = options.peer_tls, TrustedNetworks(options.cluster_networks)
    return KVPeer(
        admits_host=networks.contains_host if networks and tls is None and not options.cluster_secret else None,
        secret=options.cluster_secret.encode(),
        server_tls=server_tls,
        client_tls=client_tls,
        lease=options.peer_lease,
        checksum=options.peer_checksum,
    )


def passed_options(options: ServerOptions) -> ServerOptions:
    """Return the options for connections of API processes, which add a header to the requests that they pass."""
    return replace(
        options,
        connection_limit=ConnectionLimit(),
        header_limit=options.header_limit + PASSED_HEADER_BYTES,
        header_count=options.header_count + 1,
        keep_alive=PASSED_KEEP_ALIVE,
    )


class ServerInstance:
    """One server process: one HTTP server per port, and the models.

    ``sockets`` and ``tls_contexts``: listening sockets and TLS contexts (None: unencrypted), one per item of
    ``listening_places``.
    """

    def __init__(
        self,
        offers: Sequence[OfferedModel],
        options: ServerOptions,
        sockets: Sequence[socket.socket],
        tls_contexts: Sequence[SSLContext | None] = (),
        read_options: Callable[[], ServerOptions] | None = None,
    ):
        self.offers = offers
        self.options = options
        self._read_options = read_options or (lambda: options)
        models = [ServedModel(offer.names, offer.settings, make_engine(offer), options) for offer in offers]
        self._sockets = sockets
        self._received_signals: list[int] = []
        self._stop_event = asyncio.Event()
        self._service_manager = ServiceManager()
        tls = options.peer_tls
        peer_tls = () if tls is None else (server_tls_context(tls), client_tls_context(tls))
        self._parts = ServerParts(options, models, make_peer(options, *peer_tls), self.request_stop)
        self.registry = self._parts.registry
        self._force_event = asyncio.Event()
        self._places = listening_places(options)
        self._loaded_tls = [LoadedTls(context, tls) for context in peer_tls if tls is not None]
        self._loaded_tls += [
            LoadedTls(context, place.tls)
            for place, context in zip(self._places, tls_contexts, strict=False)
            if context is not None and place.tls is not None
        ]
        self._apps = [
            self._parts.make_port_app(place.mounts, place.host, certified=place.is_certified, keeps=place.keeps)
            for place in self._places
        ]
        cors_apps = [CorsByPath(app, options.cors, app.web_origins) for app in self._apps]
        place_options = [
            replace(options, connection_limit=admin_limit()) if place.is_admin else options for place in self._places
        ]
        self._servers = [
            HttpServer(uvicorn_config(*each)) for each in zip_longest(place_options, cors_apps, tls_contexts)
        ]
        self._api_processes = None if options.api_processes == 1 else self._make_api_processes()
        self._grpc_port: TritonGrpcPort | None = None

    def _make_api_processes(self) -> ApiProcessPool:
        """Return the API processes, which share the ports for clients."""
        numbers = [number for number, place in enumerate(self._places) if not place.is_admin]
        pool = ApiProcessPool(
            self.registry,
            {number: self._sockets[number] for number in numbers},
            {number: self._servers[number] for number in numbers},
            HttpServer(uvicorn_config(passed_options(self.options), PassedApp(dict(enumerate(self._apps))))),
        )
        for kind in REPORTING_KINDS:
            self._parts.handlers[kind] = with_refresh(pool.refresh, self._parts.handlers[kind])
        return pool

    async def serve_until_exit(self) -> int:
        """Run the server from its first output line to its end. Return the exit code."""
        start_time = time.monotonic()
        try:
            grpc_addresses = await self._listen_for_peers_and_grpc()
        except (OSError, TlsFileError) as error:
            banner.print_failure(str(error))
            return 1
        loop = asyncio.get_running_loop()
        for signal_number in STOP_SIGNALS:
            loop.add_signal_handler(signal_number, self._on_signal, signal_number)
        loop.add_signal_handler(signal.SIGHUP, hang_up_handler(self.reload_options, self.request_stop))
        roots = [
            banner.local_url(place.host, port_number(sock), place.tls is not None)
            for place, sock in zip(self._places, self._sockets, strict=True)
        ]
        api_urls = [
            (mount.dialect, root + mount.prefix)
            for place, root in zip(self._places, roots, strict=True)
            for mount in place.mounts
            if is_api(mount) and not place.title
        ]
        planes = [(place.title, root) for place, root in zip(self._places, roots, strict=True) if place.title]
        banner.print_line(opening_lines(self.options, self.offers, roots[0], api_urls, grpc_addresses, planes))
        serving = asyncio.create_task(self._serve_http())
        if self._api_processes is not None:
            self._api_processes.start()
        tls_files = list_tls_files((self.options.tls, *(tls.files for tls in self._loaded_tls)))
        sampling = asyncio.create_task(self.registry.activity_history.take_samples(self.registry.models))
        watching = asyncio.gather(
            watch_certificates(tls_files, self.reload_certificates), self._watch_keys(self.options.key_files)
        )
        alive = asyncio.create_task(self._service_manager.send_signs_of_life())
        try:
            failure = await self._load_and_serve(serving, start_time)
        finally:
            self._service_manager.notify("STOPPING=1")
            watching.cancel()
            sampling.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self._shut_down(serving)
            alive.cancel()
            for signal_number in (*STOP_SIGNALS, signal.SIGHUP):
                loop.remove_signal_handler(signal_number)
        if failure:
            banner.print_failure(failure)
            return 1
        return 128 + self._received_signals[1] if len(self._received_signals) > 1 else 0

    def request_stop(self) -> None:
        """Stop as at a first signal: running requests get the drain time to finish."""
        self._stop_event.set()

    def reload_options(self) -> ReloadedNames:
        """Read the options and all certificates again; keys and limits apply at once.

        Raises ConfigError, TlsFileError before anything has changed.
        """
        options, names = take_over_fields(self.options, self._read_options(), RELOADED_OPTIONS)
        if open_plane := find_open_plane(options, self._places):
            raise ConfigError(open_plane)
        self.reload_certificates()
        self._use_options(options)
        return names

    async def _watch_keys(self, files: tuple[Path, ...]) -> None:
        """Accept the keys of changed files, until this task is cancelled. Keys that cannot be read change nothing."""
        async for _ in file_changes(files):
            try:
                new_options = await asyncio.to_thread(self._read_options)
                options, names = take_over_fields(self.options, new_options, KEY_OPTIONS)
                if open_plane := find_open_plane(options, self._places):
                    raise ConfigError(open_plane)
            except ConfigError as error:
                log.error("Changed API keys were not loaded, and the old ones stay: %s", error)
                continue
            self._use_options(options)
            if names.changed:
                log.info("Changed API keys were loaded.")

    def _use_options(self, options: ServerOptions) -> None:
        """Take options over that may change while the server runs."""
        self.options = options
        self.registry.use_options(options)
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
            self._api_processes.use_options(self.options)
        if self._grpc_port is not None:
            self._grpc_port.reload_certificate()

    async def _listen_for_peers_and_grpc(self) -> list[str]:
        """Listen for other instances and for gRPC if configured. Return the gRPC addresses.

        Raises OSError, TlsFileError.
        """
        if self.options.peer_port is not None:
            await self._listen_for_peers(self._places[0].host, self.options.peer_port)
        if not self.options.grpc:
            return []
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its output to standard error does not have our log format
        from parley.serving.grpc.grpc_port import TritonGrpcPort  # its packages are optional

        tls = self.options.tls
        certified = tls is not None and bool(tls.client_authorities)
        host = next((each.host for each in self.options.grpc if not is_loopback(each.host)), "127.0.0.1")
        check_client = partial(self._parts.node.check_client, reach=port_reach(host, certified=certified))
        self._grpc_port = TritonGrpcPort(self.registry, check_client)
        addresses = [(each.host, each.port) for each in self.options.grpc]
        return await self._grpc_port.start_server(addresses, tls)

    async def _listen_for_peers(self, host: str, first_port: int) -> None:
        """Listen for other instances, at the first free port of those that may be tried. Raises OSError."""
        last_port = first_port + self.options.peer_port_attempts - 1
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

    async def _serve_http(self) -> None:
        pairs, pool = zip(self._servers, self._sockets, strict=True), self._api_processes
        if pool is None:
            await asyncio.gather(*(server.serve(sockets=[sock]) for server, sock in pairs))
        else:  # which may take the sockets over
            serving = [server.serve(sockets=[sock.dup()]) for server, sock in pairs]
            await asyncio.gather(*serving, pool.passed_server.serve(sockets=[]))

    async def _load_and_serve(self, serving: asyncio.Task[None], started: float) -> str:
        """Load the models, then serve. Return "" after a signal, else the error."""
        stop = asyncio.create_task(self._stop_event.wait())
        loading = asyncio.create_task(self._load_models())
        showing = asyncio.create_task(banner.show_progress(self._loading_progress))
        watching = asyncio.create_task(self._wait_engines_failed())
        try:
            await asyncio.wait({stop, loading, serving}, return_when=asyncio.FIRST_COMPLETED)
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
            if loading.done():
                if failure := loading.result():
                    return failure
                freeze_objects()
                banner.print_line(banner.ready_line(time.monotonic() - started))
                self._service_manager.notify("READY=1")
                await asyncio.wait({stop, watching, serving}, return_when=asyncio.FIRST_COMPLETED)
            return watching.result() if watching.done() else ""
        finally:
            tasks = (stop, loading, showing, watching)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _load_models(self) -> str:
        """Load the models. Return the error, or "".

        They are loaded one after the other, since each sizes itself by the memory that the earlier ones left.
        """
        models = self.registry.models
        try:
            for model in models:
                await model.fetch_weights()
            divide_memory(models)
            for model in models:
                banner.print_line(banner.loaded_line(model.name, await model.load_engine()))
            if self._api_processes is not None:
                await self._api_processes.wait_until_ready()
        except hub.ModelMissing as error:  # its message names the model
            return str(error)
        except LOAD_FAILURES as error:
            return f"{model.name}: {error}"
        except ApiProcessFailed as error:
            return str(error)
        return ""

    def _loading_progress(self) -> LoadProgress:
        """Return the progress of loading over all models."""
        models = self.registry.models
        model = self.registry.first_unready_model() or models[-1]
        return LoadProgress(
            f"{model.name}: {model.engine.progress.stage}", sum(each.load_progress for each in models) / len(models)
        )

    async def _wait_engines_failed(self) -> str:
        """Wait until every engine has failed for good, since the server is of no use then. Return the error."""
        while any(model.engine.state != "failed" for model in self.registry.models):
            await asyncio.sleep(0.2)
        await asyncio.sleep(0.5)  # time for streams to write their last event
        return f"the engine has failed for good: {self.registry.main_model.engine.failure}"

    def _on_signal(self, signal_number: int) -> None:
        self._received_signals.append(signal_number)
        if self._stop_event.is_set():
            self._force_event.set()
            for server in self._servers:
                server.force_exit = True
        else:
            self.request_stop()
            if self.registry.open_requests:
                log.info(
                    "Shutting down: %d running requests get up to %g s to finish. A second signal ends them now.",
                    len(self.registry.open_requests),
                    self.options.drain,
                )

    async def _shut_down(self, serving: asyncio.Task[None]) -> None:
        """Drain, close the engines and stop listening."""
        for server in self._servers:
            server.announce_shutdown()
        if self._api_processes is not None:
            self._api_processes.announce_shutdown()
        force = asyncio.create_task(self._force_event.wait())
        draining = asyncio.create_task(self.registry.drain_models())
        await asyncio.wait({force, draining}, return_when=asyncio.FIRST_COMPLETED)
        for task in (force, draining):
            task.cancel()
        await self.registry.close_models()
        if self._api_processes is not None:
            await self._api_processes.close()  # which report the usage of their last requests
        await self._parts.close_parts()
        if self._grpc_port is not None:
            await self._grpc_port.stop_server(GRPC_STOP_SECONDS)
        for listener in self._sockets:
            remove_unix_socket(listener)
        for server in (*self._servers, *([self._api_processes.passed_server] if self._api_processes else ())):
            server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
