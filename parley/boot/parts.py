"""The parts of a server, each made before the parts that need it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from starlette.types import ASGIApp

from parley.instance import routes
from parley.instance.entry import Intake
from parley.instance.links import Links
from parley.instance.member import Member
from parley.instance.node import Node
from parley.kv.peer import Peer
from parley.server import operations
from parley.server.app import App
from parley.server.model import Model
from parley.server.options import ServerOptions
from parley.server.port import crossed
from parley.server.service import Service
from parley.server.surfaces import Surface, universal


class Parts:
    """A service and its place in a cluster. ``peer`` reaches the other members, ``stop`` ends the server.

    ``handlers`` answer the routes of every port.
    """

    def __init__(
        self,
        options: ServerOptions,
        models: Iterable[Model],
        peer: Peer,
        stop: Callable[[], None] = lambda: None,
    ):
        self.links = Links(peer)
        self.node = Node(options, self.links)
        self.service = Service(options, models, (self.node, self.links), stop)
        self.member = Member(self.node, peer)
        self.intake = Intake(self.member)
        self.handlers = {**operations.HANDLERS, **routes.handlers(self.node, self.intake)}

    def app(self, surfaces: Sequence[Surface], host: str) -> App:
        """An application for one port, without CORS."""
        return App(self.service, surfaces, host, self.handlers, self.node)

    def build(self, surfaces: Sequence[Surface] = (), host: str = "") -> ASGIApp:
        """The application of one port, by default the server's own; with CORS around it if any origin is allowed."""
        options = self.service.options
        app = self.app(surfaces or universal(options.strict, options.tgi_compat), host or options.host)
        return crossed(app, options.cors)

    async def listen(self, host: str, port: int, apps: Sequence[App]) -> None:
        """Let other members hand over requests, which one of these apps answers. Raises OSError."""
        await self.links.listen(host, port, partial(self.intake.take, apps))

    async def close(self) -> None:
        """End the engines, the results that wait for coordinators, and all links."""
        await self.service.close()
        await self.node.close()
        await self.member.close()
