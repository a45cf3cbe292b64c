"""vLLM as the host uses it. This module and four others import vLLM (see the package's docstring).

It reads whole steps from vLLM's engine core, below ``AsyncLLM.generate``, which makes a task and an object for each
choice and step and so costs two to four times the processor time. ``has_engine_core`` says whether this vLLM can be
used in this way.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from vllm.config.structured_outputs import StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import mm_input, tokens_input
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.platforms import current_platform
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.serial_utils import MsgpackDecoder

from parley.child_process import python_command
from parley.types import EngineRequest, MediaKind, ModelInfo, VLLMSettings
from parley.worker.vllm.capabilities import BOUNDS, vllm_features
from parley.worker.vllm.connector import (
    adapter_digest,
    connector_arena,
    connector_config,
    lease_seconds,
    listen_for_pages,
)
from parley.worker.vllm.logits_plugin import plugin_names
from parley.worker.vllm.media.item_features import locate_placeholder, read_item_features
from parley.worker.vllm.requests.continuation import Continuation
from parley.worker.vllm.requests.engine_args import engine_arguments
from parley.worker.vllm.requests.sampling_fields import ChoiceFields, translate_choice, translate_pooling

_item_decoder = MsgpackDecoder(MultiModalKwargsItem)


class StartRefused(Exception):
    """vLLM does not start with these settings. The message is one sentence."""


class FlagParser(FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's parser of flags. Raises StartRefused."""

    def error(self, message: str) -> NoReturn:
        """Raise StartRefused instead of ending the process."""
        raise StartRefused(f"vLLM does not accept the flags after --: {message}.")


def start_vllm(settings: VLLMSettings) -> AsyncLLM:
    """Start vLLM's processes and load the model. Call it outside of an event loop. Raises StartRefused, Exception."""
    if settings.exact and current_platform.is_cpu():
        raise StartRefused("--exact needs a GPU: vLLM has no batch-invariant kernels for CPUs.")
    arguments = parse_arguments(settings)
    if settings.transfer_host:
        arguments.kv_transfer_config = connector_config(arguments.kv_transfer_config)
        listen_for_pages(settings.transfer_host)
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    if config.parallel_config.use_ray:
        # Ray's nodes may run another Python, such as parley's.
        config.parallel_config.ray_runtime_env = {"py_executable": shlex.join(python_command())}
    config.model_config.logits_processors = [*(config.model_config.logits_processors or ()), *plugin_names(config)]
    return AsyncLLM.from_vllm_config(config, disable_log_stats=arguments.disable_log_stats)


def parse_arguments(settings: VLLMSettings) -> AsyncEngineArgs:
    """Return vLLM's arguments: the user's flags, and those that follow from parley's settings. Raises StartRefused."""
    parser = AsyncEngineArgs.add_cli_args(FlagParser())
    options = parser.parse_args(settings.arguments)
    vars(options).update(
        engine_arguments(settings), structured_outputs_config=StructuredOutputsConfig(backend="guidance")
    )
    return AsyncEngineArgs.from_cli_args(options)


