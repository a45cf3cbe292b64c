"""Prepares a request's prompt for the engine: its token ids, and how the answer will be marked up.

Knows the tokenizer, the chat template and the neutral prompt, but no engine and no API.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path

import msgspec

from parley.errors import Invalid, excerpt
from parley.text.grammar import answer_grammar
from parley.text.grammar.compiler import Compiler
from parley.text.parsing.calls import Tools
from parley.text.parsing.chat_template import ChatTemplate
from parley.text.parsing.markup import AUTO, PLAIN, Markup, begins_thinking, detect, switch
from parley.text.tokens import truncation
from parley.text.tokens.prediction import Predicted
from parley.text.tokens.tokenizer import Tokenizer, read_json
from parley.types import Chat, Grammar, Keep, Message, Pooling, Prompt, Text, Thinking

ADVICE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
TAIL = 16  # tokens at the end of a prompt that are searched for a closing mark


@dataclass(frozen=True)
class Customs:
    """The prompts that sentence-transformers puts before a text to embed, by name, and the name of the default one."""

    prompts: dict[str, str] = field(default_factory=dict)
    usual: str | None = None
    lower: bool = False  # lower-case the texts

    @classmethod
    def load(cls, folder: Path) -> Customs:
        """Load the prompts of a model folder. Raises BadTokenizer."""
        said = read_json(folder / "config_sentence_transformers.json")
        prompts, usual = said.get("prompts"), said.get("default_prompt_name")
        prompts = prompts if isinstance(prompts, dict) else {}
        prompts = {name: text for name, text in prompts.items() if isinstance(text, str)}
        lower = any(read_json(path).get("do_lower_case") is True for path in folder.glob("sentence_*_config.json"))
        return cls(prompts, usual if usual in prompts else None, lower)

    def apply(self, text: str, name: str | None) -> str:
        """Return the text with the named (or default) prompt before it. Raises Invalid for an unknown name."""
        name = self.usual if name is None else name
        if name is not None and name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise Invalid(f"The model has no prompt {excerpt(name)}; it has {known}.", field="prompt_name")
        whole = self.prompts[name] + text if name is not None else text
        return whole.lower() if self.lower else whole


@dataclass(frozen=True)
class Prepared:
    """A prompt in tokens.

    ``markup``: how to parse the answer. ``starts_in_reasoning``: the prompt opens the reasoning or the model always
    reasons. ``tools``: the tools the answer may call. ``single_call``: it may make only one call and finishes with it.
    ``predicted``: the client's predicted output.
    """

    token_ids: list[int]
    markup: Markup = PLAIN
    thinking: bool = False
    tools: Tools | None = None
    single: bool = False
    predicted: Predicted | None = None


class Language:
    """Reads the prompts of one model: its tokenizer, its chat template and the markup of its family.

    ``generation_defaults``: the sampling values that the model's makers recommend, if any. ``embedding_prompts``: the
    prompts that they put before texts to embed.
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
        """Load from a model folder in Hugging Face format. Raises BadTokenizer.

        ``tools`` and ``reasoning``: names of families to use if the template does not identify them (ValueError for an
        unknown name).
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
        """Render and encode a prompt. Slow for a long prompt, so run it in a thread. Raises BadRequest.

        With ``limit``, the context length, a text that is far too long is refused before all of it is encoded
        (ContextLength); a prompt that is only somewhat too long is returned as it is. With ``cut``, at most ``cut``
        tokens of the end named by ``keep`` are returned, and of a far longer text only a part is encoded. The special
        tokens around a prompt count towards ``cut`` if its head is kept or it is embedded (``pooling``).
        """
        marked = keep == "head" or pooling is not None
        encode = partial(truncation.encode, self.tokenizer, limit=limit, cut=cut, keep=keep, marked=marked)
        if pooling is not None and isinstance(prompt, Text):
            prompt = Text(self.customs.apply(prompt.text, pooling.prompt), prompt.special, prompt.turn)
        if isinstance(prompt, Text) and prompt.turn and self.template:
            return Prepared(encode(self.template.render(_turn(prompt)), False))
        if isinstance(prompt, Chat):
            text = self.render(prompt)
            ids = encode(text, prompt.special)
            if pooling is not None:
                return Prepared(ids)
            if keep == "head" and cut is not None:  # the start of the answer depends on the text that is left
                text = self.tokenizer.decode(ids, skip_special=False)
            markup = answer_grammar.readable(self.markup, prompt)
            thinking = begins_thinking(markup, text, prompt.continue_final)
            tools = Tools(answer_grammar.callable_tools(prompt))
            return Prepared(ids, markup, thinking, tools, not prompt.parallel or prompt.only is not None)
        if isinstance(prompt, Text):
            return Prepared(encode(prompt.text, prompt.special))
        return Prepared(prompt.ids if cut is None else prompt.ids[:cut] if keep == "head" else prompt.ids[-cut:])

    def predict(self, text: str, limit: int) -> Predicted | None:
        """Encode a predicted output, at most ``limit`` tokens of it. None for an empty text."""
        return (
            Predicted(self.tokenizer.encode(text[: truncation.PROBE * limit], special=False)[:limit]) if text else None
        )

    def render(self, chat: Chat) -> str:
        """Render a conversation as the model reads it. Raises BadRequest."""
        if _forced(chat) and chat.tools and not self.markup.calls and "tools" not in self.template.text:
            chat = answer_grammar.told(chat)
        thinking = chat.options.get("enable_thinking") if chat.thinking is None else chat.thinking
        options = switch(self.template.variables, chat.options, thinking, chat.effort)
        return self.template.render(msgspec.structs.replace(chat, options=options))

    def found(self, prompt: Prompt, grammar: Grammar | None) -> str | None:
        """Return the result of ``compile_answer_grammar`` if it is available at once, else None.

        Writing the grammar of a hundred tools is slow, so it is looked up by a digest of its inputs.
        """
        if isinstance(prompt, Chat) and prompt.tools:
            if grammar is None and answer_grammar.unbound(prompt):
                return ""
            key = _key(prompt, grammar)
            made = None if key is None else self.grammars.recall(key)
            return made if isinstance(made, str) else None
        form = self._form(prompt, grammar)
        if form is None:
            return ""
        try:
            return self.grammars.find(form)
        except Invalid:  # ``compile_answer_grammar`` may find a way around it
            return None

    def compile(self, prompt: Prompt, grammar: Grammar | None) -> str:
        """Compile the requested format and the tools to the grammar that the engine reads; "" if the answer is free.

        Takes up to seconds, so run it in ``compiler.COMPILE_WORKERS``. Raises Invalid.
        """
        made = self._compile(prompt, grammar)
        if isinstance(prompt, Chat) and prompt.tools and (key := _key(prompt, grammar)) is not None:
            self.grammars.keep(key, made)
        return made

    def _compile(self, prompt: Prompt, grammar: Grammar | None) -> str:
        if _forced(prompt) and grammar is not None:
            self.grammars.get(grammar)  # a forced call replaces it, but an invalid one is still refused
        try:
            form = self._form(prompt, grammar)
            return self.grammars.get(form) if form is not None else ""
        except Invalid:
            loose = answer_grammar.unfit(prompt, self.grammars.get) if isinstance(prompt, Chat) else None
            if not loose:
                raise
            form = self._form(prompt, grammar, loose)
            assert form is not None
            return self.grammars.get(form)

    def _form(self, prompt: Prompt, grammar: Grammar | None, loose: Collection[str] = ()) -> Grammar | None:
        if not isinstance(prompt, Chat) or not (prompt.tools or grammar):
            return grammar
        markup = answer_grammar.readable(self.markup, prompt)
        return answer_grammar.compose(markup, self.grammars.lark, prompt, grammar, loose)

    def spellings(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each word at the start of a text and after a blank, if these differ."""
        found: list[list[int]] = []
        for word in words:
            text = word.lstrip()
            for each in (text, f" {text}"):
                ids = self.tokenizer.encode(each, special=False)
                if ids and ids not in found[-1:]:
                    found.append(ids)
        return found

    def bound(self, ready: Prepared, budget: int) -> Thinking | None:
        """Return a limit of ``budget`` tokens for the reasoning, or None if the model has no reasoning marks."""
        think = ready.markup.think
        if think is None:
            return None
        close, bare = (self.tokenizer.encode(f"{line}{think[1]}\n\n", special=False) for line in ("\n", ""))
        line = len(close) - len(bare)  # tokens of the line break before the mark; they count as reasoning
        if line > budget:
            return Thinking(*think, ready.thinking, budget, bare)
        return Thinking(*think, ready.thinking, budget - line, close)

    def gate(self, grammar: str, ready: Prepared, plain: bool) -> str:
        """Return a compiled grammar for the whole answer, with reasoning before it if the answer may have some.

        With ``plain`` the answer is not parsed into parts, so only reasoning that the prompt has opened is allowed.
        """
        think = ready.markup.think
        if not grammar or think is None or not (ready.thinking or (not plain and self._may_think(ready, think))):
            return grammar
        return self.grammars.behind(grammar, think, ready.thinking)

    def _may_think(self, ready: Prepared, think: tuple[str, str]) -> bool:
        """Whether the answer may begin with reasoning: it may not if the prompt has closed it already."""
        end = self.tokenizer.decode(ready.token_ids[-TAIL:], skip_special=False)
        return not end.rstrip().endswith(think[1])

    def spell(self, prompt: Prompt) -> tuple[str, list[int], list[tuple[int, int]]]:
        """Return a prompt's text (rendered, for a conversation), its token ids, and each token's character span."""
        if isinstance(prompt, Chat):
            text, special = self.render(prompt), prompt.special
        elif isinstance(prompt, Text):
            text, special = prompt.text, prompt.special
        else:
            return "", prompt.ids, [(0, 0)] * len(prompt.ids)
        return text, *self.tokenizer.spell(text, special)


def _forced(prompt: Prompt) -> bool:
    """Whether the answer must consist of calls, for any requested format."""
    return isinstance(prompt, Chat) and prompt.choice == "required"


def _key(chat: Chat, grammar: Grammar | None) -> bytes | None:
    """Return a digest of all inputs to the grammar of an answer that may call, or None if they cannot be encoded."""
    try:
        made = msgspec.json.encode([chat.tools, chat.choice, chat.only, chat.allowed, chat.parallel, grammar])
    except (RecursionError, UnicodeEncodeError, TypeError):
        return None
    return sha256(b"answer" + made).digest()


def _turn(prompt: Text) -> Chat:
    return Chat([Message("user", prompt.text)])


def _advice(folder: Path) -> dict[str, float]:
    """Return the numeric sampling values in generation_config.json. Raises BadTokenizer."""
    said = read_json(folder / "generation_config.json")
    return {name: said[name] for name in ADVICE if isinstance(said.get(name), int | float) and said[name] is not True}
