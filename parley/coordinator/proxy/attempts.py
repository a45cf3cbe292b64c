"""Runs one generating request on the cluster: schedules it, sends it to instances, and retries if they fail.

    schedule -> ask P -> merge P's answer with D's results -> end

A failed attempt is followed by another, which receives the outputs that the client already has. The answer therefore
continues where it broke, with the text that it would have had. Knows the wire format between coordinator and instances,
and no API; the two parts of an answer are combined in ``stream_merge``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from parley.coordinator import refusals
from parley.coordinator.config import Options
from parley.coordinator.proxy import forward, prefill_answer
from parley.coordinator.proxy.client import Caller
from parley.coordinator.proxy.connections import Connections
from parley.coordinator.proxy.http_client import Broken, Response, Unreachable, Whole
from parley.coordinator.proxy.prefill_answer import BadAnswer, First
from parley.coordinator.proxy.stream_merge import Cut, Recompute, Splice
from parley.coordinator.routing.admission import Choice, Chosen, Refused
from parley.coordinator.routing.instance import Instance
from parley.coordinator.routing.policies import Wanted
from parley.disagg.wire.headers import LOST, SHORT
from parley.errors import ParleyError
from parley.web.random_ids import draw

PAUSE, LONGEST = 0.05, 2.0  # seconds before the same instance is tried again: doubled each time, and at most
RECOMPUTE = 1.0  # seconds before a refused recompute is tried again


class Failed(Exception):
    """An attempt failed because of an instance.

    ``answer``: P's answer, if there is one; ``final``: no other instance would do better; ``equally_unfit``: ids of
    instances that would not do better either. ``status`` and ``text``: the client's error if no other attempt is made.
    """

    def __init__(
        self,
        status: int,
        text: str,
        instance: Instance | None = None,
        *,
        answer: Response | None = None,
        final: bool = False,
        alike: Iterable[int] = (),
    ):
        super().__init__(text)
        self.status, self.text, self.instance, self.alike = status, text, instance, alike
        self.answer, self.final = answer, final


class Passage:
    """One request of a client, with all its attempts.

    ``body``: as the client sent it; ``scheduling_request``: its requirements; ``error_ending`` returns the last bytes
    of a stream that ends with an error, none if the API has no form for it.
    """

    def __init__(
        self,
        choice: Choice,
        connections: Connections,
        caller: Caller,
        body: bytes,
        wanted: Wanted,
        closing: Callable[[ParleyError], bytes],
    ):
        self.caller = caller
        self.options: Options = choice.options
        self.attempts = 0
        self._choice, self._connections = choice, connections
        self._wanted, self._closing = wanted, closing
        self._body: Sequence[bytes] = (body,)
        self._target = caller.target
        self._method = caller.scope["method"].encode()
        self._headers = caller.forwarded()
        if caller.label:
            self._headers.append((b"parley-label", caller.label))
        self._created = b"%d" % time.time()
        self._avoid: frozenset[int] = frozenset()
        self._told: Response | None = None  # the answer of the last P that refused the request
        self._timer: asyncio.Timeout  # expires for the first token until P answers, then for the whole request
        self._due = 0.0
        self._ended: ParleyError | None = None  # set by ``fail_request``
        self._soon = inf  # when the first token is due; finite once P was asked
        self._recomputes = 0
        self._splice = Splice(caller)
        self._layout = ""  # KV layout of the instances that computed the part the client has
        # of the current attempt
        self._id = ""
        self._busy: Sequence[Instance] = ()  # instances where the request may be running

    async def run(self) -> None:
        """Answer the client. Raises ParleyError only before anything was sent."""
        try:
            self._due = asyncio.get_running_loop().time() + self.options.infer_timeout
            try:
                async with asyncio.timeout_at(self._due) as self._timer:
                    while not await self._once():
                        pass
            except TimeoutError:
                if self._ended is not None:
                    raise self._ended from None
                first = self._timer.when() != self._due
                raise refusals.refusal(408, refusals.LATE_FIRST if first else refusals.LATE_END) from None
        except ParleyError as error:
            if not self._splice.sent:
                raise
            self._break(error)
        finally:
            await self._splice.settle()

    def end(self, error: ParleyError) -> None:
        """Stop the request; the client receives this error."""
        self._ended = error
        with contextlib.suppress(RuntimeError):  # all attempts are over, and the client reads the rest
            self._timer.reschedule(0.0)

    def _break(self, error: ParleyError) -> None:
        """End a stream that has begun with an error."""
        last = self._closing(error)
        if last:
            self._splice.finish(last)
        else:
            self.caller.abort()

    # -- attempts

    async def _once(self) -> bool:
        """Run one attempt; True if the request is answered. Raises ParleyError when no other attempt may follow."""
        chosen = await self._choose()
        try:
            if self.attempts and not self._avoid.isdisjoint((chosen.p.id, chosen.d.id)):  # no others are left
                if self._told is not None and not self._splice.sent and chosen.p.id in self._avoid:
                    self.caller.whole(*self._told)
                    return True
                await asyncio.sleep(min(LONGEST, PAUSE * 2**self.attempts))
            if chosen.p is chosen.d and not chosen.p.extended:
                await self._whole(chosen.p)
            else:
                await self._attempt(chosen)
            chosen.end()
            return True
        except Recompute as wish:
            self._recomputes += 1
            self._body = (wish.body,)
            return False
        except Failed as failure:
            return await self._failed(failure)
        finally:
            chosen.end(False)

    async def _failed(self, failure: Failed) -> bool:
        """Prepare for another attempt (False), or send the client P's answer (True). Raises ParleyError."""
        self.attempts += 1
        splice = self._splice
        if failure.instance is not None:
            self._avoid |= {failure.instance.id, *failure.alike}
        answer = self._told = failure.answer
        if self._recomputes:
            if self.attempts > self.options.max_retry:
                raise refusals.refusal(500, refusals.NO_RETRY)
            await asyncio.sleep(RECOMPUTE)
            return False
        if not (failure.final or self.attempts > self.options.max_retry or (splice.sent and not splice.exact)):
            return False
        if answer is None or splice.sent:
            raise refusals.refusal(failure.status if failure.status >= 400 else 500, failure.text)
        self.caller.whole(*answer)
        return True

    async def _choose(self) -> Chosen:
        """Schedule an attempt. Raises ParleyError."""
        wanted, again = self._wanted, self.attempts + self._recomputes
        if again:
            self._wait_for_first()
            left = None if wanted.deadline is None else max(0.0, wanted.deadline - self._spent())
            begun = self._layout if self._splice.sent else ""
            wanted = replace(wanted, avoid=self._avoid, attempt=again, deadline=left, layout=begun)
        try:
            return await self._choice.choose(wanted)
        except Refused as refused:
            raise refusals.refusal(refused.status, refused.text, refused.retry_after) from None

    def _wait_for_first(self) -> None:
        """Let the request time out when its first token is due, unless the client has it."""
        self._wait_until(self._due if self._splice.sent else min(self._due, self._soon))

    def _wait_until(self, due: float) -> None:
        if self._ended is None and due != self._timer.when():  # mostly it is unchanged, and rescheduling is expensive
            self._timer.reschedule(due)

    def _spent(self) -> float:
        """Return the seconds since the client's request arrived; its time limits cover all attempts together."""
        return time.perf_counter() - self.caller.arrived

    async def _whole(self, instance: Instance) -> None:
        """Send the request unchanged to a server that takes no prefill commands. Raises AttemptFailed, ParleyError."""
        if self._splice.sent:
            raise Failed(500, refusals.D_FAILED, instance, final=True)
        await forward.one(self._connections, self.caller, [instance], b"".join(self._body))

    async def _attempt(self, chosen: Chosen) -> None:
        """Run one attempt on a prefill and a decode instance. Raises AttemptFailed, RecomputeRequested."""
        feed, splice = self._connections.feed(chosen.d), self._splice
        if not self._recomputes:  # a recompute keeps the id
            self._id = str(int.from_bytes(draw()[:8]))
        if not splice.sent:
            self._layout = chosen.d.layout or chosen.p.layout  # read it now: a restarted instance may have another
        splice.anew(chosen.token)
        if feed is None or not await feed.ready():
            raise Failed(500, refusals.D_FAILED, chosen.d)
        feed.open(self._id, splice)
        try:
            first = await self._ask(chosen)
            if first is None:
                self._busy = ()
                return
            chosen.first()
            if not splice.begin(first, feed.exact, partial(self._connections.flow, chosen.d, self._id)):
                self._busy = (chosen.d,)
                await splice.done
            self._busy = ()
        except Cut as cut:
            if cut.over:
                self._busy = ()
            raise Failed(500, cut.text, chosen.d, final=cut.final) from None
        except Recompute:
            self._busy = ()
            raise
        finally:
            feed.close(self._id)
            self._halt()

    def _halt(self) -> None:
        """Abort the request on all instances where it may be running."""
        for instance in self._busy:
            self._connections.halt(instance, self._id, self._wanted.model)
        self._busy = ()

    async def _ask(self, chosen: Chosen) -> First | None:
        """Return P's answer; None if D has already sent a complete one. Raises AttemptFailed, ResultsCut,
        RecomputeRequested."""
        p, d, splice = chosen.p, chosen.d, self._splice
        given = splice.given()
        headers = [
            *self._headers,
            *self._connections.secret,
            (b"req-id", self._id.encode()),
            (b"req-type", b"prefill"),
            *_target(p, d, self._connections),
            (b"parley-results", self._connections.name.encode()),
            (b"parley-id", self.caller.unique.encode()),
            (b"parley-created", self._created),
            (b"parley-spent", b"%d" % (1000 * self._spent())),
        ]
        if given:
            headers.append((b"parley-given", b"%d" % len(given)))
        if self._recomputes:
            headers.append((b"is-recompute", b"true"))
        body = (given, *self._body) if given else self._body
        self._busy = (p, d) if chosen.separate else (p,)
        if self._soon == inf:
            self._soon = asyncio.get_running_loop().time() + self.options.first_token_timeout
        self._wait_for_first()
        try:
            upstream = self._connections.upstream(p)
            answer = await upstream.ask(self._method, self._target, headers, body, again=False, told=self._asked)
            self._wait_until(self._due)
        except Unreachable:
            self._busy = ()
            self._choice.table.fault(p, refusals.NO_CONNECTION)
            raise Failed(500, refusals.NO_CONNECTION, p) from None
        except Broken as broken:
            if splice.done.done():  # the request to P was dropped: D is lost, or has answered
                await splice.done
                return None
            text = refusals.P_FAILED if broken.left else refusals.UNASKED if broken.unsent else refusals.UNREAD
            raise Failed(500, text, p) from None
        if splice.overtaken:
            await splice.done
            return None
        if answer.status != 200:
            self._busy = ()
            raise _refused(chosen, answer, self._choice.table.usable())
        try:
            return prefill_answer.first(answer.body)
        except BadAnswer:
            raise Failed(500, refusals.P_FAILED, p) from None

    def _asked(self, whole: Whole) -> None:
        self._splice.asking = whole


