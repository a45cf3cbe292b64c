"""Request intake: where a cluster's requests arrive, commanded by a coordinator or begun by another member.

It chooses the stage of a request and prepares it; the stages are in ``prefill`` and ``decode``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from parley.dialects.dialect import Route
from parley.dialects.mounts import INSTANCE_PLANE
from parley.disagg.kv.receiver import Taker
from parley.disagg.wire import handover
from parley.disagg.wire.headers import Order
from parley.instance import decode
from parley.instance.member import Member
from parley.instance.prefill import Prefill
from parley.serving.app import App
from parley.serving.generate import generate
from parley.serving.registry import Service
from parley.web.exchange import Exchange


class Intake:
    """Receives the requests for a prefill or decode stage on this member."""

    def __init__(self, member: Member):
        self._member = member

    async def begin(self, service: Service, route: Route, exchange: Exchange, order: Order) -> None:
        """Run the prefill stage that a coordinator commands. Raises ParleyError, ClientGone, OrderRefused."""
        exchange.identify(order.identity or exchange.unique)
        exchange.created = int(time.time()) if order.created is None else order.created
        exchange.arrived -= order.spent
        handover.strip(exchange.headers)
        body = await exchange.peek()
        past, prompt = handover.split(exchange.before) if order.given else None, None
        if order.recompute and not order.client:
            opened = INSTANCE_PLANE.read_resumed(exchange.scope["path"], body)
            body, past, prompt = opened.body, opened.past, opened.prompt
            exchange.replace(body)
            if opened.unique:
                exchange.identify(opened.unique)
                exchange.created = opened.created
        exchange.leg = leg = Prefill(self._member, exchange, order, body, past, prompt)
        exchange.divert(leg.opening)
        self._member.note(body)
        del body
        await generate(service, route, exchange)

    async def take(self, apps: Sequence[App], taker: Taker) -> None:
        """Take over a request that another member began, or refuse it. ``apps``: the apps of this server's ports."""
        role = self._member.node.role
        if role.unknown or not role.decodes:
            share = f" with {role.share} % for prompts" if role.name == "flex" else ""
            await taker.refuse(f"Its role is {role.name}{share}.")
        else:
            await decode.accept(self._member, apps, taker)
