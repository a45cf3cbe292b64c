"""One request between admission and its last event: submits it to the engine and turns outputs into events.

A request may have several prompts. Each is an engine request of its own (``prompt_stream.py``); their events form one
series. ``engine_requests.py`` builds the engine requests. The prompt of an answer that follows a summary joins them
when the summary ends. In every case, ``close`` cancels the work that still runs and
releases the slots. Knows no HTTP and no API.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from parley.dialects.reply import RequestTimings
from parley.disagg.wire.vouched_client import UsedTokens
from parley.engine.output_stream import StepArrivals, StreamGroup, split_steps
from parley.errors import EngineError, InUse, NotReady, ParleyError, TimeLimitPassed, excerpt
from parley.serving.engine_requests import (
    check_adapter,
    check_request,
    prepare_answer,
    prepare_engine_requests,
    reserved_counts,
    resolve_model_name,
    summary_request,
)
from parley.serving.keys.accounts import RequestAccount
from parley.serving.keys.scopes import check_key_models
from parley.serving.media.loader import MediaLease
from parley.serving.media.request_media import drop_media, request_media
from parley.serving.open_requests import RequestProgress
from parley.serving.prompt_stream import PromptStream
from parley.serving.request_deadline import RequestDeadline
from parley.serving.request_metrics import RequestMetrics
from parley.serving.request_stage import RequestStage
from parley.serving.served_model import ServedModel
from parley.text.media_prompt import count_media_tokens
from parley.text.prepared_prompt import AnswerAfterSummary, PreparedPrompt
from parley.text.summary_choice import SummaryChoice
from parley.text.tokens.stop_strings import StopAutomaton
from parley.types import (
    NO_TENANT,
    PING_NUMBER,
    ChoiceDone,
    EngineOutput,
    EngineRequest,
    Event,
    FinishReason,
    ProcessedMedia,
    Request,
    Tenant,
    Usage,
)
from parley.web.logs import AccessLogEntry
from parley.web.offload import to_thread_if_large

UNANSWERED_MESSAGE = "The engine ended this request without an answer."


class Generation:
    """One request from admission to its last event.

    * ``tenant``: the client, by its API key.
    * ``stage``: the stage of a separated request that runs here; None for a whole request.
    * ``account``: charged for the request's tokens; None: they do not count.

    It ends in one of these ways: it finishes by itself; its client cancels it by an id (``cancel_by_id``) or by
    disconnecting (``close``); it is finished early with the output so far (``finish_early``); an error ends it
    (``fail_request``, ``fail_on_shutdown``). ``close`` follows in every case.
    """

    def __init__(
        self,
        model: ServedModel,
        request: Request,
        request_metrics: RequestMetrics,
        tenant: Tenant = NO_TENANT,
        stage: RequestStage | None = None,
        account: RequestAccount | None = None,
    ):
        resolve_model_name(model, request)
        request_metrics.log_entry.model = request.model
        if request.exclusive_id and model.find_open_request(request.exclusive_id, tenant):
            raise InUse(f"Another request is running under the id {excerpt(request.exclusive_id)}.")
        for name in (*model.names, request.adapter or ""):
            model.check_query(name, tenant)
        check_key_models(tenant, model.names if request.adapter is None else (request.adapter,))
        model.take_slots(request.sequences, tenant.id)
        model.open_requests[self] = None
        self.usage = Usage()
        self._model = model
        self._request = request
        self._request_metrics = request_metrics
        self.tenant = tenant
        self._account = account
        self._prompt_streams: list[PromptStream] = []
        self._stream_group = StreamGroup()  # reads the outputs of all prompts
        self._undelivered: list[Event] = []  # not yet delivered to a reader
        self._unfinished = request.n * len(request.prompts)  # choices that have not finished
        self._failure: ParleyError | None = None
        self._closed = False
        self._early_finish: FinishReason | None = None  # set if it was finished early
        self._stage = stage
        self._stops: StopAutomaton | None = None  # of the request's stop strings
        self._answer: AnswerAfterSummary | None = None  # follows the summary that the prompt asks for; not begun yet
        self._summary_end: ChoiceDone | None = None  # of a summary whose answer is due
        self._media_lease: MediaLease | None = None
        limits = (request.timeout, model.options.timeout, model.options.token_timeout)
        self._deadline = (
            RequestDeadline(*limits, self._on_deadline, stage.elapsed if stage is not None else 0.0)
            if any(limits)
            else None
        )

    @property
    def cancel_ids(self) -> tuple[str, ...]:
        """The ids by which a client can cancel the request."""
        stage_ids = (self._stage.cancel_id,) if self._stage is not None else ()
        return self._request.id, *self._request.cancel_ids, *stage_ids

    @property
    def model(self) -> ServedModel:
        """The model that serves the request."""
        return self._model

    @property
    def used_tokens(self) -> UsedTokens:
        """The tokens that the request has used so far."""
        return UsedTokens(
            self._request.model, self.usage.prompt_tokens, self.usage.cached_tokens, sum(self._delivered_tokens())
        )

    @property
    def adapter_state(self) -> tuple[str, bool] | None:
        """The request's adapter, if any, and whether it still waits for its first token."""
        name = self._request.adapter
        return None if name is None else (name, self._request_metrics.awaits_first_token)

    @property
    def progress(self) -> RequestProgress:
        """The request's progress."""
        log_entry = self._request_metrics.log_entry
        choices = (choice for stream in self._prompt_streams for choice in stream.choices)
        return RequestProgress(
            self._request.id,
            log_entry.api,
            log_entry.key,
            log_entry.model,
            seconds=round(self._request_metrics.seconds_since_arrival, 3),
            choices=self._request.sequences,
            prompt_tokens=self.usage.prompt_tokens,
            output_tokens=sum(choice.usage.completion_tokens for choice in choices),
            started=not self._request_metrics.awaits_first_token,
        )

    async def submit_request(self) -> None:
        """Build the engine requests and submit them. Raises BadRequest, NotReady."""
        request, model = self._request, self._model
        check_request(model, request)
        media = await self._load_media()
        prepared_prompts = await prepare_engine_requests(model, request, self.tenant, media)
        if self._account is not None:
            await self._account.reserve_tokens(*reserved_counts(request, prepared_prompts))
        self._answer = prepared_prompts[0][0].answer
        if self._answer is not None:
            prepared_prompts += await self._prepare_earlier_answer(*prepared_prompts[0])
        if self._stage is not None:
            await self._stage.before_submit(self, request, [engine_request for _, engine_request in prepared_prompts])
        if media:
            drop_media(request)
        strings = request.stop_conditions.strings
        self._stops = (
            await to_thread_if_large(16 * sum(map(len, strings)), partial(StopAutomaton, strings)) if strings else None
        )
        self._check_still_possible(model.unready_error())
        for prepared, engine_request in prepared_prompts:
            self._open_prompt_stream(prepared, engine_request)
        for item in media:
            if item.seconds:
                self.usage.media_seconds[item.kind] = self.usage.media_seconds.get(item.kind, 0.0) + item.seconds
        if self._stage is not None:
            self._stage.after_submit()
        resumed = self._stage is not None and self._stage.prior_outputs is not None
        if self._early_finish and not resumed:
            self.finish_early(self._early_finish)
        self._request_metrics.record_submit(request, self.usage, resumed=resumed)

    def _check_still_possible(self, not_ready: NotReady | None) -> None:
        """Check what may have changed while prompts were prepared. Raises ParleyError: ``not_ready`` is one reason."""
        if self._failure is not None:
            raise self._failure
        if not_ready is not None:
            raise not_ready
        check_adapter(self._model, self._request)

    async def _prepare_earlier_answer(
        self, asking: PreparedPrompt, engine_request: EngineRequest
    ) -> list[tuple[PreparedPrompt, EngineRequest]]:
        """Prepare the answer after a summary that other instances wrote to its end; no answer if there is none.

        ``asking``: the prompt that asks for the summary, by ``engine_request``. Raises BadRequest.
        """
        earlier_outputs = self._stage.earlier_outputs if self._stage is not None else ()
        request = summary_request(self._request, engine_request.max_tokens)
        choice = SummaryChoice(request, self._model.text_pipeline.tokenizer, asking)
        for number, output in (numbered for batch in earlier_outputs for numbered in batch):
            if number == 0 and isinstance(done := next(iter(choice.push_output(output)), None), ChoiceDone):
                return [await self._prepare_answer(done)]
        return []

    async def _prepare_answer(self, summary_end: ChoiceDone) -> tuple[PreparedPrompt, EngineRequest]:
        """Prepare the answer that follows a summary. Raises BadRequest."""
        answer, self._answer = self._answer, None
        assert answer is not None
        return await prepare_answer(self._model, self._request, self.tenant, answer, summary_end.summary or "")

    async def _begin_answer(self, summary_end: ChoiceDone) -> None:
        """Submit the prompt of the answer that follows a summary. Raises BadRequest, NotReady."""
        self._summary_end = None
        if not self._early_finish:
            prepared_prompt = await self._prepare_answer(summary_end)
            # A server that is paused or about to stop still ends the requests that it has begun.
            engine_error = self._model.engine_error()
            if engine_error is not None and self._failure is None and self._stage is not None:
                self._stage.fail_over()  # no output tells of an engine that died between the prompts
            self._check_still_possible(engine_error)
        if self._early_finish:
            self._undelivered.append(ChoiceDone(1, self._early_finish, Usage()))
            self._unfinished -= 1
            self._request_metrics.record_finish(self._early_finish)
        else:
            self._open_prompt_stream(*prepared_prompt)

    def _open_prompt_stream(self, prepared: PreparedPrompt, engine_request: EngineRequest) -> None:
        """Submit the engine request of the next prompt, and count its prompt."""
        request = self._request
        if prepared.answer is not None:
            request = summary_request(request, engine_request.max_tokens)
        prompt_stream = PromptStream(
            prompt_number=len(self._prompt_streams),
            request=request,
            prepared=prepared,
            engine_request=engine_request,
            stream_group=self._stream_group,
            model=self._model,
            stops=self._stops,
            request_metrics=self._request_metrics,
            deadline=self._deadline,
            on_choice_done=self._count_finished,
        )
        self._prompt_streams.append(prompt_stream)
        self.usage.prompt_tokens += len(engine_request.token_ids)
        for kind, count in count_media_tokens(engine_request.media).items():
            self.usage.media_tokens[kind] = self.usage.media_tokens.get(kind, 0) + count
        self._undelivered += prompt_stream.accepted_events(engine_request)

    async def _load_media(self) -> Sequence[ProcessedMedia]:
        """Fetch and process the request's media, unless another instance has done so. Raises BadMedia."""
        items = request_media(self._request)
        if not items:
            return ()
        if self._stage is not None and self._stage.processed_media is not None:
            return self._stage.processed_media
        self._media_lease = await self._model.load_media(items, self.tenant)
        if self._stage is not None:
            self._stage.processed_media = self._media_lease.items
        return self._media_lease.items

    def replay_outputs(self) -> Iterator[list[Event] | None]:
        """Render the outputs that another instance produced, batch by batch; None is a ping that it wrote. Call it
        before ``feed_events``."""
        prior_outputs = self._stage.prior_outputs if self._stage is not None else None
        if prior_outputs is None:
            return
        yield self._undelivered
        self._undelivered = []
        for batch in prior_outputs:
            with self._request_metrics.replaying_outputs():
                events = [
                    event
                    for number, output in batch
                    if number != PING_NUMBER
                    for event in self._render_outputs(self._prompt_streams[number], [output])
                ]
            yield events
            if batch and batch[-1][0] == PING_NUMBER:
                yield None
        for prompt_stream in self._prompt_streams:
            for index in range(len(prompt_stream.choices)):
                if prompt_stream.choices[index].finished:
                    prompt_stream.stream.cancel_choice(index)
        if self._early_finish:
            self.finish_early(self._early_finish)

    async def feed_events(self, take_steps: Callable[[list[list[Event]]], bool]) -> None:
        """Call ``take_steps`` with the events of the steps that have arrived, until it returns False or the events end.

        Usually that is one step. Outputs that were not read in time come together, still divided by steps. The caller's
        task is not woken for each step. Raises ParleyError, and anything that ``take_steps`` raises.
        """
        more_follows = True
        while more_follows:
            if self._undelivered:
                events, self._undelivered = self._undelivered, []
                more_follows = take_steps([events])
            elif self._failure is not None:
                raise self._failure
            elif not self.expects_events:
                return
            elif self._summary_end is not None and self._stream_group.all_read:
                await self._begin_answer(self._summary_end)
            elif self._stream_group.all_read:
                raise EngineError(UNANSWERED_MESSAGE)
            else:
                more_follows = await self._stream_group.feed_outputs(partial(self._take_arrivals, take_steps))

    async def next_events(self) -> list[Event]:
        """Return the events since the last call, at least one; an empty list after the last. Raises ParleyError."""
        events: list[Event] = []

        def keep_events(steps: list[list[Event]]) -> bool:
            for step_events in steps:
                events.extend(step_events)
            return not events

        await self.feed_events(keep_events)
        return events

    @property
    def finished(self) -> bool:
        """Whether all choices have finished and all events have been delivered."""
        return not self._unfinished and not self._undelivered

    @property
    def expects_events(self) -> bool:
        """Whether more events will come here. False once the request continues on another instance."""
        if self._hands_over and not self._undelivered and self._prompt_streams:
            return not self._stream_group.all_read
        return not self.finished

    async def hand_over_request(self) -> None:
        """Hand the request over to the next instance: no more events come here. Raises ParleyError."""
        assert self._stage is not None
        await self._stage.hand_over()

    @property
    def _hands_over(self) -> bool:
        return self._stage is not None and not self._stage.finishes_here

    def cancel_by_id(self, cancel_id: str) -> None:
        """Cancel the request for a client or an operator, who gave one of its cancel ids."""
        if self._stage is not None and cancel_id == self._stage.cancel_id:
            self._stage.cancel_stage()
        else:
            self.finish_early()

    def fail_request(self, error: ParleyError) -> None:
        """End the request with an error, which the current or next reader of events gets."""
        self._failure = self._failure or error
        for prompt_stream in self._prompt_streams:
            prompt_stream.stream.cancel_choice()

    def fail_on_shutdown(self, error: ParleyError) -> None:
        """Fail the request because the server shuts down. A stage tells its coordinator, which continues it."""
        if self._stage is not None:
            self._stage.fail_over()
        self.fail_request(error)

    def finish_early(self, reason: FinishReason = "cancel") -> None:
        """Finish every choice with the output so far; the next events are the last ones of each choice."""
        self._early_finish = reason
        if self._request.pooling is not None:
            return  # an embedding is complete or missing
        for prompt_stream in self._prompt_streams:
            self._undelivered += prompt_stream.finish_choices(reason)

    def _on_deadline(self, error: TimeLimitPassed) -> None:
        if self._request.return_partial:
            self.finish_early("length")
        else:
            self.fail_request(error)

    @property
    def request_timings(self) -> RequestTimings:
        """The seconds that each phase took until now; read them after the last token."""
        return self._request_metrics.current_timings()

    def close(self) -> None:
        """Cancel the work that still runs, release the slots, and record the metrics. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._deadline is not None:
            self._deadline.cancel_timer()
        for prompt_stream in self._prompt_streams:
            prompt_stream.close_stream()
        self._model.release_slots(self._request.sequences, self.tenant.id)
        self._model.open_requests.pop(self, None)
        if self._failure is not None:
            self._request_metrics.log_entry.record_error(self._failure)
        delivered = self._delivered_tokens()
        handed_over = self._stage is not None and self._stage.handed_over
        if self._account is not None:
            self._account.settle(
                self._request.model,
                self.usage,
                sum(delivered),
                was_submitted=bool(self._prompt_streams),
                handed_over=handed_over,
            )
        self._request_metrics.record_end(
            delivered, self._unfinished, failed=self._failure is not None, handed_over=handed_over
        )
        if self._media_lease is not None:
            self._media_lease.release()
        if self._stage is not None:
            self._stage.close_stage()

    def _delivered_tokens(self) -> list[int]:
        """Return the number of tokens of each choice that the client has received in part or whole."""
        return [
            choice.usage.completion_tokens
            for prompt_stream in self._prompt_streams
            for choice in prompt_stream.delivered_choices
        ]

    def _take_arrivals(self, take_steps: Callable[[list[list[Event]]], bool], arrived: StepArrivals) -> bool:
        """Render outputs and pass the events on, divided by engine steps."""
        for outputs in arrived.values():  # nearly always there is one output; this runs for every streamed token
            if len(outputs) > 1:
                return take_steps([self._render_step(step) for step in split_steps(arrived)])
        return take_steps([self._render_step(arrived)])

    def _render_step(self, step: StepArrivals) -> list[Event]:
        """Render the outputs of one engine step."""
        events: list[Event] = []
        for number, outputs in step.items():
            prompt_stream = self._prompt_streams[number]
            if prompt_stream.uncounted_tokens:
                prompt_stream.count_prefix_hit(outputs)
            if self._stage is not None:
                self._stage.on_outputs(number, outputs)
            events += self._render_outputs(prompt_stream, outputs)
        return events

    def _render_outputs(self, prompt_stream: PromptStream, outputs: list[EngineOutput]) -> list[Event]:
        """Render outputs of one prompt. An error that they report ends the whole request. Raises EngineError."""
        try:
            return prompt_stream.render_outputs(outputs)
        except EngineError as error:
            self._failure = error
            raise

    def _count_finished(self, prompt_stream: PromptStream, done: ChoiceDone) -> None:
        """Count the usage of a choice that has delivered its last event."""
        if done.summary is None:
            self._unfinished -= 1
            self._request_metrics.record_finish(done.reason)
        elif self._answer is not None:  # it has not begun on another instance
            self._summary_end = done
        self.usage.completion_tokens += done.usage.completion_tokens
        self.usage.reasoning_tokens += done.usage.reasoning_tokens
        self.usage.accepted_tokens += done.usage.accepted_tokens
        self.usage.rejected_tokens += done.usage.rejected_tokens
        if done.index % self._request.n == 0:  # the first choice of a prompt; the others always hit its pages
            self.usage.cached_tokens += prompt_stream.choices[0].usage.cached_tokens


@asynccontextmanager
async def open_generation(model: ServedModel, request: Request) -> AsyncIterator[Generation]:
    """Submit a request that did not arrive over HTTP or gRPC, and close its generation at the end.

    Raises the errors of ``Generation.submit_request``, and Overloaded.
    """
    request_metrics = RequestMetrics(model.metrics, AccessLogEntry(), time.perf_counter())
    generation = Generation(model, request, request_metrics)
    try:
        await generation.submit_request()
        yield generation
    finally:
        generation.close()
