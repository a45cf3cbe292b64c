"""The coordinator process: its ports, its components, and its shutdown. Handles no requests itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import uvloop
from starlette.types import ASGIApp

from parley.coordinator.config import Options, Tls
from parley.coordinator.controller import Controller
from parley.coordinator.ports.management import Management
from parley.coordinator.ports.metrics import Metrics
from parley.coordinator.ports.port import Asked
from parley.coordinator.ports.status import Status
from parley.coordinator.proxy.connections import Connections
from parley.coordinator.proxy.front import Front, application
from parley.coordinator.routing.admission import Choice
from parley.coordinator.routing.health import Health
from parley.coordinator.routing.instance_table import Table
from parley.dialects.mounts import universal
from parley.serving.options import ServerOptions
from parley.version import __version__
from parley.web import banner, logs, tls
from parley.web.auth import is_loopback
from parley.web.connection_limit import Room
from parley.web.options import Tls as Files
from parley.web.port import Server, http, keep_standard_streams, listen, reason, settle

if TYPE_CHECKING:
    from parley.coordinator.proxy import grpc_port

log = logging.getLogger("parley.cluster")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
DRAIN = 30.0  # seconds that open requests have to finish after the first signal
GRACE = 1.0  # seconds to send an error to the requests that did not finish
BOOT = Path("/proc/sys/kernel/random/boot_id")  # differs after each boot of the kernel
LOOK = 0.05  # seconds between two checks whether requests are still open


class Port(NamedTuple):
    """A listening socket and the application that answers on it."""

    name: str
    host: str
    sock: socket.socket
    app: ASGIApp


class Coordinator:
    """The coordinator process, from construction through ``run_until_stopped`` to its exit code."""

    def __init__(self, options: Options, sockets: dict[str, tuple[str, socket.socket]], access_log: bool = True):
        self.options = options
        self.table = Table(options)
        self.choice = Choice(self.table)
        self.connections = Connections(self.table, options, seat(*sockets["predict"]), towards(options.tls))
        self.health = Health(self.table, self.connections.ask, self.connections.heard)
        self.controller = Controller(self.table, self.choice, self.connections.ask)
        hosts = {name: host for name, (host, _) in sockets.items()}
        host = hosts["predict"]
        self.management = Management(self.table, self.choice, self.connections.ask, hosts.get("management", host))
        self.metrics = Metrics(self.table, self.choice, self.connections.ask, hosts.get("metrics", host))
        status = Status(self.table, self.choice, self.management, hosts.get("status", host))
        most = options.max_requests if options.strict else 2 * options.max_requests  # room to answer refused requests
        room = Room.greatest(2)  # descriptors per request: the client's connection and one to an instance
        served = replace(port_options(options, host), access_log=access_log, connections=most, room=room)
        self.front = Front(
            self.choice,
            self.connections,
            self._page,
            universal(),
            served,
            options.memory_limit,
            options.strict,
        )
        apps: dict[str, ASGIApp] = {
            "predict": application(self.front, served),
            "management": self.management.app,
            "metrics": self.metrics.app,
            "status": status.app,
        }
        self._ports = [Port(name, *place, apps[name]) for name, place in sockets.items()]
        limits = {name: port_options(options, host) for name, host in hosts.items()} | {"predict": served}
        self._context = front_tls(options.tls)
        self._servers = [Server(http(limits[port.name], port.app, self._context)) for port in self._ports]
        self._stop, self._force = asyncio.Event(), asyncio.Event()
        self._signals: list[int] = []
        self._rpc: grpc_port.Port | None = None

    async def run(self, *, signals: bool = True) -> int:
        """Serve until a signal or ``request_stop``; return the exit code."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS if signals else ():
            loop.add_signal_handler(number, self._signalled, number)
        try:
            calls = await self._listen()
        except OSError as error:
            banner.say(f"parley: {error}")
            return 1
        self.connections.start()
        self.health.start()
        self.controller.start()
        serving = asyncio.create_task(self._serve())
        banner.say("\n".join([f"parley {__version__} coordinator", *self._addresses(), *calls]))
        settle()
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({stop, serving}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        finally:
            stop.cancel()
            for server in self._servers:
                server.should_exit = server.force_exit = True
            await asyncio.gather(serving, stop, return_exceptions=True)
            if self._rpc is not None:
                await self._rpc.stop(LOOK)
            await self.controller.close()
            await self.health.close()
            await self.connections.stop()
            for number in SIGNALS if signals else ():
                loop.remove_signal_handler(number)
        return 128 + self._signals[1] if len(self._signals) > 1 else 0

    def stop(self) -> None:
        """Shut down as after a signal; called a second time, at once."""
        (self._force if self._stop.is_set() else self._stop).set()

    async def _listen(self) -> list[str]:
        """Open the gRPC port if it is configured; return the banner lines for it. Raises OSError."""
        if self.options.grpc_port is None:
            return []
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its messages on standard error do not follow our log format
        from parley.coordinator.proxy import grpc_port  # imports packages of the extra "grpc"

        self._rpc = grpc_port.Port(self.table, self.front, self.options)
        return [f"  {'gRPC':<10} {await self._rpc.start(self.options.host, self.options.grpc_port)}"]

    async def _serve(self) -> None:
        pairs = zip(self._servers, self._ports, strict=True)
        await asyncio.gather(*(server.serve(sockets=[port.sock]) for server, port in pairs))

    async def _drain(self) -> None:
        """Take no more requests; let open ones finish for DRAIN_SECONDS, then end them with an error."""
        self.front.stopping = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN):
                while self.front.open and not self._force.is_set():
                    await asyncio.sleep(LOOK)
        self.front.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                while self.front.open:
                    await asyncio.sleep(LOOK)

    def _signalled(self, number: int) -> None:
        self._signals.append(number)
        self.stop()

    def _addresses(self) -> list[str]:
        secure = self._context is not None
        lines = [
            f"  {port.name:<10} {banner.address(port.host, port.sock.getsockname()[1], secure)}" for port in self._ports
        ]
        if self.options.tls.clients is not None:  # clients are authenticated
            return lines
        public = [(port.name, port.host) for port in self._ports if not is_loopback(port.host)]
        changing = [] if self.options.secret else [place for place in public if place[0] == "management"]
        telling = [place for place in public if place[0] in ("management", "metrics", "status")]
        if changing:
            told = "may add and remove instances, and shut them down; set a secret to keep others out"
            lines.append(banner.warning(changing, told))
        if telling:
            told = (
                "may see the instances and their activity; set client certificates ([tls] clients) to keep others out"
            )
            lines.append(banner.warning(telling, told))
        return lines

    async def _page(self) -> bytes:
        return (await self.metrics.page(Asked("", (), b""))).body


