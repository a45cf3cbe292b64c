"""A request as a dialect reads it from a body: prompts as text, chat or token ids, and options."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from parley.types.context_edits import ContextEdit
from parley.types.grammar import Grammar
from parley.types.media import PlacedMedia


class TextPrompt(msgspec.Struct, frozen=True):
    """A plain prompt.

    * ``add_special_tokens``: the tokenizer adds its own special tokens (such as a leading BOS).
    * ``as_user_turn``: wrap the text as a user turn in the model's chat template, if it has one.
    * ``max_tokens``: keep only the text's first tokens, at most this many; special tokens around it do not count.
    * ``media``: items within the text.
    * ``suffix``: the text that follows the missing middle, for models that have marks for that.
    """

    text: str
    add_special_tokens: bool = True
    as_user_turn: bool = False
    max_tokens: int | None = None
    media: list[PlacedMedia] = []
    suffix: str = ""


class TokensPrompt(msgspec.Struct, frozen=True):
    """A prompt that the client has already tokenized.

    ``reasoning_ended``: True for plain text, whose answer has no reasoning. For a conversation: False if the answer
    starts inside reasoning, None if the last tokens decide whether it starts inside reasoning or may begin with it.
    """

    ids: list[int]
    reasoning_ended: bool | None = True


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call in an assistant turn. ``arguments`` is JSON text, exactly as the model wrote it."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation. ``content`` is text, and ``media`` are items within it."""

    role: str
    content: str | None = None
    name: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    media: list[PlacedMedia] = []


