"""Compiles the grammar of an answer: of the response format and of the tools that it may call.

The API process asks grammar workers for this, processes of their own (``workers/grammar_workers.py``), and keeps the
results. Knows no processes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from hashlib import sha256

from parley.errors import InvalidValue
from parley.text.grammar import answer_grammar
from parley.text.grammar.answer_question import AnswerCompiled, AnswerRefused, find_answered_chat
from parley.text.grammar.compiler import CACHE_BYTES, GrammarCompiler, GrammarVocabulary
from parley.text.parsing.markup import Markup
from parley.types import ChatPrompt, Grammar, Prompt


class AnswerGrammarCompiler:
    """Compiles the answers' grammars of one model. ``markup``: how its answers are marked."""

    def __init__(self, vocabulary: GrammarVocabulary, markup: Markup):
        self.vocabulary, self.markup = vocabulary, markup
        self.grammar_compiler = GrammarCompiler(vocabulary)

    def compile_answer(self, prompt: Prompt | None, grammar: Grammar | None) -> str:
        """Compile the requested format and the tools to the grammar that the engine reads; "" if the answer is free.

        Takes up to seconds. Raises InvalidValue.
        """
        find_or_compile = self.grammar_compiler.find_or_compile
        chat = find_answered_chat(prompt)
        if chat is not None and chat.tool_choice == "required" and grammar is not None:
            find_or_compile(grammar)  # a forced call replaces it, but an invalid one is still refused
        try:
            full_grammar = self._compose_grammar(chat, grammar)
            return find_or_compile(full_grammar) if full_grammar is not None else ""
        except InvalidValue:
            loose = answer_grammar.unenforced_tools(chat, find_or_compile) if chat is not None else None
            if not loose:
                raise
            full_grammar = self._compose_grammar(chat, grammar, loose)
            assert full_grammar is not None
            return find_or_compile(full_grammar)

    def _compose_grammar(
        self, chat: ChatPrompt | None, grammar: Grammar | None, loose: Collection[str] = ()
    ) -> Grammar | None:
        if chat is None or not (chat.tools or grammar):
            return grammar
        markup = answer_grammar.answer_markup(self.markup, chat)
        return answer_grammar.compose_grammar(markup, self.grammar_compiler.lark_writer, chat, grammar, loose)


def may_be_any_text(prompt: Prompt, grammar: Grammar | None) -> bool:
    """Whether the answer is free, so that nothing needs to be compiled."""
    if grammar is not None:
        return False
    return not isinstance(prompt, ChatPrompt) or not prompt.tools or answer_grammar.allows_any_text(prompt)


class AnswerGrammarCache:
    """Answers to questions, refusals included; the least recently used ones are evicted.

    Belongs to the event loop's thread.
    """

    def __init__(self) -> None:
        self._results: OrderedDict[bytes, AnswerCompiled | AnswerRefused] = OrderedDict()
        self._bytes = 0

    def find_result(self, question: str) -> AnswerCompiled | AnswerRefused | None:
        """Return the answer to a question, None if it is not known."""
        key = sha256(question.encode()).digest()
        result = self._results.get(key)
        if result is not None:
            self._results.move_to_end(key)
        return result

    def add_result(self, question: str, result: AnswerCompiled | AnswerRefused) -> None:
        """Keep the answer to a question."""
        key = sha256(question.encode()).digest()
        if key not in self._results:
            self._results[key] = result
            self._bytes += _result_size(result)
        while self._bytes > CACHE_BYTES:
            self._bytes -= _result_size(self._results.popitem(last=False)[1])


def _result_size(result: AnswerCompiled | AnswerRefused) -> int:
    """Return roughly how many bytes a cached answer takes."""
    return 256 + len(result.grammar if isinstance(result, AnswerCompiled) else result.reason)
