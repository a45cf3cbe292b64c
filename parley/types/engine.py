"""The engine's side of the neutral model: requests and outputs in token ids, model info, statistics and settings.

The messages that carry these structs are in ``engine/messages.py``.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal, get_args

import msgspec

from parley.types.media import MediaItem, MediaKind
from parley.types.request import BeamOptions, PoolingOptions, PoolingTask, SamplingOptions


class ReasoningLimit(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A limit of ``budget`` tokens for reasoning, which stands between the texts ``opening_mark`` and ``closing_mark``.

    At the limit the engine appends ``closing_ids``, which end the reasoning. With ``starts_inside`` the output begins
    within reasoning; otherwise reasoning begins only if the output starts with the opening mark.
    """

    opening_mark: str
    closing_mark: str
    starts_inside: bool
    budget: int
    closing_ids: list[int]


BATCH_PRIORITY = 1 << 62  # the least priority of requests in a batch


class EngineRequest(msgspec.Struct, array_like=True, gc=False):
    """One prompt for the engine. Choice k of n draws with seed + k, exactly as a single request with that seed would.

    The order of the fields is that of the message to the engine process.
    """

    id: str
    token_ids: list[int]  # with placeholders at the places of ``media``
    max_tokens: int
    sampling: SamplingOptions = SamplingOptions()
    seed: int = 0
    n: int = 1
    min_tokens: int = 0
    stop_ids: list[int] = []  # with the model's end tokens, unless the request ignores them
    logprobs: int = -1  # alternatives besides the drawn token; -1: no log-probabilities
    prompt_logprobs: int = -1  # the same for the tokens of the prompt
    cache_salt: str = ""
    token_costs: bool = False  # report with each output how long its tokens took
    pooling: PoolingOptions | None = None
    grammar: str = ""  # constrains the output, in llguidance's JSON; "" means unconstrained
    reasoning_limit: ReasoningLimit | None = None  # caps the reasoning part of the output
    priority: int = 0  # lower values run first
    tenant: str = ""  # its owner; tenants of equal priority get equal shares
    tenant_priority: int = 0  # lower values are admitted first, of waiting requests of the same priority and tenant
    beam: BeamOptions | None = None  # search; the choices are the n best outputs, sent whole when the search ends
    adapter: str = ""  # name of the LoRA adapter; "" means the base model
    # For each choice, output tokens that another instance drew; empty if there are none. They count as drawn here, and
    # outputs start after them. The caller must cancel a choice that these tokens already finish.
    prior_tokens: list[list[int]] = []
    resumed: bool = False  # another instance counted this prompt and its prefix cache hits: they do not count again
    # Pin the whole pages of the prompt and of choice 0's prior tokens from the moment they are computed until
    # ``ReleaseLease``, even if the request ends early; ``PagesComputed`` reports their numbers. Release it at the
    # latest when all choices have outputs, because other requests wait for these pages. Needs the prefix cache;
    # excludes ``beam``.
    lease: bool = False
    release_group: str = ""  # requests of a group are submitted together, and released once all have outputs
    prediction: list[int] = []  # tokens that the output may contain: draft tokens, which never change a result
    logprob_ids: list[int] = []  # report their log-probabilities, in this order, not the likeliest's; excludes ``beam``
    media: list[MediaItem] = []  # the images, videos and clips in the prompt, in order
    # Where the tokens of a pair's second text begin, for models that tell the two apart; 0: they do not, or there is
    # one text.
    second_text_start: int = 0
    transfer: bytes = b""  # the ``EngineOutput.transfer`` of the instance that computed the prompt, if any