class ChatPrompt(msgspec.Struct, frozen=True):
    """A conversation, which the model's chat template turns into text.

    * ``tools``: the tools that the model may see, in OpenAI's form. If a tool's function is ``strict``, its arguments
      must follow its ``parameters``.
    * ``tool_choice``: whether the answer may ("auto"), must not ("none") or must ("required") call a tool. With
      "required" the answer consists of calls only, all to ``forced_tool`` if that is set.
    * ``allowed_tools``: names of the tools that may be called; empty: all.
    * ``parallel_calls``: several calls are allowed.
    * ``schema_fields``: the body's members with the tools' schemas, by the names of the tools, for errors about them.
    * ``thinking`` switches reasoning on or off, and ``reasoning_effort`` sets its amount ("none" to "max"); None is the
      model's default.
    * ``options``: extra variables for the template; they override all of the above.
    * ``continue_final``: leave the last turn open so that the model continues it.
    * ``add_special_tokens``: add the special tokens that the model expects around plain text, besides those in its
      template.
    * ``preceding_ids``: tokens before the conversation's own, such as those of an earlier one that it continues.
    * ``rendered``: the content of the only message is the whole conversation, as the model reads it; the chat template
      is not used.
    * ``rendered_ids``: the tokens of the conversation from a server that has rendered it; the messages are not rendered
      again.
    * ``edits``: what leaves the conversation, in this order, if it is long.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none", "required"] = "auto"
    forced_tool: str | None = None
    allowed_tools: list[str] = []
    parallel_calls: bool = True
    schema_fields: dict[str, str] = {}
    thinking: bool | None = None
    reasoning_effort: str | None = None
    options: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final: bool = False
    add_special_tokens: bool = False
    preceding_ids: list[int] = []
    rendered: bool = False
    rendered_ids: list[int] = []
    edits: list[ContextEdit] = []


class TextPair(msgspec.Struct, frozen=True):
    """Two texts that a model reads together, such as a question and a document. The first one's ``add_special_tokens``
    counts."""

    first: TextPrompt
    second: TextPrompt


class JoinedPrompt(msgspec.Struct, frozen=True):
    """Texts and tokens that are one plain prompt, each tokenized on its own. The texts have no media."""

    parts: list[TextPrompt | TokensPrompt]


Prompt = TextPrompt | TextPair | TokensPrompt | ChatPrompt | JoinedPrompt

KeptSide = Literal["head", "tail"]  # the end of a too long prompt that is kept


class SamplingOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are drawn from the logits. As in every API, the values 1, 0 and empty mean "off".

    * ``temperature``: 0 is greedy.
    * ``top_k``: 0 keeps all tokens.
    * ``seed``: None: the server draws one.
    * ``allowed``: only these tokens may be drawn; empty: any.
    * ``banned``: token sequences that never occur in the output.
    * ``no_repeat_ngram``: length of token n-grams that may not occur twice; 0 is off.
    * ``watermark``: mark the text so that ``parley watermark`` can detect it.
    * ``penalty_window``: number of tokens at the end of prompt and output that the penalties look at; 0: the repetition
      penalty looks at all tokens of both, and the other two look at the output.

    A rule that would leave no token at all is ignored. Order of operations: grammar -> bias, watermark -> forbid
    (allowed, banned, n-grams, min_tokens) -> penalties -> temperature -> min_p -> top_k -> top_p -> typical_p -> draw.
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
    penalty_window: int = 0
    logit_bias: dict[int, float] = {}
    allowed: list[int] = []
    banned: list[list[int]] = []
    no_repeat_ngram: int = 0
    watermark: bool = False


class RepetitionPattern(msgspec.Struct, frozen=True):
    """A pattern of ``min_pattern_size`` to ``max_pattern_size`` tokens that repeats ``min_count`` (2 or more) times."""

    min_pattern_size: int
    max_pattern_size: int
    min_count: int


class StopConditions(msgspec.Struct, frozen=True):
    """When generation stops. ``max_tokens`` None means "up to the end of the context".

    ``reserved_tokens``: the part of ``max_tokens`` that must fit after the prompt; tokens beyond it are generated as
    long as the context has room. None: all of ``max_tokens`` must fit.
    """

    strings: list[str] = []
    ids: list[int] = []
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    include_in_output: bool = False  # keep the stop string (or the stop token's text) in the output
    reserved_tokens: int | None = None
    repetition: RepetitionPattern | None = None  # end an output whose last tokens match this pattern


class OutputOptions(msgspec.Struct, frozen=True):
    """The data that the client wants besides the text.

    ``logprobs`` and ``prompt_logprobs``: number of alternatives; -1: the whole vocabulary; None: no log-probabilities.
    """

    logprobs: int | None = None
    logprob_ids: list[int] = []  # report log-probabilities of these tokens instead of the most likely ones
    prompt_logprobs: int | None = None
    echo: bool = False
    usage: bool = False  # a usage record in the stream
    skip_special: bool = True  # leave special tokens out of the text
    ids: bool = False  # the tokens of each delta, even without log-probabilities
    whole_ids: bool = False  # the tokens of each choice at its end
    tokens_at_once: bool = False  # with ``ids``: tokens do not wait for the rest of a character or stop string
    prompt_text: bool = False  # the prompt as the model reads it, including special tokens
    unparsed: bool = False  # the text as the model wrote it, without separating reasoning and tool calls
    token_costs: bool = False  # the cost of each token, together with the tokens of each delta
    stream_interval: int = 1  # streams: new tokens of a choice per delta; its first and last tokens are sent at once


class BeamOptions(msgspec.Struct, frozen=True):
    """Beam search: find the most likely outputs with ``width`` beams instead of sampling.

    An output's score is the sum of its tokens' log-probabilities divided by its length ** ``length_penalty``.
    ``early_stopping``: when the search ends. True: with ``width`` finished outputs. False: when the best beam, ended
    now, would not beat them. "never": when no continuation of a beam could beat them. All as in Transformers. Sampling
    options have no effect. ``field``: the request field that asked for beam search, for error messages.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    field: str = "use_beam_search"


