"""A stand-in for vLLM, with which parley's clients of it run where it is not installed."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

IMPORTERS = tuple(f"parley.worker.vllm.{name}" for name in ("connector", "logits_plugin", "vllm_client"))
IMPORTERS += ("parley.worker.vllm.generate_client",)


class LoRARequest:
    """An adapter as vLLM is told of it."""

    def __init__(self, lora_name: str, lora_int_id: int, lora_path: str):
        self.lora_name, self.lora_int_id, self.lora_path = lora_name, lora_int_id, lora_path


class StandInModule(ModuleType):
    """A module of vLLM. Its other names are classes without members."""

    __version__ = "0.0"
    LoRARequest = LoRARequest
    RequestOutputKind = SimpleNamespace(DELTA=0, CUMULATIVE=1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *arguments, **members: None})


class StandInFinder:
    """Finds every module of vLLM."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "vllm" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """A stand-in has no code."""


@contextmanager
def stand_in_modules() -> Iterator[None]:
    """Let modules of parley that import vLLM be imported."""
    finder: Any = StandInFinder()
    sys.meta_path.insert(0, finder)
    try:
        for name in IMPORTERS:
            importlib.import_module(name)
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name in IMPORTERS or name.partition(".")[0] == "vllm"]:
            del sys.modules[name]


class StandInVLLM:
    """A running vLLM that records the adapters and requests that it gets, and computes nothing."""

    errored = False

    def __init__(self) -> None:
        self.adapters: list[LoRARequest] = []  # those that were ever loaded
        self.submitted: list[Any] = []
        self.rejected_moves: list[dict[str, Any]] = []
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=4),
            parallel_config=SimpleNamespace(data_parallel_size=1, distributed_executor_backend="mp"),
            cache_config=SimpleNamespace(num_gpu_blocks=9),
            model_config=SimpleNamespace(runner_type="pooling", model="/model"),
            kv_transfer_config=None,
        )
        self.renderer = SimpleNamespace(get_eos_token_id=lambda: 2)
        self.input_processor = SimpleNamespace(process_inputs=lambda *arguments, **members: object())
        self.engine_core = SimpleNamespace(
            get_output_async=asyncio.Event().wait,
            add_request_async=self._add_request,
            abort_requests_async=self._abort_requests,
        )

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_lora(self, adapter: LoRARequest) -> None:
        self.adapters.append(adapter)

    async def remove_lora(self, number: int) -> None:
        """Nothing is kept."""

    async def notify_kv_transfer_request_rejected(self, request_id: str, params: dict[str, Any]) -> None:
        self.rejected_moves.append(params)

    async def generate(self, prompt: Any, *arguments: Any, **members: Any) -> AsyncIterator[Any]:
        self.submitted.append(prompt)
        await asyncio.Event().wait()
        yield

    def shutdown(self) -> None:
        """Nothing runs."""

    async def _add_request(self, request: Any) -> None:
        self.submitted.append(request)

    async def _abort_requests(self, choice_ids: list[str]) -> None:
        """Nothing is computed."""
