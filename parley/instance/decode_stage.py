"""The decode stage of a request: everything after the first outputs, which another instance generated.

The stage parses the request again, renders its outputs so far again and discards those bytes; then the request
continues like any other. Pages of its prompts arrive meanwhile and are found in the prefix cache; missing ones are
computed again. Knows the stage interface of a generation, and a link's receiver.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
from starlette.types import Message, Scope

from parley.core.rope_positions import hashed_items
from parley.dialects.instance_plane import OriginalRequest
from parley.dialects.reply import Answer
from parley.disagg.kv.receiver import KVReceiver
from parley.disagg.kv.transport import LinkLost
from parley.disagg.wire import handover
from parley.disagg.wire.vouched_client import UsedTokens
from parley.engine.page_transfer import NO_PAGE_TRANSFER, PageTransferEngine, find_page_transfer
from parley.errors import EngineError, MalformedBody, Overloaded, ParleyError
from parley.instance.cluster_member import ClusterMember
from parley.instance.remote_writer import RemoteResponseWriter
from parley.serving.app import App
from parley.serving.media.memory_files import MemoryBudget, MemoryFile
from parley.serving.request_stage import RequestStage, RunningRequest
from parley.tracing.encode_spans import Attributes
from parley.tracing.request_trace import RequestTrace
from parley.types import EngineOutput, EngineRequest, KVPrefix, OutputBatch, ProcessedMedia, Request
from parley.web.http_cycle import CYCLE_KEY

PULL_FAILED = "Pull kv failed irreversibly."  # the text that MindIE's coordinators expect
PAGE_TIMEOUT = 5.0  # seconds without a new page until the missing pages are computed here


class DecodeStage(RequestStage):
    """``refusal_reason``: the error that prevented the acceptance of the request, if any."""

    def __init__(self, member: ClusterMember, receiver: KVReceiver, message: handover.HandoverMessage):
        self.cancel_id = message.id
        self.elapsed = message.elapsed
        self._feature_files = _store_features(message)
        self.processed_media = [self._with_features(item) for item in message.media] or None
        self.refusal_reason = "The instance cannot read the request."
        self._member = member
        self._receiver = receiver
        self._message = message
        self._unrecorded: list[OutputBatch] = []  # not recorded yet; for MindIE's coordinator none ever is
        self._running_request: RunningRequest
        self._page_engine: PageTransferEngine
        self._first_request: EngineRequest
        self._shared_requests = 0  # engine requests that the prefill instance has begun; later ones follow a summary
        self._reservation_keys: dict[int, str] = {}  # keys of page reservations, by number of the engine request
        self._missing_pages: dict[int, int] = {}  # pages that each incomplete reservation still expects
        self._unstarted: set[int] = set()  # engine requests that have not used their reservation yet
        self._last_page_time = 0.0  # when the last page arrived, by the event loop's clock
        self._is_accepted = self._reservations_freed = self._is_recalled = False
        self.response_writer = RemoteResponseWriter(self._take_unrecorded, bool(message.client), self._counted_tokens)
        self.response_writer.is_silent = True  # until the request is accepted
        self.trace: RequestTrace | None = None  # collects the spans, if the request is traced

    @property
    def earlier_outputs(self) -> Sequence[OutputBatch]:
        """The outputs of earlier attempts, without those of the prefill instance."""
        return self._message.prior_outputs or ()

    async def before_submit(
        self, running: RunningRequest, request: Request, engine_requests: list[EngineRequest]
    ) -> None:
        """Take over pages and outputs from the prefill instance, and continue the engine requests from there."""
        self._running_request = running
        page_engine = find_page_transfer(running.model.engine)
        if page_engine is None:
            raise EngineError(NO_PAGE_TRANSFER)
        self._page_engine = page_engine
        earlier_outputs = self._message.prior_outputs or []
        handover.restore_prompt(
            engine_requests,
            self._message.prompt_ids,
            running.model.model_info.max_model_len,
            running.model.text_pipeline.placeholder_ids,
        )
        self._first_request, self._shared_requests = engine_requests[0], len(engine_requests)
        started_at = time.perf_counter()
        wanted_pages = await self._reserve_pages(engine_requests, earlier_outputs)
        reserved_at = time.perf_counter()
        new_outputs = handover.split_records(await self._receive_outputs(wanted_pages, is_stream=request.stream))
        transfers = handover.take_transfers(new_outputs)
        self.prior_outputs = [*earlier_outputs, *new_outputs]
        if self._is_recalled:
            self.recall_request()
        await self._wait_for_pages()
        self._trace_pages(wanted_pages, started_at, reserved_at)
        if self._missing_pages:
            self._member.spawn_task(self._free_missing_pages())
        for number, tokens in enumerate(handover.collect_prior_tokens(self.prior_outputs, engine_requests)):
            engine_request = engine_requests[number]
            handover.set_prior_tokens(engine_request, tokens)
            engine_request.resumed, engine_request.transfer = True, transfers.get(number, b"")
        if self._running_request.model.unready_error() is not None:
            self.fail_over()  # this instance has stopped meanwhile, so the request must continue elsewhere

    async def _receive_outputs(self, wanted_pages: list[tuple[int, list[int]]], *, is_stream: bool) -> bytes:
        """Accept the handover, and return the outputs of the prefill instance. Raises EngineError if it is lost."""
        try:
            await self._receiver.accept_handover(wanted_pages, self._on_pages_received)
            self._is_accepted, self.response_writer.is_silent = True, False
            self.response_writer.response_started = is_stream
            return await self._receiver.wait_outputs()
        except LinkLost:
            if not self.response_writer.native and self.response_writer.channel is not None:
                self.response_writer.channel.write_error(PULL_FAILED)
            self.response_writer.is_silent = True  # parley's own coordinator repeats the command
            raise EngineError(PULL_FAILED) from None

    def _trace_pages(self, wanted_pages: list[tuple[int, list[int]]], started_at: float, reserved_at: float) -> None:
        """Add the spans of reserving and receiving pages, which has ended."""
        if self.trace is None:
            return
        self.trace.add_span("reserve pages", started_at, reserved_at)
        attributes: Attributes = {
            "parley.kv.pages": sum(len(pages) for _, pages in wanted_pages),
            "parley.kv.cached_pages": sum(skipped for skipped, _ in wanted_pages),
            "parley.kv.missing_pages": sum(self._missing_pages.values()),
        }
        self.trace.add_span("receive pages", reserved_at, time.perf_counter(), attributes)

    def after_submit(self) -> None:
        """Note which reservations the engine requests will use."""
        self._unstarted = set(self._reservation_keys)

    def on_outputs(self, prompt_number: int, outputs: list[EngineOutput]) -> None:
        """Record new outputs, and free the reservations once every engine request uses its pages."""
        if self._unstarted and outputs:
            self._unstarted.discard(prompt_number)
            if not self._unstarted:
                self._free_reservations()
        for output in outputs:
            output.id = ""
            if prompt_number < self._shared_requests:
                output.cached_tokens = 0  # the prefill instance counted the cached tokens
        engine_state = self._running_request.model.engine.state
        if handover.engine_was_lost(engine_state, outputs) or handover.media_pages_were_lost(outputs):
            self.fail_over()
        else:
            self._unrecorded.append([(prompt_number, output) for output in outputs])

    def on_ping(self) -> None:
        """Record the ping."""
        if self.response_writer.native:
            self._unrecorded.append(handover.ping_record())

    def fail_over(self) -> None:
        """Continue the request on another instance, because this one is stopping, or its engine died or lost pages."""
        if self.response_writer.native:
            self.response_writer.send_loss()
        elif self.prior_outputs is not None:
            self._send_retry()

    def recall_request(self) -> None:
        """Continue the request on another instance, for a coordinator that gets no more results from this one."""
        if self.prior_outputs is not None:
            self._send_retry()
            self.cancel_stage()
        self._is_recalled = True

    def _send_retry(self) -> None:
        message, all_outputs = self._message, [*(self.prior_outputs or []), *self._unrecorded]
        origin = OriginalRequest(message.body, all_outputs, message.request_uuid, message.created, message.prompt_ids)
        self.response_writer.send_retry(message.path, origin, self._first_request)

    def cancel_stage(self) -> None:
        """Stop as if the client had left."""
        self.response_writer.cancel_response()

    def close_stage(self) -> None:
        """Release the link and the reserved pages."""
        if self._is_accepted:
            self._receiver.close_handover()
        self._free_reservations()

    def coordinator_answer(self, error: ParleyError) -> Answer | None:
        """Keep the error for the prefill instance if the request was not accepted."""
        if not self._is_accepted:
            self.refusal_reason = error.message
        return None

    def _take_unrecorded(self) -> list[OutputBatch]:
        recent, self._unrecorded = self._unrecorded, []
        return recent

    def _counted_tokens(self) -> UsedTokens | None:
        """Return the request's token usage so far, if the coordinator counts it."""
        return self._running_request.used_tokens if self._message.limits_counted and self._is_accepted else None

    def _with_features(self, item: ProcessedMedia) -> ProcessedMedia:
        file = self._feature_files.get(item.digest)
        return msgspec.structs.replace(item, features=None if file is None else file.feature_file)

    # -- pages

    async def _reserve_pages(
        self, engine_requests: list[EngineRequest], earlier_outputs: list[OutputBatch]
    ) -> list[tuple[int, list[int]]]:
        """Reserve pages for the tokens that the engine requests begin with. Raises Overloaded."""
        wanted_pages: list[tuple[int, list[int]]] = []
        for number, (engine_request, tokens) in enumerate(
            zip(engine_requests, handover.collect_prior_tokens(earlier_outputs, engine_requests), strict=True)
        ):
            if engine_request.max_tokens <= handover.prefill_output_limit(
                number, engine_request, tokens, earlier_outputs
            ):
                wanted_pages.append((0, []))  # it ends in the prefill stage
                continue
            key = self._reservation_keys[number] = engine_request.id
            token_ids = (
                engine_request.token_ids if engine_request.beam is not None else [*engine_request.token_ids, *tokens[0]]
            )
            media = hashed_items(engine_request.media, engine_request.token_ids)
            prefix = KVPrefix(
                token_ids, engine_request.cache_salt, engine_request.adapter, self._message.adapter_digest, list(media)
            )
            reserved = await self._page_engine.reserve_pages(key, prefix)
            if reserved.error:
                raise Overloaded(reserved.error)
            wanted_pages.append((reserved.skip, reserved.pages))
            if reserved.pages:
                self._missing_pages[number] = len(reserved.pages)
        return wanted_pages

    def _on_pages_received(self, request_number: int, count: int) -> None:
        self._last_page_time = asyncio.get_running_loop().time()
        if count == self._missing_pages.get(request_number):
            del self._missing_pages[request_number]
        self._page_engine.publish_received(self._reservation_keys[request_number], count)

    async def _wait_for_pages(self) -> None:
        """Wait for all pages, as long as pages keep arriving."""
        clock = asyncio.get_running_loop().time
        while True:
            try:
                async with asyncio.timeout(PAGE_TIMEOUT):
                    await self._receiver.wait_settled()
                return
            except TimeoutError:
                if clock() - self._last_page_time > PAGE_TIMEOUT:
                    return

    async def _free_missing_pages(self) -> None:
        """Free the reservations of pages that will not arrive: the request itself may need the room to begin."""
        await self._receiver.wait_settled()
        for number in self._missing_pages:
            self._page_engine.free_reservation(self._reservation_keys[number])

    def _free_reservations(self) -> None:
        """Free all reservations once the prefill instance no longer writes into their pages."""
        if not self._reservations_freed and self._reservation_keys:
            self._member.spawn_task(self._free_when_settled())
        self._reservations_freed = True

    async def _free_when_settled(self) -> None:
        try:
            await self._receiver.wait_settled()
        finally:
            for key in self._reservation_keys.values():
                self._page_engine.free_reservation(key)


