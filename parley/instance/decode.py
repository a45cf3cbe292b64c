"""The decode stage of a request: everything after the first outputs, which another instance generated.

The stage parses the request again, renders its outputs so far again and discards those bytes; then the request
continues like any other. Pages of its prompts arrive meanwhile and are found in the prefix cache; missing ones are
computed again.
Knows the stage interface of a generation, and a link's receiver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import Message

from parley.dialects.dialect import Answer
from parley.dialects.instance_plane import Origin
from parley.disagg.kv.receiver import Taker
from parley.disagg.kv.transport import Lost
from parley.disagg.wire import handover
from parley.engine.stream import Stream
from parley.errors import EngineError, Malformed, Overloaded, ParleyError
from parley.instance.member import Member
from parley.instance.remote_writer import Outlet
from parley.serving.app import App
from parley.serving.stage import Leg, RunningRequest
from parley.types import Batch, Output, Request, Work
from parley.web.connection import CYCLE

UNFINISHED = "Pull kv failed irreversibly."  # the text that MindIE's coordinators expect
PATIENCE = 5.0  # seconds without a page after which the missing pages are computed here


class Decode(Leg):
    """``reason``: the error that prevented the acceptance of the request, if any."""

    def __init__(self, member: Member, taker: Taker, begun: handover.Begun):
        self.label = begun.id
        self.spent = begun.spent
        self.reason = "The instance cannot read the request."
        self._member = member
        self._taker = taker
        self._begun = begun
        self._recent: list[Batch] = []  # outputs not recorded yet; with MindIE's coordinator they are never recorded
        self._running: RunningRequest
        self._first: Work
        self._keys: dict[int, str] = {}  # keys of page reservations, by number of the engine request
        self._wanted: dict[int, int] = {}  # pages that each incomplete reservation still expects
        self._starting: set[int] = set()  # engine requests that have not used their reservation yet
        self._landed = 0.0  # when the last page arrived, by the event loop's clock
        self._accepted = self._returned = self._recalled = False
        self.outlet = Outlet(self._records, bool(begun.client))
        self.outlet.silent = True  # until the request is accepted

    async def prepare(self, running: RunningRequest, request: Request, works: list[Work]) -> None:
        """Take over pages and outputs from the prefill instance, and continue the engine requests from there."""
        self._running = running
        past = self._begun.past or []
        handover.restore(works, self._begun.prompt, self._running.model.info.max_model_len)
        self._first = works[0]
        wants = await self._reserve(works, past)
        try:
            await self._taker.accept(wants, self._land)
            self._accepted, self.outlet.silent = True, False
            self.outlet.response_started = request.stream
            given = await self._taker.given()
        except Lost:
            if not self.outlet.exact and self.outlet.channel is not None:
                self.outlet.channel.fail(UNFINISHED)
            self.outlet.silent = True  # parley's own coordinator repeats the command
            raise EngineError(UNFINISHED) from None
        self.past = [*past, *handover.split(given)]
        if self._recalled:
            self.recall()
        await self._pages()
        if self._wanted:
            self._member.spawn(self._forgo())
        for work, tokens in zip(works, handover.drawn(self.past, works), strict=True):
            handover.resume(work, tokens)
            work.begun = True
        if self._running.model.refusal() is not None:
            self.lose()  # this instance has stopped meanwhile, so the request must continue elsewhere

    def submitted(self, streams: list[Stream]) -> None:
        """Note which reservations the engine requests will use."""
        self._starting = set(self._keys)

    def took(self, number: int, outputs: list[Output]) -> None:
        """Record new outputs, and free the reservations once every engine request uses its pages."""
        if self._starting and outputs:
            self._starting.discard(number)
            if not self._starting:
                self._return()
        for output in outputs:
            output.id, output.cached_tokens = "", 0  # the prefill instance counted the cached tokens
        if handover.engine_lost(self._running.model.engine.state, outputs):
            self.lose()
        else:
            self._recent.append([(number, output) for output in outputs])

    def lose(self) -> None:
        """Let the request continue on another instance, as this one is stopping or its engine died."""
        if self.outlet.exact:
            self.outlet.lose()
        elif self.past is not None:
            self._give_back()

    def recall(self) -> None:
        """Let the request continue on another instance, for a coordinator that gets no more results from this one."""
        if self.past is not None:
            self._give_back()
            self.drop()
        self._recalled = True

    def _give_back(self) -> None:
        begun, past = self._begun, [*(self.past or []), *self._recent]
        origin = Origin(begun.body, past, begun.unique, begun.created, begun.prompt)
        self.outlet.retry(begun.path, origin, self._first)

    def drop(self) -> None:
        """Stop as if the client had left."""
        self.outlet.depart()

    def close(self) -> None:
        """Release the link and the reserved pages."""
        if self._accepted:
            self._taker.close()
        self._return()

    def refusal(self, error: ParleyError) -> Answer | None:
        """Keep the error for the prefill instance if the request was not accepted."""
        if not self._accepted:
            self.reason = error.message
        return None

    def _records(self) -> list[Batch]:
        recent, self._recent = self._recent, []
        return recent

    # -- pages

    async def _reserve(self, works: list[Work], past: list[Batch]) -> list[tuple[int, list[int]]]:
        """Reserve pages for the tokens that the engine requests begin with. Raises Overloaded."""
        engine, wants = self._running.model.engine, list[tuple[int, list[int]]]()
        for number, (work, tokens) in enumerate(zip(works, handover.drawn(past, works), strict=True)):
            if work.max_tokens <= handover.first(number, work, tokens, past):
                wants.append((0, []))  # it ends in the prefill stage
                continue
            key = self._keys[number] = work.id
            ids = work.token_ids if work.beam is not None else [*work.token_ids, *tokens[0]]
            reserved = await engine.reserve(key, ids, work.salt, work.adapter, self._begun.digest)
            if reserved.error:
                raise Overloaded(reserved.error)
            wants.append((reserved.skip, reserved.pages))
            if reserved.pages:
                self._wanted[number] = len(reserved.pages)
        return wants

    def _land(self, part: int, count: int) -> None:
        self._landed = asyncio.get_running_loop().time()
        if count == self._wanted.get(part):
            del self._wanted[part]
        self._running.model.engine.landed(self._keys[part], count)

    async def _pages(self) -> None:
        """Wait for all pages, as long as pages keep arriving."""
        clock = asyncio.get_running_loop().time
        while True:
            try:
                async with asyncio.timeout(PATIENCE):
                    await self._taker.settled()
                return
            except TimeoutError:
                if clock() - self._landed > PATIENCE:
                    return

    async def _forgo(self) -> None:
        """Free the reservations of pages that will not arrive: the request itself may need the room to begin."""
        await self._taker.settled()
        for number in self._wanted:
            self._running.model.engine.free(self._keys[number])

    def _return(self) -> None:
        """Free all reservations once the prefill instance no longer writes into their pages."""
        if not self._returned and self._keys:
            self._member.spawn(self._free())
        self._returned = True

    async def _free(self) -> None:
        try:
            await self._taker.settled()
        finally:
            for key in self._keys.values():
                self._running.model.engine.free(key)


async def accept(member: Member, apps: Sequence[App], taker: Taker) -> None:
    """Take over a request and answer it to its end, or refuse it. Uses the app of the port with the same APIs."""
    try:
        begun = handover.begin(taker.body)
        app = next((app for app in apps if app.apis == begun.apis), None)
        if app is None:
            raise Malformed("This instance does not serve the same APIs.")
        leg = Decode(member, taker, begun)
        leg.outlet.channel = channel = member.node.results.channel(begun.client, begun.id, leg.recall)
    except ParleyError as error:
        await taker.refuse(error.message)
        return
    scope = {
        "type": "http",
        "http_version": "1.1",
        "scheme": "http",
        "method": begun.method,
        "path": begun.path,
        "root_path": "",
        "query_string": begun.query,
        "headers": begun.headers,
        CYCLE: leg.outlet,
    }

    async def receive() -> Message:
        return {"type": "http.request", "body": begun.body, "more_body": False}

    exchange = app.exchange(scope, receive, leg.outlet.send)
    exchange.identify(begun.unique)
    exchange.created, exchange.tenant, exchange.leg = begun.created, begun.tenant, leg
    exchange.arrived -= begun.spent
    member.note(begun.body)
    try:
        await app.answer(exchange, admitted=True)
    finally:
        channel.close()
        await taker.refuse(leg.reason)  # has no effect if the request was accepted
