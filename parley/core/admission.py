"""Admission of requests: reject those that cannot run, and wait for their grammar and LoRA adapter.

A request may have a grammar that must be compiled and an adapter that is not in memory. Both are prepared outside the
steps and delay no other request; a request that needs neither starts at once. Knows nothing of sequences and steps, and
belongs to the engine loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

from parley.core.adapter_cache import AdapterCache, AdapterEntry, FetchAdapter, FetchedAdapter
from parley.core.beam_search.beam import beam_capacity
from parley.core.media.placeholders import are_known_tokens, placement_fault
from parley.core.rope_positions import largest_position
from parley.core.sequence import LoadedAdapter, ModelRunner
from parley.types import EngineRequest

# Prepares a request, then calls back in the loop's thread.
PrepareRequest = Callable[[EngineRequest, Callable[[], None]], None]


def rejection_reason(
    request: EngineRequest, runner: ModelRunner, max_context: int, page_count: int, max_slots: int
) -> str | None:
    """Return why the request cannot run, or None. The API process has checked all this before. If it has a defect,
    these checks keep an invalid request from blocking others."""
    if not request.token_ids:
        return "The prompt has no tokens."
    if len(request.token_ids) > max_context:
        return f"The prompt has {len(request.token_ids)} tokens, but only {max_context} fit."
    if request.pooling is None and not runner.generates:
        return "The model only returns vectors."
    if request.beam is not None:
        beams, beam_tokens = request.beam.width, beam_capacity(page_count, request.beam.width)
        if beams > max_slots or (request.max_tokens and len(request.token_ids) >= beam_tokens):
            return f"{beams} beams do not fit. At most {max_slots} beams of {beam_tokens} tokens each do."
    if request.pooling is not None and request.pooling.task not in runner.pooling_tasks:
        return f"The model does not {request.pooling.task}."
    if request.pooling is not None and request.pooling.dimensions is not None:
        width = runner.token_dimensions if request.pooling.task == "token_embed" else runner.dimensions
        if request.pooling.dimensions > width:
            return f"The model returns vectors of {width} dimensions."
    if request.media and (runner.media_encoder is None or not page_count):
        return "The model reads text only."
    if (fault := placement_fault(request.media, len(request.token_ids))) is not None:
        return fault
    if request.media and (furthest := largest_position(request.media, len(request.token_ids))) >= max_context:
        return f"The prompt reaches position {furthest}, but only {max_context} fit."
    vocab_size = runner.vocab_size
    if not are_known_tokens(request.token_ids, request.media, vocab_size) or not all(
        are_known_tokens(ids, [], vocab_size) for ids in request.prior_tokens
    ):
        return f"A token id of the prompt is outside the vocabulary (0 to {vocab_size - 1})."
    if request.prior_tokens and (
        len(request.prior_tokens) != request.n
        or request.pooling is not None
        or (request.beam and any(request.prior_tokens))
    ):
        return "The prior output tokens do not match the choices of the request."
    if any(len(request.token_ids) + len(ids) > max_context for ids in request.prior_tokens):
        return f"The prompt and the prior output tokens do not fit into {max_context} tokens."
    return None


def blocking_fetch(runner: ModelRunner) -> FetchAdapter:
    """Return a fetch function that reads adapters synchronously, blocking the loop."""

    def fetch_adapter(folder: str, on_fetched: Callable[[FetchedAdapter], None]) -> None:
        try:
            fetched: FetchedAdapter = runner.load_adapter(folder)
        except Exception as error:
            fetched = str(error)
        on_fetched(fetched)

    return fetch_adapter


class Admission:
    """Requests that wait for a grammar or an adapter, and the adapters of requests that have started.

    ``start_request(request, wanted_choices, queued_at, adapter)`` is called when everything is ready,
    ``reject_request(request, wanted_choices, reason)`` when it cannot be prepared. ``wanted_choices``: those that were
    not cancelled; ``queued_at``: arrival, time.perf_counter.
    """

    def __init__(
        self,
        adapter_cache: AdapterCache,
        prepare: PrepareRequest | None,
        start_request: Callable[[EngineRequest, set[int], float, LoadedAdapter | None], None],
        reject_request: Callable[[EngineRequest, set[int], str], None],
    ):
        self._adapter_cache = adapter_cache
        self._prepare = prepare
        self._start_request = start_request
        self._reject_request = reject_request
        self._wanted_choices: dict[str, set[int]] = {}  # by waiting request
        self._adapter_entries: dict[str, AdapterEntry] = {}  # by started request with an adapter

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._wanted_choices)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._wanted_choices

    @property
    def adapter_use_count(self) -> int:
        """Number of started requests that use an adapter."""
        return len(self._adapter_entries)

    def submit_request(self, request: EngineRequest) -> None:
        """Start a request, now or when its grammar and adapter are ready."""
        self._wanted_choices[request.id] = set(range(request.n))
        on_prepared = partial(self._on_prepared, request, perf_counter())
        if self._prepare is not None:
            self._prepare(request, on_prepared)
        else:
            on_prepared()

    def cancel_waiting(self, request_id: str, index: int = -1) -> set[int]:
        """Cancel the choice ``index`` of a waiting request, or (-1) all. Return the cancelled choices; unknown ids have
        none."""
        wanted_choices = self._wanted_choices.get(request_id, set())
        cancelled = wanted_choices & {index} if index >= 0 else wanted_choices
        if cancelled:
            self._wanted_choices[request_id] = wanted_choices - cancelled
            if not self._wanted_choices[request_id]:
                del self._wanted_choices[request_id]
                self._adapter_cache.cancel_acquire(request_id)
        return cancelled

    def finish_request(self, request_id: str) -> None:
        """Release the adapter of a started request that has ended. Requests without an adapter are ignored."""
        if (entry := self._adapter_entries.pop(request_id, None)) is not None:
            self._adapter_cache.release_adapter(entry)

    def _on_prepared(self, request: EngineRequest, queued_at: float) -> None:
        """Start a prepared request, or acquire its adapter first. Does nothing if it was cancelled meanwhile."""
        if request.id not in self._wanted_choices:
            return
        if request.adapter:
            self._adapter_cache.acquire_adapter(
                request.id,
                request.adapter,
                partial(self._on_adapter_ready, request, queued_at),
                partial(self._on_adapter_failed, request),
            )
        else:
            self._start_request(request, self._wanted_choices.pop(request.id), queued_at, None)

    def _on_adapter_ready(self, request: EngineRequest, queued_at: float, entry: AdapterEntry) -> None:
        self._adapter_entries[request.id] = entry
        self._start_request(request, self._wanted_choices.pop(request.id), queued_at, entry.adapter)

    def _on_adapter_failed(self, request: EngineRequest, reason: str) -> None:
        self._reject_request(request, self._wanted_choices.pop(request.id), reason)
