"""The prefill stage of a request, commanded by a coordinator; this instance or another one continues afterwards.

If another instance continues, each choice gets its first token here. That instance is asked as soon as the prompts
are tokenised, and fetches their first pages while later ones are computed. Knows a generation's stage interface and a
link's sender.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

import msgspec

from parley.dialects.dialect import Answer, Headers
from parley.dialects.instance_plane import Origin
from parley.disagg.kv.sender import Giver, Refused
from parley.disagg.kv.transport import LinkError
from parley.disagg.wire import handover
from parley.disagg.wire.headers import LOST, SHORT, UNKNOWN, Order
from parley.engine.stream import Stream
from parley.errors import ContextLength, EngineDied, NotReady, ParleyError, Stopping
from parley.instance.member import Member
from parley.instance.remote_writer import Opening
from parley.serving.stage import Leg, RunningRequest
from parley.types import Batch, Output, Request, Work
from parley.web.connection import CYCLE
from parley.web.exchange import Exchange

log = logging.getLogger("parley.instance")


class Declined(ParleyError):
    """The other instance refuses to continue the request."""


class Prefill(Leg):
    """The stage that ``order`` commands; the command also names the instance that continues."""

    def __init__(
        self,
        member: Member,
        exchange: Exchange,
        order: Order,
        body: bytes,
        past: list[Batch] | None,
        prompt: list[int] | None,
    ):
        self.label = order.id
        self.past = past
        self.spent = order.spent
        self._prompt = prompt  # token ids, if the body does not contain the prompt
        self._member = member
        self._exchange = exchange
        self._order = order
        self._body = body
        self._begun = False  # outputs have arrived
        self._recent: list[Batch] = []  # outputs not recorded yet
        self._cut: set[int] = set()  # numbers of the engine requests that another instance finishes
        self._searched: set[int] = set()  # beam searches among those; their one token is discarded
        self._running: RunningRequest
        self._first: Work
        self._works: list[Work] = []
        self._asking: asyncio.Task[Giver] | None = None
        self._giver: Giver | None = None
        self._news: list[tuple[int, list[int]]] = []  # pages computed before the sender existed
        self.opening = Opening(exchange.scope[CYCLE], order, self._records, lambda: self._begun and order.here)

    @property
    def ends(self) -> bool:  # type: ignore[override]
        """Whether the request ends on this instance."""
        return not self._cut

    async def prepare(self, running: RunningRequest, request: Request, works: list[Work]) -> None:
        """Limit the engine requests to the prefill stage, and ask the other instance to continue."""
        self._running = running
        past = self.past or []
        self.opening.stream = request.stream
        if self._order.here:
            self.opening.channel = self._member.node.results.channel(self._order.client, self._order.id, self.recall)
        handover.restore(works, self._prompt, self._running.model.info.max_model_len)
        tokens = handover.drawn(past, works)
        for number, work in enumerate(works):
            handover.resume(work, tokens[number])
            work.begun = self.past is not None
        self._first = works[0]
        if self._order.here or request.pooling is not None:
            if self.opening.exact:
                self._body = b""
            return
        for number, work in enumerate(works):
            most = handover.first(number, work, tokens[number], past)
            if work.max_tokens > most:
                self._cut.add(number)
                work.max_tokens, work.lease = most, True
                if work.beam is not None:
                    work.beam, work.n, work.logprobs = None, 1, -1
                    self._searched.add(number)
        if self._cut:
            self._works = works
            if len(works) > 1:  # released together, so that none waits for another's pages
                for work in works:
                    work.lease, work.group = True, self._first.id
            self._asking = asyncio.create_task(self._ask(len(works)))
            self._asking.add_done_callback(self._asked)

    def submitted(self, streams: list[Stream]) -> None:
        """Observe the pages that the engine computes."""
        for number in self._cut:
            streams[number].filled = partial(self._filled, number)

    def took(self, number: int, outputs: list[Output]) -> None:
        """Record new outputs, without the ends that the other instance will decide."""
        self._begun = self._begun or bool(outputs)
        for output in outputs:
            if number in self._searched and output.finish != "error":
                output.token_ids, output.finish, output.stop_id, output.costs = [], None, None, None
            elif number in self._cut and output.finish == "length":
                output.finish = None
            if self.past:
                output.cached_tokens = 0  # the cached tokens are those of earlier attempts
        if self._order.here and handover.engine_lost(self._running.model.engine.state, outputs):
            self.lose()
        elif self._cut or self.opening.exact or self._order.here:
            for output in outputs:
                output.id = ""
            self._recent.append([(number, output) for output in outputs])

    def lose(self) -> None:
        """Let the request continue on another instance, as this one is stopping or its engine died."""
        if not self._order.here or not self.opening.answered:
            return  # the answer to the coordinator's command says it
        if self.opening.exact:
            self.opening.lose()
        else:
            self._give_back()

    def recall(self) -> None:
        """Let the request continue on another instance, for a coordinator that gets no more results from this one."""
        if self.opening.answered:
            self._give_back()
            self.drop()
        else:
            self._running.abort(NotReady(UNKNOWN))

    def _give_back(self) -> None:
        exchange = self._exchange
        assert exchange.created is not None
        past = [*(self.past or []), *self._recent]
        origin = Origin(self._body, past, exchange.unique, exchange.created, self._prompt)
        self.opening.retry(exchange.scope["path"], origin, self._first)

    def moved(self) -> None:
        """Tell the writer that a complete answer has grown."""
        self.opening.moved()

    async def leave(self) -> None:
        """Hand the outputs over to the other instance, and answer the coordinator's command. Raises Declined."""
        assert self._asking is not None
        try:
            giver = await self._asking
            await giver.give(handover.encode(self._recent))
        except (Refused, LinkError) as error:
            raise Declined(f"[P Node] Send D request failed:{error}") from None
        self.left = True
        self._member.spawn(self._settle(giver))
        self.opening.answer()
        self._exchange.status = 200  # of the answer to the coordinator's command

    def drop(self) -> None:
        """Stop as if the client had left."""
        self.opening.depart()

    def close(self) -> None:
        """Release the results channel and, unless the request was handed over, the sender and the pages."""
        if self.opening.channel is not None:
            self.opening.channel.close()
        if self.left:
            return
        if self._asking is not None:
            self._asking.cancel()
        if self._giver is not None:
            self._giver.close()
        self._release()

    def refusal(self, error: ParleyError) -> Answer | None:
        """Word the refusal of the other instance for parley's own coordinator."""
        if not isinstance(error, Declined) or not self.opening.exact:
            return None
        told = {
            "reqId": self._order.id,
            "isStream": self.opening.stream,
            "isLastResp": False,
            "refused": True,
            "reason": error.message,
        }
        return Answer(503, msgspec.json.encode(told))

    def remarks(self, error: ParleyError) -> Headers:
        """Tell parley's own coordinator by a header if another instance may serve the request."""
        if not self.opening.exact:
            return ()
        if isinstance(error, EngineDied | Stopping):
            return ((LOST, b"engine"),)
        return ((SHORT, b"context"),) if isinstance(error, ContextLength) else ()

    def _records(self) -> list[Batch]:
        recent, self._recent = self._recent, []
        return recent

    # -- the instance that continues

    async def _ask(self, parts: int) -> Giver:
        """Ask it to take the request. Raises HandoverRefused, LinkError."""
        model, order, exchange = self._running.model, self._order, self._exchange
        digest = await self._digest()
        giver = self._giver = await self._member.peer.connect(str(order.target), model.name)
        for news in self._news:
            giver.filled(*news)
        self._news.clear()
        assert exchange.created is not None
        begun = handover.Begun(
            version=handover.VERSION,
            id=order.id,
            client=order.client,
            unique=exchange.unique,
            created=exchange.created,
            spent=time.perf_counter() - exchange.arrived,
            apis=exchange.scope["app"].apis,
            method=exchange.scope["method"],
            path=exchange.scope["path"],
            query=exchange.scope.get("query_string", b""),
            headers=[header for header in exchange.headers.items() if header[0] not in handover.CONNECTION],
            body=self._body,
            tenant=exchange.tenant,
            past=list(self.past) if self.past is not None else None,
            prompt=self._prompt,
            digest=digest,
        )
        self._body = b""
        await giver.begin(handover.encode(begun), parts)
        return giver

    async def _digest(self) -> str:
        """Return a digest of the LoRA adapter's content: pages of another instance are valid only if it is the same."""
        work, engine = self._works[0], self._running.model.engine
        if not work.adapter:
            return ""
        try:
            told = await engine.reserve(work.id, [], adapter=work.adapter)
        finally:
            engine.free(work.id)
        return told.digest

    def _asked(self, asking: asyncio.Task[Giver]) -> None:
        if not asking.cancelled() and (error := asking.exception()) is not None:
            told = str(error)
            if not isinstance(error, Refused | LinkError):
                log.error("Asking another instance to continue a request failed.", exc_info=error)
                told = "an internal error"
            self._running.abort(Declined(f"[P Node] Send D request failed:{told}"))

    def _filled(self, number: int, pages: list[int]) -> None:
        if self._giver is None:
            self._news.append((number, pages))
        else:
            self._giver.filled(number, pages)

    async def _settle(self, giver: Giver) -> None:
        """Keep the pages until the receiver has read them."""
        began = time.perf_counter()
        try:
            await giver.done()
        finally:
            giver.close()
            self._member.count(count=1, bytes=giver.bytes, seconds=time.perf_counter() - began)
            self._release()

    def _release(self) -> None:
        for work in self._works:
            self._running.model.engine.release(work.id)
