"""The interface of an engine as the API process sees it: submit requests, read outputs.

The guarantees that every engine gives are in the docstring of ``Engine``. All methods belong to one event loop; engines
that run elsewhere pass their messages to that loop.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import count
from typing import Any, Literal

from parley.engine.messages import (
    AdapterResult,
    CancelRequest,
    FinishBeamSearch,
    FromEngine,
    LoadAdapter,
    LoadProgress,
    ReserveResponse,
    ResetDone,
    ResetPrefixCache,
    SetPrefillShare,
    StepOutputs,
    SubmitRequest,
    ToEngine,
    UnloadAdapter,
)
from parley.engine.output_stream import OutputStream, StreamGroup
from parley.types import EngineOutput, EngineRequest, EngineStats, ModelInfo

EngineState = Literal["idle", "loading", "ready", "restarting", "failed", "closed"]


class EngineFailed(Exception):
    """The engine could not be started, or has failed for good. The message is one sentence with a hint."""


class Engine(ABC):
    """Base class of all engines: keeps the open streams. Subclasses transport messages and compute.

    The guarantees of an engine. ``tests/engine/test_conformance.py`` tests each by its name:

    * load: ``start`` MUST return as soon as loading has begun. When ``wait_until_ready`` returns, ``info`` MUST be set
      and requests MUST be served. If loading fails, it MUST raise EngineFailed and ``state`` MUST be "failed".
    * submit: ``submit_request`` MUST NOT block. It MUST raise ValueError for the id of an open request and for nothing
      else: a request that cannot be served MUST end with an error output. An id MUST be free again after the end.
    * capability: a request that needs nothing outside of ``info.features`` and ``info.bounds`` MUST NOT fail for that.
    * terminal: every choice MUST get exactly one output with ``finish_reason``, its last, unless it is cancelled.
    * length: a choice MUST have at most ``max_tokens`` tokens. With ``max_tokens`` 0 it MUST end with "length".
    * stop: a choice MUST end with the first of ``stop_ids`` after ``min_tokens`` tokens, and report it as ``stop_id``.
    * greedy: greedy answers MUST NOT depend on earlier or simultaneous requests.
    * choice: choice k MUST have the tokens of a single request whose seed is k higher.
    * cancel: no output of a cancelled choice may be delivered, and its slot and pages MUST be free a step later. Other
      choices MUST NOT notice it.
    * error: a request that fails MUST get an error output for each choice, and others MUST continue.
    * statistics: the gauges MUST return to zero when no request is open, and the counters MUST count each token once.
    * questions: a question (prefix cache, adapters) MUST have an answer, also while the engine is not ready.
    * close: ``close`` MUST be possible at any time, also twice. It MUST end all streams with an error output, and
      ``wait_until_ready`` with EngineFailed. Later requests MUST end with an error output.
    * death: if the engine dies, every stream MUST end with an error output, and ``state`` MUST NOT be "ready" until it
      serves again.

    ``scripted``: the engine has no weights to download and no content in its pages. ``needs_weights``: it loads the
    weights from the model's folder. ``media_command``: starts the processes that prepare media for it; None: parley's
    own. ``page_transfer.py`` has a capability that engines may have besides.
    """

    scripted = False
    needs_weights = True
    media_command: list[str] | None = None

    def __init__(self) -> None:
        self.state: EngineState = "idle"
        self.progress = LoadProgress("starting", 0.0)
        self.info: ModelInfo | None = None
        self.stats = EngineStats()
        self.step_observers: list[Callable[[EngineStats], None]] = []  # called after each step
        self.info_observers: list[Callable[[ModelInfo], None]] = []  # called each time the model's description changes
        self.load_observers: list[Callable[[ModelInfo], None]] = []  # called each time the model has been loaded
        self.failure = ""
        self.restarts = 0  # how often the engine was started again
        self.prefill_share = 100  # prefill share: percent of the time for prefill while requests decode
        self._streams: dict[str, OutputStream] = {}
        self._touched_groups: dict[StreamGroup, None] = {}  # groups with new outputs whose readers were not woken yet
        self._pending_answers: dict[int, asyncio.Future[Any]] = {}  # by the id of the message to answer
        self._question_ids = count()
        self._load_future: asyncio.Future[ModelInfo] | None = None

    @abstractmethod
    async def start(self) -> None:
        """Begin loading and return at once. Raises EngineFailed only if nothing could be started."""

    async def wait_until_ready(self) -> ModelInfo:
        """Wait until the model is loaded. Raises EngineFailed."""
        assert self._load_future is not None, "start() comes first"
        return await asyncio.shield(self._load_future)

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine and everything it started. Open streams end with an error."""

    @abstractmethod
    def _send_to_engine(self, message: ToEngine) -> None:
        """Send a message without blocking."""

    def submit_request(self, request: EngineRequest, group: StreamGroup | None = None) -> OutputStream:
        """Submit a request and return its stream, where its outputs arrive. Raises ValueError for an id in use.

        ``group``: reads the stream; by default the stream has a group of its own.
        """
        if request.id in self._streams:
            raise ValueError(f"Request {request.id} is already running.")
        stream = OutputStream(self, request, group or StreamGroup())
        self._streams[request.id] = stream
        if self.state == "ready":
            self._send_to_engine(SubmitRequest(request))
        else:
            self._fail_streams([stream], self.failure or "The engine is not ready.")
        return stream

    def cancel_stream(self, stream: OutputStream, index: int) -> None:
        """Cancel one choice of a stream, or (-1) all; called by the stream."""
        if index < 0:
            self._streams.pop(stream.request_id, None)
        self._send_if_ready(CancelRequest(stream.request_id, index))

    def finish_search(self, stream: OutputStream, reason: Literal["length", "cancel"]) -> None:
        """Finish a stream's beam search early; called by the stream."""
        if self.state == "ready":
            self._send_to_engine(FinishBeamSearch(stream.request_id, reason))

    async def reset_prefix_cache(self, *, running: bool = False) -> bool:
        """Clear the prefix cache. ``running``: preempt running requests for it. Return True if it was cleared.

        False while requests run, unless ``running``, and if the engine is not ready or ends meanwhile.
        """
        answer = await self._ask_engine(lambda number: ResetPrefixCache(number, running))
        return isinstance(answer, ResetDone) and answer.done

    async def load_adapter(self, name: str, folder: str) -> str:
        """Load an adapter under a name, in place of another. Return the error, or ""."""
        return self._error_of(await self._ask_engine(lambda number: LoadAdapter(number, name, folder)))

    async def unload_adapter(self, name: str) -> str:
        """Unload an adapter. Return the error, or ""."""
        return self._error_of(await self._ask_engine(lambda number: UnloadAdapter(number, name)))

    def set_prefill_share(self, percent: int) -> None:
        """Set the prefill share, as ``messages.SetPrefillShare`` describes; it survives a restart of the engine."""
        if percent != self.prefill_share:
            self.prefill_share = percent
            self._send_if_ready(SetPrefillShare(percent))

    def _send_if_ready(self, message: ToEngine) -> None:
        if self.state == "ready":  # otherwise the engine has no state that the message could change
            self._send_to_engine(message)

    def _error_of(self, answer: Any) -> str:
        return answer.error if isinstance(answer, AdapterResult) else self.failure or "The engine is not ready."

    async def _ask_engine(self, question: Callable[[int], ToEngine]) -> Any:
        """Send a question and return the message that answers it; None if the engine is not ready or ends meanwhile."""
        if self.state != "ready":
            return None
        question_id = next(self._question_ids)
        answer = self._pending_answers[question_id] = asyncio.get_running_loop().create_future()
        try:
            self._send_to_engine(question(question_id))
            return await answer
        finally:
            del self._pending_answers[question_id]

    @property
    def open_stream_count(self) -> int:
        """Number of requests that have not finished."""
        return len(self._streams)

    @property
    def pending_answer_count(self) -> int:
        """Number of questions (prefix cache, adapters, reservations) that the engine has not answered yet."""
        return len(self._pending_answers)

    def _begin_loading(self) -> None:
        """Enter the state "loading"; from now on, readiness can be awaited."""
        self.state = "loading"
        self._load_future = asyncio.get_running_loop().create_future()
        # If no task awaits it, asyncio would log its exception as never retrieved.
        self._load_future.add_done_callback(lambda loaded: loaded.cancelled() or loaded.exception())

    def _become_ready(self, info: ModelInfo) -> None:
        """Enter the state "ready": the model is loaded, for the first time or again."""
        self.state, self.failure = "ready", ""
        self._publish_info(info)
        if self.prefill_share != 100:
            self._send_to_engine(SetPrefillShare(self.prefill_share))
        for observe in self.load_observers:
            observe(info)
        if self._load_future is not None and not self._load_future.done():
            self._load_future.set_result(info)

    def _publish_info(self, info: ModelInfo) -> None:
        """Use a new description of the model. Without a load, it is used only if pages and requests stay valid."""
        self.info = info
        for observe in self.info_observers:
            observe(info)

    def _fail_for_good(self, reason: str) -> None:
        """Enter the state "failed", before or after the engine was ready, and fail all streams."""
        self.state, self.failure = "failed", reason
        if self._load_future is not None and not self._load_future.done():
            self._load_future.set_exception(EngineFailed(reason))
        self._fail_all_streams(reason)

    def _release_waiters(self, reason: str) -> None:
        """Release everything that waits for the model or for outputs of the closed engine."""
        if self._load_future is not None and not self._load_future.done():
            self._load_future.set_exception(EngineFailed("The engine was closed while it was loading."))
        self._fail_all_streams(reason)

    def _handle_message(self, message: FromEngine) -> None:
        """Handle a message from the engine; subclasses handle EngineReady, EngineFatal and those on pages."""
        match message:
            case StepOutputs():
                self._deliver_outputs(message)
            case ResetDone() | AdapterResult():
                self._deliver_answer(message)
            case LoadProgress():
                self.progress = message

    def _deliver_outputs(self, message: StepOutputs) -> None:
        """Pass the outputs of a step to their streams. Readers are woken in the next iteration of the event loop."""
        self.stats = message.stats
        for observe in self.step_observers:
            observe(message.stats)
        if message.outputs and not self._touched_groups:
            # Not at once: clients get one write for all steps that have arrived together.
            asyncio.get_running_loop().call_soon(self._wake_readers)
        for output in message.outputs:
            stream = self._streams.get(output.id)
            if stream is None:
                continue
            stream.add_output(output)
            self._touched_groups[stream.group] = None
            if not stream.open_choices:
                del self._streams[output.id]

    def _wake_readers(self) -> None:
        """Wake the readers of all groups with new outputs."""
        groups, self._touched_groups = self._touched_groups, {}
        for group in groups:
            group.wake_reader()

    def _deliver_answer(self, message: ResetDone | AdapterResult | ReserveResponse) -> None:
        answer = self._pending_answers.get(message.id)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _fail_streams(self, streams: list[OutputStream], reason: str) -> None:
        """End the open choices of streams with an error."""
        for stream in streams:
            for index in sorted(stream.open_choices):
                stream.add_output(EngineOutput(stream.request_id, index, finish_reason="error", error=reason))
            self._streams.pop(stream.request_id, None)
            stream.group.wake_reader()

    def _fail_all_streams(self, reason: str) -> None:
        """End all streams with an error, and answer all questions with None."""
        self.stats = EngineStats()  # no request runs and no page is held any more; a restarted engine counts from zero
        self._fail_streams(list(self._streams.values()), reason)
        for answer in self._pending_answers.values():
            if not answer.done():
                answer.set_result(None)
