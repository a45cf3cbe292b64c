"""parley's plugin in vLLM's workers: one class for each of vLLM's model runners, and a second one for the older runner.

vLLM loads them by name (``plugin_names``). They are not loaded with speculation, which excludes such plugins, nor for
models that only pool, nor with Ray, whose workers do not see parley's modules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, process_dict_updates
from vllm.v1.sample.logits_processor import LogitsProcessor as BatchProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotProcessor

from parley.model.sampling.row_edits import RowEdits
from parley.worker.vllm.requests.extra_options import read_extra_options


def plugin_names(config: VllmConfig) -> list[str]:
    """Return the names of the plugin's classes for this configuration of vLLM; [] if they cannot be loaded."""
    is_remote = config.parallel_config.distributed_executor_backend == "ray"
    if config.model_config.runner_type != "generate" or config.speculative_config is not None or is_remote:
        return []
    classes: tuple[type, ...] = (SlotEditor,) if config.use_v2_model_runner else (RowEditor, RowCutter)
    return [f"{__name__}:{processor.__name__}" for processor in classes]


@cache
def load_token_bytes(folder: str) -> Callable[[int], bytes]:
    """Return a function from the tokens of the model in a folder to their bytes."""
    from parley.text.tokens.tokenizer import Tokenizer  # only in workers: it imports much

    return Tokenizer.from_folder(folder).token_bytes


class _OutputReader:
    """The edits of a choice in the older runner, and the list that vLLM appends its output to."""

    def __init__(self, edits: RowEdits, output: list[int]):
        self.edits = edits
        self._output = output

    def read_output(self) -> RowEdits:
        """Return the edits, with all output so far."""
        self.edits.add_tokens(self._output[self.edits.output_count :])
        return self.edits


class _RowProcessor(BatchProcessor):  # type: ignore[misc]
    """Keeps the choices with options of parley's by their rows."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        self._rows: dict[int, _OutputReader] = {}
        self._token_bytes = load_token_bytes(vllm_config.model_config.model)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of the batch."""
        process_dict_updates(self._rows, batch_update, self._new_reader)

    def _new_reader(self, params: SamplingParams, prompt: list[int] | None, output: list[int]) -> _OutputReader | None:
        options = read_extra_options(params.extra_args)
        if options is None:
            return None
        return _OutputReader(RowEdits(options, list(prompt or ()), self._token_bytes), output)


class RowEditor(_RowProcessor):
    """Edits logits before temperature, for greedy rows as well."""

    def is_argmax_invariant(self) -> bool:
        """Return False: it changes the most likely token."""
        return False

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Edit the rows."""
        for index, reader in self._rows.items():
            reader.read_output().edit_logits(logits[index])
        return logits


class RowCutter(_RowProcessor):
    """Cuts logits that have been divided by the temperature."""

    def is_argmax_invariant(self) -> bool:
        """Return True, so that vLLM calls it after the temperature; greedy rows have no typical_p."""
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Cut the rows."""
        for index, reader in self._rows.items():
            reader.edits.cut_logits(logits[index], 1.0)
        return logits


class SlotEditor(SlotProcessor):  # type: ignore[misc]
    """Edits and cuts the rows of the newer runner, whose requests have slots."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState):
        self._states = req_states
        self._slots: dict[int, RowEdits] = {}
        self._token_bytes = load_token_bytes(vllm_config.model_config.model)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Take a request into a slot, in place of the one before it."""
        options = read_extra_options(sampling_params.extra_args)
        if options is None:
            self._slots.pop(req_idx, None)
            return False
        self._slots[req_idx] = RowEdits(options, [], self._token_bytes)
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Edit and cut the rows."""
        if not any(int(slot) in self._slots for slot in ctx.idx_mapping_np):
            return logits
        positions = ctx.pos.tolist()
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            if (edits := self._slots.get(slot)) is not None:
                self._read_tokens(edits, slot, positions[row] + 1)
                edits.edit_logits(logits[row])
                edits.cut_logits(logits[row], edits.options.temperature)
        return logits

    def _read_tokens(self, edits: RowEdits, slot: int, length: int) -> None:
        """Bring the tokens of a request up to date. ``length``: of prompt and output so far."""
        copied_count = len(edits.tokens)
        new_tokens: list[Any] = self._states.all_token_ids.gpu[slot, copied_count:length].tolist()
        prompt_left = max(0, int(self._states.prompt_len.np[slot]) - copied_count)
        edits.tokens += new_tokens[:prompt_left]
        edits.add_tokens(new_tokens[prompt_left:])
