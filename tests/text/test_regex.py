"""Regular expressions: grammars allow only texts that Python matches, and in JSON schemas that ECMAScript does too."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import llguidance
import pytest
from support import tiny_tokenizers

from parley.errors import InvalidValue
from parley.text.grammar.compiler import GrammarCompiler
from parley.text.grammar.regex import to_rust_regex
from parley.types import Grammar

LETTERS = "aAbkzK\u212aß\u017féñ٣05_-.,+*?&~[]{}()|^$\\/ \t\n\r\x0b\x1c\x85\xa0\u0301\u203f\u2028\ufeff日🐲<>#:"
TEXTS = ["", *LETTERS, *(f"a{letter}" for letter in LETTERS), "ab", "aab", "aaa", "a0", "a.b", "{a}", "a{2", "<a>",
         "[a", "a]", "2024-02", "\N{OX}", "\x08", "\x01", "\0",
         ".+*?()|[]{}^$-"]  # fmt: skip

SAME_AS_PYTHON = [
    r"a", r"a|b", r"^a$", r"(^a$)|(^b$)", r"a*?", r"[ab]+", r".", r"(?s).", r"(?s:a.)", r"a.", r"\d", r"\D", r"\w",
    r"\W", r"\s", r"\S", r"[\s\S]", r"[^\s]", r"[\w.-]", r"[^\W\d_]", r"[\D5]", r"[\w\W]", r"[[a]", r"[a&&b]",
    r"[a~~b]", r"[+--]", r"[a\-b]", r"[\b]", r"[]a]", r"[^]a]", r"[\]\[]", r"[\^a]", r"{a}", r"a{2", r"a{,2}",
    r"a{2}", r"a{1,}", r"(?P<n>a)(?:b)?", r"(?#any)a", r"(?i)k", r"(?i)A", r"(?i:a)b", r"\Aa\Z", r"\x61", r"\u0061",
    r"\U0001F402", r"\0", r"\/", r"/", r"\<a\>", r"\.\+\*\?\(\)\|\[\]\{\}\^\$\-", r"\_", r"\t|\n|\r|\f|\v|\a",
    r"[é-ñ]", r"日|🐲", r"()", r"a||b", r"(a*)*", r"(?-i:a)", r"\d{4}-\d\d", "a\nb|a", r"[\x01-\x08]", r"\012", r"\101",
    r"[\t-\r]", r"(?u)a",
]  # fmt: skip
REFUSED = [
    (r"(a)\1", "backreferences"), (r"(?P<n>a)(?P=n)", "backreferences"), (r"(?=a)a", "look-ahead"),
    (r"(?<!a)b", "look-"), (r"\ba", r"\b"), (r"a++", "possessive"), (r"a{2}+", "possessive"), (r"(?>a)", "atomic"),
    (r"(?x) a", "flag x"), (r"(?L)a", "flag L"), (r"a\q", "escape"), (r"[\q]", "escape"), (r"[b-a]", "range"),
    (r"[a-\d]", "range"), (r"[a", "class"), (r"(a", "group"), (r"a)", "group"), (r"(?#a", "comment"),
    (r"*a", "repetition"), ("a\\", "backslash"), ("[\\", "backslash"), (r"\ud800", "surrogate"),
    (r"\U00110000", "character"), (r"a$b", "^ and $"), (r"[^\s\S]", "no text"), (r"b(?i)a", "flags"),
]  # fmt: skip
BYTES = llguidance.LLTokenizer("byte")


def text_matcher(compiler: GrammarCompiler, grammar: Grammar) -> Callable[[str], bool]:
    """Return a check whether a text matches the grammar, read byte by byte."""
    initial_matcher = llguidance.LLMatcher(BYTES, compiler.compile_grammar(grammar), log_level=0)

    def fits(text: str) -> bool:
        matcher, read = initial_matcher.deep_copy(), list(text.encode())
        return bool(matcher.try_consume_tokens(read) == len(read) and matcher.is_accepting())

    return fits


def json_string_matcher(compiler: GrammarCompiler, schema: dict[str, Any]) -> Callable[[str], bool]:
    fits = text_matcher(compiler, Grammar("json", schema))
    return lambda text: fits(json.dumps(text, ensure_ascii=False))


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(tiny_tokenizers.byte_level())


@pytest.mark.filterwarnings("ignore:Possible")
@pytest.mark.parametrize("expression", SAME_AS_PYTHON)
def test_regex_grammar_allows_only_python_matches(compiler, expression):
    fits = text_matcher(compiler, Grammar("regex", expression))
    accepted = {text for text in TEXTS if fits(text)}
    assert accepted
    assert [text for text in accepted if not re.fullmatch(expression, text)] == []
    missed = [text for text in TEXTS if text.isascii() and re.fullmatch(expression, text) and text not in accepted]
    assert set("".join(missed)) <= {"\x0b", "\x1c"}  # only Python counts these as white space


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\w$", "a5_", "é٣-"), (r"^\W$", "-. ", "aé٣"), (r"^\d$", "05", "٣a"), (r"^\D$", "aé", "5٣"),
        (r"^\s$", " \n\xa0\u2028", "\x85\x1ca"), (r"^\S$", "aé.", " \ufeff\x85\xa0"), (r"^.$", "a\t🐲", "\n\r\u2028"),
        (r"^[^a]$", "b\n🐲", "a"), (r"^[\s\S]$", "a\n\ufeff🐲", ""), (r"^\ud83d\udc32$", "🐲", "a"), (r"b", "b", "a"),
        (r"^\cI$", "\t", "I"), (r"^[\x00-\x1f]$", "\n\t\b", '"\\a'), (r"^[\x00-\x7f]$", 'a"\\\n', "é"),
        (r"^(?s:.)$", "a\n", ""), (r"^[\w-.]$", "a-.", "+"), (r"^\p{Lu}$", "AK", "a"),
    ],
)  # fmt: skip
def test_schema_patterns_mean_the_same_to_all_readers(compiler, pattern, good, bad):
    fits = json_string_matcher(compiler, {"type": "string", "pattern": pattern})
    assert all(map(fits, good)) and not any(map(fits, bad))


def test_control_characters_in_schemas_are_never_dropped(compiler):
    for pattern in ("^a\\x01$", "^a\x01b$", "[0-9]+\\x00", "^\\u007f$"):
        with pytest.raises(InvalidValue, match="pattern"):
            compiler.compile_grammar(Grammar("json", {"type": "string", "pattern": pattern}))
    fits = json_string_matcher(compiler, {"type": "string", "pattern": "^(a\\x01|b)$"})
    assert fits("b") and not fits("a")
    fits = text_matcher(compiler, Grammar("json", {"enum": ["a\x01b", "a\x7fb"]}))
    assert fits(r'"a\u0001b"') and fits(r'"a\u007fb"') and not fits('"ab"')


@pytest.mark.parametrize(("expression", "sentence"), REFUSED)
def test_unsupported_regex_is_refused_with_reason(compiler, expression, sentence):
    with pytest.raises(InvalidValue) as caught:
        compiler.compile_grammar(Grammar("regex", expression, field="guided_regex"))
    assert sentence in caught.value.message and caught.value.field == "guided_regex"


def test_regex_translation_to_rust_is_idempotent():
    translated = to_rust_regex(r"[\W\d].\s", schema=True)
    assert (
        to_rust_regex(translated, schema=True) is translated and to_rust_regex(translated, schema=False) is translated
    )
