"""Runs a server from its options to its end: listen, load, serve, drain, close. No state outlives the process.

The ports listen before the models load, so that probes are answered from the start. The first signal drains, the second
stops at once; the engines are closed in either case.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from ssl import SSLContext
from typing import TYPE_CHECKING, NamedTuple

import uvloop

from parley import hub
from parley.boot.engines import make_engine
from parley.boot.opening import opening
from parley.boot.parts import Parts
from parley.dialects.mounts import ALONE, INNER, Surface, alone, universal
from parley.disagg.kv.peer import Peer
from parley.engine.messages import Progress
from parley.engine.protocol import EngineFailed
from parley.serving.options import Listen, Offer, ServerOptions
from parley.serving.served_model import Model, share
from parley.serving.traffic_split import BadFile
from parley.text import BadTokenizer
from parley.web import banner, logs
from parley.web.connection_limit import Room
from parley.web.options import Tls
from parley.web.port import Server, crossed, http, keep_standard_streams, listen, reason, settle
from parley.web.tls import BadTls, calling, context

if TYPE_CHECKING:
    from parley.serving.grpc_port import Port

log = logging.getLogger("parley.server")

LAST_WORDS = 0.5  # seconds for the last gRPC messages while closing
SIGNALS = (signal.SIGTERM, signal.SIGINT)
FAILURES = (EngineFailed, BadTokenizer)


def run(offers: Sequence[Offer], options: ServerOptions) -> int:
    """Serve until a signal or a failure. Return 0 or 1, or after a second signal 128 + its number."""
    keep_standard_streams()
    logs.set_up(options.log_format)
    for note in options.notes:
        log.warning(note)
    options = replace(options, room=Room.greatest(1 if options.role == "mixed" else 2))  # a handover takes one as well
    with contextlib.ExitStack() as stack:
        sockets, contexts = [], []
        for host, port, _, tls in places(options):
            try:
                contexts.append(context(tls) if tls is not None else None)
                sockets.append(stack.enter_context(listen(host, port)))
            except BadTls as error:
                banner.say(f"parley: cannot encrypt {host} port {port}: {error}.")
                return 1
            except OSError as error:
                banner.say(f"parley: cannot listen on {host} port {port}: {reason(error)}.")
                return 1
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        try:
            instance = Instance(offers, options, sockets, contexts)
        except BadFile as error:
            banner.say(f"parley: {error}")
            return 1
        except BadTls as error:
            banner.say(f"parley: the handovers between instances cannot be encrypted: {error}.")
            return 1
        return runner.run(instance.live())


class Place(NamedTuple):
    """An address to listen on, the APIs mounted there, and the TLS settings."""

    host: str
    port: int
    surfaces: Sequence[Surface]
    tls: Tls | None = None


def places(options: ServerOptions) -> list[Place]:
    """Return the listening places: first the port shared by all APIs, then the ports of single APIs.

    APIs that were given the same port share a place.
    """
    made = []
    if options.port is not None:
        made.append(Place(options.host, options.port, universal(options.strict, options.tgi_compat)))
    apis = {**ALONE, **options.apis}
    together: dict[tuple[str, int], list[Listen]] = {}
    for number, each in enumerate(options.listen):
        together.setdefault((each.host, each.port or -number), []).append(each)
    made += [
        Place(first.host, first.port, alone(first.api, *(each.api for each in others), apis=apis), first.tls)
        for first, *others in together.values()
    ]
    return made


def peer(options: ServerOptions) -> Peer:
    """Return the peer that connects to other instances. Raises BadTls."""
    tls = options.peer_tls
    return Peer(
        secret=options.cluster_secret.encode(),
        lets=context(tls) if tls is not None else None,
        shows=calling(tls) if tls is not None else None,
        lease=options.peer_lease,
        checksum=options.peer_checksum,
    )


class Instance:
    """One server process: one HTTP server per port, and the models.

    ``sockets`` and ``tls_contexts``: listening sockets and TLS contexts (None: unencrypted), one per item of
    ``listening_places``.
    """

    def __init__(
        self,
        offers: Sequence[Offer],
        options: ServerOptions,
        sockets: Sequence[socket.socket],
        contexts: Sequence[SSLContext | None] = (),
    ):
        self.offers = offers
        self.options = options
        models = [Model(offer.names, offer.settings, make_engine(offer), options) for offer in offers]
        self._sockets = sockets
        self._signals: list[int] = []
        self._stop = asyncio.Event()
        self._parts = Parts(options, models, peer(options), self._stop.set)
        self.service = self._parts.service
        self._force = asyncio.Event()
        self._places = places(options)
        self._apps = [self._parts.app(place.surfaces, place.host) for place in self._places]
        crossing = [crossed(app, options.cors) for app in self._apps]
        self._servers = [Server(http(options, *each)) for each in zip_longest(crossing, contexts)]
        self._rpc: Port | None = None

    async def live(self) -> int:
        """Run the server from its first output line to its end. Return the exit code."""
        started = time.monotonic()
        try:
            calls = await self._listen()
        except OSError as error:
            banner.say(f"parley: {error}")
            return 1
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)
        roots = [
            banner.address(place.host, sock.getsockname()[1], place.tls is not None)
            for place, sock in zip(self._places, self._sockets, strict=True)
        ]
        surfaces = [
            (surface.dialect, root + surface.prefix)
            for place, root in zip(self._places, roots, strict=True)
            for surface in place.surfaces
            if surface not in INNER
        ]
        banner.say(opening(self.options, self.offers, roots[0], surfaces, calls))
        serving = asyncio.create_task(self._serve())
        try:
            failure = await self._until_stopped(serving, started)
        finally:
            await self._end(serving)
            for number in SIGNALS:
                loop.remove_signal_handler(number)
        if failure:
            banner.say(f"parley: {failure}")
            return 1
        return 128 + self._signals[1] if len(self._signals) > 1 else 0

    async def _listen(self) -> list[str]:
        """Listen for other instances and for gRPC if configured. Return the gRPC addresses. Raises OSError."""
        if self.options.peer_port is not None:
            host, port = self._places[0].host, self.options.peer_port
            try:
                await self._parts.listen(host, port, self._apps)
            except OSError as error:
                reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
                raise OSError(
                    f"cannot listen on {host} port {port} for handovers: {reason}. Choose another with --peer-port."
                ) from None
        if not self.options.grpc:
            return []
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its output to standard error does not have our log format
        from parley.serving.grpc_port import Port  # its packages are optional

        self._rpc = Port(self.service)
        return await self._rpc.start([(each.host, each.port) for each in self.options.grpc])

    async def _serve(self) -> None:
        pairs = zip(self._servers, self._sockets, strict=True)
        await asyncio.gather(*(server.serve(sockets=[sock]) for server, sock in pairs))

    async def _until_stopped(self, serving: asyncio.Task[None], started: float) -> str:
        """Load the models, then serve. Return "" after a signal, else the error."""
        stop = asyncio.create_task(self._stop.wait())
        loading = asyncio.create_task(self._load())
        showing = asyncio.create_task(banner.follow(self._progress))
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({stop, loading, serving}, return_when=asyncio.FIRST_COMPLETED)
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
            if loading.done():
                if failure := loading.result():
                    return failure
                settle()
                banner.say(banner.ready(time.monotonic() - started))
                await asyncio.wait({stop, watching, serving}, return_when=asyncio.FIRST_COMPLETED)
            return watching.result() if watching.done() else ""
        finally:
            tasks = (stop, loading, showing, watching)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self) -> str:
        """Load the models. Return the error, or "".

        They are loaded one after the other, since each sizes itself by the memory that the earlier ones left.
        """
        models = self.service.models
        try:
            for model in models:
                await model.fetch()
            share(models)
            for model in models:
                banner.say(banner.loaded(model.name, await model.load()))
        except hub.ModelMissing as error:  # its message names the model
            return str(error)
        except FAILURES as error:
            return f"{model.name}: {error}"
        return ""

    def _progress(self) -> Progress:
        """Return the progress of loading over all models."""
        models = self.service.models
        model = self.service.waits() or models[-1]
        return Progress(
            f"{model.name}: {model.engine.progress.stage}", sum(each.loaded for each in models) / len(models)
        )

    async def _watch(self) -> str:
        """Wait until every engine has failed for good, since the server is of no use then. Return the error."""
        while any(model.engine.state != "failed" for model in self.service.models):
            await asyncio.sleep(0.2)
        await asyncio.sleep(0.5)  # time for streams to write their last event
        return f"the engine has failed for good: {self.service.main.engine.failure}"

    def _signalled(self, number: int) -> None:
        self._signals.append(number)
        if self._stop.is_set():
            self._force.set()
            for server in self._servers:
                server.force_exit = True
        else:
            self._stop.set()
            if self.service.open:
                log.info(
                    "Shutting down: %d running requests get up to %g s to finish. A second signal ends them now.",
                    len(self.service.open),
                    self.options.drain,
                )

    async def _end(self, serving: asyncio.Task[None]) -> None:
        """Drain, close the engines and stop listening."""
        force = asyncio.create_task(self._force.wait())
        draining = asyncio.create_task(self.service.drain())
        await asyncio.wait({force, draining}, return_when=asyncio.FIRST_COMPLETED)
        for task in (force, draining):
            task.cancel()
        await self._parts.close()
        if self._rpc is not None:
            await self._rpc.stop(LAST_WORDS)
        for server in self._servers:
            server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
