"""A request's prompt, made ready for the engine: token ids, and what is known of how the answer will be written.

Knows the tokenizer, the template and the neutral prompt; nothing of engines or APIs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from parley.types import Chat, Prompt, Text

from .regions import PLAIN, Markup, begins_thinking, detect
from .template import ChatTemplate
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class Prepared:
    """A prompt in tokens. ``markup``: tells the parts of the answer; ``thinking``: it begins inside reasoning."""

    token_ids: list[int]
    markup: Markup = PLAIN
    thinking: bool = False


class Language:
    """All that one model needs to read prompts: its tokenizer, its chat template, the markup of its family."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate):
        self.tokenizer = tokenizer
        self.template = template
        self.markup = detect(template.text)

    @classmethod
    def load(cls, folder: str | Path) -> Language:
        """From a model folder in Hugging Face format. Raises BadTokenizer."""
        tokenizer = Tokenizer.load(folder)
        return cls(tokenizer, ChatTemplate.load(folder, tokenizer))

    def prepare(self, prompt: Prompt) -> Prepared:
        """Render and encode. Takes long for a huge prompt (run it in a thread). Raises BadRequest."""
        if isinstance(prompt, Chat):
            text = self.template.render(prompt)
            markup = self.markup if prompt.tools else replace(self.markup, call=None)
            thinking = begins_thinking(markup, text, prompt.continue_final)
            return Prepared(self.tokenizer.encode(text, special=False), markup, thinking)
        if isinstance(prompt, Text):
            return Prepared(self.tokenizer.encode(prompt.text, prompt.special))
        return Prepared(prompt.ids)