# A vector of the text (an embedding), a vector of each of its tokens, those weights of the vocabulary's tokens that are
# not 0, or a score of each of the model's classes, for the text or for each of its tokens.
PoolingTask = Literal["embed", "token_embed", "embed_sparse", "classify", "token_classify"]
TOKEN_TASKS: frozenset[PoolingTask] = frozenset({"token_embed", "token_classify"})  # those with numbers for each token


class PoolingOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request for numbers about the prompt instead of generated text.

    * ``dimensions``: keep only the first numbers of a vector; None: all.
    * ``normalize``: scale vectors to length 1, after that cut, and turn the scores of classes into probabilities; None:
      as the model's settings say.
    * ``prompt``: the name of the model's own prompt that precedes a text to embed; None: its default prompt, if it has
      one.
    * ``prompt_aliases``: other names of that prompt, tried in this order.
    * ``prompt_optional``: a model without any prompts ignores the name.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    prompt: str | None = None
    task: PoolingTask = "embed"
    prompt_aliases: tuple[str, ...] = ()
    prompt_optional: bool = False


class Request(msgspec.Struct, kw_only=True):
    """One request of any API. With several prompts, choice index = prompt number * n + k.

    ``best_of``: generate this number of choices and return the n most likely by mean log-probability of their tokens,
    best first. With ``beam``, return the n best outputs of the search, best first.
    With ``pooling``, each prompt gets numbers and no text: ``n`` is 1 and sampling options have no effect.
    """

    id: str
    model: str
    prompts: list[Prompt]
    sampling: SamplingOptions = SamplingOptions()
    stop_conditions: StopConditions = StopConditions()
    output_options: OutputOptions = OutputOptions()
    banned_words: list[str] = []  # words that must not be written; ``sampling.banned`` has them as tokens
    grammar: Grammar | None = None
    thinking_budget: int | None = None  # reasoning is closed after this many tokens; None: no limit
    n: int = 1
    best_of: int | None = None
    beam: BeamOptions | None = None
    stream: bool = False
    cache_salt: str = ""  # requests with different salts never share cached prefixes
    adapter: str | None = None  # LoRA adapter by name; None: derived from ``model``, which may name an adapter
    max_prompt_tokens: int | None = None  # truncate longer prompts to this number of tokens
    kept_side: KeptSide = "tail"  # the end of a truncated prompt that is kept
    pooling: PoolingOptions | None = None
    timeout: float | None = None  # time limit for the whole request, in seconds
    return_partial: bool = False  # at the time limit, return the partial answer instead of an error
    priority: int = 0  # lower numbers are served sooner, among requests of one tenant or of all
    in_batch: bool = False  # it runs after the requests of all tenants that belong to no batch
    # The treatment of a prompt that is too long for the model. "head" or "tail": that part of it is kept.
    # "oldest_turns": a conversation loses its oldest turns, but not its first system message and its last turn.
    on_overflow: Literal["refuse", "oldest_turns"] | KeptSide = "refuse"
    context_limit: int | None = None  # most tokens of a prompt and its output together; None: the model's context
    # A prompt that is too long is still tokenized up to this number of tokens, so that the refusal can name its length.
    counted_tokens: int = 0
    cancel_ids: tuple[str, ...] = ()  # further ids by which clients can cancel the request
    prediction: str = ""  # the text that the client expects; affects speed only
    prompt_places: list[str] = []  # the positions of several prompts in the body, for errors; empty: they name none
    exclusive_id: str = ""  # one of ``cancel_ids`` that no other open request to the model may have

    @property
    def choices_per_prompt(self) -> int:
        """Number of choices that the engine generates for each prompt."""
        return self.best_of or self.n

    def prompt_choices(self, prompt: int) -> range:
        """Return the indices of the choices that a prompt's answer has, by the prompt's number."""
        return range(prompt * self.n, (prompt + 1) * self.n)

    @property
    def sequences(self) -> int:
        """Number of sequences that the engine computes for all prompts."""
        return len(self.prompts) * (self.beam.width if self.beam is not None else self.choices_per_prompt)
