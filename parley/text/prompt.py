"""A request's prompt, made ready for the engine: token ids, and what is known of how the answer will be written.

Knows the tokenizer, the template and the neutral prompt; nothing of engines or APIs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path

import msgspec

from parley.errors import Invalid, excerpt
from parley.types import Chat, Grammar, Keep, Message, Pooling, Prompt, Text, Thinking

from . import answer, length
from .calls import Tools
from .grammar import Compiler
from .markup import AUTO, PLAIN, Markup, begins_thinking, detect, switch
from .predicted import Predicted
from .template import ChatTemplate
from .tokenizer import Tokenizer, read_json

ADVICE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
TAIL = 16  # tokens at the end of a prompt in which a closing mark is looked for


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

    ``markup``: tells the parts of the answer; ``thinking``: it begins inside reasoning; ``tools``: those it may call;
    ``single``: it may make one call at most, and is at its end with that. ``predicted``: what it may well be.
    """

    token_ids: list[int]
    markup: Markup = PLAIN
    thinking: bool = False
    tools: Tools | None = None
    single: bool = False
    predicted: Predicted | None = None


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
        markup: Markup | None = None,
    ):
        self.tokenizer = tokenizer
        self.advice = advice or {}
        self.customs = customs or Customs()
        self.template = template
        self.markup = detect(template.text) if markup is None else markup
        self.grammars = Compiler(tokenizer)

    @classmethod
    def load(cls, folder: str | Path, tools: str = AUTO, reasoning: str = AUTO) -> Language:
        """From a model folder in Hugging Face format. Raises BadTokenizer.

        ``tools`` and ``reasoning``: families by name (ValueError if there is none), where the template does not tell.
        """
        tokenizer = Tokenizer.load(folder)
        template = ChatTemplate.load(folder, tokenizer)
        markup = detect(template.text, tools, reasoning)
        return cls(tokenizer, template, _advice(Path(folder)), Customs.load(Path(folder)), markup)

    def prepare(
        self,
        prompt: Prompt,
        limit: int | None = None,
        cut: int | None = None,
        keep: Keep = "tail",
        *,
        pooling: Pooling | None = None,
    ) -> Prepared:
        """Render and encode. Takes long for a long prompt (run it in a thread). Raises BadRequest.

        With ``limit``, the context length, a text that is hopelessly longer is refused before all of it was read
        (ContextLength). What comes back may still be too long. With ``cut`` only so many tokens of the end that is
        kept come back, and of a hopelessly longer text no more is read. Of a beginning, and of what a vector is made
        of as ``pooling`` says, the marks around it are among them.
        """
        marked = keep == "head" or pooling is not None
        encode = partial(length.encode, self.tokenizer, limit=limit, cut=cut, keep=keep, marked=marked)
        if pooling is not None and isinstance(prompt, Text):
            prompt = Text(self.customs.apply(prompt.text, pooling.prompt), prompt.special, prompt.turn)
        if isinstance(prompt, Text) and prompt.turn and self.template:
            return Prepared(encode(self.template.render(_turn(prompt)), False))
        if isinstance(prompt, Chat):
            text = self.render(prompt)
            ids = encode(text, prompt.special)
            if pooling is not None:
                return Prepared(ids)
            if keep == "head" and cut is not None:  # how the answer begins is for what was left to say
                text = self.tokenizer.decode(ids, skip_special=False)
            markup = answer.readable(self.markup, prompt)
            thinking = begins_thinking(markup, text, prompt.continue_final)
            tools = Tools(answer.callable_tools(prompt))
            return Prepared(ids, markup, thinking, tools, not prompt.parallel or prompt.only is not None)
        if isinstance(prompt, Text):
            return Prepared(encode(prompt.text, prompt.special))
        return Prepared(prompt.ids if cut is None else prompt.ids[:cut] if keep == "head" else prompt.ids[-cut:])

    def predict(self, text: str, limit: int) -> Predicted | None:
        """A text that may be the answer, as far as so many tokens go; None for an empty one."""
        return Predicted(self.tokenizer.encode(text[: length.PROBE * limit], special=False)[:limit]) if text else None

    def render(self, chat: Chat) -> str:
        """A conversation as the model reads it. Raises BadRequest."""
        if _forced(chat) and chat.tools and not self.markup.calls and "tools" not in self.template.text:
            chat = answer.told(chat)
        thinking = chat.options.get("enable_thinking") if chat.thinking is None else chat.thinking
        options = switch(self.template.variables, chat.options, thinking, chat.effort)
        return self.template.render(msgspec.structs.replace(chat, options=options))

    def found(self, prompt: Prompt, grammar: Grammar | None) -> str | None:
        """What ``compile`` gives, if that takes no time; None if it does.

        To write the grammar of a hundred tools does, so it is known by what it is made of.
        """
        if isinstance(prompt, Chat) and prompt.tools:
            if grammar is None and answer.unbound(prompt):
                return ""
            key = _key(prompt, grammar)
            made = None if key is None else self.grammars.recall(key)
            return made if isinstance(made, str) else None
        form = self._form(prompt, grammar)
        if form is None:
            return ""
        try:
            return self.grammars.find(form)
        except Invalid:  # there may be a way around it
            return None

    def compile(self, prompt: Prompt, grammar: Grammar | None) -> str:
        """What the answer has to follow, of the form asked for and the tools, as the engine reads it; "": nothing.

        Takes up to seconds: for ``grammar.WORKERS``. Raises Invalid.
        """
        made = self._compile(prompt, grammar)
        if isinstance(prompt, Chat) and prompt.tools and (key := _key(prompt, grammar)) is not None:
            self.grammars.keep(key, made)
        return made

    def _compile(self, prompt: Prompt, grammar: Grammar | None) -> str:
        if _forced(prompt) and grammar is not None:
            self.grammars.get(grammar)  # it has no say, but is not to be wrong
        try:
            form = self._form(prompt, grammar)
            return self.grammars.get(form) if form is not None else ""
        except Invalid:
            loose = answer.unfit(prompt, self.grammars.get) if isinstance(prompt, Chat) else None
            if not loose:
                raise
            form = self._form(prompt, grammar, loose)
            assert form is not None
            return self.grammars.get(form)

    def _form(self, prompt: Prompt, grammar: Grammar | None, loose: Collection[str] = ()) -> Grammar | None:
        if not isinstance(prompt, Chat) or not (prompt.tools or grammar):
            return grammar
        markup = answer.readable(self.markup, prompt)
        return answer.compose(markup, self.grammars.lark, prompt, grammar, loose)

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

    def bound(self, ready: Prepared, budget: int) -> Thinking | None:
        """A limit to the reasoning of an answer; None where the answer has no marks to tell it by."""
        think = ready.markup.think
        if think is None:
            return None
        close, bare = (self.tokenizer.encode(f"{line}{think[1]}\n\n", special=False) for line in ("\n", ""))
        line = len(close) - len(bare)  # the end of a line before the mark, which is of the reasoning
        if line > budget:
            return Thinking(*think, ready.thinking, budget, bare)
        return Thinking(*think, ready.thinking, budget - line, close)

    def gate(self, grammar: str, ready: Prepared, plain: bool) -> str:
        """A compiled grammar as one for the whole answer, reasoning included where there may be some.

        Where parts are not told apart (``plain``), there is only what the prompt has begun.
        """
        think = ready.markup.think
        if not grammar or think is None or not (ready.thinking or (not plain and self._may_think(ready, think))):
            return grammar
        return self.grammars.behind(grammar, think, ready.thinking)

    def _may_think(self, ready: Prepared, think: tuple[str, str]) -> bool:
        """Whether an answer may begin with reasoning: not where the prompt has closed that already."""
        end = self.tokenizer.decode(ready.token_ids[-TAIL:], skip_special=False)
        return not end.rstrip().endswith(think[1])

    def spell(self, prompt: Prompt) -> tuple[str, list[int], list[tuple[int, int]]]:
        """A prompt's text, rendered if it is a conversation, its tokens, and the characters that each stands for."""
        if isinstance(prompt, Chat):
            text, special = self.render(prompt), prompt.special
        elif isinstance(prompt, Text):
            text, special = prompt.text, prompt.special
        else:
            return "", prompt.ids, [(0, 0)] * len(prompt.ids)
        return text, *self.tokenizer.spell(text, special)


def _forced(prompt: Prompt) -> bool:
    """Whether the answer has to be calls, whatever form is asked for."""
    return isinstance(prompt, Chat) and prompt.choice == "required"


def _key(chat: Chat, grammar: Grammar | None) -> bytes | None:
    """A digest of all that the grammar of an answer which may call is made of; None where that cannot be written."""
    try:
        made = msgspec.json.encode([chat.tools, chat.choice, chat.only, chat.allowed, chat.parallel, grammar])
    except (RecursionError, UnicodeEncodeError, TypeError):
        return None
    return sha256(b"answer" + made).digest()


def _turn(prompt: Text) -> Chat:
    return Chat([Message("user", prompt.text)])


def _advice(folder: Path) -> dict[str, float]:
    """What generation_config.json says of sampling, where it is a number. Raises BadTokenizer."""
    said = read_json(folder / "generation_config.json")
    return {name: said[name] for name in ADVICE if isinstance(said.get(name), int | float) and said[name] is not True}