def _refused(chosen: Chosen, answer: Response, usable: Sequence[Instance]) -> Failed:
    """Classify P's error: one of P or D, so that other instances may do better, or one of the client."""
    marks = {name for name, _ in answer.headers}
    if prefill_answer.refused(answer):
        chosen.refused()
        return Failed(429, refusals.TOO_MANY, chosen.d)
    if LOST in marks:
        chosen.p.loaded = False  # until its status reports a new engine
        return Failed(answer.status, refusals.P_FAILED, chosen.p)
    if prefill_answer.misplaced(answer):
        return Failed(503, refusals.P_FAILED, chosen.p)
    if SHORT in marks and any(each.longest > chosen.p.longest for each in usable):
        alike = [each.id for each in usable if each.longest <= chosen.p.longest]
        return Failed(answer.status, refusals.P_FAILED, chosen.p, answer=answer, alike=alike)
    text = refusals.LATE_END if answer.status == 408 else refusals.P_FAILED
    return Failed(answer.status, text, chosen.p, answer=answer, final=answer.status not in (429, 503))


def _target(p: Instance, d: Instance, connections: Connections) -> list[tuple[bytes, bytes]]:
    """Return the headers that tell P where D is."""
    if p is d and p.extended:
        return [(b"d-target", b"self")]
    target = d.peer or connections.upstream(d).host
    port = target.partition(";")[2]
    return [(b"d-target", target.encode()), *([(b"d-port", port.encode())] if port else [])]
