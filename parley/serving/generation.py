"""One request between admission and its last event: submits it to the engine and turns outputs into events.

A request may have several prompts. Each is an engine request of its own (``prompt_stream.py``); their events form one
series. ``prepare.py`` builds the engine requests. In every case, ``close`` cancels the work that still runs and
releases the slots. Knows no HTTP and no API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from parley.dialects.dialect import Timings
from parley.engine.stream import Arrived, StreamGroup
from parley.errors import EngineError, Expired, InUse, ParleyError, excerpt
from parley.serving.deadline import Clock
from parley.serving.prepare import check_adapter, works
from parley.serving.prompt_stream import Branch
from parley.serving.request_metrics import Tally
from parley.serving.served_model import Model
from parley.serving.stage import Leg
from parley.text import Stops
from parley.types import Done, Event, Output, Reason, Request, Usage
from parley.web.offload import off_loop

UNANSWERED = "The engine ended this request without an answer."


class Generation:
    """One request from admission to its last event. ``tenant``: the client, by its API key. ``stage``: the stage of a
    separated request that runs here, None for a whole request.

    It ends in one of these ways: it finishes by itself; its client cancels it by an id (``cancel_by_id``) or by
    disconnecting (``close``); it is finished early with the output so far (``finish_early``); an error ends it
    (``fail_request``, ``fail_on_shutdown``). ``close`` follows in every case.
    """

    def __init__(self, model: Model, request: Request, tally: Tally, tenant: str = "", leg: Leg | None = None):
        request.model = tally.note.model = model.called(request.model)
        if request.adapter is None and request.model in model.adapters:
            request.adapter = request.model
        if request.sole and model.labelled(request.sole):
            raise InUse(f"Another request is running under the id {excerpt(request.sole)}.")
        model.hold(request.places, tenant)
        model.open[self] = None
        self.usage = Usage()
        self._model = model
        self._request = request
        self._tally = tally
        self._tenant = tenant
        self._branches: list[Branch] = []
        self._streams = StreamGroup(())  # of all prompts
        self._fresh: list[Event] = []  # not yet delivered to a reader
        self._left = request.n * len(request.prompts)  # choices that have not finished
        self._error: ParleyError | None = None
        self._closed = False
        self._stopped: Reason | None = None  # set if it was finished early
        self._leg = leg
        limits = (request.timeout, model.options.timeout, model.options.token_timeout)
        self._clock = Clock(*limits, self._expire, leg.spent if leg is not None else 0.0) if any(limits) else None

    @property
    def labels(self) -> tuple[str, ...]:
        """The ids that a client can cancel it by."""
        own = (self._leg.label,) if self._leg is not None else ()
        return self._request.id, *self._request.labels, *own

    @property
    def model(self) -> Model:
        return self._model

    @property
    def adapter(self) -> tuple[str, bool] | None:
        """Its adapter, if any, and whether it still waits for its first token."""
        name = self._request.adapter
        return None if name is None else (name, self._tally.waits)

    async def begin(self) -> None:
        """Build the engine requests and submit them. Raises BadRequest, NotReady."""
        request, model = self._request, self._model
        made = await works(model, request, self._tenant)
        if self._leg is not None:
            await self._leg.prepare(self, request, [work for _, work in made])
        strings = request.stop.strings
        stops = await off_loop(16 * sum(map(len, strings)), partial(Stops, strings)) if strings else None
        if self._error is not None:
            raise self._error
        model.require()  # the state may have changed while a long prompt was prepared
        check_adapter(model, request)
        for number, (prepared, work) in enumerate(made):
            branch = Branch(number, request, prepared, work, model, stops, self._tally, self._clock, self._end)
            self._branches.append(branch)
            self.usage.prompt_tokens += len(work.token_ids)
            self._fresh += branch.accepted(work)
        streams = [branch.stream for branch in self._branches]
        self._streams = StreamGroup(streams)
        if self._leg is not None:
            self._leg.submitted(streams)
        begun = self._leg is not None and self._leg.past is not None
        if self._stopped and not begun:
            self.stop(self._stopped)
        self._tally.submit(request, self.usage, begun=begun)

    def replay(self) -> Iterator[list[Event]]:
        """Render the outputs that another instance produced, batch by batch. Call it before ``feed_events``."""
        past = self._leg.past if self._leg is not None else None
        if past is None:
            return
        yield self._fresh
        self._fresh = []
        for batch in past:
            with self._tally.elsewhere():
                events = [event for number, output in batch for event in self._render(self._branches[number], [output])]
            yield events
        for branch in self._branches:
            for index in range(len(branch.choices)):
                if branch.choices[index].ended:
                    branch.stream.cancel(index)
        if self._stopped:
            self.stop(self._stopped)

    async def feed(self, take: Callable[[list[Event]], bool]) -> None:
        """Call ``take_events`` with the events of each step as they arrive, until it returns False or the events end.

        The caller's task is not woken for each step. Raises ParleyError, and anything that ``take_events`` raises.
        """
        more = True
        while more:
            if self._fresh:
                events, self._fresh = self._fresh, []
                more = take(events)
            elif self._error is not None:
                raise self._error
            elif not self.live:
                return
            elif self._streams.ended:
                raise EngineError(UNANSWERED)
            else:
                more = await self._streams.feed(lambda arrived: take(self._take(arrived)))

    async def next(self) -> list[Event]:
        """Return the events since the last call, at least one; an empty list after the last. Raises ParleyError."""
        events: list[Event] = []

        def keep(made: list[Event]) -> bool:
            events.extend(made)
            return not events

        await self.feed(keep)
        return events

    @property
    def ended(self) -> bool:
        """Whether all choices have finished and all events have been delivered."""
        return not self._left and not self._fresh

    @property
    def live(self) -> bool:
        """Whether more events will come here. False once the request continues on another instance."""
        if self._leaves and not self._fresh and self._branches:
            return not self._streams.ended
        return not self.ended

    async def leave(self) -> None:
        """Hand the request over to the next instance: no more events come here. Raises ParleyError."""
        assert self._leg is not None
        await self._leg.leave()

    @property
    def _leaves(self) -> bool:
        return self._leg is not None and not self._leg.ends

    def halt(self, label: str) -> None:
        """Cancel it at the request of a client or an operator, by one of its cancel ids."""
        if self._leg is not None and label == self._leg.label:
            self._leg.drop()
        else:
            self.stop()

    def abort(self, error: ParleyError) -> None:
        """End it with an error, which the current or next reader of events gets."""
        self._error = self._error or error
        for branch in self._branches:
            branch.stream.cancel()

    def lose(self, error: ParleyError) -> None:
        """Fail it because the server shuts down. A stage tells its coordinator first, which continues elsewhere."""
        if self._leg is not None:
            self._leg.lose()
        self.abort(error)

    def stop(self, reason: Reason = "cancel") -> None:
        """Finish every choice with the output so far; the next events are the last ones of each choice."""
        self._stopped = reason
        if self._request.pooling is not None:
            return  # an embedding is complete or missing
        for branch in self._branches:
            self._fresh += branch.stop(reason)

    def _expire(self, error: Expired) -> None:
        if self._request.partial:
            self.stop("length")
        else:
            self.abort(error)

    @property
    def timings(self) -> Timings:
        return self._tally.timings()

    def close(self) -> None:
        """Cancel the work that still runs, release the slots, and record the metrics. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._clock is not None:
            self._clock.stop()
        for branch in self._branches:
            branch.stream.cancel()
        self._model.free(self._request.places, self._tenant)
        self._model.open.pop(self, None)
        delivered = [choice.usage.completion_tokens for branch in self._branches for choice in branch.given]
        onward = self._leg is not None and self._leg.left
        self._tally.close(delivered, self._left, failed=self._error is not None, onward=onward)
        if self._leg is not None:
            self._leg.close()

    def _take(self, arrived: Arrived) -> list[Event]:
        """Render the outputs of one engine step."""
        events: list[Event] = []
        for number, outputs in arrived:
            branch = self._branches[number]
            branch.count(outputs)
            if self._leg is not None:
                self._leg.took(number, outputs)
            events += self._render(branch, outputs)
        return events

    def _render(self, branch: Branch, outputs: list[Output]) -> list[Event]:
        try:
            return branch.render(outputs)
        except EngineError as error:
            self._error = error
            raise

    def _end(self, branch: Branch, done: Done) -> None:
        """Count the usage of a choice that has delivered its last event."""
        self._left -= 1
        self.usage.completion_tokens += done.usage.completion_tokens
        self.usage.reasoning_tokens += done.usage.reasoning_tokens
        self.usage.accepted_tokens += done.usage.accepted_tokens
        self.usage.rejected_tokens += done.usage.rejected_tokens
        if done.index % self._request.n == 0:  # the first choice of a prompt; the others always hit its pages
            self.usage.cached_tokens += branch.choices[0].usage.cached_tokens
        self._tally.end(done.reason)
