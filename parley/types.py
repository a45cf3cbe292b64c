"""The neutral model: what every API is translated into, and what the engine is asked to do.

Read this file first. It has three parts, in the order in which a request meets them:

1. ``Request``: what a dialect makes of a body. Text, chat or token ids, nothing computed yet.
2. ``Work`` and ``Output``: the engine's side. Token ids in, token ids out; nothing of HTTP or text. The messages that
   carry them are in ``engine/messages.py``.
3. ``Event``: what the server makes of outputs (text, stop strings, usage) and a dialect renders into bytes.

Everything here is data. The file imports neither torch nor any part of parley, and knows no API's field names.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

# --------------------------------------------------------------------------------------------------------------
# 1. Request: made by a dialect
# --------------------------------------------------------------------------------------------------------------


class Text(msgspec.Struct, frozen=True):
    """A plain prompt. ``special``: let the tokenizer add its own marks (such as a leading BOS).

    ``turn``: it is what a user says, in the model's chat template if it has one.
    """

    text: str
    special: bool = True
    turn: bool = False


class Tokens(msgspec.Struct, frozen=True):
    """A prompt that the client tokenised itself."""

    ids: list[int]


class ToolCall(msgspec.Struct, frozen=True):
    """A call that an assistant turn made. ``arguments`` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation. ``content`` is text."""

    role: str
    content: str | None = None
    name: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None


class Chat(msgspec.Struct, frozen=True):
    """A conversation that the model's chat template turns into text.

    ``tools`` are those that the model is shown, in OpenAI's form; the arguments of one whose function is ``strict``
    follow its ``parameters``. By ``choice`` the answer may, must not or must call: with "required" it is nothing but
    calls, of the tool that ``only`` names if it does. ``allowed``: names of those that it may call; empty: any.
    ``parallel``: there may be several calls. ``thinking`` switches reasoning on or off, ``effort`` says how much of it
    ("none" to "max"); None is the model's default. ``options`` are extra names that the template may read, and win over
    these. ``continue_final`` leaves the last turn open so that the model goes on writing it. ``special`` adds the marks
    that the model expects around a plain text to those of its template.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = []
    choice: Literal["auto", "none", "required"] = "auto"
    only: str | None = None
    allowed: list[str] = []
    parallel: bool = True
    thinking: bool | None = None
    effort: str | None = None
    options: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final: bool = False
    special: bool = False


Prompt = Text | Tokens | Chat
Keep = Literal["head", "tail"]  # the part of a longer prompt that is read


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a token is drawn from the logits. The same values mean "off" here as in every API: 1, 0 or empty.

    temperature 0 is greedy. ``top_k`` 0 keeps all tokens. ``seed`` None lets the server draw one.
    ``allowed``: of other tokens none is drawn; empty: any may be. ``banned``: token sequences that the output never
    contains; ``no_repeat_ngram``: so many tokens in a row never come twice; 0 is off. What would leave no token at all
    does not count. ``watermark``: the text gets a mark that ``parley watermark`` finds.
    Order of operations: grammar -> bias, watermark -> forbid (allowed, banned, n-grams, min_tokens) -> penalties ->
    temperature -> min_p -> top_k -> top_p -> typical_p -> draw.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed: list[int] = []
    banned: list[list[int]] = []
    no_repeat_ngram: int = 0
    watermark: bool = False


class Repetition(msgspec.Struct, frozen=True):
    """A pattern of ``least`` to ``most`` tokens that comes ``count`` (2 or more) times in a row."""

    least: int
    most: int
    count: int


class Stop(msgspec.Struct, frozen=True):
    """When to stop. ``max_tokens`` None means "to the end of the context".

    ``reserve``: how many of ``max_tokens`` must fit behind the prompt; the others are given as long as there is room.
    None: all of them.
    """

    strings: list[str] = []
    ids: list[int] = []
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    include: bool = False  # keep the stop string (or stop token's text) in the output
    reserve: int | None = None
    repetition: Repetition | None = None  # ends an output whose last tokens are that