class VLLMClient:
    """A running vLLM. ``on_rejection(choice_id, reason)`` is called for choices that vLLM does not accept.

    Create it with ``connect``.
    """

    def __init__(self, llm: AsyncLLM, tasks: tuple[str, ...], on_rejection: Callable[[str, str], None]):
        config = llm.vllm_config
        self._llm = llm
        self._tasks = tasks
        self._on_rejection = on_rejection
        self._adapters: dict[str, LoRARequest] = {}
        self._adapter_digests: dict[str, str] = {}  # of the files of each loaded adapter, by its name
        self._adapter_numbers = count(1)  # vLLM treats adapters with one number as the same
        self._rejection_numbers = count()
        self._preparing: set[str] = set()
        self._running_tasks: set[asyncio.Task[None]] = set()
        self.max_choices: int = config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size
        self.kv_pages: int = config.cache_config.num_gpu_blocks or 0
        self.can_force = bool(plugin_names(config))
        self.lease_seconds = lease_seconds(config)
        end_id = llm.renderer.get_eos_token_id()
        self.end_ids = frozenset() if end_id is None else frozenset({end_id})

    @classmethod
    async def connect(cls, llm: AsyncLLM, on_rejection: Callable[[str, str], None]) -> Self:
        """Return a client of a vLLM that has been started."""
        return cls(llm, await llm.get_supported_tasks(), on_rejection)

    @property
    def preparing_count(self) -> int:
        """Number of choices that vLLM's engine core does not have yet."""
        return len(self._preparing)

    async def next_step(self) -> Any:
        """Return vLLM's outputs of the next step. Raises an exception if its engine has died."""
        return await self._llm.engine_core.get_output_async()

    def knows_adapter(self, name: str) -> bool:
        """Whether an adapter of this name is loaded."""
        return name in self._adapters

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter under a name, in place of another, unless exactly this one is loaded.

        Raises OSError, or an exception with vLLM's reason.
        """
        digest, loaded = await asyncio.to_thread(adapter_digest, folder), self._adapters.get(name)
        if loaded is not None and (loaded.lora_path, self._adapter_digests[name]) == (folder, digest):
            return
        # vLLM's prefix cache treats adapters with one name and folder as the same.
        adapter = LoRARequest(f"{name}@{digest[:16]}", next(self._adapter_numbers), folder)
        await self._llm.add_lora(adapter)
        self._adapters[name], self._adapter_digests[name] = adapter, digest

    async def unload_adapter(self, name: str, *, in_use: bool) -> None:
        """Unload an adapter. Requests that use it keep it: then vLLM drops it when it needs its place."""
        adapter = self._adapters.pop(name)
        del self._adapter_digests[name]
        if not in_use:
            await self._llm.remove_lora(adapter.lora_int_id)

    def digest_adapter(self, name: str) -> str:
        """Return a digest of an adapter's files as they were when it was loaded. Raises KeyError."""
        return self._adapter_digests[name]

    async def reset_prefix_cache(self, *, running: bool) -> bool:
        """Clear the prefix cache. ``running``: preempt running requests for it. Returns whether it was cleared."""
        return bool(await self._llm.reset_prefix_cache(reset_running_requests=running))

    def add_choice(self, choice_id: str, request: EngineRequest, index: int, continuation: Continuation) -> None:
        """Give a choice to vLLM."""
        self._preparing.add(choice_id)
        adapter = self._adapters.get(request.adapter)
        self._start_task(self._submit_choice(choice_id, request, index, continuation, adapter))

    def cancel_choices(self, choice_ids: list[str]) -> None:
        """Take choices away from vLLM. Pages that a choice has not fetched by then are freed."""
        submitted = [choice_id for choice_id in choice_ids if choice_id not in self._preparing]
        self._preparing.difference_update(choice_ids)
        if submitted:
            self._start_task(self._llm.engine_core.abort_requests_async(submitted))

    def reject_pages(self, page_move: dict[str, Any]) -> None:
        """Let the other instance free pages that are not fetched."""
        self._start_task(self._notify_of_rejection(page_move))

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._running_tasks.add(task)
        task.add_done_callback(self._running_tasks.discard)

    async def _notify_of_rejection(self, page_move: dict[str, Any]) -> None:
        number = next(self._rejection_numbers)
        await self._llm.notify_kv_transfer_request_rejected(f"rejected-{number}", page_move)

    async def _submit_choice(
        self,
        choice_id: str,
        request: EngineRequest,
        index: int,
        continuation: Continuation,
        adapter: LoRARequest | None,
    ) -> None:
        try:
            if request.grammar or request.media:  # vLLM compiles a grammar to check it; media are large
                core_request = await asyncio.to_thread(
                    self._core_request, choice_id, request, index, continuation, adapter
                )
            else:
                core_request = self._core_request(choice_id, request, index, continuation, adapter)
        except Exception as error:  # vLLM does not document what it raises
            core_request = error
        if choice_id not in self._preparing:  # it was cancelled meanwhile
            if continuation.page_move is not None:
                self.reject_pages(continuation.page_move)
            return
        self._preparing.discard(choice_id)
        if isinstance(core_request, Exception):
            self._reject(choice_id, core_request)
        else:
            await self._llm.engine_core.add_request_async(core_request)

    def _reject(self, choice_id: str, error: Exception) -> None:
        """Report that vLLM does not accept a choice."""
        folder = self._llm.vllm_config.model_config.model
        reason = " ".join(str(error).replace(folder, "the model").split())
        self._on_rejection(choice_id, f"vLLM does not accept the request: {reason}")

    def _core_request(
        self,
        choice_id: str,
        request: EngineRequest,
        index: int,
        continuation: Continuation,
        adapter: LoRARequest | None,
    ) -> Any:
        """Return vLLM's form of a choice. Raises an exception with vLLM's reason if it does not accept the choice."""
        if request.pooling is None:
            fields = translate_choice(request, index, continuation)
            parameters, token_ids = sampling_params(fields), fields.token_ids
        else:
            fields, parameters, token_ids = None, pooling_params(request), request.token_ids
        core_request = self._llm.input_processor.process_inputs(
            choice_id,
            engine_prompt(token_ids, request),
            parameters,
            supported_tasks=self._tasks,
            lora_request=adapter,
            priority=request.priority,
        )
        if fields is not None and fields.banned:
            # After process_inputs, which derives them from words. No public member takes token sequences.
            core_request.sampling_params._bad_words_token_ids = fields.banned
        return core_request

    def describe_model(self, settings: VLLMSettings, version: str) -> ModelInfo:
        """Describe the model to the API process."""
        config = self._llm.vllm_config
        model, cache = config.model_config, config.cache_config
        generates = "generate" in self._tasks
        parameters, weights_bytes = measure_weight_files(Path(settings.model))
        media_counts = self._media_counts(settings)
        return ModelInfo(
            architecture=model.architecture,
            dtype=str(model.dtype).removeprefix("torch."),
            device=current_platform.device_type,
            parameters=parameters,
            vocab_size=model.get_vocab_size(),
            max_model_len=model.max_model_len,
            weights_bytes=weights_bytes,
            kv_bytes=0,
            kv_pages=self.kv_pages,
            page_tokens=cache.block_size,
            fused=False,
            quantization=model.quantization or "none",
            generates=generates,
            dimensions=model.embedding_size if "embed" in self._tasks else 0,
            engine=f"vllm {version}",
            features=vllm_features(
                adapters=config.lora_config is not None,
                speculation=config.speculative_config is not None,
                plugin=self.can_force,
                connector=config.kv_transfer_config is not None,
                on_cpu=current_platform.is_cpu(),
            ),
            bounds=dict(BOUNDS),
            arena=connector_arena(config, settings, version),
            media_kinds=frozenset(media_counts),
            media_counts=media_counts,
        )

    def _media_counts(self, settings: VLLMSettings) -> dict[MediaKind, int]:
        """Return the kinds of media that vLLM reads and that can be decoded here, each with the most items in a
        prompt."""
        if not self._llm.vllm_config.model_config.supports_multimodal_inputs:
            return {}
        limits = self._llm.renderer.get_mm_processor().info.allowed_mm_limits
        decodable = settings.media_marks.keys() & ({"image", "video", "audio"} if find_spec("av") else {"image"})
        return {kind: limits[kind] for kind in sorted(decodable) if limits.get(kind)}

    def shut_down(self) -> None:
        """End vLLM's processes."""
        self._llm.shutdown()


