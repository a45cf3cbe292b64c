"""A prompt as the engine gets it, with all that is needed to read the answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from parley.text.parsing.calls import RequestTools
from parley.text.parsing.markup import UNMARKED, Markup
from parley.text.tokens.prediction import PredictedTokens
from parley.types import AppliedEdit, MediaItem


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