class Want(msgspec.Struct, frozen=True):
    """What the client wants back beside the text.

    Numbers are how many alternatives, -1 all of the vocabulary; None means no log-probs.
    """

    logprobs: int | None = None
    named: list[int] = []  # tokens whose log-probabilities are told in place of the likeliest
    prompt_logprobs: int | None = None
    echo: bool = False
    usage: bool = False  # a usage record in the stream
    skip_special: bool = True  # leave special tokens out of the text
    ids: bool = False  # the tokens behind each delta, although no log-probs are wanted
    text: bool = False  # the prompt as the model reads it, marks and all
    plain: bool = False  # the text as the model wrote it: reasoning and calls are not told apart
    costs: bool = False  # what each token took, with the tokens behind each delta
    interval: int = 1  # of a stream: how many new tokens of a choice are worth telling, but for its first and last ones


class AnyText(msgspec.Struct, frozen=True, tag=True):
    """Any text, also none, that has none of these in it."""

    excludes: list[str] = []


class Tag(msgspec.Struct, frozen=True, tag=True):
    """``begin``, a piece, and ``end`` or one of them. A piece that is a schema is JSON that follows it."""

    begin: str
    inside: dict[str, Any] | bool | Piece
    end: str | list[str]


class Tags(msgspec.Struct, frozen=True, tag=True):
    """Free text, in which whatever begins with one of ``triggers`` must be one of ``tags``, whole and of its form.

    ``some``: it begins with a tag. ``single``: it has no more than one, which is its end.
    """

    tags: list[Tag]
    triggers: list[str]
    excludes: list[str] = []
    some: bool = False
    single: bool = False


class TagList(msgspec.Struct, frozen=True, tag=True):
    """Nothing but tags and ``separator`` between two. ``some``: at least one; ``single``: not more than one."""

    tags: list[Tag]
    separator: str
    some: bool = False
    single: bool = False


class Sequence(msgspec.Struct, frozen=True, tag=True):
    """One piece behind the other."""

    pieces: list[Piece]


class Either(msgspec.Struct, frozen=True, tag=True):
    """One of the pieces."""

    pieces: list[Piece]


class Repeat(msgspec.Struct, frozen=True, tag=True):
    """A piece, ``least`` to ``most`` times; None: any number of times."""

    piece: Piece
    least: int = 0
    most: int | None = None


class Exactly(msgspec.Struct, frozen=True, tag=True):
    """One token, by its id or as the vocabulary writes it; marks as their text."""

    token: int | str


class Grammar(msgspec.Struct, frozen=True):
    """The form that an answer has to have. One that came to its end has it, one that was cut off is a beginning of one.

    By ``kind``, ``value`` is: "json" a JSON schema (object or bool), "regex" a regular expression for the whole answer,
    "choice" a list of answers, "lark" a grammar in llguidance's Lark dialect, "ebnf" one in llama.cpp's GBNF, "tags"
    a ``Piece``, "around" a grammar in Lark and one of another kind, which that one calls ``@inner``.
    ``whitespace``: what may stand between JSON's marks, as a regular expression; None: the usual; "" nothing.
    ``closed``: objects have no members that their schema does not name, unless it says otherwise.
    ``field``: the member of the request that asked for it, for errors.
    """

    kind: Literal["json", "regex", "choice", "lark", "ebnf", "tags", "around"]
    value: Any
    whitespace: str | None = None
    closed: bool = False
    field: str = "response_format"


Piece = (  # of an answer; a grammar not of kind "around"
    AnyText | Tag | Tags | TagList | Sequence | Either | Repeat | Exactly | Grammar
)


class Beam(msgspec.Struct, frozen=True):
    """Beam search: not drawn but searched for, the likeliest outputs among those that ``width`` beams come across.

    An output's score is the sum of its tokens' log-probabilities divided by its length ** ``length_penalty``.
    ``early_stopping``: when the search ends. True: with ``width`` finished outputs. False: when the best beam, ended as
    it is, would not beat them. "never": when it could not, however it went on. All as in Transformers. What says how
    tokens are drawn has no part in it. ``field``: the member of the request that asked for it, for errors.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    field: str = "use_beam_search"


class Pooling(msgspec.Struct, frozen=True, omit_defaults=True):
    """The wish for a vector of the prompt (an embedding) rather than for text behind it.

    ``dimensions``: only the first so many numbers; None: all. ``normalize``: to length 1, after that cut; None: as the
    model's own settings say. ``prompt``: which of the model's own prompts stands before a text; None: its usual one, if
    it has one.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    prompt: str | None = None


