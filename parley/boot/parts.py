"""The parts of a server, each constructed before the parts that need it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from starlette.types import ASGIApp

from parley.dialects.mounts import Surface, universal
from parley.disagg.kv.peer import Peer
from parley.instance import handlers as instance_handlers
from parley.instance.entry import Intake
from parley.instance.links import Links
from parley.instance.member import Member
from parley.instance.node import Node
from parley.serving import handlers
from parley.serving.app import App
from parley.serving.options import ServerOptions
from parley.serving.registry import Service
from parley.serving.served_model import Model
from parley.web.port import crossed


class Parts:
    """A service and its place in a cluster. ``peer`` connects to the other members, ``stop`` stops the server.

    ``handlers``: the handlers of the routes of all ports, by operation.
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
        self.handlers = {**handlers.HANDLERS, **instance_handlers.handlers(self.node, self.intake)}

    def app(self, surfaces: Sequence[Surface], host: str) -> App:
        """Return the application of one port, without CORS."""
        return App(self.service, surfaces, host, self.handlers, self.node)

    def build(self, surfaces: Sequence[Surface] = (), host: str = "") -> ASGIApp:
        """Return the application of one port, with CORS if any origin is allowed. Default: the server's main port."""
        options = self.service.options
        app = self.app(surfaces or universal(options.strict, options.tgi_compat), host or options.host)
        return crossed(app, options.cors)

    async def listen(self, host: str, port: int, apps: Sequence[App]) -> None:
        """Listen for handovers from other members, which one of these apps answers. Raises OSError."""
        await self.links.listen(host, port, partial(self.intake.take, apps))

    async def close(self) -> None:
        """Close the engines, the results that wait for coordinators, and all links."""
        await self.service.close()
        await self.node.close()
        await self.member.close()
