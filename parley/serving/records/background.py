"""Requests that run in the background: they survive their client, which follows them or looks at their record later.

A run keeps the events of its stream until some minutes after its end, so that a client resumes it at any event. The
record of a run is touched while it lasts; a record that says "running" and was not touched belongs to a server that
has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from parley.dialects.records import NO_RECORDS, RecordChange, TenantRecords
from parley.dialects.reply import Reply
from parley.dialects.sse import EVENT_END, split_events
from parley.errors import EngineError, NotReady, ParleyError
from parley.serving.generation import Generation
from parley.serving.records.open_store import AnyRecordStore
from parley.types import Event

RunKey = tuple[str, str]  # tenant, and name of the record
EVENTS_KEPT_SECONDS = 300.0  # after the end of a run
MAX_KEPT_BYTES = 64 << 20  # bytes of the events of ended runs, with RUN_BYTES for each
RUN_BYTES = 4096  # bytes that a run takes in addition to its events
TOUCH_SECONDS = 20.0
RECORD_SHARE_DIVISOR = 4  # a record has at most the store's size divided by this


class KeptEvents:
    """The events of a stream that may outlive its client. ``has_ended``: no more events follow."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.size = 0  # bytes of all events
        self.has_ended = False
        self._tail = b""  # the beginning of an event that has not arrived completely
        self._changed = asyncio.Event()

    def add_bytes(self, data: bytes) -> None:
        """Add the next part of the stream."""
        new_events, self._tail = split_events(self._tail + data)
        if new_events:
            self.events += [event + EVENT_END for event in new_events]
            self.size += sum(map(len, new_events)) + len(EVENT_END) * len(new_events)
            self._signal_change()

    def end_events(self) -> None:
        """Let those who follow the events know that no more will come. May be called twice."""
        self.has_ended = True
        self._signal_change()

    async def write_events(self, first: int, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write the events from number ``first`` on, those to come as well, until they end."""
        while True:
            changed, due = self._changed, self.events[first:]
            if due:
                first += len(due)
                await write(b"".join(due))
            elif self.has_ended:
                return
            else:
                await changed.wait()

    def _signal_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


@dataclass(frozen=True, slots=True)
class BackgroundRun:
    """A request that runs. ``is_stream``: its client asked for a stream. ``task`` computes the events."""

    kept_events: KeptEvents
    is_stream: bool
    task: asyncio.Task[None]


async def generate_events(reply: Reply, generation: Generation, kept_events: KeptEvents) -> None:
    """Generate the answer to a request that was submitted; the reply keeps its record. Closes the generation."""

    def take_steps(steps: list[list[Event]]) -> bool:
        for events in steps:
            kept_events.add_bytes(reply.render_chunk(events))
        return True

    try:
        while generation.expects_events:
            await generation.feed_events(take_steps)
        reply.timings = generation.request_timings
        kept_events.add_bytes(reply.finish_stream(generation.usage))
    except ParleyError as error:
        kept_events.add_bytes(reply.fail_stream(error))
    except Exception:
        kept_events.add_bytes(reply.fail_stream(EngineError("The server had an error while it answered.")))
        raise
    finally:
        generation.close()


class BackgroundRunner:
    """Runs requests of one server without their clients. Keeps the events of each run for clients that follow it."""

    def __init__(self, store: AnyRecordStore):
        self._store = store
        self._runs: dict[RunKey, BackgroundRun] = {}
        self._ended_sizes: dict[RunKey, int] = {}  # sizes of ended runs, in the order of their ends
        self._ended_size = 0  # sum of these
        self.is_closing = False  # the server ends

    def start_run(
        self,
        tenant: str,
        name: str,
        kept_events: KeptEvents,
        work: Coroutine[Any, Any, None],
        *,
        is_stream: bool,
        touched_prefixes: Sequence[str] = (),
    ) -> BackgroundRun:
        """Start ``work``, which adds its events to ``kept_events``, and return the run. ``name``: the name of the
        record that it keeps. Records whose names begin with one of ``touched_prefixes`` are touched together with
        it.
        """
        key = tenant, name
        self._forget_run(key)  # an ended run of this name, whose time would end the new one's
        task = asyncio.get_running_loop().create_task(self._run_to_end(key, kept_events, work, touched_prefixes))
        run = self._runs[key] = BackgroundRun(kept_events, is_stream, task)
        return run

    def find_run(self, tenant: str, name: str) -> BackgroundRun | None:
        """Return a tenant's run by the name of its record."""
        return self._runs.get((tenant, name))

    def stop_run(self, tenant: str, name: str) -> bool:
        """Stop a run. Return whether one was running. May be called in any thread."""
        run = self._runs.get((tenant, name))
        if run is None or run.kept_events.has_ended:
            return False
        run.kept_events.has_ended = True  # outputs that arrive before the task has stopped are dropped
        run.task.get_loop().call_soon_threadsafe(run.kept_events.end_events)
        self._cancel_started(run.task)
        return True

    async def close(self) -> None:
        """Stop all runs."""
        self.is_closing = True
        tasks = [run.task for run in self._runs.values()]
        for task in tasks:
            self._cancel_started(task)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cancel_started(self, task: asyncio.Task[None]) -> None:
        """Cancel a task after its first step: one that is cancelled before that never gets to release its slots."""
        task.get_loop().call_soon_threadsafe(task.cancel)

    async def _run_to_end(
        self, key: RunKey, kept_events: KeptEvents, work: Coroutine[Any, Any, None], touched_prefixes: Sequence[str]
    ) -> None:
        touching = asyncio.get_running_loop().create_task(self._touch_records(key, touched_prefixes))
        try:
            await work
        finally:
            kept_events.end_events()
            touching.cancel()
            self._keep_for_a_while(key, kept_events.size + RUN_BYTES)

    async def _touch_records(self, key: RunKey, prefixes: Sequence[str]) -> None:
        while True:
            await asyncio.sleep(TOUCH_SECONDS)
            with contextlib.suppress(NotReady):  # the store has logged it, and the next touch may succeed
                self._store.touch_record(*key)
                for prefix in prefixes:
                    self._store.touch_records(key[0], prefix)

    def _keep_for_a_while(self, key: RunKey, size: int) -> None:
        """Keep a run that has ended, and forget those that ended first if the events of all are too large."""
        self._ended_sizes[key] = size
        self._ended_size += size
        asyncio.get_running_loop().call_later(EVENTS_KEPT_SECONDS, self._forget_run, key)
        while self._ended_size > MAX_KEPT_BYTES:
            self._forget_run(next(iter(self._ended_sizes)))

    def _forget_run(self, key: RunKey) -> None:
        """Forget a run that has ended, unless that has been done."""
        if size := self._ended_sizes.pop(key, 0):
            self._ended_size -= size
            del self._runs[key]


def tenant_records(store: AnyRecordStore, runs: BackgroundRunner, tenant: str) -> TenantRecords:
    """Return the records of a tenant, or those of none if the store keeps nothing."""
    return RecordsOfTenant(store, runs, tenant) if store.size else NO_RECORDS


class RecordsOfTenant:
    """The records of one tenant, as dialects see them."""

    are_kept, are_inlined = True, False

    def __init__(self, store: AnyRecordStore, runs: BackgroundRunner, tenant: str):
        self._store, self._runs, self._tenant = store, runs, tenant

    def save_record(self, name: str, data: bytes, parts: Sequence[str] = ()) -> bool:
        """Keep a record. Return False if it is too large for the store."""
        return self._store.save_record(self._tenant, name, data, parts)

    def update_record(self, name: str, change: RecordChange) -> bool:
        """Replace a record by the result of ``change``. Return whether the record exists. Raises RecordTooLarge."""
        return self._store.update_record(self._tenant, name, change)

    def find_record(self, name: str) -> bytes | None:
        """Return a record."""
        return self._store.find_record(self._tenant, name)

    @property
    def largest_record(self) -> int:
        """The bytes that one record may have: a part of the store, so that it does not displace all others."""
        return self._store.size // RECORD_SHARE_DIVISOR

    def list_names(self, prefix: str) -> list[str]:
        """Return the names of the records that begin with ``prefix``, in alphabetical order."""
        return self._store.list_names(self._tenant, prefix)

    def find_part(self, part: str) -> bytes | None:
        """Return the record that has this part."""
        return self._store.find_part(self._tenant, part)

    def record_age(self, name: str) -> float:
        """Return the seconds since a record was kept or touched; 0 while this process runs the request that writes it,
        whatever the machine's time says."""
        run = self._runs.find_run(self._tenant, name)
        return 0.0 if run is not None and not run.task.done() else self._store.record_age(self._tenant, name)

    def delete_record(self, name: str) -> bool:
        """Drop a record."""
        return self._store.delete_record(self._tenant, name)

    def stop_run(self, name: str) -> bool:
        """Stop the request that writes the record."""
        return self._runs.stop_run(self._tenant, name)