class Request(msgspec.Struct, kw_only=True):
    """One request of any API. With several prompts, choice index = prompt number * n + k.

    ``best_of``: so many choices are made, and the n likeliest by the mean log-probability of their tokens are given,
    the likeliest first. With ``beam`` the n best that the search finds are, the best first.
    With ``pooling`` each prompt gets a vector and no text: ``n`` is 1, and what is said of sampling has no meaning.
    """

    id: str
    model: str
    prompts: list[Prompt]
    sampling: Sampling = Sampling()
    stop: Stop = Stop()
    want: Want = Want()
    banned: list[str] = []  # words that are not to be written; as tokens they are in ``sampling``
    grammar: Grammar | None = None
    thinking_budget: int | None = None  # tokens of reasoning, after which it is closed; None: any number
    n: int = 1
    best_of: int | None = None
    beam: Beam | None = None
    stream: bool = False
    salt: str = ""  # requests with different salts never share cached prefixes
    adapter: str | None = None  # by name; None: what ``model`` says, which may be the name of one
    truncate: int | None = None  # of a longer prompt only so many tokens are used
    keep: Keep = "tail"  # those of its beginning, or of its end
    pooling: Pooling | None = None
    timeout: float | None = None  # seconds that it may take as a whole
    partial: bool = False  # when its time is over, what there is is the answer, cut off; else that is an error
    priority: int = 0  # lower numbers are served sooner
    overflow: Literal["refuse"] | Keep = "refuse"  # which part is kept of a prompt that is too long
    labels: tuple[str, ...] = ()  # names under which clients can stop it, beside its id
    prediction: str = ""  # what the client thinks will be written: makes nothing but speed
    sole: str = ""  # one of them that no other open request to the model may have

    @property
    def made(self) -> int:
        """How many choices the engine gives for each prompt."""
        return self.best_of or self.n

    @property
    def places(self) -> int:
        """How many sequences it computes for all prompts."""
        return len(self.prompts) * (self.beam.width if self.beam is not None else self.made)


# --------------------------------------------------------------------------------------------------------------
# 2. Work and Output: what crosses the socket to the engine. array_like: short frames, fast to encode.
# --------------------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------------------
# 3. Event: what a dialect renders
# --------------------------------------------------------------------------------------------------------------


class Token(msgspec.Struct):
    """One token as a client may see it. ``raw`` are its own bytes, which may be part of a character.

    ``special``: a mark of the model rather than text. ``cost`` is there if it was wanted.
    """

    id: int
    text: str
    raw: bytes
    logprob: float | None = None
    rank: int | None = None
    top: list[Token] = []
    special: bool = False
    cost: Cost | None = None


class CallDelta(msgspec.Struct):
    """A piece of a tool call: the first piece of call ``index`` has id and name, later ones only ``arguments``."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Usage(msgspec.Struct):
    """Tokens read and delivered. For one choice in ``Done``, for the whole request when added up by the server."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_tokens: int = 0  # of the request's prediction, those that the answer has
    rejected_tokens: int = 0  # and those that it does not have


class Accepted(msgspec.Struct):
    """Prompt number ``prompt`` was tokenised, fits, and is in the engine's hands. Choice k draws with ``seed`` + k.

    ``text``: of these tokens, if it is wanted.
    """

    prompt: int
    token_ids: list[int]
    seed: int = 0
    text: str | None = None


class Scored(msgspec.Struct):
    """The prompt's tokens, with log-probabilities when they were asked for (the first has none), and its text."""

    prompt: int
    tokens: list[Token]
    text: str = ""


Part = Literal["content", "reasoning", "tool"]


class Delta(msgspec.Struct):
    """New output of one choice. Concatenated texts of a part are that part's full text.

    ``tokens`` are the tokens behind the text; while a character or a possible stop string is incomplete, tokens may
    arrive with a later delta. ``call`` is set when part is "tool".
    """

    index: int
    text: str
    part: Part = "content"
    tokens: list[Token] = []
    call: CallDelta | None = None


Reason = Literal["stop", "length", "tool", "repetition", "cancel", "error"]


class Done(msgspec.Struct):
    """The end of one choice. ``stop`` is the stop string or stop id that matched, None for the model's own end."""

    index: int
    reason: Reason
    usage: Usage
    stop: str | int | None = None


class Vector(msgspec.Struct):
    """The vector of prompt number ``prompt``: float32, little endian."""

    prompt: int
    values: bytes


class Failed(msgspec.Struct):
    """The end of the whole request by an error after it was accepted. ``error`` is a parley.errors.ParleyError."""

    error: Any


Event = Accepted | Scored | Delta | Vector | Done | Failed
