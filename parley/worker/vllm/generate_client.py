"""Uses vLLM through its public interface, for versions whose inner interface has changed: each choice is a call of
``AsyncLLM.generate``.

This costs two to four times the processor time, reports no use of the KV cache, and takes no banned token sequences.
"""

from __future__ import annotations

import asyncio
import contextlib
from time import monotonic
from typing import Any

import msgspec
from vllm.lora.request import LoRARequest

from parley.heartbeat import BEAT_SECONDS
from parley.types import EngineRequest, ModelInfo, VLLMSettings
from parley.worker.vllm.outputs.choice_output import ChoiceOutput, VLLMStep, note_start
from parley.worker.vllm.outputs.generated_output import read_generated, read_prompt_scores
from parley.worker.vllm.requests.continuation import Continuation
from parley.worker.vllm.requests.sampling_fields import translate_choice
from parley.worker.vllm.vllm_client import VLLMClient, engine_prompt, pooling_params, sampling_params


class GenerateClient(VLLMClient):
    """A running vLLM, used through its public interface only."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._steps: asyncio.Queue[VLLMStep] = asyncio.Queue()
        self._calls: dict[str, asyncio.Task[None]] = {}

    @property
    def preparing_count(self) -> int:
        """Return 0: the public interface does not show it."""
        return 0

    async def next_step(self) -> Any:
        """Return the next output of a choice, as a step. Raises an exception if vLLM's engine has died."""
        while not self._llm.errored:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_SECONDS):
                    return await self._steps.get()
        raise self._llm.dead_error

    def add_choice(self, choice_id: str, request: EngineRequest, index: int, continuation: Continuation) -> None:
        """Begin a choice."""
        self._preparing.add(choice_id)
        task = asyncio.create_task(
            self._compute_choice(choice_id, request, index, continuation, self._adapters.get(request.adapter))
        )
        self._calls[choice_id] = task
        task.add_done_callback(lambda _: self._end_call(choice_id, continuation))

    def cancel_choices(self, choice_ids: list[str]) -> None:
        """End calls; vLLM then aborts their requests."""
        for choice_id in choice_ids:
            if (task := self._calls.get(choice_id)) is not None:
                task.cancel()

    def describe_model(self, settings: VLLMSettings, version: str) -> ModelInfo:
        """Describe the model to the API process."""
        info = super().describe_model(settings, version)
        return msgspec.structs.replace(info, features=info.features - {"banned_tokens"})

    def _end_call(self, choice_id: str, continuation: Continuation) -> None:
        del self._calls[choice_id]
        if choice_id in self._preparing:  # it was cancelled before it began
            self._preparing.discard(choice_id)
            if continuation.page_move is not None:
                self.reject_pages(continuation.page_move)

    async def _compute_choice(
        self,
        choice_id: str,
        request: EngineRequest,
        index: int,
        continuation: Continuation,
        adapter: LoRARequest | None,
    ) -> None:
        """Pass on the outputs of one choice."""
        self._preparing.discard(choice_id)
        try:
            if request.pooling is None:
                await self._generate_choice(choice_id, request, index, continuation, adapter)
            else:
                await self._encode_choice(choice_id, request, adapter)
        except Exception as error:  # vLLM does not document what it raises
            if not self._llm.errored:  # else all choices end with the engine
                self._reject(choice_id, error)

    async def _generate_choice(
        self,
        choice_id: str,
        request: EngineRequest,
        index: int,
        continuation: Continuation,
        adapter: LoRARequest | None,
    ) -> None:
        fields, is_first, sent_at = translate_choice(request, index, continuation), True, monotonic()
        call = self._llm.generate(
            engine_prompt(fields.token_ids, request),
            sampling_params(fields, streams=True),
            choice_id,
            lora_request=adapter,
            priority=request.priority,
        )
        async for output in call:
            choice_output = read_generated(choice_id, request, output)
            if is_first:
                note_start(choice_output, request, sent_at, output.num_cached_tokens or 0)
                choice_output.new_prompt_logprobs_tensors = read_prompt_scores(request, output)
            is_first = False
            self._pass_on(choice_output)

    async def _encode_choice(self, choice_id: str, request: EngineRequest, adapter: LoRARequest | None) -> None:
        prompt, sent_at = engine_prompt(request.token_ids, request), monotonic()
        async for output in self._llm.encode(
            prompt, pooling_params(request), choice_id, lora_request=adapter, priority=request.priority
        ):
            choice_output = ChoiceOutput(choice_id, pooling_output=output.outputs.data)
            note_start(choice_output, request, sent_at)
            self._pass_on(choice_output)

    def _pass_on(self, output: ChoiceOutput) -> None:
        self._steps.put_nowait(VLLMStep([output], monotonic()))
