"""The engine's side: token ids in, token ids out, its model, statistics and settings.

The messages that carry these structs are in ``engine/messages.py``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from parley.types.request import Beam, Pooling, Sampling


class Thinking(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Reasoning that may have ``budget`` tokens between its marks, the texts ``opening`` and ``closing``.

    After so many, the tokens of ``close`` follow, which end it. ``inside``: the output begins in it; otherwise it may
    begin with it, by the mark.
    """

    opening: str
    closing: str
    inside: bool
    budget: int
    close: list[int]


class Work(msgspec.Struct, array_like=True, gc=False):
    """Token work for the engine. Choice k of n draws with seed + k, exactly as a single request would with that seed.

    With ``beam`` nothing is drawn: the choices are the n best that a search finds, given whole when it ends.
    ``logprobs`` / ``prompt_logprobs``: number of alternatives beside the chosen token, or -1 for none at all.
    ``stop_ids`` already contains the model's end tokens unless they are to be ignored. ``costs``: outputs tell what
    their tokens took. ``grammar``: the form that the output has to have, in llguidance's JSON; "" for none.
    ``thinking``: a limit to its reasoning.
    ``priority``: lower runs first. ``tenant``: on whose behalf; of equal priority, tenants get equal shares.
    ``adapter``: the name of one that is computed with; empty: none is.
    ``given``: for each choice, tokens of its output that were drawn elsewhere; empty: there are none. They count as
    drawn here, and outputs go on behind them. One that has come to its end with them is to be cancelled by the caller.
    ``begun``: elsewhere, where its prompt was counted. It is not here, nor is what of it is found in the prefix cache.
    ``lease``: the whole pages of the prompt, and of what choice 0 was given, are held from when they are computed until
    ``Release``, whatever becomes of the work, and ``Filled`` tells their numbers. It is to be released when there are
    outputs of all choices, if not before: others wait for that. Not without the prefix cache, and not of a search.
    ``group``: names works that are released together, when there are outputs of all; they are submitted together.
    ``prediction``: tokens of which its outputs may well be made: they are guesses (drafts) and change no result.
    ``named``: scores of its output list these tokens, in this order, in place of the likeliest. Not with ``beam``.
    """

    id: str
    token_ids: list[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    seed: int = 0
    n: int = 1
    min_tokens: int = 0
    stop_ids: list[int] = []
    logprobs: int = -1
    prompt_logprobs: int = -1
    salt: str = ""
    costs: bool = False
    pooling: Pooling | None = None
    grammar: str = ""
    thinking: Thinking | None = None
    priority: int = 0
    tenant: str = ""
    beam: Beam | None = None
    adapter: str = ""
    given: list[list[int]] = []
    begun: bool = False
    lease: bool = False
    group: str = ""
    prediction: list[int] = []
    named: list[int] = []


class Cost(msgspec.Struct, array_like=True, gc=False):
    """What one token took. Seconds count from the choice's last token, or from when it was queued.

    ``rows`` is how many choices had a row in the step that gave it. ``computed``: in steps that had a row of the
    choice, all of them where its prompt was read in chunks or again; ``waited``: the rest, outside of steps or in
    steps without it. Together they are the time between two tokens.
    ``tokens``: so many the step gave the choice, which share its time.
    """

    rows: int
    waited: float
    computed: float
    tokens: int = 1


class Score(msgspec.Struct, array_like=True, gc=False):
    """Log-probability (natural log, of the raw logits before any penalty or temperature) of one token.

    ``rank`` is 1 for the most likely token. ``top_ids``/``top`` list the most likely tokens, best first.
    """

    logprob: float
    rank: int
    top_ids: list[int] = []
    top: list[float] = []


Finish = Literal["stop", "length", "cancel", "error"]


class Output(msgspec.Struct, array_like=True, gc=False):
    """What one step gave one choice. The last output of a choice has ``finish``; exactly one does.

    ``stop_id`` is the stop token that ended it (it is the last of ``token_ids``); None with "stop" where its grammar
    has come to its end. ``prompt_scores`` arrives once, with the first output of choice 0; its first entry is None, for
    nothing precedes the first token. ``waited``: seconds in the engine's queue, told with the first output of a choice.
    ``preemptions``: how often it had to give up its place until now. ``vector``: float32, little endian; of a work with
    ``pooling``, with its only output.
    """

    id: str
    index: int
    token_ids: list[int] = []
    scores: list[Score] | None = None
    finish: Finish | None = None
    stop_id: int | None = None
    error: str | None = None
    cached_tokens: int = 0
    prompt_scores: list[Score | None] | None = None
    waited: float = 0.0
    preemptions: int = 0
    costs: list[Cost] | None = None
    vector: bytes | None = None


Batch = list[tuple[int, Output]]  # outputs that are rendered together, each with the number of its prompt


class Stats(msgspec.Struct, array_like=True, gc=False):
    """The engine's gauges and counters, sent with every batch of outputs, one for each step. Counters only grow."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache
    prefix_hits: int = 0  # of those, found
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    # of the last step, all 0 if these numbers come without one
    step_tokens: int = 0
    step_prompt: int = 0  # of those, tokens of prompts
    step_rows: int = 0
    step_seconds: float = 0.0
    # of speculation
    drafts: int = 0
    draft_tokens: int = 0  # of all drafts
    draft_accepted: list[int] = []  # how many were right as a draft's first token, as its second …
    # pages of ``blocks_used`` that are held for other instances
    pinned: int = 0  # which read them
    reserved: int = 0  # for what comes from them
    unstaged: int = 0  # pages that were not handed over because the memory for staging them was full, in all


class Region(msgspec.Struct, array_like=True, frozen=True):
    """Where one layer's pages lie in the memory of an ``Arena``: page p from ``offset + p * stride`` on, in bytes."""

    offset: int
    stride: int
    size: int


class Arena(msgspec.Struct, frozen=True):
    """The KV cache, or where its pages are staged, as memory that other processes of the same user can open, at
    ``/proc/{pid}/fd/{fd}``.

    Of ``pages`` pages each lies in all ``regions``. ``layout``: a fingerprint of all that decides what the bytes of a
    page are for given tokens; a page's bytes mean the same in every arena with the same one.
    """

    pid: int
    fd: int
    pages: int
    regions: list[Region]
    layout: str


class ModelInfo(msgspec.Struct, kw_only=True):
    """What the engine says of the model once it is loaded. Sizes in bytes, lengths in tokens.

    A model generates text, or makes vectors of so many ``dimensions`` (0: it does not), or both.
    """

    architecture: str
    dtype: str
    device: str
    parameters: int
    vocab_size: int
    max_model_len: int
    weights_bytes: int
    kv_bytes: int
    kv_blocks: int
    block_size: int
    lowered: bool  # runs on the fused decoder rather than through Transformers
    pack_cache: bool = False  # keep packed weights on disk
    quantization: str = "none"  # of the weights: int8, int4 or the method of the checkpoint
    kv_dtype: str = "auto"  # of keys and values: auto (as ``dtype``) or int8
    generates: bool = True
    dimensions: int = 0
    arena: Arena | None = None  # of its pages, where they are shared


class Settings(msgspec.Struct, kw_only=True):
    """All that an engine needs to start. Plain data, so that it can be sent to another process."""

    model: str  # a folder in Hugging Face format
    dtype: str = "bfloat16"
    device: str = "cpu"
    max_model_len: int | None = None
    kv_memory: int | None = None  # bytes; None: a share of what is free
    kv_share: float = 1.0  # which part of that share, where several models have one together
    set_aside: int = 0  # bytes of what is free that other models are going to need
    kv_dtype: str = "auto"  # what keys and values are stored as: auto (the model's dtype) or int8
    max_batch: int = 256  # sequences that run at once
    step_ms: float = 250.0  # CPU: how long a step with prefill in it may take
    step_tokens: int = 8192  # accelerator: how many tokens a step may have
    prefix_cache: bool = True
    threads: int | None = None
    lowering: bool = True
    tool_parser: str = "auto"  # the family whose calls are read, for the API process
    reasoning_parser: str = "auto"  # and that whose reasoning is
    pack_cache: bool = False  # keep packed weights on disk
    quantization: str = "none"  # what to make of plain weights: none, int8 or int4
    speculate: str = "none"  # who guesses tokens: none, ngram (what the text so far says) or draft=FOLDER (a model)
    speculate_tokens: int = 7  # how many at most
    adapters: dict[str, str] = {}  # folders of adapters, by name; they are read when they are wanted
    max_adapters: int = 8  # that are in memory at once
    max_rank: int = 256  # of an adapter
    shared: bool = False  # pages of the KV cache lie where other processes can open them
    staging: int | None = None  # bytes of host memory in which they do if not in the cache; None: see model.memory
    costs: str = ""  # file of a cost model, by which steps take their time and compute nothing

    @property
    def draft(self) -> str | None:
        """The folder of the model that guesses tokens, if one does."""
        return self.speculate.removeprefix("draft=") if self.speculate.startswith("draft=") else None
