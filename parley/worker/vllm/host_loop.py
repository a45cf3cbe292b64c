"""The open requests in the host of vLLM: which of their choices vLLM computes, and which still wait.

vLLM gets only as many choices as it computes at once. The others wait here, so that tenants get equal shares
(``core/wait_queue.py``); vLLM knows no tenants. A request with n choices becomes n requests of vLLM with consecutive
seeds, so choice k equals a single request with that seed.

If another instance has the KV pages of the prompt, choice 0 fetches them at once, because they are kept for a limited
time. The other choices wait until the pages have arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import Any, Protocol

from parley.core.beam_search.beam import BeamSearch
from parley.core.sequence import Sequence
from parley.core.shared_pages.reservations import ADAPTER_DIFFERS
from parley.core.wait_queue import WaitQueue
from parley.engine.messages import ReserveResponse, StepOutputs
from parley.types import EngineFinishReason, EngineOutput, EngineRequest, KVPrefix, TokenCost
from parley.worker.vllm.beam_rounds import BeamRounds, round_request
from parley.worker.vllm.outputs.output_reader import read_output, record_progress
from parley.worker.vllm.outputs.step_totals import StepTotals
from parley.worker.vllm.page_moves import rejected_params, write_transfer
from parley.worker.vllm.requests.continuation import DREW_ANOTHER, Continuation, plan_continuations
from parley.worker.vllm.requests.sampling_fields import scores_prompt

log = logging.getLogger("parley.engine")

UNKNOWN_ADAPTER = "There is no adapter of this name."


class ChoiceClient(Protocol):
    """The part of vLLM that the loop uses. ``max_choices``: how many choices it computes at once. ``can_force``: it can
    be forced to draw tokens. ``lease_seconds``: how long it keeps pages for another instance."""

    max_choices: int
    kv_pages: int
    end_ids: frozenset[int]
    can_force: bool
    lease_seconds: float

    def knows_adapter(self, name: str) -> bool:
        """Whether an adapter of this name is loaded."""

    def add_choice(self, choice_id: str, request: EngineRequest, index: int, continuation: Continuation) -> None:
        """Give a choice to vLLM."""

    def cancel_choices(self, choice_ids: list[str]) -> None:
        """Take choices away from vLLM. Pages that a choice has not fetched by then are freed."""

    def reject_pages(self, page_move: dict[str, Any]) -> None:
        """Let the other instance free pages that are not fetched."""


def compare_adapter(number: int, prefix: KVPrefix, digest_adapter: Callable[[str], str]) -> ReserveResponse:
    """Answer ``ReservePages`` with this number: no page is reserved, as vLLM fetches them, but adapters must be equal.

    ``digest_adapter(name)`` raises KeyError.
    """
    try:
        digest = digest_adapter(prefix.adapter) if prefix.adapter else ""
    except KeyError:
        return ReserveResponse(number, error=UNKNOWN_ADAPTER)
    error = "" if prefix.adapter_digest in ("", digest) else ADAPTER_DIFFERS
    return ReserveResponse(number, error=error, digest=digest)


@dataclass
class SubmittedChoice:
    """A choice that vLLM computes. ``page_move``: pages that it will fetch before its first output.

    ``redrawn_tokens``: known tokens that it will draw again. If it draws others, the first of ``fallbacks`` is tried.
    """

    sequence: Sequence
    page_move: dict[str, Any] | None = None
    redrawn_tokens: list[int] = field(default_factory=list)
    fallbacks: list[Continuation] = field(default_factory=list)

    def drop_redrawn(self, output: EngineOutput) -> bool:
        """Remove known tokens from an output. Return False if others were drawn, or fewer before the end."""
        count = min(len(self.redrawn_tokens), len(output.token_ids))
        if output.token_ids[:count] != self.redrawn_tokens[:count]:
            return False
        if output.finish_reason not in (None, "error") and count < len(self.redrawn_tokens):
            return False
        del output.token_ids[:count], self.redrawn_tokens[:count]
        for part in (output.scores, output.token_costs):
            del (part or [])[:count]
        return True


class HostLoop:
    """Passes requests to ``client`` and its outputs to ``emit``. ``counters``: of its steps, new ones by default."""

    def __init__(self, client: ChoiceClient, emit: Callable[[StepOutputs], None], counters: StepTotals | None = None):
        self._client = client
        self._emit = emit
        self._waiting = WaitQueue()
        self._computing: dict[str, SubmittedChoice] = {}  # by their id in vLLM
        self._followers: dict[str, list[Sequence]] = {}  # choices that wait for pages that choice 0 fetches, by request
        self._open_requests: dict[str, dict[int, Sequence]] = {}  # unfinished choices, by request and index
        self._choice_numbers = count()
        self._arrival_numbers = count()
        self._counters = counters or StepTotals(client.kv_pages)
        self._beam_rounds = BeamRounds(self._waiting.enqueue, self._end_search)

    @property
    def is_idle(self) -> bool:
        """Whether no choice is open."""
        return not self._open_requests and not self._beam_rounds

    @property
    def computing_count(self) -> int:
        """Number of choices that were given to vLLM."""
        return len(self._computing)

    def uses_adapter(self, name: str) -> bool:
        """Whether an open request uses an adapter."""
        return any(
            sequence.request.adapter == name
            for choices in self._open_requests.values()
            for sequence in choices.values()
        )

    def add_request(self, request: EngineRequest) -> None:
        """Queue all choices of a request."""
        if request.id in self._open_requests or request.id in self._beam_rounds:
            log.error("a request was submitted twice under one id; the second is ignored")
            return
        if not request.resumed:
            self._counters.prompt_tokens += len(request.token_ids)
        if request.adapter and not self._client.knows_adapter(request.adapter):
            self._reject_transfer(request.transfer)
            self._emit_outputs(
                [
                    EngineOutput(request.id, index, finish_reason="error", error=UNKNOWN_ADAPTER)
                    for index in range(request.n)
                ]
            )
        elif request.beam and request.max_tokens:
            self._beam_rounds.add_search(request, self._make_sequences(request, request.beam.width))
        else:
            sequences = self._make_sequences(request, request.n)
            self._open_requests[request.id] = {sequence.index: sequence for sequence in sequences}
            if request.transfer:
                self._followers[request.id] = sequences[1:]
                self._submit_choice(sequences[0])
            else:
                for sequence in sequences:
                    self._waiting.enqueue(sequence)
        self._start_choices()

    def cancel_request(self, request_id: str, index: int = -1) -> None:
        """Cancel one choice of a request, or (-1) all. No output of them follows. Unknown ids are ignored."""
        if request_id in self._beam_rounds:
            self._beam_rounds.cancel_search(request_id, index)
            self._start_choices()
            self._emit_outputs([])
        cancelled = [
            sequence
            for sequence in self._open_requests.get(request_id, {}).values()
            if index < 0 or sequence.index == index
        ]
        self._stop_choices(cancelled)
        if cancelled:
            self._start_choices()
            self._emit_outputs([])

    def finish_beam_search(self, request_id: str, reason: EngineFinishReason) -> None:
        """End a beam search with the results so far. Unknown ids are ignored."""
        if request_id in self._beam_rounds:
            self._beam_rounds.finish_search(request_id, reason)
            self._start_choices()
            self._emit_outputs([])

    def reject_choice(self, choice_id: str, reason: str) -> None:
        """End a choice that vLLM does not accept with an error."""
        submitted = self._computing.pop(choice_id, None)
        if submitted is None:
            return
        sequence = submitted.sequence
        if submitted.page_move is not None:
            self._client.reject_pages(submitted.page_move)
        rejected: list[EngineOutput] = []
        if sequence.request_id in self._beam_rounds:
            self._beam_rounds.fail_search(sequence.request_id, reason)
        else:
            self._close_choice(sequence)
            rejected = [EngineOutput(sequence.request_id, sequence.index, finish_reason="error", error=reason)]
        self._start_choices()
        self._emit_outputs(rejected)

    def handle_step(self, step: Any) -> None:
        """Pass on the outputs of one step of vLLM (``EngineCoreOutputs``)."""
        rows, outputs = len(step.outputs), []
        for raw in step.outputs:
            submitted = self._computing.get(raw.request_id)
            if submitted is None:
                continue
            submitted.page_move = None
            cost = self._cost_of(submitted.sequence, step.timestamp, rows)
            if submitted.sequence.request_id in self._beam_rounds:
                self._read_beam(submitted.sequence, raw, step.timestamp, cost)
            elif (output := self._read_choice(submitted, raw, step.timestamp, cost)) is not None:
                outputs.append(output)
        self._counters.record_step(step)
        self._start_choices()
        self._emit_outputs(outputs)
        self._counters.reset_step()

    def report_statistics(self) -> None:
        """Send the statistics without outputs."""
        self._emit_outputs([])

    def _cost_of(self, sequence: Sequence, step_ended_at: float, rows: int) -> TokenCost:
        """Return the cost of a step's token: the seconds since the choice's last one, divided into both parts."""
        seconds = max(0.0, step_ended_at - (sequence.last_token_at or sequence.queued_at))
        compute_seconds = min(seconds, self._counters.seconds_since_step(step_ended_at))
        return TokenCost(rows, seconds - compute_seconds, compute_seconds)

    def _read_beam(self, beam: Sequence, raw: Any, step_ended_at: float, cost: TokenCost) -> None:
        """Pass the result of a beam's round to its search."""
        del self._computing[raw.request_id]
        record_progress(beam, raw)
        if not beam.last_token_at:
            self._waiting.record_service(beam, beam.prompt_len - beam.cached_tokens)
        beam.last_token_at = step_ended_at
        self._waiting.record_service(beam, 1)
        self._beam_rounds.take_round(beam, raw, cost)

    def _read_choice(
        self, submitted: SubmittedChoice, raw: Any, step_ended_at: float, cost: TokenCost
    ) -> EngineOutput | None:
        """Return the output of a choice, and close the choice with its last one."""
        sequence = submitted.sequence
        try:
            output = read_output(sequence, raw, end_ids=self._client.end_ids, cost=cost)
        except Exception:
            log.exception("an output of vLLM could not be read")
            self._client.cancel_choices([raw.request_id])
            error = "vLLM's output could not be read."
            output = EngineOutput(sequence.request_id, sequence.index, finish_reason="error", error=error)
        if output is None:
            return None
        self._release_followers(sequence.request_id)
        if submitted.redrawn_tokens:
            output = self._drop_redrawn(submitted, output, raw)
            if output is None:
                return None
        if sequence.request.lease and raw.kv_transfer_params:
            output.transfer = write_transfer(raw.kv_transfer_params, self._client.lease_seconds)
        if not sequence.last_token_at:
            self._waiting.record_service(sequence, sequence.prompt_len - sequence.cached_tokens)
        sequence.last_token_at = step_ended_at
        self._waiting.record_service(sequence, len(output.token_ids))
        if output.finish_reason is not None:
            if raw.finish_reason is None:
                self._client.cancel_choices([raw.request_id])
            self._computing.pop(raw.request_id, None)
            self._close_choice(sequence)
        return output

    def _drop_redrawn(self, submitted: SubmittedChoice, output: EngineOutput, raw: Any) -> EngineOutput | None:
        """Return the part of an output that is not known yet, None if there is none. If other tokens than the known
        ones were drawn, compute the choice in another way, or end it."""
        if submitted.drop_redrawn(output):
            return output if output.token_ids or output.finish_reason is not None else None
        if not submitted.fallbacks:
            return EngineOutput(output.id, output.index, finish_reason="error", error=DREW_ANOTHER)
        if raw.finish_reason is None:
            self._client.cancel_choices([raw.request_id])
        del self._computing[raw.request_id]
        self._submit_choice(submitted.sequence, submitted.fallbacks)
        return None

    def _release_followers(self, request_id: str) -> None:
        """Queue the choices of a request that waited for the pages of its prompt: these have arrived, or will not."""
        for sequence in self._followers.pop(request_id, ()):
            self._waiting.enqueue(sequence)

    def _start_choices(self) -> None:
        """Give waiting choices to vLLM, up to the number that it computes at once."""
        while len(self._waiting) and len(self._computing) < self._client.max_choices:
            self._submit_choice(self._waiting.pop_head())

    def _submit_choice(self, sequence: Sequence, continuations: list[Continuation] | None = None) -> None:
        """Give a choice to vLLM, in the first of these ways, by default of all."""
        is_beam = sequence.request_id in self._beam_rounds
        request, index = (round_request(sequence), 0) if is_beam else (sequence.request, sequence.index)
        if continuations is None:
            continuations = plan_continuations(request, index, can_force=self._client.can_force)
            if index == 0 and continuations[0].page_move is None:
                self._reject_transfer(request.transfer)
        continuation, *fallbacks = continuations
        choice_id = f"{next(self._choice_numbers)}"
        redrawn = continuation.redrawn_tokens(request, index)
        self._computing[choice_id] = SubmittedChoice(sequence, continuation.page_move, redrawn, fallbacks)
        self._client.add_choice(choice_id, request, index, continuation)

    def _make_sequences(self, request: EngineRequest, number: int) -> list[Sequence]:
        """Return the choices of a request, or the beams of a search, which wait from now on."""
        queued_at = monotonic()
        sequences = [
            Sequence(
                request.id, index, request, request.token_ids, len(request.token_ids), request.seed + index,
                next(self._arrival_numbers), queued_at=queued_at,
            )
            for index in range(number)
        ]  # fmt: skip
        if scores_prompt(request, 0):
            sequences[0].prompt_scores.append(None)  # nothing precedes the first token
        return sequences

    def _stop_choices(self, sequences: Iterable[Sequence]) -> None:
        self._withdraw_sequences(sequences)
        for sequence in sequences:
            self._close_choice(sequence)

    def _end_search(self, search: BeamSearch) -> None:
        """Withdraw the rounds of a search that has ended."""
        self._withdraw_sequences(search.beam_sequences)

    def _withdraw_sequences(self, sequences: Iterable[Sequence]) -> None:
        """Remove these sequences from the queue, and from vLLM if it computes them."""
        ids = set(map(id, sequences))
        choice_ids = [choice_id for choice_id, submitted in self._computing.items() if id(submitted.sequence) in ids]
        for choice_id in choice_ids:
            del self._computing[choice_id]
        if choice_ids:
            self._client.cancel_choices(choice_ids)
        for sequence in [sequence for sequence in self._waiting if id(sequence) in ids]:
            self._waiting.remove_waiting(sequence)
            if sequence.index == 0 and not sequence.output_length:
                self._reject_transfer(sequence.request.transfer)
        for followers in self._followers.values():
            followers[:] = [sequence for sequence in followers if id(sequence) not in ids]

    def _reject_transfer(self, transfer: bytes) -> None:
        """Let the other instance free the pages of a transfer, if there are any, as no choice will fetch them."""
        if transfer and (page_move := rejected_params(transfer)) is not None:
            self._client.reject_pages(page_move)

    def _close_choice(self, sequence: Sequence) -> None:
        choices = self._open_requests[sequence.request_id]
        del choices[sequence.index]
        self._release_followers(sequence.request_id)
        if not choices:
            del self._open_requests[sequence.request_id]

    def _emit_outputs(self, outputs: list[EngineOutput]) -> None:
        outputs, self._beam_rounds.outputs = outputs + self._beam_rounds.outputs, []
        self._counters.generated_tokens += sum(len(output.token_ids) for output in outputs)
        waiting = len(self._waiting) + sum(map(len, self._followers.values()))
        stats = self._counters.collect_stats(computing=len(self._computing), waiting=waiting)
        self._emit(StepOutputs(outputs, stats))
