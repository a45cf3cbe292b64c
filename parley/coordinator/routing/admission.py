"""The instance scheduler: queueing, ordering, refusal and accounting of requests.

The resources that a request holds on its instances are always released exactly once: those of prefill at its first
token, all others at its end. A policy picks the instances; HTTP is left to the caller.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

from parley.coordinator import refusals
from parley.coordinator.config import Options
from parley.coordinator.routing.cost_model import ewma
from parley.coordinator.routing.counters import Tally
from parley.coordinator.routing.instance import Instance
from parley.coordinator.routing.instance_table import News, Table
from parley.coordinator.routing.load import Charge
from parley.coordinator.routing.policies import CacheAffinity, LoadBalance, Pair, Policy, Sight, Turn, Wanted
from parley.coordinator.routing.predicted_ttft import Predicted, crowded


class Refused(Exception):
    """A request is refused: HTTP status, documented text and, if useful, the seconds before a retry."""

    def __init__(self, status: int, text: str, retry_after: float | None = None):
        super().__init__(text)
        self.status, self.text = status, text
        self.retry_after = None if retry_after is None else max(1, math.ceil(retry_after))


class Chosen:
    """The instances of one attempt at a request, and the resources it holds there.

    The caller reports ``first``, ``token`` and ``close_placement`` as they happen; each may be called at any time and
    repeatedly. As a context manager it closes itself.
    """

    __slots__ = ("_began", "_charges", "_choice", "_first", "_fresh", "_last", "_second", "d", "length",
                 "ok", "p", "separate", "tokens")  # fmt: skip

    def __init__(self, choice: Choice, pair: Pair, sight: Sight):
        wanted, now = sight.wanted, sight.now
        self.p, self.d = pair.p, pair.d
        self.separate = pair.p is not pair.d
        self.length = wanted.length
        self.tokens = 0
        self.ok: bool | None = None  # None until the attempt has ended
        choice.open += 1
        choice.tally.chosen(self.separate)
        self._choice = choice
        asked = sight.asked(self.p)
        self._fresh = self.p.prefill.tokens + asked.tokens  # tokens to compute before its first token
        self._charges: tuple[Charge, Charge] = (
            self.p.prefill.charge(asked, self.separate),
            self.d.decode.charge(sight.asked(self.d)),
        )
        self._began, self._first, self._second, self._last = now, 0.0, 0.0, 0.0
        self.p.note(wanted.marks, now)
        if self.separate:
            self.d.note(wanted.marks, now)

    def __enter__(self) -> Chosen:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.end(kind is None)

    def first(self) -> None:
        """Report that P has answered with the first token."""
        if self._first or self.ok is not None:
            return
        now = self._choice.table.clock()
        self._first = self._last = now
        self.tokens += 1
        self._charges[0].release()
        self.p.prefill.pace.observe(self._fresh, now - self._began)
        self._choice.tally.first(now - self._began)
        self._choice.wake()

    def refused(self) -> None:
        """Report that D refused to take the request over from P."""
        self.p.refused(self.d, self._choice.table.clock())

    def token(self, count: int = 1) -> None:
        """Report ``count`` further tokens."""
        if not self._second:
            self._moved()
        self._last = self._choice.table.clock()
        self.tokens += count

    def _moved(self) -> None:
        """Record D's first token."""
        self.first()
        self._second = self._choice.table.clock()
        if self.separate:
            side = self.d.decode
            gap = self._second - self._first
            self.p.refusals.pop(self.d.id, None)
            side.pace.observe(self._charges[1].demand.tokens, max(0.0, gap - side.cadence))
            self._choice.tally.moved(gap)

    def end(self, ok: bool = True) -> None:
        """End the attempt, successfully or not, and release all it holds."""
        if self.ok is not None:
            return
        self.ok = ok
        beside = self.d.decode.tasks
        self._choice.open -= 1
        for charge in self._charges:
            charge.release()
        each = None
        if self.tokens > 2 and self._last > self._second:
            each = (self._last - self._second) / (self.tokens - 2)
            side = self.d.decode
            side.cadence = ewma(side.cadence, each)
            side.rhythm.observe(beside, each)
            side.stay = ewma(side.stay, self._last - self._began)
        first = self._first - self._began if self._first else None
        self._choice.tally.end(ok, first, each, self.length, self.tokens)
        self._choice.wake()


def policy(options: Options) -> Policy:
    """Return the policy that the configuration names."""
    if options.algorithm_type == "cache_affinity":
        return CacheAffinity(options)
    if options.scheduler_type == "default_scheduler":
        return Turn(options)
    return LoadBalance(options) if options.algorithm_type == "load_balance" else Predicted(options)


class _Waiting:
    """A queued request; ``number`` is its order of arrival."""

    __slots__ = ("future", "number", "wanted")

    def __init__(self, number: int, wanted: Wanted, future: asyncio.Future[Chosen]):
        self.number, self.wanted, self.future = number, wanted, future


ORDER: dict[int, Callable[[_Waiting], tuple[int, int]]] = {
    1: lambda each: (0, each.number),
    2: lambda each: (each.wanted.length, each.number),
    3: lambda each: (-each.wanted.length, each.number),
}