class KVPrefix(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The tokens of a prefix, and all else that determines their keys and values.

    ``media``: the items among the tokens; ``adapter``: name of the LoRA adapter, and ``adapter_digest``: the required
    digest of its content (hexadecimal), empty for any.
    """

    token_ids: list[int]
    cache_salt: str = ""
    adapter: str = ""
    adapter_digest: str = ""
    media: list[MediaItem] = []


class TokenCost(msgspec.Struct, array_like=True, gc=False):
    """How long one token took. Seconds count from the choice's previous token, or from queueing for its first token.

    * ``batch_rows``: number of choices with a row in the step that produced the token.
    * ``compute_seconds``: time in steps with a row of this choice, including every step of a chunked or repeated
      prefill.
    * ``wait_seconds``: the rest, between steps or in steps without this choice.
    * ``tokens``: number of tokens that the step gave this choice; they share its time.

    ``compute_seconds`` and ``wait_seconds`` add up to the time between two tokens.
    """

    batch_rows: int
    wait_seconds: float
    compute_seconds: float
    tokens: int = 1


class TokenScore(msgspec.Struct, array_like=True, gc=False):
    """Log-probability of one token: natural log of the raw logits, before any penalty or temperature.

    ``rank`` is 1 for the most likely token. ``top_ids`` and ``top_logprobs`` list the most likely tokens, best first.
    """

    logprob: float
    rank: int
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class PrefillChunk(msgspec.Struct, array_like=True, gc=False):
    """A step that computed a part of a prompt: ``tokens`` of it.

    ``start_seconds``: from the arrival of the request in the queue to the start of the step. ``seconds``: its duration.
    """

    tokens: int
    start_seconds: float
    seconds: float


EngineFinishReason = Literal["stop", "length", "cancel", "error"]


class EngineOutput(msgspec.Struct, array_like=True, gc=False):
    """The output of one step for one choice. Exactly one output of a choice has ``finish_reason``: its last."""

    id: str
    index: int
    token_ids: list[int] = []
    scores: list[TokenScore] | None = None
    finish_reason: EngineFinishReason | None = None
    # The stop token that ended the choice, also the last of ``token_ids``; None with "stop": its grammar was complete.
    stop_id: int | None = None
    error: str | None = None
    cached_tokens: int = 0
    # Once, with the first output of choice 0; the first entry is None, as nothing precedes the first token.
    prompt_scores: list[TokenScore | None] | None = None
    queue_seconds: float = 0.0  # time in the engine's queue, with a choice's first output
    preemptions: int = 0  # so far
    token_costs: list[TokenCost] | None = None
    # In the only output of a request with ``pooling``: the embedding, the embeddings of all tokens, or the scores of
    # all classes, as float32, little endian.
    vector: bytes | None = None
    prefill_chunks: list[PrefillChunk] | None = None  # steps of the prompt, if several, with a choice's first output
    # How the engine of another instance gets the KV pages of this choice, for engines that move pages themselves; only
    # the two engines understand it. It comes with the last output of choice 0 of a request with a lease.
    transfer: bytes = b""


OutputBatch = list[tuple[int, EngineOutput]]  # outputs that are rendered together, each with its prompt's number
PING_NUMBER = -1  # in a batch: no output, but a ping that was written into the stream


class EngineStats(msgspec.Struct, array_like=True, gc=False):
    """The engine's gauges and counters. Sent with every batch of outputs, once per step. Counters only grow."""

    running: int = 0
    waiting: int = 0
    used_pages: int = 0  # of the KV cache
    total_pages: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache
    prefix_hits: int = 0  # tokens of those that were found
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    # the last step; all 0 if these numbers do not belong to a step
    step_tokens: int = 0
    step_prompt_tokens: int = 0  # prompt tokens among those
    step_rows: int = 0
    step_seconds: float = 0.0
    # speculation
    drafts: int = 0
    draft_tokens: int = 0  # in all drafts
    draft_accepted: list[int] = []  # number of accepted tokens by position in the draft
    # pages among ``used_pages`` that are held for other instances
    pinned_pages: int = 0  # pages that other instances read
    reserved_pages: int = 0  # pages that other instances will fill
    unstaged_pages: int = 0  # counter: pages not handed over because the staging memory was full
    # media
    media_cache_queries: int = 0  # items whose embeddings were looked up
    media_cache_hits: int = 0  # items of those whose embeddings were cached, or on their way for another request
    media_items: dict[MediaKind, int] = {}  # items in prompts
    encode_seconds: float = 0.0  # time spent on encoding


class LayerRegion(msgspec.Struct, array_like=True, frozen=True):
    """One layer's pages in the memory of an ``Arena``: page p begins at ``offset + p * stride``. Values in bytes."""

    offset: int
    stride: int
    size: int


class Arena(msgspec.Struct, frozen=True):
    """The KV cache, or the staging copy of its pages, as memory that the server of this engine opens at
    ``/proc/{pid}/fd/{fd}``.

    Each of the ``pages`` pages has a part in every one of ``regions``. ``layout`` is a fingerprint of everything that
    determines the bytes of a page for given tokens: arenas with equal layouts have interchangeable pages. An arena
    without regions is no memory: the engine moves the pages itself, or they have no content. The numbers after those of
    pages belong to ``states``: snapshots of states (``core.pages.state_slots``), which have a part in every one of
    ``state_regions`` and travel as pages do.
    """

    pid: int
    fd: int
    pages: int
    regions: list[LayerRegion]
    layout: str
    states: int = 0
    state_regions: list[LayerRegion] = []


# Features that engines may lack: the members of ``SamplingOptions`` and ``EngineRequest`` that not every engine can
# follow (``named_logprobs``: of ``logprob_ids``; ``allowed_tokens``, ``banned_tokens``: ``allowed``, ``banned``;
# ``beam_edits``: a grammar or an edit of the logits in a beam search; ``limited_grammar``: a grammar together with
# ``allowed``, which may exclude all tokens that the grammar allows), and ``page_transfer``: KV pages are exchanged
# with other instances by ``engine.page_transfer``.
EngineFeature = Literal[
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "penalty_window",
    "logit_bias",
    "allowed_tokens",
    "banned_tokens",
    "no_repeat_ngram",
    "watermark",
    "min_tokens",
    "beam_search",
    "beam_edits",
    "logprobs",
    "named_logprobs",
    "prompt_logprobs",
    "grammar",
    "limited_grammar",
    "thinking_budget",
    "adapters",
    "cache_salt",
    "page_transfer",
]
ALL_ENGINE_FEATURES: frozenset[EngineFeature] = frozenset(get_args(EngineFeature))
# Abilities that a model's chat template and tokenizer give it: conversations, tool calls, reasoning, filling in the
# middle, documents next to a conversation, safety modes.
ModelAbility = Literal["chat", "tools", "thinking", "insert", "documents", "safety_mode"]
ALL_MODEL_ABILITIES: frozenset[ModelAbility] = frozenset(get_args(ModelAbility))
# The tasks of models: generate text, transcribe speech, make vectors of texts (dense or sparse) or of their tokens,
# score pairs of texts, classify texts or their tokens.
ModelTask = Literal[
    "generate", "transcribe", "embed", "embed_sparse", "token_embed", "score", "classify", "token_classify"
]
ALL_MODEL_TASKS: frozenset[ModelTask] = frozenset(get_args(ModelTask))
EngineBound = Literal[
    "temperature",
    "top_k",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",  # number of tokens
    "allowed_tokens",  # number of tokens
    "banned_tokens",  # number of token sequences
    "stop_ids",  # number of ids
    "max_tokens",
    "n",  # choices per prompt, with those that a ranking drops
    "beam_width",
    "logprobs",  # alternatives per token; -1: the whole vocabulary
    "named_logprobs",  # number of ids
    "prompt_logprobs",  # as for logprobs
]


class ModelInfo(msgspec.Struct, kw_only=True, frozen=True, dict=True):
    """The engine's description of the loaded model. Sizes in bytes, lengths in tokens.

    A model generates text, or computes vectors with ``dimensions`` numbers (0: no vectors), or both. A classifier
    computes scores of its ``labels`` instead, with ``token_classes`` for each token and not for the text.
    ``token_vectors``: it also computes vectors of single tokens. ``bounds``:
    the least and the most that the engine accepts, infinite for no limit, where that is less than the APIs allow. A
    request outside of ``features`` or ``bounds`` is refused before it reaches the engine
    (``serving/engine_features.py``).
    """

    architecture: str
    dtype: str
    device: str
    parameters: int
    vocab_size: int
    max_model_len: int
    weights_bytes: int
    kv_bytes: int
    kv_pages: int  # pages of the KV cache
    page_tokens: int  # tokens that a page holds
    fused: bool  # runs on the fused decoder rather than through Transformers
    state_bytes: int = 0  # of all states, for models with layers that keep one
    pack_cache: bool = False  # packed weights are kept on disk
    quantization: str = "none"  # of the weights: int8, int4 or the checkpoint's method
    kv_dtype: str = "auto"  # of keys and values: auto (same as ``dtype``) or int8
    kernels: str = ""  # the kernels in use: a level of the compiled ones, "triton" or "torch"; "": unknown
    generates: bool = True
    dimensions: int = 0
    pooling: str = ""  # the pooling of token states to a vector, as sentence-transformers names it
    token_vectors: bool = False
    token_dimensions: int = 0  # numbers in the vector of a token; 0: ``dimensions``
    labels: list[str] = []
    token_classes: bool = False
    arena: Arena | None = None  # set if the KV pages are shared with other processes
    engine: str = "parley"  # name and version of the engine, for error messages
    features: frozenset[EngineFeature] = ALL_ENGINE_FEATURES
    bounds: dict[EngineBound, tuple[float, float]] = {}
    media_kinds: frozenset[MediaKind] = frozenset()  # the kinds of media that it reads besides text
    media_counts: dict[MediaKind, int] = {}  # the most items of these kinds in a prompt, where the engine has a limit
    adapters: dict[str, str] = {}  # adapters that the engine has without loading them on request: their sources by name

    @cached_property
    def pooling_tasks(self) -> frozenset[PoolingTask]:
        """The tasks that the model performs instead of generating text."""
        offered: dict[PoolingTask, bool] = {
            "embed": self.dimensions > 0,
            "token_embed": self.token_vectors,
            "embed_sparse": self.pooling == "splade",
            "classify": bool(self.labels) and not self.token_classes,
            "token_classify": self.token_classes,
        }
        return frozenset(task for task, is_offered in offered.items() if is_offered)

    @cached_property
    def tasks(self) -> frozenset[ModelTask]:
        """The tasks that it performs. Its vectors of texts are either dense or sparse."""
        is_sparse = self.pooling == "splade"
        offered: dict[ModelTask, bool] = {
            "generate": self.generates,
            "transcribe": self.generates and "audio" in self.media_kinds,
            "embed": self.dimensions > 0 and not is_sparse,
            "embed_sparse": is_sparse,
            "token_embed": self.token_vectors,
            "score": len(self.labels) == 1 and not self.token_classes,
            "classify": len(self.labels) > 1 and not self.token_classes,
            "token_classify": self.token_classes,
        }
        return frozenset(task for task, is_offered in offered.items() if is_offered)


class CacheEventSettings(msgspec.Struct, frozen=True):
    """Where an engine publishes the events of its prefix cache, over ZeroMQ.

    * ``endpoint``: the engine binds an address that names all interfaces ("*" or "::") or a local one ("ipc://",
      "inproc://"), and connects to any other.
    * ``replay_endpoint``: where it answers requests for the last ``buffer_steps`` batches; "" for nowhere.
    * ``form``: how an event is encoded, as a MessagePack map or array.
    * ``high_water_mark``: batches that may wait for a slow subscriber, which misses further ones.
    """

    endpoint: str
    replay_endpoint: str = ""
    topic: str = ""
    form: Literal["map", "array"] = "map"
    buffer_steps: int = 10_000
    high_water_mark: int = 100_000


class ModelOverrides(msgspec.Struct, frozen=True):
    """The parts of a model that are not read from its own folder; empty: none.

    * ``revision``: branch, tag or commit on the hub.
    * ``tokenizer``: a folder or hub name whose tokenizer, with its chat template, is used.
    * ``chat_template``: a Jinja file, or the template itself.
    * ``hf_overrides``: members of config.json that replace others there; objects are merged.
    * ``mmproj``: the file with the encoder of a GGUF file, or "none": no such file; empty: the file next to it.
    """

    revision: str = ""
    tokenizer: str = ""
    chat_template: str = ""
    hf_overrides: dict[str, Any] = {}
    mmproj: str = ""


class EngineSettings(msgspec.Struct, kw_only=True):
    """The settings that every kind of engine has. Plain data, so that they can be sent to another process."""

    model: str  # folder in Hugging Face format
    overrides: ModelOverrides = ModelOverrides()  # applied to the folder before anything else reads it
    dtype: str = "bfloat16"
    device: str = "cpu"
    max_model_len: int | None = None
    max_batch: int = 256  # sequences that run at once
    prefix_cache: bool = True
    threads: int | None = None
    # memory
    kv_memory: int | None = None  # bytes; None: a share of the free memory
    kv_share: float = 1.0  # fraction of that share, if several models divide it
    set_aside: int = 0  # bytes of free memory that other models will need
    cache_events: CacheEventSettings | None = None  # where it publishes the events of its prefix cache
    # LoRA adapters
    adapters: dict[str, str] = {}  # folders by name; loaded on first use
    max_adapters: int = 8  # adapters in memory at once
    max_rank: int = 256  # highest rank of an adapter
    # read by the API process
    engine_timeout: float = 8.0  # seconds without a sign of life until the engine counts as hung; 0: no limit
    tool_parser: str = "auto"  # model family whose tool calls it parses
    reasoning_parser: str = "auto"  # model family whose reasoning marks it parses
    trust_marks: bool = False  # special tokens that clients write in conversations stay special tokens

    @property
    def weight_folders(self) -> tuple[str, ...]:
        """The folders whose weights the engine loads."""
        return (self.model,)


class ParleySettings(EngineSettings, kw_only=True):
    """The settings of parley's own engine."""

    kv_dtype: str = "auto"  # stored type of keys and values: auto (the model's dtype) or int8
    quantization: str = "none"  # applied to plain weights: none, int8 or int4
    lowering: bool = True  # run models of known families on the fused decoder
    pack_cache: bool = False  # keep packed weights on disk
    step_ms: float = 250.0  # CPU: time limit of a step with prefill, in milliseconds
    step_tokens: int = 8192  # accelerator: token limit of a step
    speculate: str = "none"  # source of draft tokens: none, ngram (earlier text) or draft=MODEL
    speculate_tokens: int = 15  # most draft tokens at a time
    state_cache: int | None = None  # bytes for states besides those of running sequences; None: half of all states
    shared: bool = False  # place the KV cache pages where other processes can open them
    staging: int | None = None  # bytes of host memory for staged pages; None: a share of the free memory
    media_cache: int = 256 << 20  # bytes of embeddings of media items that are kept
    media_eager: bool = False  # load the encoders of media with the model, not with the first item
    costs: str = ""  # file of a cost model: the engine computes nothing, and steps take the time that it predicts

    @property
    def draft_model(self) -> str | None:
        """The draft model, or None: as the operator names it, and its folder once that is found."""
        return self.speculate.removeprefix("draft=") if self.speculate.startswith("draft=") else None

    @property
    def weight_folders(self) -> tuple[str, ...]:
        """The folders whose weights the engine loads."""
        return (self.model,) if self.draft_model is None else (self.model, self.draft_model)


class VLLMSettings(EngineSettings, kw_only=True):
    """The settings of vLLM as an engine. ``device`` has no effect: vLLM finds its devices itself."""

    python: str = ""  # path of the Python that vLLM is installed for; empty: this one
    arguments: list[str] = []  # flags for vLLM's own parser
    loads_adapters: bool = False  # requests may use LoRA adapters; ``max_rank`` 0: the highest rank in ``adapters``
    exact: bool = False  # the bits of an answer do not depend on other requests
    # The marks of media in a prompt, which vLLM's processor replaces: the id of a token, or a text.
    media_marks: dict[MediaKind, int | str] = {}
    transfer_host: str = ""  # the address where other instances reach it for KV pages; empty: it exchanges none


class AttachedSettings(EngineSettings, kw_only=True):
    """The settings of a vLLM server that runs already. ``model``: a folder with its tokenizer and config.json.

    ``max_batch``: the most choices that are sent to the server at once.
    """

    url: str  # http:// or https://, host, port and perhaps a path before those of its routes
    key: str = ""  # its API key
    exchanges_pages: bool = False  # it exchanges KV pages with other servers through its connector

    @property
    def weight_folders(self) -> tuple[str, ...]:
        """No folders: the server loads the weights."""
        return ()
