"""The coordinator process: its ports, its components, and its shutdown. Handles no requests itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import uvloop
from starlette.types import ASGIApp

from parley.child_process import keep_standard_streams
from parley.coordinator.access import coordinator_reach, find_open_management
from parley.coordinator.config import CoordinatorOptions
from parley.coordinator.controller import RoleController
from parley.coordinator.ports.management import ManagementPort
from parley.coordinator.ports.metrics import MetricsPort
from parley.coordinator.ports.status import StatusPort
from parley.coordinator.proxy.downstream.client_keys import ClientKeys
from parley.coordinator.proxy.front import InferenceFront, wrap_cors
from parley.coordinator.proxy.upstream.connections import InstanceConnections
from parley.coordinator.routing.health import HealthChecker
from parley.coordinator.routing.instance_scheduler import InstanceScheduler
from parley.coordinator.routing.instance_table import InstanceTable
from parley.coordinator.routing.recheck import InstanceRecheck
from parley.coordinator.tls_contexts import (
    coordinator_tls_files,
    instance_tls_context,
    load_instance_tls,
    port_tls_context,
)
from parley.dialects.mounts import universal_mounts
from parley.log_lines import LogFormat, LogLevel
from parley.serving.keys.usage_store import BadUsageFile
from parley.serving.records.record_store import BadRecordFile
from parley.serving.server_options import ServerOptions
from parley.settings.file_changes import file_changes
from parley.settings.options import ConfigError
from parley.settings.reload import ReloadedNames, take_over_fields
from parley.tracing.otlp import open_span_exporter
from parley.version import __version__
from parley.web import banner, logs
from parley.web.connection_limit import ADMIN_CONNECTIONS, ConnectionLimit, admin_limit, divide_descriptors
from parley.web.hangup import install_hang_up_handler
from parley.web.port import (
    HttpServer,
    explain_listen_error,
    freeze_objects,
    open_listener,
    uvicorn_config,
)
from parley.web.request_body import BodyBudget
from parley.web.tls.certificate_watch import watch_certificates
from parley.web.tls.contexts import LoadedTls, reload_certificates
from parley.web.tls.files import TlsFileError, list_tls_files

if TYPE_CHECKING:
    from parley.coordinator.proxy.grpc import grpc_port

log = logging.getLogger("parley.cluster")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
DRAIN_SECONDS = 30.0  # seconds that open requests have to finish after the first signal
GRACE_SECONDS = 1.0  # seconds to send an error to the requests that did not finish
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")  # differs after each boot of the kernel
PORT_LIMITS = ("body_limit", "body_timeout", "header_timeout", "write_timeout", "keep_alive")
# The settings that SIGHUP changes while the coordinator runs: keys, limits and times.
RELOADED_KEYS = frozenset(
    {
        "max_requests", "body_limit", "memory_limit", "http_timeout_seconds", "header_timeout_seconds",
        "keep_alive_seconds", "max_retry", "schedule_timeout", "recovery_timeout", "first_token_timeout",
        "infer_timeout", "tokenizer_timeout", "heartbeat", "misses", "fault_seconds", "hashed_keys",
    }
)  # fmt: skip
NO_INSTANCES = """\
  instances  none yet, so requests get 503 until a controller lists some at the management port. To name them
             yourself, start with --config FILE, and have in the file for each server:
               [[instances]]
               url = "http://127.0.0.1:8000\""""
POLL_SECONDS = 0.05  # seconds between two checks whether requests are still open


class ListeningPort(NamedTuple):
    """A listening socket and the application that answers on it."""

    name: str
    host: str
    sock: socket.socket
    app: ASGIApp


