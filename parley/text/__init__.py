"""Text to tokens and back: tokenizer, chat template, output parser, detokenizer, stop strings. Never imports torch."""

from .choice import Choice, scored, token
from .detokenizer import Detokenizer
from .markup import Markup, detect
from .prompt import Language, Prepared
from .regions import Regions
from .stops import Scanner, Stops
from .template import ChatTemplate
from .tokenizer import BadTokenizer, Tokenizer

__all__ = [
    "BadTokenizer", "ChatTemplate", "Choice", "Detokenizer", "Language", "Markup", "Prepared", "Regions", "Scanner",
    "Stops", "Tokenizer", "detect", "scored", "token",
]  # fmt: skip
