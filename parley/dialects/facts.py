"""Facts about the server that a dialect can report: names, models, counts, endpoints. Neutral data, no API's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import msgspec

from parley.errors import Forbidden
from parley.metrics.request_totals import RequestTotals
from parley.types import CacheEventSettings, EngineStats, KeyOwner, ModelAbility, ModelInfo, Tenant


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model name that the server offers."""

    name: str
    created: int  # seconds since the epoch
    max_model_len: int | None  # None until the model is loaded
    root: str = ""  # the main name of its model, which is the base model if the name is an adapter's
    phase: str = "ready"  # loading, ready, restarting, draining, failed, closed; held, prepared: see ``PauseCommand``
    totals: RequestTotals = field(default_factory=RequestTotals)  # over all names of the model
    purpose: Literal["chat", "text", "vectors"] = "chat"  # as far as it is known; "chat" reads text as well
    adapter_folder: str = ""  # of the adapter, if the name is an adapter's
    info: ModelInfo | None = None  # the engine's description; None until the model is loaded
    abilities: frozenset[ModelAbility] = frozenset()  # by its chat template and tokenizer
    config: Mapping[str, Any] = field(default_factory=dict)  # its config.json
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # of generation_config.json, by its names
    tokenizer_size: int | None = None  # ids that its tokenizer knows; models are often padded to more; None: not loaded
    license: str = ""  # text of the license in its folder
    weight_format: Literal["safetensors", "gguf"] = "safetensors"  # of its files


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The current state of the main model.

    ``phase``: idle, loading, ready, restarting, draining, failed, closed; held or prepared after a ``PauseCommand`` of
    that kind. ``used_slots`` of ``slots`` are taken; at most ``max_batch`` of them run at once. ``mean_ttft`` and
    ``mean_tpot`` are seconds, averaged over the last thousand.
    """

    phase: str = "ready"
    slots: int = 1
    used_slots: int = 0
    max_batch: int = 1
    stats: EngineStats = field(default_factory=EngineStats)
    info: ModelInfo | None = None
    mean_ttft: float = 0.0
    mean_tpot: float = 0.0


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Everything that the server reports about itself."""

    version: str
    cards: Sequence[ModelCard]  # every name that it serves, the main one first
    ready: bool  # all its models accept requests
    status: ServerStatus = ServerStatus()
    cache_events: CacheEventSettings | None = None  # where the main model's engine publishes events of its prefix cache
    key_owners: Sequence[KeyOwner] | None = None  # of its API keys; None if it has no keys
    keeps_tables: bool = False  # the operator allows endpoints to record their requests
    root_path: str = ""  # the path below which a proxy shows the server


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A summary of the server: its main model, how many choices it generates or queues at once (``slots``), its
    version, and the model's dtype and device."""

    card: ModelCard
    slots: int
    version: str
    dtype: str = "bfloat16"
    device: str = "cpu"


class EndpointShare(msgspec.Struct, frozen=True):
    """One model of an endpoint: its ``name`` there, the server's ``model``, and its percentage of the requests."""

    name: str
    model: str
    percent: int


class EndpointLimit(msgspec.Struct, frozen=True, omit_defaults=True):
    """A limit on the use of an endpoint in each minute: of requests (``calls``) or of ``tokens``, prompts and answers
    together. It holds for each client by itself (``per_client``), or for all together."""

    calls: int | None = None
    tokens: int | None = None
    per_client: bool = False


GrantLevel = Literal["view", "query", "manage"]  # each includes those before it
GRANT_LEVELS: tuple[GrantLevel, ...] = get_args(GrantLevel)
PrincipalKind = Literal["user", "group", "service_principal"]
ALL_KEYS_GROUP, ADMIN_GROUP = "users", "admins"  # groups that exist everywhere


class EndpointGrant(msgspec.Struct, frozen=True):
    """Permissions on an endpoint. Users and service principals are the names of API keys."""

    principal: str
    kind: PrincipalKind
    level: GrantLevel

    def covers(self, client: Tenant) -> bool:
        """Whether the permission is granted to a client."""
        if self.kind == "group":
            return self.principal == ALL_KEYS_GROUP or self.principal in client.owner.groups
        return self.principal == client.owner.name


class EndpointTable(msgspec.Struct, frozen=True):
    """The table that records an endpoint's requests and answers: ``CATALOG.SCHEMA.PREFIX_payload``."""

    catalog: str
    schema: str
    prefix: str

    @property
    def folder_name(self) -> str:
        """The folder of the table's files."""
        return f"{self.catalog}.{self.schema}.{self.prefix}_payload"


class Endpoint(msgspec.Struct, frozen=True):
    """A model name whose requests are split among several models. ``about``: further JSON data of its API.

    ``table``: where its requests are recorded. ``grants``: who may use it; if there are none, every client. One with
    the name of a model has only the model's grants.
    """

    name: str
    shares: list[EndpointShare]
    about: dict[str, Any] = {}
    limits: list[EndpointLimit] = []
    grants: list[EndpointGrant] = []
    table: EndpointTable | None = None

    def client_level(self, client: Tenant) -> GrantLevel | None:
        """Return a client's permission level; None: it may do nothing."""
        if not self.grants or not client.id or client.is_admin:
            return "manage"
        return max((grant.level for grant in self.grants if grant.covers(client)), key=GRANT_LEVELS.index, default=None)

    def check_client(self, client: Tenant, level: GrantLevel) -> None:
        """Raise Forbidden unless a client may do this."""
        allowed = self.client_level(client)
        if allowed is None or GRANT_LEVELS.index(allowed) < GRANT_LEVELS.index(level):
            permission = level.capitalize()
            raise Forbidden(f"This API key does not have permission '{permission}' on Endpoint {self.name}.")
