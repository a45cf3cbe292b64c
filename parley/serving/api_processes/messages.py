"""Messages between the main process and an API process, as frames on a socket pair that the API process inherits."""

from __future__ import annotations

import msgspec

from parley.engine.messages import CancelRequest, FinishBeamSearch, SubmitRequest
from parley.metrics.http_requests import HttpRequestDelta
from parley.metrics.model_metrics import ModelMetricsDelta
from parley.serving.api_processes.plan import ApiProcessPlan, ModelFacts, OptionValues
from parley.serving.api_processes.relayed_error import RelayedError
from parley.serving.open_requests import RequestProgress
from parley.types import EngineOutput, EngineStats, KeyLimitStates, Tenant


class ProcessReady(msgspec.Struct, tag="process_ready", array_like=True):
    """The API process has loaded everything. It accepts connections as soon as it has the current options."""


class OpenAccount(msgspec.Struct, tag="open_account", array_like=True):
    """Count request ``id`` for the limits of its key. ``key_name``: of the key in logs. Answered."""

    id: int
    tenant: Tenant
    key_name: str


class AdmitRequest(msgspec.Struct, tag="admit", array_like=True):
    """Admit request ``id``: take a slot for each of its ``choices``, and list it as open. Answered.

    ``model``: the model's main name; ``answer_name``: the name in its answer. ``arrived_at``: by ``time.perf_counter``.
    """

    id: int
    tenant: Tenant
    key_name: str
    model: str
    answer_name: str
    adapter: str | None
    choices: int
    exclusive_id: str
    cancel_ids: tuple[str, ...]
    api: str
    arrived_at: float


class ReserveTokens(msgspec.Struct, tag="reserve_tokens", array_like=True):
    """Reserve the tokens of request ``id``, as ``RequestAccount.reserve_tokens`` does. Answered."""

    id: int
    prompt_tokens: int
    output_tokens: int | None


class EndRequest(msgspec.Struct, tag="end", array_like=True):
    """Request ``id`` has ended: give back its slots, and charge its key. ``was_submitted``: the engine had it."""

    id: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    was_submitted: bool = False


class WithdrawRequest(msgspec.Struct, tag="withdraw", array_like=True):
    """A request that was counted for the limits of a key is passed to the main process, which counts it itself."""

    tenant: Tenant


class EngineMessage(msgspec.Struct, tag="engine_message", array_like=True):
    """A message for the engine of the model with this main name."""

    model: str
    message: SubmitRequest | CancelRequest | FinishBeamSearch


class MetricsSnapshot(msgspec.Struct, tag="snapshot", array_like=True):
    """The metrics of an API process since the last snapshot, those of models by their main names. ``id``: of the
    question; -1 without one. ``responses``: by status; ``progress``: how far its open requests are, by id."""

    id: int
    models: dict[str, ModelMetricsDelta]
    requests: HttpRequestDelta
    responses: dict[str, float]
    progress: dict[int, RequestProgress]


FromApiProcess = (
    ProcessReady
    | OpenAccount
    | AdmitRequest
    | ReserveTokens
    | EndRequest
    | WithdrawRequest
    | EngineMessage
    | MetricsSnapshot
)


class UsePlan(msgspec.Struct, tag="plan", array_like=True):
    """Begin to serve. The first message."""

    plan: ApiProcessPlan


class UseOptions(msgspec.Struct, tag="options", array_like=True):
    """Use other options from now on, and read the certificates again."""

    options: OptionValues


class UseFacts(msgspec.Struct, tag="facts", array_like=True):
    """New facts about the models, by their main names."""

    facts: dict[str, ModelFacts]


class AdmissionGranted(msgspec.Struct, tag="granted", array_like=True):
    """Allows the last message about request ``id``. ``states``: the limits of its key, if it has any."""

    id: int
    states: KeyLimitStates | None = None


class AdmissionRefused(msgspec.Struct, tag="refused", array_like=True):
    """Refuses the last message about request ``id``. ``states``: as in ``AdmissionGranted``."""

    id: int
    error: RelayedError
    states: KeyLimitStates | None = None


class RelayedOutputs(msgspec.Struct, tag="outputs", array_like=True):
    """Outputs of a model's engine for requests of this process, and the engine's statistics. ``is_ready``: the engine
    serves; otherwise errors among the outputs say that it has died."""

    model: str
    is_ready: bool
    outputs: list[EngineOutput]
    stats: EngineStats


class CancelOpen(msgspec.Struct, tag="cancel_open", array_like=True):
    """Cancel request ``id`` by one of its cancel ids."""

    id: int
    cancel_id: str


class FailOpen(msgspec.Struct, tag="fail_open", array_like=True):
    """Fail request ``id``, because the server shuts down."""

    id: int
    error: RelayedError


class TakeMetricsSnapshot(msgspec.Struct, tag="take_snapshot", array_like=True):
    """Send a MetricsSnapshot with this ``id``."""

    id: int


class MainBeat(msgspec.Struct, tag="beat", array_like=True):
    """A sign of life of the main process."""


class AnnounceShutdown(msgspec.Struct, tag="announce_shutdown", array_like=True):
    """Ask clients to send further requests elsewhere: the server will stop soon."""


class EndProcess(msgspec.Struct, tag="end_process", array_like=True):
    """Finish the open answers, and end."""


ToApiProcess = (
    UsePlan
    | UseOptions
    | UseFacts
    | AdmissionGranted
    | AdmissionRefused
    | RelayedOutputs
    | CancelOpen
    | FailOpen
    | TakeMetricsSnapshot
    | MainBeat
    | AnnounceShutdown
    | EndProcess
)