def _store_features(message: handover.HandoverMessage) -> dict[bytes, MemoryFile]:
    """Move the features of the message to files that the engine can read, by digest. Raises Overloaded."""
    features, message.features = message.features, {}
    budget = MemoryBudget(sum(map(len, features.values())))
    files: dict[bytes, MemoryFile] = {}
    try:
        for digest, content in features.items():
            files[digest] = MemoryFile(budget)
            files[digest].write_bytes(content)
    except OSError:
        raise Overloaded("There is not enough memory for the media of this request. Try again later.") from None
    return files


async def accept_handover(member: ClusterMember, apps: Sequence[App], receiver: KVReceiver) -> None:
    """Take over a request and answer it to its end, or refuse it. Uses the app of the port with the same APIs."""
    try:
        message = handover.decode_handover(receiver.body)
        app = next((app for app in apps if app.apis == message.port_apis), None)
        if app is None:
            raise MalformedBody("This instance does not serve the same APIs.")
        stage = DecodeStage(member, receiver, message)
        stage.response_writer.channel = channel = member.instance_state.results.open_request_channel(
            message.client, message.id, stage.recall_request
        )
    except ParleyError as error:
        await receiver.refuse_handover(error.message)
        return
    scope = _request_scope(message, stage.response_writer)

    async def receive() -> Message:
        return {"type": "http.request", "body": message.body, "more_body": False}

    exchange = app.make_exchange(scope, receive, stage.response_writer.send_message)
    stage.trace = exchange.trace
    exchange.set_request_uuid(message.request_uuid)
    exchange.created_at, exchange.tenant, exchange.stage = message.created, message.tenant, stage
    exchange.arrived_at -= message.elapsed
    exchange.log_entry.key = message.key_name or app.keys.name_key(message.tenant)
    exchange.limits_counted = message.limits_counted
    member.note_prompt(message.body, app.registry.options.prefix_owner(message.tenant))
    try:
        await app.answer_request(exchange, authorized=True)
    finally:
        channel.close_channel()
        await receiver.refuse_handover(stage.refusal_reason)  # has no effect if the request was accepted


def _request_scope(message: handover.HandoverMessage, writer: RemoteResponseWriter) -> Scope:
    """Return the client's request as it reached the prefill instance, as an ASGI scope; ``writer`` takes the place of
    its connection. So the app reads the request as any other."""
    return {
        "type": "http",
        "http_version": "1.1",
        "scheme": "http",
        "method": message.method,
        "path": message.path,
        "root_path": "",
        "query_string": message.query,
        "headers": message.headers,
        CYCLE_KEY: writer,
    }
