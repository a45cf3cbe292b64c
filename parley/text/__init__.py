"""Text to tokens and back: tokenizer, chat template, output parser, detokenizer, stop strings. Never imports torch."""

from parley.text.choice import Choice, scored, token
from parley.text.parsing.chat_template import ChatTemplate
from parley.text.parsing.markup import Markup, detect
from parley.text.parsing.output_parser import Regions
from parley.text.prompt import Language, Prepared
from parley.text.tokens.detokenizer import Detokenizer
from parley.text.tokens.stop_strings import Scanner, Stops
from parley.text.tokens.tokenizer import BadTokenizer, Tokenizer

__all__ = [
    "BadTokenizer", "ChatTemplate", "Choice", "Detokenizer", "Language", "Markup", "Prepared", "Regions", "Scanner",
    "Stops", "Tokenizer", "detect", "scored", "token",
]  # fmt: skip
