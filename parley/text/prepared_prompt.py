"""A prompt as the engine gets it, with all that is needed to read the answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from parley.text.parsing.calls import RequestTools
from parley.text.parsing.markup import UNMARKED, Markup
from parley.text.tokens.prediction import PredictedTokens
from parley.types import AppliedEdit, ChatPrompt, MediaItem


@dataclass(frozen=True, slots=True)
class AnswerAfterSummary:
    """What an answer needs that follows a summary.

    * ``chat``: the conversation, without the edits that it had.
    * ``heading``: as in ``SummarizeContext.answer_heading``.
    * ``whole``: the conversation as the model reads it if there is no summary.
    * ``spared_tokens``: how many fewer it has without its turns; a summary must be shorter.
    """

    chat: ChatPrompt
    heading: str
    whole: PreparedPrompt
    spared_tokens: int


@dataclass(slots=True)
class PreparedPrompt:
    """A prompt in tokens.

    * ``markup``: how to parse the answer.
    * ``starts_in_reasoning``: the prompt opens the reasoning or the model always reasons.
    * ``tools``: the tools the answer may call.
    * ``single_call``: it may make only one call and finishes with it.
    * ``predicted``: the client's predicted output.
    * ``media``: the items whose embeddings take the place of tokens.
    * ``second_text_start``: as in ``EngineRequest``.
    * ``applied_edits``: those that changed the conversation.
    * ``answer``: the prompt asks for a summary, and this answer follows it.
    """

    token_ids: list[int]
    markup: Markup = UNMARKED
    starts_in_reasoning: bool = False
    tools: RequestTools | None = None
    single_call: bool = False
    predicted: PredictedTokens | None = None
    media: list[MediaItem] = field(default_factory=list)
    second_text_start: int = 0
    applied_edits: list[AppliedEdit] = field(default_factory=list)
    answer: AnswerAfterSummary | None = None
