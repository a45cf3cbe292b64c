"""The parts of a server, each constructed before the parts that need it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from starlette.types import ASGIApp

from parley.dialects.mounts import ApiMount, universal_mounts
from parley.dialects.route import Route
from parley.disagg.kv.peer import KVPeer
from parley.instance import instance_handlers
from parley.instance.cluster_member import ClusterMember
from parley.instance.instance_state import InstanceState
from parley.instance.peer_links import PeerLinks
from parley.instance.request_intake import RequestIntake
from parley.serving.app import App
from parley.serving.handlers.route_table import SERVER_HANDLERS
from parley.serving.model_registry import ModelRegistry
from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.tracing.otlp import open_span_exporter
from parley.web.port import CorsByPath


class ServerParts:
    """The parts of a server. ``peer`` connects to the other members of a cluster, ``stop_server`` stops the server.

    ``handlers``: the handlers of the routes of all ports, by operation.
    """

    def __init__(
        self,
        options: ServerOptions,
        models: Iterable[ServedModel],
        peer: KVPeer,
        stop_server: Callable[[], None] = lambda: None,
    ):
        self._span_exporter = open_span_exporter(options.otlp_traces_endpoint, options.role)
        self.links = PeerLinks(peer)
        self.instance_state = InstanceState(options, self.links)
        self.registry = ModelRegistry(
            options, models, (self.instance_state, self.links), stop_server, self._span_exporter
        )
        self.member = ClusterMember(self.instance_state, peer)
        self.intake = RequestIntake(self.member)
        self.handlers = {
            **SERVER_HANDLERS,
            **instance_handlers.build_instance_handlers(self.instance_state, self.intake),
        }

    def make_port_app(
        self,
        mounts: Sequence[ApiMount],
        host: str,
        *,
        certified: bool = False,
        serves_route: Callable[[Route], bool] = lambda route: True,
    ) -> App:
        """Return the application of one port, without CORS. ``certified``: it requires a client's certificate.
        ``serves_route``: whether it serves a route of its APIs."""
        return App(self.registry, mounts, host, self.handlers, self.instance_state, certified, serves_route)

    def build_app(self, mounts: Sequence[ApiMount] = (), host: str = "") -> ASGIApp:
        """Return the application of one port, with CORS. Default: the server's main port."""
        options = self.registry.options
        mounts = mounts or universal_mounts(options.strict, options.tgi_compat, pages=options.ui)
        app = self.make_port_app(mounts, host or options.host)
        return CorsByPath(app, options.cors, app.web_origins)

    async def listen_for_handovers(self, host: str, port: int, apps: Sequence[App]) -> None:
        """Listen for handovers from other members, which one of these apps answers. Raises OSError."""
        await self.links.accept_handovers(host, port, partial(self.intake.take_handover, apps))

    async def close_parts(self) -> None:
        """Close the files of requests, whose engines are closed, the results that wait for coordinators, and all links,
        and send the last spans."""
        await self.registry.close_stores()
        await self.instance_state.close_state()
        await self.member.close_member()
        if self._span_exporter is not None:
            await asyncio.to_thread(self._span_exporter.close)
