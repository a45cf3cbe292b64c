"""The interface of an engine as the API process sees it: submit requests, read outputs.

Life cycle: ``start`` returns as soon as loading has begun; ``wait_until_ready`` waits for its end. ``submit_request``
never blocks and reports no error: later failures arrive as an EngineOutput with ``finish_reason="error"``. Every choice
of every request gets exactly one EngineOutput with ``finish_reason`` set, or none after it was cancelled. ``close`` may
be called at any time, also twice.

All methods belong to one event loop; engines that run elsewhere pass their messages to that loop.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import count
from typing import Any, Literal

from parley.engine.messages import (
    Cancel,
    Changed,
    Conclude,
    Divide,
    Filled,
    Free,
    FromEngine,
    Landed,
    LoadAdapter,
    Outputs,
    Progress,
    Release,
    Reserve,
    Reserved,
    Reset,
    Submit,
    ToEngine,
    UnloadAdapter,
    Wiped,
)
from parley.engine.stream import Stream
from parley.types import ModelInfo, Output, Stats, Work

State = Literal["idle", "loading", "ready", "restarting", "failed", "closed"]


class EngineFailed(Exception):
    """The engine could not be started, or has failed for good. The message is one sentence with a hint."""


class Engine(ABC):
    """Base class of all engines: keeps the open streams. Subclasses transport messages and compute.

    ``scripted``: the engine has no weights to download and no content in its pages.
    """

    scripted = False

    def __init__(self) -> None:
        self.state: State = "idle"
        self.progress = Progress("starting", 0.0)
        self.info: ModelInfo | None = None
        self.stats = Stats()
        self.step_observers: list[Callable[[Stats], None]] = []  # called after each step
        self.load_observers: list[Callable[[ModelInfo], None]] = []  # called each time the model has been loaded
        self.failure = ""
        self.share = 100  # prefill share: percent of the time for prefill while requests decode
        self._streams: dict[str, Stream] = {}
        self._touched: list[Stream] = []  # streams with new outputs that have not been woken yet
        self._questions: dict[int, asyncio.Future[Any]] = {}  # futures of messages that get an answer, by message id
        self._numbers = count()
        self._loaded: asyncio.Future[ModelInfo] | None = None

    @abstractmethod
    async def start(self) -> None:
        """Begin loading and return at once. Raises EngineFailed only if nothing could be started."""

    async def ready(self) -> ModelInfo:
        """Wait until the model is loaded. Raises EngineFailed."""
        assert self._loaded is not None, "start() comes first"
        return await asyncio.shield(self._loaded)

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine and everything it started. Open streams end with an error."""

    @abstractmethod
    def _send(self, message: ToEngine) -> None:
        """Send a message without blocking."""

    def submit(self, work: Work) -> Stream:
        """Submit a request and return its stream, where its outputs arrive. Raises ValueError for an id in use."""
        stream = Stream(self, work)
        if work.id in self._streams:
            raise ValueError(f"Request {work.id} is already running.")
        self._streams[work.id] = stream
        if self.state == "ready":
            self._send(Submit(work))
        else:
            self._fail([stream], self.failure or "The engine is not ready.")
        return stream

    def cancelled(self, stream: Stream, index: int) -> None:
        """Cancel one choice of a stream, or (-1) all; called by the stream."""
        if index < 0:
            self._streams.pop(stream.id, None)
        self._tell(Cancel(stream.id, index))

    def concluded(self, stream: Stream, reason: Literal["length", "cancel"]) -> None:
        """Finish a stream's beam search early; called by the stream."""
        if self.state == "ready":
            self._send(Conclude(stream.id, reason))

    async def reset(self, *, running: bool = False) -> bool:
        """Clear the prefix cache. ``running``: preempt running requests for it. Return True if it was cleared.

        False while requests run, unless ``running``, and if the engine is not ready or ends meanwhile.
        """
        answer = await self._ask(lambda id: Reset(id, running))
        return isinstance(answer, Wiped) and answer.done

    async def load_adapter(self, name: str, folder: str) -> str:
        """Load an adapter under a name, in place of another. Return the error, or ""."""
        return self._why(await self._ask(lambda id: LoadAdapter(id, name, folder)))

    async def unload_adapter(self, name: str) -> str:
        """Unload an adapter. Return the error, or ""."""
        return self._why(await self._ask(lambda id: UnloadAdapter(id, name)))

    async def reserve(
        self, key: str, token_ids: list[int], salt: str = "", adapter: str = "", digest: str = ""
    ) -> Reserved:
        """Reserve pages for the full pages of these tokens that the prefix cache lacks: see ``messages.ReservePages``.

        ``free_reservation`` must follow, also after an error.
        """
        answer = await self._ask(lambda id: Reserve(id, key, token_ids, salt, adapter, digest))
        return answer if isinstance(answer, Reserved) else Reserved(-1, error=self._why(answer))

    def landed(self, key: str, count: int) -> None:
        """Publish the first ``count`` pages reserved under ``key``, whose content has been received."""
        self._tell(Landed(key, count))

    def free(self, key: str) -> None:
        """Free the reservation ``key``. No other instance may write into its pages any more."""
        self._tell(Free(key))

    def release(self, id: str) -> None:
        """Release the lease of request ``id``, running or finished. No other instance reads its pages any more."""
        self._tell(Release(id))

    def divide(self, percent: int) -> None:
        """Set the prefill share, as ``messages.SetPrefillShare`` describes; it survives a restart of the engine."""
        if percent != self.share:
            self.share = percent
            self._tell(Divide(percent))

    def _tell(self, message: ToEngine) -> None:
        if self.state == "ready":  # otherwise the engine has no state that the message could change
            self._send(message)

    def _why(self, answer: Any) -> str:
        return answer.error if isinstance(answer, Changed) else self.failure or "The engine is not ready."

    async def _ask(self, question: Callable[[int], ToEngine]) -> Any:
        """Send a question and return the message that answers it; None if the engine is not ready or ends meanwhile."""
        if self.state != "ready":
            return None
        id = next(self._numbers)
        answer = self._questions[id] = asyncio.get_running_loop().create_future()
        try:
            self._send(question(id))
            return await answer
        finally:
            del self._questions[id]

    @property
    def in_flight(self) -> int:
        """Number of requests that have not finished."""
        return len(self._streams)

    def _begin(self) -> None:
        """Enter the state "loading"; from now on, readiness can be awaited."""
        self.state = "loading"
        self._loaded = asyncio.get_running_loop().create_future()
        self._loaded.add_done_callback(lambda loaded: loaded.cancelled() or loaded.exception())  # it may be unawaited

    def _serve(self, info: ModelInfo) -> None:
        """Enter the state "ready": the model is loaded, for the first time or again."""
        self.info, self.state, self.failure = info, "ready", ""
        if self.share != 100:
            self._send(Divide(self.share))
        for observe in self.load_observers:
            observe(info)
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(info)

    def _give_up(self, reason: str) -> None:
        """Enter the state "failed", before or after the engine was ready, and fail all streams."""
        self.state, self.failure = "failed", reason
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(EngineFailed(reason))
        self._fail_all(reason)

    def _closed(self, reason: str) -> None:
        """Release everything that waits for the model or for outputs of the closed engine."""
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(EngineFailed("The engine was closed while it was loading."))
        self._fail_all(reason)

    def _receive(self, message: FromEngine) -> None:
        """Handle a message from the engine, except EngineReady and EngineFatal, which are for the subclasses."""
        match message:
            case Outputs():
                self._deliver(message)
            case Filled():
                self._filled(message)
            case Wiped() | Changed() | Reserved():
                self._answered(message)
            case Progress():
                self.progress = message

    def _deliver(self, message: Outputs) -> None:
        self.stats = message.stats
        for observe in self.step_observers:
            observe(message.stats)
        if message.outputs and not self._touched:
            # Not at once: clients get one write for all steps that have arrived together.
            asyncio.get_running_loop().call_soon(self._wake)
        for output in message.outputs:
            stream = self._streams.get(output.id)
            if stream is None:
                continue
            stream.push(output)
            self._touched.append(stream)
            if not stream.open:
                del self._streams[output.id]

    def _wake(self) -> None:
        streams, self._touched = self._touched, []
        for stream in streams:
            stream.wake()

    def _filled(self, message: Filled) -> None:
        stream = self._streams.get(message.id)
        if stream is not None and stream.filled is not None:
            stream.filled(message.pages)

    def _answered(self, message: Wiped | Changed | Reserved) -> None:
        answer = self._questions.get(message.id)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _fail(self, streams: list[Stream], reason: str) -> None:
        for stream in streams:
            for index in sorted(stream.open):
                stream.push(Output(stream.id, index, finish="error", error=reason))
            self._streams.pop(stream.id, None)
            stream.wake()

    def _fail_all(self, reason: str) -> None:
        self.stats = Stats()  # no request runs and no page is held any more; a restarted engine counts from zero
        self._fail(list(self._streams.values()), reason)
        for answer in self._questions.values():
            if not answer.done():
                answer.set_result(None)