class Choice:
    """The scheduler of one cluster: places requests on instances, and queues those that find no room."""

    def __init__(self, table: Table, tally: Tally | None = None):
        self.table = table
        self.options = table.options
        self.tally = tally or Tally(self.options.slo_ttft, self.options.slo_tpot)
        self._policy = policy(self.options)
        self._queue: list[_Waiting] = []
        self.open = 0  # requests that are placed on instances and have not ended
        self._number = 0
        self._woken = False
        table.watchers.append(self._changed)

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return len(self._queue)

    @property
    def goodput(self) -> float:
        """The share of finished requests, refused ones included, that met their objectives."""
        over = self.tally.requests - self.open - self.waiting
        return min(1.0, self.tally.good / over) if over > 0 else 0.0

    async def choose(self, wanted: Wanted) -> Chosen:
        """Place a request on instances as soon as there is room. Raises RequestRefused.

        A request cancelled while it waits holds nothing. The caller must end the placement that is returned.
        """
        self.tally.asked(wanted.attempt)
        usable = self.table.usable()
        if not wanted.attempt and not self._possible(usable):
            raise self._refused(503, refusals.NOT_READY)
        chosen = None if self._queue else self._try(wanted, usable)
        if chosen is not None:
            return chosen
        if len(self._queue) >= self.options.max_schedule_count:
            raise self._refused(429, refusals.TOO_MANY, 1.0)
        return await self._wait(wanted)

    async def _wait(self, wanted: Wanted) -> Chosen:
        self._number += 1
        loop = asyncio.get_running_loop()
        each = _Waiting(self._number, wanted, loop.create_future())
        self._queue.append(each)
        self._queue.sort(key=ORDER[self.options.reordering_type])
        self.wake()
        patience = self.options.recovery_timeout if wanted.attempt else self.options.schedule_timeout
        late = wanted.deadline is not None and wanted.deadline < patience
        try:
            async with asyncio.timeout(wanted.deadline if late else patience):
                try:
                    return await each.future
                except asyncio.CancelledError:
                    if each.future.done() and not each.future.cancelled() and each.future.exception() is None:
                        each.future.result().end(False)
                    raise
        except TimeoutError:
            if late and not wanted.attempt:
                raise self._refused(429, refusals.TOO_MANY, 1.0) from None
            raise self._refused(408, refusals.LATE_END if late else refusals.LATE) from None
        finally:
            if each in self._queue:
                self._queue.remove(each)

    def possible(self) -> bool:
        """Whether the cluster can serve requests at all."""
        return self._possible(self.table.usable())

    def _possible(self, usable: Sequence[Instance]) -> bool:
        return self.table.complete(usable) or (self.options.fallback and any(each.extended for each in usable))

    def _try(self, wanted: Wanted, usable: Sequence[Instance]) -> Chosen | None:
        """Place a request now; None if there is no room. Raises RequestRefused."""
        able, now = self._able(wanted, usable), self.table.clock()
        others = [each for each in able if each.id not in wanted.avoid] if wanted.avoid else able
        sight = Sight(wanted, others, now)
        pair = self._policy.pick(sight)
        if pair is None and wanted.avoid:  # an instance that failed the request once is better than none
            sight = Sight(wanted, able, now)
            pair = self._policy.pick(sight)
        if pair is None:
            if not others and self._possible(usable):
                raise self._refused(500, refusals.NOBODY)
            return None
        if wanted.attempt == 0:
            self._admit(wanted, pair)
        return Chosen(self, pair, sight)

    def _admit(self, wanted: Wanted, pair: Pair) -> None:
        """Refuse a request whose first or later tokens would be late because of others. Raises RequestRefused.

        A request that has received a part of its answer is never refused.
        """
        deadlines = [each for each in (wanted.deadline, self.options.slo_ttft) if each is not None]
        if deadlines and pair.first is not None:
            least = min(deadlines)
            own = pair.first - pair.wait
            if pair.wait > (least - own if own <= least else least):
                raise self._refused(429, refusals.TOO_MANY, pair.first - least)
        if self.options.slo_tpot is not None:
            slow, after = crowded(pair, self.options.slo_tpot)
            if slow:
                raise self._refused(429, refusals.TOO_MANY, after)

    def _able(self, wanted: Wanted, usable: Sequence[Instance]) -> Sequence[Instance]:
        """Return the usable instances that have the model. If no instance has it, return all: any may report that.

        An answer that has begun can only continue on the same weights; their name does not matter.
        """
        if wanted.layout:
            usable = [each for each in usable if each.layout in ("", wanted.layout)]
        able = [each for each in usable if wanted.model in each.models] if wanted.model else usable
        return able if able or any(wanted.model in each.models for each in self.table) else usable

    def _refused(self, status: int, text: str, after: float | None = None) -> Refused:
        self.tally.refused(status)
        return Refused(status, text, after)

    def _changed(self, instance: Instance, news: News) -> None:
        self.wake()

    def wake(self) -> None:
        """Retry queued requests, once per event-loop iteration: resources were freed, or an instance became usable."""
        if self._queue and not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._woken = False
        usable = self.table.usable()
        full: set[str] = set()  # models whose first queued request finds no room: later ones may not overtake it
        for each in tuple(self._queue):
            if each.future.done() or each.wanted.model in full:
                continue
            try:
                chosen = self._try(each.wanted, usable)
            except Refused as refused:
                each.future.set_exception(refused)
                self._queue.remove(each)
                continue
            if chosen is None:
                full.add(each.wanted.model)
            else:
                each.future.set_result(chosen)
                self._queue.remove(each)
