"""A request as a dialect reads it from a body: text, chat or token ids, before anything is computed."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from parley.types.grammar import Grammar


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
