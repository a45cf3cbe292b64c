"""The prefill stage of a request, commanded by a coordinator; this instance or another one continues afterwards.

If another instance continues, each choice gets its first token here. That instance is asked as soon as the prompts
are tokenized, and fetches their first pages while later ones are computed. Knows a generation's stage interface and a
link's sender.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

import msgspec

from parley.dialects.instance_plane import OriginalRequest
from parley.dialects.reply import Answer, HeaderList
from parley.disagg.kv.sender import HandoverRefused, KVSender
from parley.disagg.kv.transport import LinkError
from parley.disagg.wire import handover
from parley.disagg.wire.headers import LOST_HEADER, REFUSED_HEADER, SHORT_HEADER, UNKNOWN_STATUS, PrefillCommand
from parley.disagg.wire.vouched_client import UsedTokens
from parley.engine.page_transfer import NO_PAGE_TRANSFER, PageTransferEngine, find_page_transfer
from parley.errors import BadRequest, ContextLength, EngineDied, NotReady, ParleyError, ServerStopping
from parley.instance.cluster_member import ClusterMember
from parley.instance.remote_writer import PrefillResponseWriter
from parley.serving.media.memory_files import read_memory_file
from parley.serving.request_stage import RequestStage, RunningRequest
from parley.tracing.encode_spans import Attributes
from parley.tracing.trace_context import TraceContext
from parley.types import EngineOutput, EngineRequest, KVPrefix, OutputBatch, Request
from parley.web.exchange import Exchange
from parley.web.http_cycle import CYCLE_KEY

log = logging.getLogger("parley.instance")

MAX_PAGE = 1 << 40  # tokens; no prompt fills a page of this size
SEND_FAILED = "[P Node] Send D request failed:"  # followed by the reason
UNKNOWN_TARGET = (
    "{} is not a known instance. Name it as a peer when you give the role, or name its network with --cluster-network."
)


class HandoverDeclined(ParleyError):
    """The other instance refuses to continue the request."""


class PrefillStage(RequestStage):
    """The prefill stage of a request. ``command``: the coordinator's; it also names the instance that continues."""

    def __init__(
        self,
        member: ClusterMember,
        exchange: Exchange,
        command: PrefillCommand,
        body: bytes,
        prior_outputs: list[OutputBatch] | None,
        prompt_ids: list[int] | None,
    ):
        self.cancel_id = command.request_id
        self.prior_outputs = prior_outputs
        self.elapsed = command.elapsed
        self._prompt_ids = prompt_ids  # token ids, if the body does not contain the prompt
        self._member = member
        self._exchange = exchange
        self._command = command
        self._body = body
        self._engine_asked = False  # the request is about to be submitted, or was
        self._has_outputs = False  # outputs have arrived
        self._unrecorded: list[OutputBatch] = []  # outputs not recorded yet
        self._continued: set[int] = set()  # numbers of the engine requests that another instance finishes
        self._beam_searches: set[int] = set()  # beam searches among those; their one token is discarded
        self._running_request: RunningRequest
        self._first_request: EngineRequest
        self._engine_requests: list[EngineRequest] = []
        self._page_engine: PageTransferEngine | None = None  # set if another instance continues
        self._handover_task: asyncio.Task[KVSender] | None = None
        self._handover_context: TraceContext | None = None  # the context of the handover's span, if it is traced
        self._handover_started = 0.0  # time.perf_counter
        self._sender: KVSender | None = None
        self._early_pages: list[tuple[int, list[int]]] = []  # pages computed before the sender existed
        self.response_writer = PrefillResponseWriter(
            exchange.scope[CYCLE_KEY],
            command,
            exchange.id_headers,
            self._take_unrecorded,
            lambda: self._has_outputs and command.continues_here,
            self._counted_tokens,
        )

    @property
    def finishes_here(self) -> bool:  # type: ignore[override]
        """Whether the request ends on this instance."""
        return not self._continued

    async def before_submit(
        self, running: RunningRequest, request: Request, engine_requests: list[EngineRequest]
    ) -> None:
        """Limit the engine requests to the prefill stage, and ask the other instance to continue."""
        self._running_request, self._engine_asked = running, True
        if self._command.stopped:
            running.finish_early()
        self.response_writer.is_stream = request.stream
        if self._command.continues_here:
            self.response_writer.channel = self._member.instance_state.results.open_request_channel(
                self._command.coordinator_name, self._command.request_id, self.recall_request
            )
        handover.restore_prompt(
            engine_requests,
            self._prompt_ids,
            running.model.model_info.max_model_len,
            running.model.text_pipeline.placeholder_ids,
        )
        prior_tokens = handover.collect_prior_tokens(self.prior_outputs or [], engine_requests)
        for number, engine_request in enumerate(engine_requests):
            handover.set_prior_tokens(engine_request, prior_tokens[number])
            engine_request.resumed = self.prior_outputs is not None
        self._first_request = engine_requests[0]
        if self._command.continues_here or request.pooling is not None:
            if self.response_writer.native:
                self._body = b""
            return
        self._limit_to_prefill(engine_requests, prior_tokens)
        if self._continued:
            self._start_handover(running, engine_requests)

    def _limit_to_prefill(self, engine_requests: list[EngineRequest], prior_tokens: list[list[list[int]]]) -> None:
        """Limit the output of each engine request to that of this stage, and note which another instance finishes."""
        for number, engine_request in enumerate(engine_requests):
            output_limit = handover.prefill_output_limit(
                number, engine_request, prior_tokens[number], self.prior_outputs or []
            )
            if engine_request.max_tokens <= output_limit:
                continue
            self._continued.add(number)
            engine_request.max_tokens, engine_request.lease = output_limit, True
            if engine_request.beam is not None:
                engine_request.beam, engine_request.n, engine_request.logprobs = None, 1, -1
                self._beam_searches.add(number)

    def _start_handover(self, running: RunningRequest, engine_requests: list[EngineRequest]) -> None:
        """Begin to ask the other instance to continue, while this one computes. Raises HandoverDeclined."""
        if not self._command.target_known:
            raise HandoverDeclined(SEND_FAILED + UNKNOWN_TARGET.format(self._command.target))
        self._page_engine = find_page_transfer(running.model.engine)
        if self._page_engine is None:
            raise HandoverDeclined(SEND_FAILED + NO_PAGE_TRANSFER)
        self._engine_requests = engine_requests
        for number in self._continued:
            observer = partial(self._on_pages_computed, number)
            self._page_engine.observe_pages(engine_requests[number].id, observer)
        if len(engine_requests) > 1:  # released together, so that none waits for another's pages
            for engine_request in engine_requests:
                engine_request.lease, engine_request.release_group = True, self._first_request.id
        self._handover_started = time.perf_counter()
        self._handover_task = asyncio.create_task(self._open_handover(len(engine_requests)))
        self._handover_task.add_done_callback(self._on_handover_opened)

    def on_outputs(self, prompt_number: int, outputs: list[EngineOutput]) -> None:
        """Record new outputs, without the ends that the other instance will decide."""
        self._has_outputs = self._has_outputs or bool(outputs)
        for output in outputs:
            if prompt_number in self._beam_searches and output.finish_reason != "error":
                output.token_ids, output.finish_reason, output.stop_id, output.token_costs = [], None, None, None
            elif prompt_number in self._continued and output.finish_reason == "length":
                output.finish_reason = None
            if self.prior_outputs:
                output.cached_tokens = 0  # the cached tokens are those of earlier attempts
        if self._command.continues_here and handover.engine_was_lost(self._running_request.model.engine.state, outputs):
            self.fail_over()
        elif self._continued or self.response_writer.native or self._command.continues_here:
            for output in outputs:
                output.id = ""
            self._unrecorded.append([(prompt_number, output) for output in outputs])

    def on_ping(self) -> None:
        """Record the ping."""
        if self.response_writer.native:
            self._unrecorded.append(handover.ping_record())

    def fail_over(self) -> None:
        """Continue the request on another instance, because this one is stopping or its engine died."""
        if not self._command.continues_here or not self.response_writer.command_answered:
            return  # the answer to the coordinator's command reports the retry
        if self.response_writer.native:
            self.response_writer.send_loss()
        else:
            self._send_retry()

    def recall_request(self) -> None:
        """Continue the request on another instance, for a coordinator that gets no more results from this one."""
        if self.response_writer.command_answered:
            self._send_retry()
            self.cancel_stage()
        else:
            self._running_request.fail_request(NotReady(UNKNOWN_STATUS))

    def _send_retry(self) -> None:
        exchange = self._exchange
        assert exchange.created_at is not None
        all_outputs = [*(self.prior_outputs or []), *self._unrecorded]
        origin = OriginalRequest(self._body, all_outputs, exchange.request_uuid, exchange.created_at, self._prompt_ids)
        self.response_writer.send_retry(exchange.scope["path"], origin, self._first_request)

    def on_progress(self) -> None:
        """Tell the writer that a complete answer has grown."""
        self.response_writer.continue_if_ready()

    async def hand_over(self) -> None:
        """Hand the outputs over to the other instance, and answer the coordinator's command.

        Raises HandoverDeclined.
        """
        assert self._handover_task is not None
        try:
            sender = await self._handover_task
            await sender.send_outputs(handover.encode_msgpack(self._unrecorded))
            handover.take_transfers(self._unrecorded)  # the coordinator keeps these outputs for other attempts
        except (HandoverRefused, LinkError) as error:
            raise HandoverDeclined(f"{SEND_FAILED}{error}") from None
        self.handed_over = True
        self._member.spawn_task(self._finish_handover(sender))
        self.response_writer.answer_command()
        self._exchange.status = 200  # the status of the answer to the coordinator's command

    def cancel_stage(self) -> None:
        """Stop as if the client had left."""
        self.response_writer.cancel_response()

    def close_stage(self) -> None:
        """Release the results channel and, unless the request was handed over, the sender and the pages."""
        if self.response_writer.channel is not None:
            self.response_writer.channel.close_channel()
        if self.handed_over:
            return
        if self._handover_task is not None:
            self._handover_task.cancel()
        if self._sender is not None:
            self._sender.close_handover()
        self._trace_handover(0, error="the request was not handed over")
        self._release_pages()

    def coordinator_answer(self, error: ParleyError) -> Answer | None:
        """Word the refusal of the other instance for parley's own coordinator."""
        if not isinstance(error, HandoverDeclined) or not self.response_writer.native:
            return None
        answer_body = {
            "reqId": self._command.request_id,
            "isStream": self.response_writer.is_stream,
            "isLastResp": False,
            "refused": True,
            "reason": error.message,
        }
        return Answer(503, msgspec.json.encode(answer_body))

    def coordinator_headers(self, error: ParleyError | None) -> HeaderList:
        """Tell parley's own coordinator by headers if the request is at fault, or another instance may serve it."""
        if not self.response_writer.native:
            return ()
        if isinstance(error, EngineDied | ServerStopping):
            return ((LOST_HEADER, b"engine"),)
        refused = error is None or error.status < 500 or isinstance(error, BadRequest)
        refusal_headers = ((REFUSED_HEADER, b"request"),) if refused else ()
        return (*refusal_headers, (SHORT_HEADER, b"context")) if isinstance(error, ContextLength) else refusal_headers

    def _take_unrecorded(self) -> list[OutputBatch]:
        recent, self._unrecorded = self._unrecorded, []
        return recent

    def _counted_tokens(self) -> UsedTokens | None:
        """Return the request's token usage so far, if the coordinator counts it."""
        return self._running_request.used_tokens if self._exchange.limits_counted and self._engine_asked else None

    # -- the instance that continues

    async def _open_handover(self, request_count: int) -> KVSender:
        """Ask the other instance to take over the request, which has this number of engine requests.

        Raises HandoverRefused, LinkError.
        """
        model, command, exchange = self._running_request.model, self._command, self._exchange
        adapter_digest = await self._adapter_digest()
        headers = exchange.headers
        if exchange.trace is not None:  # the other instance's spans are below that of the handover
            self._handover_context = exchange.trace.new_context()
            headers = {**headers, **dict(self._handover_context.headers())}
        sender = self._sender = await self._member.peer.open_handover(str(command.target), model.name)
        for pages in self._early_pages:
            sender.add_computed_pages(*pages)
        self._early_pages.clear()
        assert exchange.created_at is not None
        message = handover.HandoverMessage(
            version=handover.HANDOVER_VERSION,
            id=command.request_id,
            client=command.coordinator_name,
            request_uuid=exchange.request_uuid,
            created=exchange.created_at,
            elapsed=time.perf_counter() - exchange.arrived_at,
            port_apis=exchange.scope["app"].apis,
            method=exchange.scope["method"],
            path=exchange.scope["path"],
            query=exchange.scope.get("query_string", b""),
            headers=[header for header in headers.items() if header[0] not in handover.CONNECTION_HEADERS],
            body=self._body,
            tenant=exchange.tenant,
            key_name=exchange.log_entry.key,
            limits_counted=exchange.limits_counted,
            prior_outputs=list(self.prior_outputs) if self.prior_outputs is not None else None,
            prompt_ids=self._prompt_ids,
            adapter_digest=adapter_digest,
            media=[msgspec.structs.replace(item, features=None) for item in self.processed_media or ()],
            features=self._features_beyond_pages(),
        )
        self._body = b""
        await sender.begin_handover(handover.encode_msgpack(message), request_count)
        return sender

    def _features_beyond_pages(self) -> dict[bytes, bytes]:
        """Return the features that the other instance needs besides pages, by digest."""
        info = self._running_request.model.model_info
        moves_pages = info.arena is not None and not info.arena.regions  # such an engine wants to see every item
        digests = handover.items_beyond_pages(self._engine_requests, MAX_PAGE if moves_pages else info.page_tokens)
        return {
            item.digest: read_memory_file(item.features)
            for item in self.processed_media or ()
            if item.digest in digests and item.features is not None
        }

    async def _adapter_digest(self) -> str:
        """Return a digest of the LoRA adapter's content: pages of another instance are valid only if it is the same."""
        engine_request, engine = self._engine_requests[0], self._page_engine
        if not engine_request.adapter:
            return ""
        assert engine is not None
        try:
            reservation = await engine.reserve_pages(engine_request.id, KVPrefix([], adapter=engine_request.adapter))
        finally:
            engine.free_reservation(engine_request.id)
        return reservation.digest

    def _on_handover_opened(self, handover_task: asyncio.Task[KVSender]) -> None:
        if not handover_task.cancelled() and (error := handover_task.exception()) is not None:
            reason = str(error)
            if not isinstance(error, HandoverRefused | LinkError):
                log.error("Asking another instance to continue a request failed.", exc_info=error)
                reason = "an internal error"
            self._running_request.fail_request(HandoverDeclined(SEND_FAILED + reason))

    def _on_pages_computed(self, number: int, pages: list[int]) -> None:
        if self._sender is None:
            self._early_pages.append((number, pages))
        else:
            self._sender.add_computed_pages(number, pages)

    async def _finish_handover(self, sender: KVSender) -> None:
        """Keep the pages until the receiver has read them."""
        start_time = time.perf_counter()
        try:
            await sender.finish_handover()
        finally:
            sender.close_handover()
            self._member.count_transfers(count=1, bytes=sender.sent_bytes, seconds=time.perf_counter() - start_time)
            self._trace_handover(sender.sent_bytes)
            self._release_pages()

    def _trace_handover(self, sent_bytes: int, error: str = "") -> None:
        """Add the span of the handover, which has ended."""
        if self._exchange.trace is not None and self._handover_context is not None:
            attributes: Attributes = {"parley.kv.bytes": sent_bytes, "server.address": str(self._command.target)}
            started, now = self._handover_started, time.perf_counter()
            context, self._handover_context = self._handover_context, None
            self._exchange.trace.add_span(
                "kv handover", started, now, attributes, kind="client", context=context, error=error
            )

    def _release_pages(self) -> None:
        if self._page_engine is not None:
            for engine_request in self._engine_requests:
                self._page_engine.release_lease(engine_request.id)
