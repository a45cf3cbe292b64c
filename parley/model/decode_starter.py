"""Starts decode steps of a ``DecoderRunner`` on a GPU without waiting for their results (see ``core.run_ahead``).

The sampled tokens of a step stay on the device, where the next step reads them; at the same time they are copied to the
host. On the CPU, in tests, a step is computed when it is started.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import numpy as np
import torch

from parley import native
from parley.core.sequence import RowResult, StartedStep, Step, StepRow
from parley.model.networks.decode_graphs import CudaGraphRecorder, DecodeGraphs, can_record
from parley.model.sampling.verify import BROKEN_LOGITS
from parley.native.device_copy import copy_to_device

if TYPE_CHECKING:
    from parley.model.networks.network import PackedBatch
    from parley.model.runner import DecoderRunner


class StartedDecodes:
    """``core.sequence.StartedStep``. ``drawn``: the sampled tokens on the device, int64 [rows]. ``peaks``: the largest
    logit of each row, float32 [rows]. ``row_indices``: the row of each sequence."""

    def __init__(self, rows: list[StepRow], drawn: torch.Tensor, peaks: torch.Tensor):
        self.row_indices = {row.sequence: index for index, row in enumerate(rows)}
        self.drawn = drawn
        self._tokens, self._peaks, self._copied = drawn, peaks, None
        if drawn.device.type != "cpu":
            self._tokens, self._peaks = (_copy_to_host(tensor) for tensor in (drawn, peaks))
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> list[RowResult]:
        """Wait for the device, and return the sampled tokens. A row whose logits are not finite gets ``error``."""
        if self._copied is not None:
            self._copied.synchronize()
        return [
            RowResult(tokens=[token]) if math.isfinite(peak) else RowResult(error=BROKEN_LOGITS)
            for token, peak in zip(self._tokens.tolist(), self._peaks.tolist(), strict=True)
        ]


def _copy_to_host(numbers: torch.Tensor) -> torch.Tensor:
    """Return a pinned tensor, into which the device copies these numbers when it has done its work so far."""
    return torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)


class DecodeStarter:
    """``core.sequence.StepStarter`` of a runner."""

    def __init__(self, runner: DecoderRunner):
        self._runner = runner

    def can_follow(self, row: StepRow) -> bool:
        """Whether the row's token is sampled on the device alone, and its request has no media, which decide
        positions."""
        return not row.sequence.request.media and self._runner.sampler.draws_on_device(row.sequence.slot)

    @torch.inference_mode()
    def start_step(self, step: Step, previous: StartedStep | None) -> StartedDecodes:
        """Start a step of rows that ``can_follow``. Raises RuntimeError if the device cannot start it."""
        runner, rows = self._runner, step.rows
        runner.pages.clear_pages(step.fresh_pages)
        batch = runner.pack_rows(rows)
        if previous is not None:
            assert isinstance(previous, StartedDecodes)
            self._insert_drawn(batch, rows, previous)
        logits = runner.network.compute_logits(runner.compute_hidden(batch))
        peaks, argmax_ids = native.argmax(logits)
        slots = [row.sequence.slot for row in rows]
        positions = [row.start + 1 - row.sequence.prompt_len for row in rows]
        return StartedDecodes(rows, runner.sampler.start_draw(logits, argmax_ids, slots, positions), peaks)

    def _insert_drawn(self, batch: PackedBatch, rows: list[StepRow], previous: StartedDecodes) -> None:
        """Write the tokens that ``previous`` samples, and that the host does not know yet, into a batch."""
        index_pairs = [
            (index, previous.row_indices[row.sequence])
            for index, row in enumerate(rows)
            if row.start == len(row.sequence.tokens)
        ]
        if index_pairs:
            columns = copy_to_device(np.array(index_pairs, np.int64), batch.token_ids.device)
            batch.token_ids.index_copy_(0, columns[:, 0], previous.drawn.index_select(0, columns[:, 1]))


def start_on_gpu(runner: DecoderRunner) -> None:
    """Make a runner on a GPU start decode steps ahead, and run them as CUDA graphs if its network allows that.

    The environment variable PARLEY_CUDA_GRAPHS turns graphs off if it is "off".
    """
    runner.starter = DecodeStarter(runner)
    if os.environ.get("PARLEY_CUDA_GRAPHS", "") != "off" and can_record(runner.network, runner.pages):
        runner.graphs = DecodeGraphs(
            runner.network,
            runner.pages,
            max_model_len=runner.max_model_len,
            max_rows=runner.sampler.slots,
            record=CudaGraphRecorder(),
        )
