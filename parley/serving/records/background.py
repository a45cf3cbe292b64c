"""Requests that run in the background: they survive their client, which follows them or looks at their record later.

A run keeps the events of its stream until some minutes after its end, so that a client resumes it at any event. The
record of a run is touched while it lasts; a record that says "running" and was not touched belongs to a server that
has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from parley.dialects.dialect import Reply
from parley.dialects.records import RecordChange
from parley.errors import EngineError, NotReady, ParleyError
from parley.serving.generation import Generation
from parley.serving.records.record_store import RecordStore
from parley.types import Event

RunKey = tuple[str, str]  # tenant, and name of the record
EVENTS_KEPT_SECONDS = 300.0  # after the end of a run
MAX_KEPT_BYTES = 64 << 20  # of the events of runs that have ended
TOUCH_SECONDS = 20.0
EVENT_END = b"\n\n"


class BackgroundRun:
    """One request. ``events``: those of its stream so far; ``has_ended``: no more will come."""

    def __init__(self, reply: Reply, generation: Generation):
        self.events: list[bytes] = []
        self.has_ended = False
        self.task: asyncio.Task[None] | None = None
        self._reply, self._generation = reply, generation
        self._changed = asyncio.Event()

    @property
    def streams(self) -> bool:
        """Whether it was asked for as a stream."""
        return self._reply.request.stream

    @property
    def kept_bytes(self) -> int:
        """The size of its events."""
        return sum(map(len, self.events))

    async def run(self) -> None:
        """Generate the answer, and pass it to the reply, which keeps the record."""
        reply, generation = self._reply, self._generation
        try:
            while generation.expects_events:
                await generation.feed_events(self._take_steps)
            reply.timings = generation.request_timings
            self._add_events(reply.finish_stream(generation.usage))
        except ParleyError as error:
            self._add_events(reply.fail_stream(error))
        except Exception:
            self._add_events(reply.fail_stream(EngineError("The server had an error while it answered.")))
            raise
        finally:
            generation.close()
            self.has_ended = True
            self._signal_change()

    async def follow(self, first: int, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write the events from number ``first`` on, those to come as well, until the run ends."""
        while True:
            changed, due = self._changed, self.events[first:]
            if due:
                first += len(due)
                await write(b"".join(due))
            elif self.has_ended:
                return
            else:
                await changed.wait()

    def _take_steps(self, steps: list[list[Event]]) -> bool:
        for events in steps:
            self._add_events(self._reply.render_chunk(events))
        return True

    def _add_events(self, data: bytes) -> None:
        new_events = [event + EVENT_END for event in data.split(EVENT_END) if event]
        if new_events:
            self.events += new_events
            self._signal_change()

    def _signal_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class BackgroundRuns:
    """The runs of one server that have not ended, or whose events are still kept."""

    def __init__(self, store: RecordStore):
        self._store = store
        self._runs: dict[RunKey, BackgroundRun] = {}  # oldest first

    def start(self, tenant: str, reply: Reply, generation: Generation) -> BackgroundRun:
        """Run a request that was submitted. It closes the generation at its end."""
        run = BackgroundRun(reply, generation)
        key = tenant, reply.background_name
        self._runs[key] = run
        run.task = asyncio.get_running_loop().create_task(self._run_to_end(key, run))
        return run

    def find(self, tenant: str, name: str) -> BackgroundRun | None:
        """Return a tenant's run by the name of its record."""
        return self._runs.get((tenant, name))

    def stop(self, tenant: str, name: str) -> bool:
        """Stop a run. Return whether one was running."""
        run = self._runs.get((tenant, name))
        if run is None or run.has_ended or run.task is None:
            return False
        run.task.cancel()
        return True

    async def close(self) -> None:
        """Stop all runs."""
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_to_end(self, key: RunKey, run: BackgroundRun) -> None:
        touching = asyncio.get_running_loop().create_task(self._touch_record(key))
        try:
            await run.run()
        finally:
            touching.cancel()
            asyncio.get_running_loop().call_later(EVENTS_KEPT_SECONDS, self._runs.pop, key, None)
            self._forget_large_runs()

    async def _touch_record(self, key: RunKey) -> None:
        while True:
            await asyncio.sleep(TOUCH_SECONDS)
            with contextlib.suppress(NotReady):  # the store has logged it, and the next touch may succeed
                self._store.touch(*key)

    def _forget_large_runs(self) -> None:
        """Forget the oldest runs that have ended, until the events of the others are not too large."""
        ended = {key: run.kept_bytes for key, run in self._runs.items() if run.has_ended}
        total = sum(ended.values())
        for key, size in ended.items():
            if total <= MAX_KEPT_BYTES:
                return
            total -= size
            del self._runs[key]


class RecordsOfTenant:
    """The records of one tenant, as dialects see them."""

    are_kept = True

    def __init__(self, store: RecordStore, runs: BackgroundRuns, tenant: str):
        self._store, self._runs, self._tenant = store, runs, tenant

    def keep(self, name: str, data: bytes, parts: Sequence[str] = ()) -> None:
        """Keep a record."""
        self._store.keep(self._tenant, name, data, parts)

    def change(self, name: str, change: RecordChange) -> bool:
        """Replace a record by what ``change`` returns for it. Return whether there is one."""
        return self._store.change(self._tenant, name, change)

    def find(self, name: str) -> bytes | None:
        """Return a record."""
        return self._store.find(self._tenant, name)

    def find_part(self, part: str) -> bytes | None:
        """Return the record that has this part."""
        return self._store.find_part(self._tenant, part)

    def age(self, name: str) -> float:
        """Return the seconds since a record was kept or touched."""
        return self._store.age(self._tenant, name)

    def drop(self, name: str) -> bool:
        """Drop a record."""
        return self._store.drop(self._tenant, name)

    def stop_run(self, name: str) -> bool:
        """Stop the request that writes the record."""
        return self._runs.stop(self._tenant, name)
