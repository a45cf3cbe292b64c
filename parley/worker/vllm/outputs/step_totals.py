"""Totals over vLLM's steps, in the form of parley's statistics.

This module reads attributes of vLLM's objects and does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from parley.types import EngineStats


class StepTotals:
    """Counters since the start, and the size and time of the last step. ``kv_pages``: pages in vLLM's KV cache.

    vLLM may have several engine cores (data parallel), each with its steps and its part of the requests.
    """

    def __init__(self, kv_pages: int):
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._stats = EngineStats(total_pages=kv_pages)
        self._cores: dict[int, Any] = {}  # the last statistics of each engine core's scheduler
        self._step_ended_at = 0.0

    def seconds_since_step(self, now: float) -> float:
        """Return the seconds between the last step that was recorded and ``now``."""
        return max(0.0, now - self._step_ended_at)

    def record_step(self, step: Any) -> None:
        """Record a step of vLLM (``EngineCoreOutputs``)."""
        stats = self._stats
        stats.step_seconds = self.seconds_since_step(step.timestamp) if self._step_ended_at else 0.0
        self._step_ended_at = step.timestamp
        stats.steps += bool(step.outputs)
        stats.step_rows = len(step.outputs)
        stats.step_prompt_tokens = sum(
            output.prefill_stats.num_computed_tokens for output in step.outputs if output.prefill_stats is not None
        )
        stats.step_tokens = stats.step_prompt_tokens + sum(len(output.new_token_ids) for output in step.outputs)
        self.count_preemptions(sum(int(event.type) == 3 for output in step.outputs for event in output.events or ()))
        if step.scheduler_stats is not None:
            self.record_scheduler(step.engine_index, step.scheduler_stats)

    def count_preemptions(self, number: int) -> None:
        """Count preemptions."""
        self._stats.preemptions += number

    def reset_step(self) -> None:
        """Reset the numbers of the last step: later messages do not belong to it."""
        stats = self._stats
        stats.step_rows = stats.step_prompt_tokens = stats.step_tokens = 0
        stats.step_seconds = 0.0

    def collect_stats(self, *, computing: int, waiting: int) -> EngineStats:
        """Return the statistics. ``computing``: choices in vLLM, where some may wait; ``waiting``: others."""
        stats = self._stats
        cores = self._current_cores(computing)
        waiting_in_vllm = min(computing, sum(core.num_waiting_reqs for core in cores))
        stats.running, stats.waiting = computing - waiting_in_vllm, waiting + waiting_in_vllm
        usage = sum(core.kv_cache_usage for core in cores) / max(1, len(self._cores))
        stats.used_pages = round(usage * stats.total_pages)
        stats.prompt_tokens, stats.generated_tokens = self.prompt_tokens, self.generated_tokens
        return msgspec.structs.replace(stats)

    def _current_cores(self, computing: int) -> Collection[Any]:
        """Return the statistics that still hold: vLLM does not report the end of cancelled choices."""
        return self._cores.values() if computing else ()

    def record_scheduler(self, core: int, scheduler: Any) -> None:
        """Record the statistics of an engine core's scheduler (``SchedulerStats``)."""
        self._cores[core] = scheduler
        stats = self._stats
        if scheduler.prefix_cache_stats is not None:
            stats.prefix_queries += scheduler.prefix_cache_stats.queries
            stats.prefix_hits += scheduler.prefix_cache_stats.hits
        if (drafts := scheduler.spec_decoding_stats) is not None:
            stats.drafts += drafts.num_drafts
            stats.draft_tokens += drafts.num_draft_tokens
            accepted = drafts.num_accepted_tokens_per_pos
            missing_count = len(accepted) - len(stats.draft_accepted)
            stats.draft_accepted += [0] * missing_count
            for position, number in enumerate(accepted):
                stats.draft_accepted[position] += number
