"""The facts that a dialect needs, besides a request's body, to read it and to write its answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from parley.dialects.reasoning_seal import RANDOM_SEAL, ReasoningSeal
from parley.dialects.records import NO_RECORDS, TenantRecords
from parley.types import (
    ALL_ENGINE_FEATURES,
    ALL_MODEL_ABILITIES,
    NO_TENANT,
    EngineFeature,
    MediaKind,
    ModelAbility,
    PoolingTask,
    Tenant,
)


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """The operator's choices for OpenAI's and vLLM's APIs, made by flags with vLLM's names.

    * ``max_logprobs``: the largest number of alternatives per token; -1: no limit; None: as each API has it. Without a
      limit, or with one of at least the vocabulary's size, requests may ask for the whole vocabulary.
    * ``force_include_usage``: every chunk of every stream has its usage.
    * ``return_tokens_as_token_ids``: log-probabilities name tokens by their ids unless a request says otherwise.
    * ``per_request_metrics``: answers with one choice say where their time went.
    * ``enable_mm_embeds``: requests may have embeddings of media that the client computed.
    * ``trust_request_mm_kwargs``: requests may set options for loading and processing media, which decide how much work
      they are.
    """

    max_logprobs: int | None = None
    force_include_usage: bool = False
    return_tokens_as_token_ids: bool = False
    per_request_metrics: bool = False
    enable_mm_embeds: bool = False
    trust_request_mm_kwargs: bool = False


DEFAULT_API_OPTIONS = ApiOptions()


@dataclass(slots=True)  # only named_bytes ever changes; besides, a frozen one takes nine times as long to make
class RequestContext:
    """The facts that a dialect needs, besides the body, to read a request and write its answer."""

    # the answer
    unique_id: str  # without a prefix
    created: int  # seconds since the epoch
    fingerprint: str  # of the model
    _: KW_ONLY

    # the requested model; before it is loaded, its numbers are 0
    model_names: Collection[str] = ()
    adapters: Collection[str] = ()  # their names
    context_length: int = 0  # tokens
    vocabulary_size: int = 0  # tokens
    device: str = "cpu"  # its kind
    cached_tokens: int = 0  # tokens in the KV cache now
    cache_capacity: int = 0  # tokens that the KV cache can hold
    page_tokens: int = 0  # tokens in a page of the prefix cache; 0 without one
    waiting_sequences: int = 0
    generation_defaults: Mapping[str, float] = field(default_factory=dict)  # of generation_config.json, by its names
    generates: bool = True  # False: it computes numbers and no text
    pooling_tasks: frozenset[PoolingTask] = frozenset({"embed"})
    labels: Sequence[str] = ()  # names of its classes, for a classifier
    media_limits: Mapping[MediaKind, int] = field(default_factory=dict)  # items in a request, of kinds that it reads
    media_family: str = ""  # its model type, if it reads media
    abilities: frozenset[ModelAbility] = ALL_MODEL_ABILITIES  # by its chat template and tokenizer
    engine_features: frozenset[EngineFeature] = ALL_ENGINE_FEATURES

    # the server
    api_options: ApiOptions = DEFAULT_API_OPTIONS
    reasoning_seal: ReasoningSeal = RANDOM_SEAL  # of reasoning that clients send back
    records: TenantRecords = NO_RECORDS

    # the HTTP request
    path_parts: Mapping[str, str] = field(default_factory=dict)  # decoded, by the names in the route
    headers: Mapping[bytes, bytes] = field(default_factory=dict)  # by lower-case names
    query_string: bytes = b""
    tenant: str = ""  # its id
    client: Tenant = NO_TENANT  # set only for routes that manage endpoints
    named_bytes: int = 0  # of the stored files that the request has named so far, while it is read

    def seal_reasoning(self, data: bytes) -> str:
        """Return reasoning as a text that the tenant can send back."""
        return self.reasoning_seal.seal(self.tenant, data)

    def open_reasoning(self, text: str) -> bytes:
        """Return reasoning that was sealed for the tenant. Raises ValueError for any other text."""
        return self.reasoning_seal.open(self.tenant, text)
