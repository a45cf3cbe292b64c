"""A stand-in for vLLM that records what the host's loop gives to it, and lets a test answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from parley.engine.messages import StepOutputs
from parley.types import EngineOutput, EngineRequest
from parley.worker.vllm.host_loop import HostLoop
from parley.worker.vllm.requests.continuation import Continuation


class RecordedClient:
    """Records what the loop gives to vLLM, and lets a test answer for it."""

    def __init__(self, max_choices: int = 2, *, can_force: bool = False):
        self.max_choices = max_choices
        self.kv_pages = 10
        self.end_ids = frozenset({2})
        self.can_force = can_force
        self.lease_seconds = 30.0
        self.computing: dict[str, tuple[EngineRequest, int]] = {}
        self.ways: list[Continuation] = []  # of all choices so far
        self.cancelled: list[str] = []
        self.rejected_moves: list[dict[str, Any]] = []

    def knows_adapter(self, name: str) -> bool:
        return name == "known"

    def add_choice(self, choice_id: str, request: EngineRequest, index: int, way: Continuation) -> None:
        self.computing[choice_id] = request, index
        self.ways.append(way)

    def cancel_choices(self, choice_ids: list[str]) -> None:
        self.cancelled += choice_ids
        for choice_id in choice_ids:
            del self.computing[choice_id]

    def reject_pages(self, page_move: dict[str, Any]) -> None:
        self.rejected_moves.append(page_move)

    @property
    def names(self) -> list[tuple[str, int]]:
        return [(request.id, index) for request, index in self.computing.values()]


class Harness:
    """A loop with a recorded client."""

    def __init__(self, max_choices: int = 2, *, can_force: bool = False):
        self.client = RecordedClient(max_choices, can_force=can_force)
        self.sent: list[StepOutputs] = []
        self.loop = HostLoop(self.client, self.sent.append)
        self.time = 100.0

    def add(self, name: str, **members: Any) -> None:
        self.loop.add_request(EngineRequest(**({"id": name, "token_ids": [5, 6], "max_tokens": 4} | members)))

    def step(self, *names: str, finish: int | None = None, token: int = 7) -> list[EngineOutput]:
        """Give each choice of these requests a token."""
        outputs = []
        for choice_id, (request, _) in list(self.client.computing.items()):
            if request.id in names:
                stats = SimpleNamespace(num_cached_tokens=0, num_computed_tokens=2)
                outputs.append(raw_output(choice_id, finish, stats, token))
                if finish is not None:
                    del self.client.computing[choice_id]
        self.time += 1
        caching = SimpleNamespace(queries=2, hits=1)
        scheduler = SimpleNamespace(
            num_waiting_reqs=0, kv_cache_usage=0.5, prefix_cache_stats=caching, spec_decoding_stats=None
        )
        step = SimpleNamespace(engine_index=0, outputs=outputs, scheduler_stats=scheduler, timestamp=self.time)
        self.loop.handle_step(step)
        return self.sent[-1].outputs


def raw_output(choice_id: str, finish: int | None, stats: Any, token: int = 7) -> SimpleNamespace:
    """Returns an output of vLLM with one token."""
    names = ("new_logprobs", "new_prompt_logprobs_tensors", "pooling_output", "events")
    return SimpleNamespace(
        **dict.fromkeys(names),
        request_id=choice_id,
        new_token_ids=[token],
        finish_reason=finish,
        prefill_stats=stats,
        kv_transfer_params={"remote_request_id": choice_id} if finish is not None else None,
    )
