"""What an engine is, seen from the API process: submit Work, read Outputs.

Lifecycle: ``start`` returns as soon as loading is under way, ``ready`` waits for its end. ``submit`` never blocks and
never fails: whatever goes wrong later arrives as an Output with ``finish="error"``. Every choice of every work gets
exactly one Output with ``finish`` set, unless it was cancelled, after which it gets none. ``close`` may be called at
any time, and twice.

All methods belong to one event loop; kinds of engine that live elsewhere hand their messages over to it.
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
    """The engine could not be started, or ended for good. The message is one sentence with a hint."""


class Engine(ABC):
    """Base of all engines: keeps the open streams; a kind adds how messages travel and where the work is done.

    ``scripted``: it has neither weights to fetch nor pages with content.
    """

    scripted = False

    def __init__(self) -> None:
        self.state: State = "idle"
        self.progress = Progress("starting", 0.0)
        self.info: ModelInfo | None = None
        self.stats = Stats()
        self.step_observers: list[Callable[[Stats], None]] = []  # called for each step
        self.load_observers: list[Callable[[ModelInfo], None]] = []  # called whenever the model has been loaded
        self.failure = ""
        self.share = 100  # percent of the time, beside answers, for prompts
        self._streams: dict[str, Stream] = {}
        self._touched: list[Stream] = []  # have got outputs, of which nobody has been told
        self._questions: dict[int, asyncio.Future[Any]] = {}  # messages that have an answer
        self._numbers = count()
        self._loaded: asyncio.Future[ModelInfo] | None = None

    @abstractmethod
    async def start(self) -> None:
        """Begin loading. Returns at once; raises EngineFailed only if nothing could even be begun."""

    async def ready(self) -> ModelInfo:
        """Wait until the model is loaded. Raises EngineFailed."""
        assert self._loaded is not None, "start() comes first"
        return await asyncio.shield(self._loaded)

    @abstractmethod
    async def close(self) -> None:
        """End the engine and everything it started; open streams end with an error."""

    @abstractmethod
    def _send(self, message: ToEngine) -> None:
        """Pass a message on, without blocking."""

    def submit(self, work: Work) -> Stream:
        """Hand work over. The stream's outputs arrive as the engine produces them."""
        stream = Stream(self, work)
        if work.id in self._streams:
            raise ValueError(f"work {work.id} is already running")
        self._streams[work.id] = stream
        if self.state == "ready":
            self._send(Submit(work))
        else:
            self._fail([stream], self.failure or "The engine is not ready.")
        return stream

    def cancelled(self, stream: Stream, index: int) -> None:
        """A stream was cancelled (called by the stream itself)."""
        if index < 0:
            self._streams.pop(stream.id, None)
        self._tell(Cancel(stream.id, index))

    def concluded(self, stream: Stream, reason: Literal["length", "cancel"]) -> None:
        """A stream was concluded (called by the stream itself)."""
        if self.state == "ready":
            self._send(Conclude(stream.id, reason))

    async def reset(self, *, running: bool = False) -> bool:
        """Forget all cached prefixes; ``running`` works are put back for it. Whether it was done.

        False while works run, unless ``running``, and from an engine that is not ready or ends meanwhile.
        """
        answer = await self._ask(lambda id: Reset(id, running))
        return isinstance(answer, Wiped) and answer.done

    async def load_adapter(self, name: str, folder: str) -> str:
        """Read an adapter and know it by this name, in place of another: why it was not done, empty if it was."""
        return self._why(await self._ask(lambda id: LoadAdapter(id, name, folder)))

    async def unload_adapter(self, name: str) -> str:
        """Know an adapter no longer: why it was not done, empty if it was."""
        return self._why(await self._ask(lambda id: UnloadAdapter(id, name)))

    async def reserve(
        self, key: str, token_ids: list[int], salt: str = "", adapter: str = "", digest: str = ""
    ) -> Reserved:
        """Pages for the whole pages of these tokens that the prefix cache lacks, as ``messages.Reserve`` says.

        Whatever comes of it, ``free`` must follow.
        """
        answer = await self._ask(lambda id: Reserve(id, key, token_ids, salt, adapter, digest))
        return answer if isinstance(answer, Reserved) else Reserved(-1, error=self._why(answer))

    def landed(self, key: str, count: int) -> None:
        """The first ``count`` of the pages reserved under ``key`` have their content."""
        self._tell(Landed(key, count))

    def free(self, key: str) -> None:
        """Give back what is reserved under ``key``, into which nobody writes any more."""
        self._tell(Free(key))

    def release(self, id: str) -> None:
        """Nobody reads the pages of work ``id`` any more, which had a lease. It may run or have ended."""
        self._tell(Release(id))

    def divide(self, percent: int) -> None:
        """Let prompts have so much of the time beside answers, as ``messages.Divide`` says; a restart keeps it."""
        if percent != self.share:
            self.share = percent
            self._tell(Divide(percent))

    def _tell(self, message: ToEngine) -> None:
        if self.state == "ready":  # else there is nothing that was held
            self._send(message)

    def _why(self, answer: Any) -> str:
        return answer.error if isinstance(answer, Changed) else self.failure or "The engine is not ready."

    async def _ask(self, question: Callable[[int], ToEngine]) -> Any:
        """The message that answers this one; None from an engine that is not ready, or ends meanwhile."""
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
        """Works that have not ended."""
        return len(self._streams)

    def _begin(self) -> None:
        """Loading is under way: from here on it can be waited for."""
        self.state = "loading"
        self._loaded = asyncio.get_running_loop().create_future()
        self._loaded.add_done_callback(lambda loaded: loaded.cancelled() or loaded.exception())  # nobody has to wait

    def _serve(self, info: ModelInfo) -> None:
        """The model is loaded, for the first time or again."""
        self.info, self.state, self.failure = info, "ready", ""
        if self.share != 100:
            self._send(Divide(self.share))
        for observe in self.load_observers:
            observe(info)
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(info)

    def _give_up(self, reason: str) -> None:
        """The engine has ended for good, before or after it was ready."""
        self.state, self.failure = "failed", reason
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(EngineFailed(reason))
        self._fail_all(reason)

    def _closed(self, reason: str) -> None:
        """The engine was closed: nobody waits any longer, neither for the model nor for outputs."""
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(EngineFailed("The engine was closed while it was loading."))
        self._fail_all(reason)

    def _receive(self, message: FromEngine) -> None:
        """A message has come. Those of the engine's life are its kind's affair."""
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
            # Not at once: steps that have arrived together are one to the clients, who get one write for them.
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
        self.stats = Stats()  # whatever ran or was held is gone, and another engine counts anew
        self._fail(list(self._streams.values()), reason)
        for answer in self._questions.values():
            if not answer.done():
                answer.set_result(None)
