"""Text to tokens and back: tokenizer, chat template, output parser, detokenizer, stop strings. Never imports torch."""

from parley.text.choice import AnswerChoice, describe_prompt_tokens, describe_token
from parley.text.parsing.chat_template import ChatTemplate
from parley.text.parsing.markup import Markup, detect_markup
from parley.text.parsing.output_parser import OutputParser
from parley.text.prompt import PreparedPrompt, TextPipeline
from parley.text.tokens.detokenizer import Detokenizer
from parley.text.tokens.stop_strings import StopAutomaton, StopScanner
from parley.text.tokens.tokenizer import BadTokenizer, Tokenizer

__all__ = [
    "AnswerChoice",
    "BadTokenizer",
    "ChatTemplate",
    "Detokenizer",
    "Markup",
    "OutputParser",
    "PreparedPrompt",
    "StopAutomaton",
    "StopScanner",
    "TextPipeline",
    "Tokenizer",
    "describe_prompt_tokens",
    "describe_token",
    "detect_markup",
]