class Coordinator:
    """The coordinator process, from construction through ``run_until_stopped`` to its exit code.

    ``sockets``: host and bound socket of each port by its name, "predict" and others of ``configured_ports``.
    ``read_options`` reads the options again when SIGHUP arrives.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        sockets: dict[str, tuple[str, socket.socket]],
        access_log: bool = True,
        read_options: Callable[[], CoordinatorOptions] | None = None,
    ):
        self.options = options
        self._read_options = read_options or (lambda: options)
        self._instance_context = instance_tls_context(options.tls)
        self._span_exporter = open_span_exporter(options.otlp_traces_endpoint, "coordinator")
        self.table = InstanceTable(options)
        self.connections = InstanceConnections(
            self.table, options, coordinator_id(*sockets["predict"]), self._instance_context
        )
        self.health = HealthChecker(self.table, self.connections.ask_instance, self.connections.last_heard)
        self._recheck = InstanceRecheck(self.table, self.health, self.connections.connect_results)
        self.scheduler = InstanceScheduler(self.table, check_unusable=self._recheck.check_unusable)
        self.controller = RoleController(self.table, self.scheduler, self.connections.ask_instance)
        hosts = {name: host for name, (host, _) in sockets.items()}
        host = hosts["predict"]
        self.management = ManagementPort(
            self.table, self.scheduler, self.connections.ask_instance, hosts.get("management", host)
        )
        self.metrics = MetricsPort(
            self.table,
            self.scheduler,
            self.connections.ask_instance,
            hosts.get("metrics", host),
            count_record_faults=lambda: self.front.record_faults,
        )
        self.status = StatusPort(self.table, self.scheduler, self.management, hosts.get("status", host))
        self._front_options = _front_options(options, host, len(sockets) - 1, access_log=access_log)
        self.client_keys = None if options.hashed_keys is None else ClientKeys(options)
        self.front = InferenceFront(
            self.scheduler,
            self.connections,
            self.metrics.page_of_key,
            universal_mounts(pages=options.ui),
            self._front_options,
            options.memory_limit,
            options.strict,
            self._span_exporter,
            self.client_keys,
        )
        self._ports = self._listening_ports(sockets)
        self._context = port_tls_context(options.tls, http2=options.http2)
        self._servers = [self._http_server(port) for port in self._ports]
        self._stop_event, self._force_event = asyncio.Event(), asyncio.Event()
        self._received_signals: list[int] = []
        self._grpc_port: grpc_port.CoordinatorGrpcPort | None = None

    def _listening_ports(self, sockets: dict[str, tuple[str, socket.socket]]) -> list[ListeningPort]:
        """Return the ports with their applications, in the order of ``sockets``."""
        apps: dict[str, ASGIApp] = {
            "predict": wrap_cors(self.front, self._front_options),
            "management": self.management.app,
            "metrics": self.metrics.app,
            "status": self.status.app,
        }
        return [ListeningPort(name, host, sock, apps[name]) for name, (host, sock) in sockets.items()]

    def _http_server(self, port: ListeningPort) -> HttpServer:
        """Return the HTTP server of a port. Ports other than that of inference share no connections with it."""
        server_options = (
            self._front_options
            if port.name == "predict"
            else replace(coordinator_port_options(self.options, port.host), connection_limit=admin_limit())
        )
        return HttpServer(uvicorn_config(server_options, port.app, self._context))

    async def run_until_stopped(self, *, signals: bool = True) -> int:
        """Serve until a signal or ``request_stop``; return the exit code."""
        loop = asyncio.get_running_loop()
        for signal_number in STOP_SIGNALS if signals else ():
            loop.add_signal_handler(signal_number, self._handle_signal, signal_number)
        if signals:
            install_hang_up_handler(self._read_options, self.reload_options, self.request_stop)
        try:
            grpc_lines = await self._listen_grpc()
        except OSError as error:
            banner.print_failure(str(error))
            return 1
        self.connections.start_connections()
        self.health.start_checks()
        self.controller.start_loop()
        serving = asyncio.create_task(self._serve_ports())
        banner.print_line("\n".join([f"parley {__version__} coordinator", *self._banner_lines(), *grpc_lines]))
        freeze_objects()
        stop = asyncio.create_task(self._stop_event.wait())
        watching = asyncio.gather(watch_certificates(self._tls_files(), self._reload_certificates), self._watch_keys())
        resuming = asyncio.create_task(self.front.resume_batches())
        try:
            await asyncio.wait({stop, serving}, return_when=asyncio.FIRST_COMPLETED)
            resuming.cancel()
            await self._drain_requests()
        finally:
            stop.cancel()
            watching.cancel()
            resuming.cancel()
            for server in self._servers:
                server.should_exit = server.force_exit = True
            await asyncio.gather(serving, stop, watching, resuming, return_exceptions=True)
            if self._grpc_port is not None:
                await self._grpc_port.stop_server(POLL_SECONDS)
            await self.controller.stop_loop()
            await self.health.stop_checks()
            await self._recheck.close()
            await self.connections.close_connections()
            await self.front.close()
            if self._span_exporter is not None:
                await asyncio.to_thread(self._span_exporter.close)
            for signal_number in (*STOP_SIGNALS, signal.SIGHUP) if signals else ():
                loop.remove_signal_handler(signal_number)
        return 128 + self._received_signals[1] if len(self._received_signals) > 1 else 0

    def request_stop(self) -> None:
        """Shut down as after a signal; called a second time, at once."""
        (self._force_event if self._stop_event.is_set() else self._stop_event).set()

    def reload_options(self, new_options: CoordinatorOptions) -> ReloadedNames:
        """Use options that were read again, and read all certificates again; limits apply at once.

        Raises ConfigError, TlsFileError before anything has changed.
        """
        options, names = take_over_fields(self.options, new_options, RELOADED_KEYS)
        self._reload_certificates()
        self.options = self.table.options = options
        for port, server in zip(self._ports, self._servers, strict=True):
            server.use_options(coordinator_port_options(options, port.host))
        front_changes = {
            name: getattr(coordinator_port_options(options, self._front_options.host), name) for name in PORT_LIMITS
        }
        self._front_options = replace(self._front_options, **front_changes)
        self.front.use_options(self._front_options, options.memory_limit)
        if self.client_keys is not None:
            self.client_keys.use_options(options)
        return names

    async def _watch_keys(self) -> None:
        """Accept the keys of a changed file, until this task is cancelled. A file that cannot be read changes
        nothing."""
        file = self.options.api_key_file
        if file is None or self.client_keys is None:
            return
        async for _ in file_changes((Path(file),)):
            try:
                new_options = await asyncio.to_thread(self._read_options)
            except ConfigError as error:
                log.error("Changed API keys were not loaded, and the old ones stay: %s", error)
                continue
            options, names = take_over_fields(self.options, new_options, {"hashed_keys"})
            self.options = self.table.options = options
            self.client_keys.use_options(options)
            if names.changed:
                log.info("Changed API keys were loaded.")

    def _tls_files(self) -> tuple[Path, ...]:
        authority = self.options.tls.ca
        files = list_tls_files([coordinator_tls_files(self.options.tls)])
        return files if authority is None else (*files, Path(authority))

    def _reload_certificates(self) -> None:
        """Load all certificates again. Raises TlsFileError before anything has changed."""
        files = coordinator_tls_files(self.options.tls)
        instance_tls_context(self.options.tls, ask_password=False)
        if self._context is not None and files is not None:
            reload_certificates([LoadedTls(self._context, files)])
        if self._instance_context is not None:
            load_instance_tls(self._instance_context, self.options.tls, ask_password=False)
        if self._grpc_port is not None:
            self._grpc_port.listener.reload_certificate()

    async def _listen_grpc(self) -> list[str]:
        """Open the gRPC port if it is configured; return the banner lines for it. Raises OSError."""
        if self.options.grpc_port is None:
            return []
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its messages on standard error do not follow our log format
        from parley.coordinator.proxy.grpc import grpc_port  # imports packages of the extra "grpc"

        self._grpc_port = grpc_port.CoordinatorGrpcPort(self.table, self.front, self.options, self._front_options)
        files = coordinator_tls_files(self.options.tls)
        address = await self._grpc_port.start_server(self.options.host, self.options.grpc_port, files)
        return [f"  {'gRPC':<10} {address}"]

    async def _serve_ports(self) -> None:
        pairs = zip(self._servers, self._ports, strict=True)
        await asyncio.gather(*(server.serve(sockets=[port.sock]) for server, port in pairs))

    async def _drain_requests(self) -> None:
        """Accept no more requests. Open ones have DRAIN_SECONDS to finish, and then end with an error."""
        self.front.load.stopping = True
        for server in self._servers:
            server.announce_shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while self.front.load.open_requests and not self._force_event.is_set():
                    await asyncio.sleep(POLL_SECONDS)
        self.front.fail_open_requests()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_SECONDS):
                while self.front.load.open_requests:
                    await asyncio.sleep(POLL_SECONDS)

    def _handle_signal(self, number: int) -> None:
        self._received_signals.append(number)
        self.request_stop()

    def _banner_lines(self) -> list[str]:
        secure = self._context is not None
        lines = [
            f"  {port.name:<10} {banner.local_url(port.host, port.sock.getsockname()[1], secure)}"
            for port in self._ports
        ]
        if not self.options.instances:
            lines.append(NO_INSTANCES)
        if self.options.secret or self.options.cluster_network:
            return lines
        public = [
            (port.name, port.host)
            for port in self._ports
            if port.name != "predict" and coordinator_reach(self.options, port.host) == "public"
        ]
        if public:
            warning_text = "may see the instances and their activity; set a secret or [tls] clients to keep others out"
            lines.append(banner.open_port_warning(public, warning_text))
        return lines


def run_coordinator(
    options: CoordinatorOptions,
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
    *,
    access_log: bool = True,
    read_options: Callable[[], CoordinatorOptions] | None = None,
) -> int:
    """Run a coordinator until a signal; return the exit code.

    ``read_options`` reads the options again at SIGHUP. Raises ConfigError; None: they stay.
    """
    keep_standard_streams()
    logs.set_up_logging(log_format, log_level)
    if open_management := find_open_management(options):
        banner.print_failure(open_management)
        return 1
    with contextlib.ExitStack() as stack:
        sockets = {}
        for name, host, port in configured_ports(options):
            try:
                sockets[name] = host, stack.enter_context(open_listener(host, port))
            except OSError as error:
                banner.print_failure(explain_listen_error(host, port, error))
                return 1
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))

        async def serve_coordinator() -> int:
            return await Coordinator(options, sockets, access_log, read_options).run_until_stopped()

        try:
            return runner.run(serve_coordinator())
        except TlsFileError as error:
            banner.print_failure(f"{error}.")
            return 1
        except (BadRecordFile, BadUsageFile) as error:
            banner.print_failure(str(error))
            return 1


def configured_ports(options: CoordinatorOptions) -> Sequence[tuple[str, str, int]]:
    """Return name, host and port number of each configured port."""
    others = (
        ("management", options.management_host, options.management_port),
        ("metrics", options.metrics_host, options.metrics_port),
        ("status", options.status_host, options.status_port),
    )
    optional_ports = [(name, host or options.host, port) for name, host, port in others if port is not None]
    return [("predict", options.host, options.predict_port), *optional_ports]


def coordinator_id(host: str, sock: socket.socket) -> str:
    """Return the coordinator id: the same when a coordinator is started again in the same place.

    Host names may collide, but the kernel's boot ids do not. Two containers of one host with the same name still
    share an id; instances make sure that they do not disturb each other (``ResultStreams.serve_results``).
    """
    kernel = BOOT_ID_FILE.read_text().strip() if BOOT_ID_FILE.exists() else ""
    place = f"{kernel} {socket.gethostname()} {host} {sock.getsockname()[1]}"
    return sha256(place.encode()).hexdigest()[:32]


def coordinator_port_options(options: CoordinatorOptions, host: str) -> ServerOptions:
    """Convert the coordinator's options to the server options of a port."""
    return ServerOptions(
        host=host,
        cors=options.cors_origin,
        hosts=options.allow_host,
        body_limit=options.body_limit,
        body_timeout=options.http_timeout_seconds,
        header_timeout=options.header_timeout_seconds,
        write_timeout=options.http_timeout_seconds,
        keep_alive=options.keep_alive_seconds,
        http2=options.http2,
    )


def _front_options(options: CoordinatorOptions, host: str, admin_ports: int, *, access_log: bool) -> ServerOptions:
    """Return the options of the inference port. ``admin_ports``: further ports, which need descriptors as well."""
    refused_requests = 0 if options.strict else options.max_requests  # that there is room to answer
    shares = divide_descriptors(
        2,  # the client's connection and one to an instance
        set_aside=admin_ports * ADMIN_CONNECTIONS,
        grpc_ports=options.grpc_port is not None,
        max_connections=options.max_requests + refused_requests,
    )
    client_limit = shares.clients.served_limit
    return replace(
        coordinator_port_options(options, host),
        access_log=access_log,
        connection_limit=ConnectionLimit(client_limit, client_limit) if options.strict else shares.clients,
        grpc_connections=shares.grpc,
        body_budget=BodyBudget(options.memory_limit // 2),  # so that unfinished bodies leave room for open requests
    )
