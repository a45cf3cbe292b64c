"""Handlers for the routes of an instance: requests, results, roles, status. One function for each kind of route."""

from __future__ import annotations

import re
import socket
from functools import partial
from urllib.parse import parse_qs

import msgspec

from parley.dialects.dialect import Kind, Route
from parley.disagg.wire import headers, role_request
from parley.errors import Invalid, Malformed, OrderRefused, Unauthorized
from parley.instance.entry import Intake
from parley.instance.node import Node
from parley.instance.status import status as told
from parley.serving import generate as life
from parley.serving import handlers as operations
from parley.serving.handlers import Handle
from parley.serving.registry import Service
from parley.web.connection import CYCLE, Cycle
from parley.web.exchange import Exchange

STREAM = "text/event-stream"
APART = "Non DMI does not support dresult request"
ELSEWHERE = "Only the Decode node supports dresult but you send to {}"
DEAD = 30_000  # milliseconds after which unacknowledged data ends a connection for results


class Flow(msgspec.Struct):
    """A command to pause the results of one request, or to resume them."""

    client: str
    id: str
    pause: bool


class Out:
    """An HTTP exchange as a connection for results."""

    def __init__(self, exchange: Exchange):
        self._exchange = exchange

    def part(self, data: bytes) -> bool:
        """Send data, and return whether more can be sent at once."""
        return self._exchange.part(data)

    async def write(self, data: bytes) -> None:
        """Send data once the connection accepts it."""
        await self._exchange.write(data, STREAM)

    def abort(self) -> None:
        """Break the connection."""
        self._exchange.abort()


async def generate(node: Node, intake: Intake, service: Service, route: Route, exchange: Exchange) -> None:
    """Answer a request of a client, or run the prefill stage that a coordinator commands.

    Raises OrderRefused.
    """
    order = node.order(exchange) if exchange.leg is None else None
    if order is None:
        await life.generate(service, route, exchange)
    else:
        await intake.begin(service, route, exchange, order)


async def dresult(node: Node, service: Service, route: Route, exchange: Exchange) -> None:
    """Stream results to a coordinator until it leaves or connects again. Raises OrderRefused."""
    query = _query(exchange)
    client = query.get("client", "")
    _trusted(node, exchange)
    if client:
        if not headers.CLIENT.fullmatch(client):
            raise Invalid("'client' must be 1 to 64 letters, digits, _ or -.", field="client")
    elif node.role.name == "mixed" or not node.role.decodes:
        text = APART if node.role.name == "mixed" else ELSEWHERE.format(node.role.name)
        raise OrderRefused(400, text)
    number = query.get("from")
    if number is not None and not re.fullmatch("[0-9]{1,15}", number):
        raise Invalid("'from' must be the number of a frame.", field="from")
    _impatient(exchange)
    epoch = query.get("epoch", "")
    seat = query.get("seat", "")
    if seat and not (client and headers.CLIENT.fullmatch(seat)):
        raise Invalid("'seat' must be 1 to 64 letters, digits, _ or -, and comes with 'client'.", field="seat")
    serving = node.results.serve(client, Out(exchange), epoch, None if number is None else int(number), seat)
    await exchange.while_connected(serving)
    await exchange.write(b"", STREAM, last=True)


async def flow(node: Node, service: Service, route: Route, exchange: Exchange) -> None:
    """Pause or resume the results of one request. An unknown request may have just ended."""
    _trusted(node, exchange)
    try:
        wish = msgspec.json.decode(await exchange.body(), type=Flow)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Malformed(f"The body must be {{client, id, pause}}: {error}.") from None
    known = node.results.pause(wish.client, wish.id, wish.pause)
    await exchange.answer(msgspec.json.encode({"known": known}))


async def role(node: Node, service: Service, route: Route, exchange: Exchange) -> None:
    """Assign a role; the answer does not wait until the change is complete. Raises OrderRefused."""
    version, _, name = route.path[1:].split("/")
    if not service.options.admin_keys:  # else the caller has shown an admin key or the secret
        _trusted(node, exchange)
    given = role_request.read(name, version, await exchange.body(), node.role.name == "none")
    if service.options.peer_port is None:  # started as mixed: no instance could hand anything over
        raise OrderRefused(503, role_request.UNFIT)
    node.role.assign(given)
    await exchange.answer(role_request.DONE.body)


async def status(node: Node, service: Service, route: Route, exchange: Exchange) -> None:
    """Answer with the instance's status."""
    version = 2 if route.path.startswith("/v2") else 1
    await exchange.answer(msgspec.json.encode(told(service, node, node.address(exchange), version)))


async def halt(node: Node, service: Service, route: Route, exchange: Exchange) -> None:
    """Abort a request. If it has ended, drop results of it that are still held back for a coordinator."""
    await operations.halt(service, route, exchange, node.results.drop)


def handlers(node: Node, intake: Intake) -> dict[Kind, Handle]:
    """Return the handlers of an instance's routes, including the server's routes that an instance answers itself."""
    return {
        "generate": partial(generate, node, intake),
        "halt": partial(halt, node),
        "results": partial(dresult, node),
        "results_flow": partial(flow, node),
        "role": partial(role, node),
        "instance_status": partial(status, node),
    }


def _query(exchange: Exchange) -> dict[str, str]:
    text = exchange.scope.get("query_string", b"").decode("latin-1")
    return {name: values[-1] for name, values in parse_qs(text, keep_blank_values=True, max_num_fields=16).items()}


def _trusted(node: Node, exchange: Exchange) -> None:
    if not headers.trusted(exchange.headers, node.secret):
        raise Unauthorized(headers.SECRET)


def _impatient(exchange: Exchange) -> None:
    """Let a connection end if the other side is gone; the heartbeats detect it."""
    cycle: Cycle = exchange.scope[CYCLE]
    sock = cycle.transport.get_extra_info("socket")
    if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD)