def run(options: Options, log_format: str = "text", access_log: bool = True) -> int:
    """Run a coordinator until a signal; return the exit code."""
    keep_standard_streams()
    logs.set_up("json" if log_format == "json" else "text")
    with contextlib.ExitStack() as stack:
        sockets = {}
        for name, host, port in ports(options):
            try:
                sockets[name] = host, stack.enter_context(listen(host, port))
            except OSError as error:
                banner.say(f"parley: cannot listen on {host} port {port}: {reason(error)}.")
                return 1
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))

        async def live() -> int:
            return await Coordinator(options, sockets, access_log).run()

        try:
            return runner.run(live())
        except tls.BadTls as error:
            banner.say(f"parley: {error}.")
            return 1


def ports(options: Options) -> Sequence[tuple[str, str, int]]:
    """Return name, host and port number of each configured port."""
    others = (
        ("management", options.management_host, options.management_port),
        ("metrics", options.metrics_host, options.metrics_port),
        ("status", options.status_host, options.status_port),
    )
    made = [(name, host or options.host, port) for name, host, port in others if port is not None]
    return [("predict", options.host, options.predict_port), *made]


def seat(host: str, sock: socket.socket) -> str:
    """Return the coordinator id: the same when a coordinator is started again in the same place.

    Host names may collide, but the kernel's boot ids do not. Two containers of one host with the same name still
    share an id; instances make sure that they do not disturb each other (``Results.serve``).
    """
    kernel = BOOT.read_text().strip() if BOOT.exists() else ""
    place = f"{kernel} {socket.gethostname()} {host} {sock.getsockname()[1]}"
    return sha256(place.encode()).hexdigest()[:32]


def port_options(options: Options, host: str) -> ServerOptions:
    """Convert the coordinator's options to the server options of a port."""
    return ServerOptions(
        host=host,
        cors=options.cors_origin,
        hosts=options.allow_host,
        body_limit=options.body_limit,
        body_timeout=options.http_timeout_seconds,
        write_timeout=options.http_timeout_seconds,
        keep_alive=options.keep_alive_seconds,
    )


def front_tls(given: Tls) -> ssl.SSLContext | None:
    """Return the TLS context for clients' connections; None for plain HTTP. Raises BadTls."""
    if given.certificate is None or given.key is None:
        return None
    clients = (Path(given.clients),) if given.clients else ()
    return tls.context(Files(Path(given.certificate), Path(given.key), _path(given.password), clients))


def towards(given: Tls) -> ssl.SSLContext | None:
    """Return the TLS context for https connections to instances; None for the default. Raises BadTls."""
    if given.ca is None:
        return None
    with tls.using(Path(given.ca)):
        made = ssl.create_default_context(cafile=given.ca)
    if given.certificate is not None and given.key is not None:
        tls.certify(made, Path(given.certificate), Path(given.key), _path(given.password))
    return made


def _path(name: str | None) -> Path | None:
    return Path(name) if name else None
