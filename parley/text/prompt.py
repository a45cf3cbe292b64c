"""A request's prompt, made ready for the engine: token ids, and what is known of how the answer will be written.

Knows the tokenizer, the template and the neutral prompt; nothing of engines or APIs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parley.errors import ContextLength, Invalid, Unsupported, excerpt
from parley.types import Chat, Message, Pooling, Prompt, Text

from .calls import Tools
from .markup import PLAIN, Markup, begins_thinking, detect
from .spelling import calls_grammar
from .template import ChatTemplate
from .tokenizer import Tokenizer, read_json

ADVICE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
PROBE = 32  # characters per token: what is longer than so many for each token allowed is probed before it is read


@dataclass(frozen=True)
class Customs:
    """What sentence-transformers puts before a text that a vector is made of, by name, and which of it is usual."""

    prompts: dict[str, str] = field(default_factory=dict)
    usual: str | None = None
    lower: bool = False  # texts are read in lower case

    @classmethod
    def load(cls, folder: Path) -> Customs:
        """From a model folder. Raises BadTokenizer."""
        said = read_json(folder / "config_sentence_transformers.json")
        prompts, usual = said.get("prompts"), said.get("default_prompt_name")
        prompts = prompts if isinstance(prompts, dict) else {}
        prompts = {name: text for name, text in prompts.items() if isinstance(text, str)}
        lower = any(read_json(path).get("do_lower_case") is True for path in folder.glob("sentence_*_config.json"))
        return cls(prompts, usual if usual in prompts else None, lower)

    def apply(self, text: str, name: str | None) -> str:
        """The text as it is read. Raises Invalid."""
        name = self.usual if name is None else name
        if name is not None and name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise Invalid(f"The model has no prompt {excerpt(name)}; it has {known}.", field="prompt_name")
        whole = self.prompts[name] + text if name is not None else text
        return whole.lower() if self.lower else whole


@dataclass(frozen=True)
class Prepared:
    """A prompt in tokens.

    ``markup``: tells the parts of the answer; ``thinking``: it begins inside reasoning; ``tools``: those it may call.
    """

    token_ids: list[int]
    markup: Markup = PLAIN
    thinking: bool = False
    tools: Tools | None = None


class Language:
    """All that one model needs to read prompts: its tokenizer, its chat template, the markup of its family.

    ``advice``: how its makers would sample from it, as far as they say. ``customs``: how they would embed with it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        advice: dict[str, float] | None = None,
        customs: Customs | None = None,
    ):
        self.tokenizer = tokenizer
        self.advice = advice or {}
        self.customs = customs or Customs()
        self.template = template
        self.markup = detect(template.text)

    @classmethod
    def load(cls, folder: str | Path) -> Language:
        """From a model folder in Hugging Face format. Raises BadTokenizer."""
        tokenizer = Tokenizer.load(folder)
        template = ChatTemplate.load(folder, tokenizer)
        return cls(tokenizer, template, _advice(Path(folder)), Customs.load(Path(folder)))

    def prepare(
        self, prompt: Prompt, limit: int | None = None, cut: int | None = None, *, pooling: Pooling | None = None
    ) -> Prepared:
        """Render and encode. Takes long for a long prompt (run it in a thread). Raises BadRequest.

        With ``limit``, the context length, a text that is hopelessly longer is refused before all of it was read
        (ContextLength). What comes back may still be too long. With ``cut`` only so many of the last tokens come
        back, and of a hopelessly longer text only the end is read. A prompt that a vector is made of, as ``pooling``
        says, is cut at its end instead, and keeps the marks around it.
        """
        last, first = (cut, None) if pooling is None else (None, cut)
        if pooling is not None and isinstance(prompt, Text):
            prompt = Text(self.customs.apply(prompt.text, pooling.prompt), prompt.special, prompt.turn)
        if isinstance(prompt, Text) and prompt.turn and self.template:
            return Prepared(self._encode(self.template.render(_turn(prompt)), False, limit, last))
        if isinstance(prompt, Chat):
            if prompt.choice == "required":
                raise Unsupported("Forcing a tool call is not available on this server.", field="tool_choice")
            text = self.template.render(prompt)
            markup = self.markup if prompt.tools and prompt.choice != "none" else self.markup.silent()
            thinking = begins_thinking(markup, text, prompt.continue_final)
            if first is not None:
                return Prepared(self._encode_start(text, False, first))
            return Prepared(self._encode(text, False, limit, last), markup, thinking, Tools(prompt.tools))
        if isinstance(prompt, Text):
            if first is not None:
                return Prepared(self._encode_start(prompt.text, prompt.special, first))
            return Prepared(self._encode(prompt.text, prompt.special, limit, last))
        return Prepared(prompt.ids[:first] if last is None else prompt.ids[-last:])

    def spellings(self, words: Sequence[str]) -> list[list[int]]:
        """The tokens of each word at the beginning of a text, and behind a blank where those are others."""
        found: list[list[int]] = []
        for word in words:
            text = word.lstrip()
            for each in (text, f" {text}"):
                ids = self.tokenizer.encode(each, special=False)
                if ids and ids not in found[-1:]:
                    found.append(ids)
        return found

    def calls_grammar(
        self, tools: Sequence[dict[str, Any]], *, parallel: bool, required: bool, only: str | None = None
    ) -> str:
        """The grammar, in llguidance's Lark, of an answer that may or must call tools. Raises Invalid.

        See ``spelling.calls_grammar``. It holds for what follows the reasoning.
        """
        special = self.tokenizer.marks
        return calls_grammar(self.markup, tools, parallel=parallel, required=required, only=only, special=special)

    def spell(self, prompt: Prompt) -> tuple[str, list[int], list[tuple[int, int]]]:
        """A prompt's text, rendered if it is a conversation, its tokens, and the characters that each stands for."""
        if isinstance(prompt, Chat):
            text, special = self.template.render(prompt), False
        elif isinstance(prompt, Text):
            text, special = prompt.text, prompt.special
        else:
            return "", prompt.ids, [(0, 0)] * len(prompt.ids)
        return text, *self.tokenizer.spell(text, special)

    def _encode(self, text: str, special: bool, limit: int | None, last: int | None) -> list[int]:
        if last is not None and (limit is None or last <= limit):  # more would not fit, cut or not
            return self._encode_end(text, special, limit, last)
        size = PROBE * limit if limit is not None else len(text)
        while limit is not None and size < len(text):
            # The rest cannot halve what its beginning has: where a token ends depends on little of what follows.
            if len(self.tokenizer.encode(text[:size], special=False)) > 2 * limit:
                raise ContextLength(
                    f"This model's maximum context length is {limit} tokens, and the prompt has over twice as many.",
                    field="prompt",
                )
            size *= PROBE
        return self.tokenizer.encode(text, special)

    def _encode_start(self, text: str, special: bool, count: int) -> list[int]:
        size = PROBE * count
        while size < len(text):
            if len(self.tokenizer.encode(text[:size], special=False)) > 2 * count:  # twice: as in ``_encode_end``
                return self.tokenizer.encode_first(text[:size], special, count)
            size *= PROBE
        return self.tokenizer.encode_first(text, special, count)

    def _encode_end(self, text: str, special: bool, limit: int | None, count: int) -> list[int]:
        size = PROBE * limit if limit is not None else len(text)
        while size < len(text):
            ids = self.tokenizer.encode(text[-size:], special)
            if len(ids) > 2 * count:  # twice: where the first tokens behind the cut begin is not certain
                return ids[-count:]
            size *= PROBE
        return self.tokenizer.encode(text, special)[-count:]


def _turn(prompt: Text) -> Chat:
    return Chat([Message("user", prompt.text)])


def _advice(folder: Path) -> dict[str, float]:
    """What generation_config.json says of sampling, where it is a number. Raises BadTokenizer."""
    said = read_json(folder / "generation_config.json")
    return {name: said[name] for name in ADVICE if isinstance(said.get(name), int | float) and said[name] is not True}
