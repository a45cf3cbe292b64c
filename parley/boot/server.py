"""Runs a server from its options to its end: listen, load, serve, drain, close. No state outlives the process.

The ports listen before the models load, so that probes are answered from the start. The first signal drains, the second
stops at once; the engines are closed in either case.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from ssl import SSLContext
from typing import Any

import uvloop

from parley import hub
from parley.boot.api_processes import ApiProcessFailed
from parley.boot.engine_factories import make_engine
from parley.boot.listening_places import find_unprotected_port, listening_places
from parley.boot.option_reload import OptionReloader
from parley.boot.server_parts import ServerParts
from parley.boot.server_ports import ServerPorts
from parley.boot.service_manager import ServiceManager
from parley.boot.start_banner import opening_lines
from parley.child_process import keep_standard_streams
from parley.dialects.mounts import is_api
from parley.disagg.kv.listener import MAX_UNAUTHENTICATED
from parley.disagg.kv.peer import KVPeer
from parley.disagg.wire.networks import TrustedNetworks
from parley.engine.messages import LoadProgress
from parley.engine.protocol import EngineFailed
from parley.serving.endpoints.traffic_split import BadEndpointFile
from parley.serving.keys.usage_store import BadUsageFile
from parley.serving.records.record_store import BadRecordFile
from parley.serving.served_model import ServedModel, divide_memory
from parley.serving.server_options import OfferedModel, ServerOptions
from parley.text.tokens.json_files import BadTokenizer
from parley.web import banner, logs
from parley.web.connection_limit import ADMIN_CONNECTIONS, divide_descriptors
from parley.web.hangup import install_hang_up_handler
from parley.web.port import (
    describe_address,
    explain_listen_error,
    freeze_objects,
    open_listener,
)
from parley.web.tls.certificate_watch import watch_certificates
from parley.web.tls.contexts import client_tls_context, server_tls_context
from parley.web.tls.files import TlsFileError

log = logging.getLogger("parley.server")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
LOAD_FAILURES = (EngineFailed, BadTokenizer)


def run_server(
    offered_models: Sequence[OfferedModel],
    options: ServerOptions,
    read_options: Callable[[], ServerOptions] | None = None,
) -> int:
    """Serve until a signal or a failure. Return 0 or 1, or after a second signal 128 + its number.

    ``read_options`` reads the options again at SIGHUP. Raises ConfigError; None: they stay.
    """
    keep_standard_streams()
    logs.set_up_logging(options.log_format, options.log_level)
    for notice in options.notes:
        log.warning(notice)
    options = with_connection_limits(options)
    if unprotected_port := find_unprotected_port(options, listening_places(options)):
        banner.print_failure(unprotected_port)
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
                banner.print_failure(explain_listen_error(host, port, error))
                return 1
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        try:
            server = ServerProcess(offered_models, options, sockets, tls_contexts, read_options)
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
        max_connections=options.max_connections,
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


class ServerProcess:
    """One server process, from its first line of output to its end: load the models, serve, drain, close.

    ``sockets`` and ``tls_contexts``: listening sockets and TLS contexts (None: unencrypted), one per item of
    ``listening_places``.
    """

    def __init__(
        self,
        offered_models: Sequence[OfferedModel],
        options: ServerOptions,
        sockets: Sequence[socket.socket],
        tls_contexts: Sequence[SSLContext | None] = (),
        read_options: Callable[[], ServerOptions] | None = None,
    ):
        self.offered_models = offered_models
        models = [ServedModel(model.names, model.settings, make_engine(model), options) for model in offered_models]
        self._received_signals: list[int] = []
        self._stop_event = asyncio.Event()
        self._force_event = asyncio.Event()
        self._service_manager = ServiceManager()
        tls = options.peer_tls
        peer_tls = () if tls is None else (server_tls_context(tls), client_tls_context(tls))
        self._parts = ServerParts(options, models, make_peer(options, *peer_tls), self.request_stop)
        self.registry = self._parts.registry
        self._ports = ServerPorts(self._parts, options, sockets, tls_contexts, peer_tls)
        self._reloader = OptionReloader(options, read_options or (lambda: options), self.registry, self._ports)

    @property
    def options(self) -> ServerOptions:
        """The options as they are now; some change while the server runs."""
        return self._reloader.options

    async def serve_until_exit(self) -> int:
        """Run the server from its first output line to its end. Return the exit code."""
        start_time = time.monotonic()
        try:
            grpc_addresses = await self._ports.listen_for_peers_and_grpc()
        except (OSError, TlsFileError) as error:
            banner.print_failure(str(error))
            return 1
        loop = asyncio.get_running_loop()
        for signal_number in STOP_SIGNALS:
            loop.add_signal_handler(signal_number, self._on_signal, signal_number)
        reloader = self._reloader
        install_hang_up_handler(reloader.read_options, reloader.reload_options, self.request_stop)
        self._print_opening(grpc_addresses)
        serving = asyncio.create_task(self._ports.serve_http())
        self._ports.start_api_processes()
        sampling = asyncio.create_task(self.registry.activity_history.take_samples(self.registry.models))
        watching = asyncio.gather(
            watch_certificates(self._ports.tls_files(), self._ports.reload_certificates),
            self._reloader.watch_keys(self.options.key_files),
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

    def _print_opening(self, grpc_addresses: list[str]) -> None:
        """Print the addresses where the server listens, and the models that it will load."""
        places, roots = self._ports.places, self._ports.local_urls()
        api_urls = [
            (mount.dialect, root + mount.prefix)
            for place, root in zip(places, roots, strict=True)
            for mount in place.mounts
            if is_api(mount) and not place.title
        ]
        planes = [(place.title, root) for place, root in zip(places, roots, strict=True) if place.title]
        banner.print_line(opening_lines(self.options, self.offered_models, roots[0], api_urls, grpc_addresses, planes))

    async def _load_and_serve(self, serving: asyncio.Task[None], started: float) -> str:
        """Load the models, then serve. Return "" after a signal, else the error."""
        stop = asyncio.create_task(self._stop_event.wait())
        loading = asyncio.create_task(self._load_models())
        showing = asyncio.create_task(banner.show_progress(self._loading_progress))
        watching = asyncio.create_task(self._wait_engines_failed())
        tasks: list[asyncio.Task[Any]] = [stop, loading, showing, watching]
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
                tasks.append(asyncio.create_task(self._ports.resume_batches()))
                await asyncio.wait({stop, watching, serving}, return_when=asyncio.FIRST_COMPLETED)
            return watching.result() if watching.done() else ""
        finally:
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
            await self._ports.wait_api_processes()
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
            f"{model.name}: {model.engine.progress.stage}", sum(model.load_progress for model in models) / len(models)
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
            self._ports.stop_waiting_for_clients()
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
        self._ports.announce_shutdown()
        force = asyncio.create_task(self._force_event.wait())
        draining = asyncio.create_task(self.registry.drain_models())
        await asyncio.wait({force, draining}, return_when=asyncio.FIRST_COMPLETED)
        for task in (force, draining):
            task.cancel()
        if self._force_event.is_set():  # open requests end as after the drain time; a closing engine would fail them
            await self.registry.drain_models(0)
        await self.registry.close_models()
        await self._ports.close_api_processes()
        await self._parts.close_parts()
        await self._ports.stop_listening()
        await asyncio.gather(serving, return_exceptions=True)
