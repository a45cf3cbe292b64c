"""The choices that an attached server computes: one request to ``/inference/v1/generate`` or ``/pooling`` for each.

An answer is read as it arrives, without a task for each choice. All that arrives in one iteration of the event loop is
passed on together, like a step of vLLM. Closing a connection tells the server that its answer is not wanted.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from time import monotonic
from typing import Any

import msgspec

from parley.types import EngineRequest
from parley.web.http_client import ConnectionBroken, HttpClientConnection, InstanceUnreachable
from parley.worker.attached.server_calls import ServerCalls, as_clause
from parley.worker.attached.server_facts import GENERATE_PATH, POOLING_PATH, AttachedServerFacts, error_text
from parley.worker.attached.token_answers import (
    PoolingAnswer,
    TokenAnswer,
    read_choice_output,
    read_vector_answer,
    write_choice,
    write_pooling,
)
from parley.worker.vllm.outputs.choice_output import ChoiceOutput, PrefillStats, VLLMStep, note_start
from parley.worker.vllm.page_moves import DEFAULT_LEASE_SECONDS
from parley.worker.vllm.requests.continuation import Continuation

SSE_FIELD = b"data:"
STREAM_END = b"[DONE]"
NOT_READY = frozenset({502, 503, 504})

_ANSWER_DECODER = msgspec.json.Decoder(TokenAnswer)
_VECTOR_DECODER = msgspec.json.Decoder(PoolingAnswer)


class TokenClient:
    """Sends choices to a server.

    ``on_step(step)`` is called with outputs; ``on_rejection(choice_id, reason)`` for choices that the server does not
    accept; ``on_loss(choice_id, reason)`` for those whose answer broke off, perhaps because the server ended.
    """

    def __init__(
        self,
        calls: ServerCalls,
        facts: AttachedServerFacts,
        max_choices: int,
        on_step: Callable[[VLLMStep], None],
        on_rejection: Callable[[str, str], None],
        on_loss: Callable[[str, str], None],
    ):
        self.max_choices = max_choices
        self.kv_pages, self.end_ids = facts.kv_pages, facts.end_ids
        self.calls, self.facts = calls, facts
        self.on_loss = on_loss
        self.can_force, self.lease_seconds = False, DEFAULT_LEASE_SECONDS
        self._on_step, self._on_rejection = on_step, on_rejection
        self._exchanges: dict[str, ChoiceExchange] = {}
        self._outputs: list[ChoiceOutput] = []

    def knows_adapter(self, name: str) -> bool:
        """Whether the server lists an adapter of this name."""
        return name in self.facts.adapters

    def digest_adapter(self, name: str) -> str:
        """Return a digest of the path from which the server loaded an adapter, because its content is not known here.
        Raises KeyError."""
        return hashlib.sha256(self.facts.adapters[name].encode()).hexdigest()

    def add_choice(self, choice_id: str, request: EngineRequest, index: int, continuation: Continuation) -> None:
        """Send the request for a choice."""
        exchange = self._exchanges[choice_id] = ChoiceExchange(self, choice_id, request, index, continuation)
        exchange.send_request()

    def cancel_choices(self, choice_ids: list[str]) -> None:
        """End the connections of choices, so that the server ends them."""
        for choice_id in choice_ids:
            if (exchange := self._exchanges.pop(choice_id, None)) is not None:
                exchange.abort()

    def reject_pages(self, page_move: dict[str, Any]) -> None:
        """Do nothing: servers have no route for it, so the pages are kept until their lease ends."""

    def cancel_all(self) -> None:
        """End all choices."""
        self.cancel_choices(list(self._exchanges))
        self._outputs = []

    def add_output(self, output: ChoiceOutput) -> None:
        """Pass on an output in this iteration of the event loop."""
        if output.finish_reason is not None or output.pooling_output is not None:
            self._exchanges.pop(output.request_id, None)
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self._pass_on)
        self._outputs.append(output)

    def reject(self, choice_id: str, reason: str) -> None:
        """End a choice that the server does not accept."""
        if self._exchanges.pop(choice_id, None) is not None:
            self._on_rejection(choice_id, reason)

    def _pass_on(self) -> None:
        outputs, self._outputs = self._outputs, []
        if outputs:
            self._on_step(VLLMStep(outputs, monotonic()))


class ChoiceExchange:
    """The request for one choice, and its answer."""

    def __init__(
        self, client: TokenClient, choice_id: str, request: EngineRequest, index: int, continuation: Continuation
    ):
        self._client = client
        self._choice_id, self._request = choice_id, request
        facts = client.facts
        if request.pooling is None:
            self._path = GENERATE_PATH
            body = write_choice(request, index, continuation, model=facts.card.id, max_logprobs=facts.max_logprobs)
        else:
            self._path, body = POOLING_PATH, write_pooling(request, model=facts.card.id)
        self._body = msgspec.json.encode(body)
        self._last_output: ChoiceOutput | None = None  # the last output of a stream, until its usage has arrived
        self._connection: HttpClientConnection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._is_reused = False
        self._status = 0
        self._is_stream = False
        self._unread = b""
        self._sent_at = 0.0
        self._has_output = self._is_finished = False

    def send_request(self) -> None:
        """Send the request, over an idle connection if there is one."""
        if (connection := self._client.calls.http_client.take_idle()) is not None:
            self._is_reused = True
            self._send_over(connection)
        else:
            self._is_reused = False
            self._opening = asyncio.create_task(self._open_connection())

    def abort(self) -> None:
        """End the connection."""
        self._is_finished = True
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            self._connection.abort_silently(self)

    async def _open_connection(self) -> None:
        try:
            connection = await self._client.calls.http_client.open_connection()
        except InstanceUnreachable as error:
            self._client.on_loss(self._choice_id, as_clause(str(error)))
            return
        self._send_over(connection)

    def _send_over(self, connection: HttpClientConnection) -> None:
        calls = self._client.calls
        self._connection, self._sent_at = connection, monotonic()
        target = calls.target(self._path)
        connection.send_request(calls.http_client.format_request(b"POST", target, calls.headers, (self._body,)), self)

    # -- the answer, as an AnswerSink

    def receive_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Note the status, and whether the answer is a stream."""
        self._status = status
        self._is_stream = status == 200 and dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")

    def receive_data(self, data: bytes) -> None:
        """Read all complete lines of a stream; keep the rest."""
        data = self._unread + data
        if not self._is_stream:
            self._unread = data
            return
        *lines, self._unread = data.split(b"\n")
        for line in lines:
            if line.startswith(SSE_FIELD) and not self._is_finished:
                self._read_event(line[len(SSE_FIELD) :].strip())

    def receive_end(self, error: ConnectionBroken | None) -> None:
        """Read an answer that is no stream. Report one that broke off."""
        self._connection = None
        if self._is_finished:
            return
        if error is not None and self._is_reused and not error.answer_begun:
            self.send_request()  # the server had closed the connection
        elif error is not None:
            self._client.on_loss(self._choice_id, as_clause(str(error)))
        elif self._status in NOT_READY:
            self._client.on_loss(self._choice_id, f"it is not ready (status {self._status})")
        elif self._status != 200:
            self._refuse_answer(error_text(self._status, self._unread))
        elif not self._is_stream:
            self._read_event(self._unread)
        elif self._last_output is not None:
            self._pass_on(self._last_output)
        if error is None and self._status == 200 and not self._is_finished:
            self._client.on_loss(self._choice_id, "its answer ended early")

    def _read_event(self, event: bytes) -> None:
        if event == STREAM_END:
            return
        try:
            if self._request.pooling is not None:
                answer = TokenAnswer()
                output = read_vector_answer(self._choice_id, _VECTOR_DECODER.decode(event))
            else:
                answer = _ANSWER_DECODER.decode(event)
                output = read_choice_output(self._choice_id, self._request, answer)
        except (msgspec.DecodeError, ValueError):
            self._refuse_answer("its answer could not be read")
            return
        if answer.error is not None:
            self._refuse_answer(answer.error.message or "it failed")
            return
        if output is not None:
            self._start_output(output, answer)
            if output.finish_reason is not None and self._is_stream and self._client.facts.reports_cache:
                self._last_output = output
                return
        elif answer.usage is not None and self._last_output is not None:
            output = self._last_output
            computed = len(self._request.token_ids) - answer.usage.cached_tokens
            output.prefill_stats = PrefillStats(computed, answer.usage.cached_tokens, is_late=True)
        if output is not None:
            self._pass_on(output)

    def _start_output(self, output: ChoiceOutput, answer: TokenAnswer) -> None:
        if not self._has_output:
            self._has_output = True
            cached_tokens = answer.usage.cached_tokens if answer.usage is not None and not self._is_stream else 0
            note_start(output, self._request, self._sent_at, cached_tokens)

    def _pass_on(self, output: ChoiceOutput) -> None:
        self._is_finished = output.finish_reason is not None or self._request.pooling is not None
        self._client.add_output(output)

    def _refuse_answer(self, reason: str) -> None:
        self._is_finished = True
        if self._connection is not None:
            self._connection.abort_silently(self)
        self._client.reject(self._choice_id, f"The engine's server failed the request: {reason.rstrip('.')}.")