def has_engine_core(llm: AsyncLLM) -> bool:
    """Whether this vLLM has the inner interface that ``VLLMClient`` uses."""
    methods = ("get_output_async", "add_request_async", "abort_requests_async")
    core, processor = getattr(llm, "engine_core", None), getattr(llm, "input_processor", None)
    return hasattr(processor, "process_inputs") and all(hasattr(core, method) for method in methods)


def engine_prompt(token_ids: list[int], request: EngineRequest) -> Any:
    """Return vLLM's prompt of these tokens, with the media of the request. Raises BadFeatures."""
    salt = request.cache_salt or None
    if not request.media:
        return tokens_input(token_ids, cache_salt=salt)
    items: dict[str, list[MultiModalKwargsItem]] = {}
    hashes: dict[str, list[str]] = {}
    placeholder_ranges: dict[str, list[PlaceholderRange]] = {}
    for item in request.media:
        features = read_item_features(item)
        start, length, embedded = locate_placeholder(item, features, token_ids)
        mask = None if embedded is None else torch.tensor(embedded)
        items.setdefault(item.kind, []).append(_item_decoder.decode(features.content))
        hashes.setdefault(item.kind, []).append(item.digest.hex())
        placeholder_ranges.setdefault(item.kind, []).append(PlaceholderRange(start, length, mask))
    return mm_input(token_ids, MultiModalKwargsItems(items), hashes, placeholder_ranges, cache_salt=salt)


def pooling_params(request: EngineRequest) -> PoolingParams:
    """Return vLLM's parameters of a request for a vector."""
    return PoolingParams(**translate_pooling(request))


def sampling_params(fields: ChoiceFields, *, streams: bool = False) -> SamplingParams:
    """Return vLLM's sampling parameters of a choice. ``streams``: each output has the tokens since the last one.

    Raises ValueError, with vLLM's reason.
    """
    grammar = StructuredOutputsParams(grammar=fields.lark) if fields.lark else None
    members = fields.sampling
    if fields.page_move is not None:
        members = members | {"extra_args": members.get("extra_args", {}) | {"kv_transfer_params": fields.page_move}}
    kind = RequestOutputKind.DELTA if streams else RequestOutputKind.CUMULATIVE
    return SamplingParams(**members, structured_outputs=grammar, detokenize=False, skip_clone=True, output_kind=kind)


def measure_weight_files(folder: Path) -> tuple[int, int]:
    """Return the number of parameters and of bytes in a folder's safetensors files, whose headers are JSON."""
    parameters = size = 0
    for file in folder.glob("*.safetensors"):
        size += file.stat().st_size
        with file.open("rb") as content:
            header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
        parameters += sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return parameters, size
