"""Compile the grammar of a response format into the text that the engine's matcher reads. Compiling is also checking.

A ``Grammar`` of any kind becomes one text: llguidance's JSON, which names tokens only by their ids. Before the text is
used, a matcher is built from it over a small vocabulary: the 256 bytes and the model's own marks. This finds every
error, costs the same for every model, and needs no large vocabulary in this process.

The cost of a hostile grammar is limited in three ways: by its size, by llguidance's fuel, and by the measured processor
time. The first two ensure that no single call runs much longer than the third allows. For clients' grammars this runs
in processes that the kernel ends if it takes too long nevertheless (``workers/grammar_workers.py``). Results are
cached, refusals included.

Depends on tokenizers and neutral grammars, not on requests or engines.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Protocol

import llguidance
import msgspec

from parley.errors import InvalidValue, excerpt
from parley.text.grammar import gbnf, lexemes
from parley.text.grammar.grammar_refused import GrammarRefused
from parley.text.grammar.lark import LarkWriter, quote_lark
from parley.text.grammar.limits import (
    COMPILE_LIMITS,
    COMPILE_SECONDS,
    CRASHED,
    MAX_GRAMMAR_CHARS,
    TOO_DEEP,
    TOO_LARGE,
    TOO_SLOW,
)
from parley.text.grammar.regex import to_rust_regex
from parley.text.grammar.schemas import json_schema as schemas
from parley.text.grammar.structural_tags import ANY_TEXT_TERMINAL, TagWriter
from parley.types import Grammar

MAX_GBNF_CHARS = 32 << 10  # characters; smaller than MAX_GRAMMAR_CHARS because Python parses GBNF, which is slower
MAX_MASK_SECONDS = 0.03  # seconds for the first mask: a batch may have to wait this long for one
CACHE_BYTES = 16 << 20  # bytes of cached grammars and their keys

# White space between JSON tokens: enough for readable output, without endless runs of it.
DEFAULT_WHITESPACE = r" |\n[ \t]{0,32}"

# A grammar that nothing refers to; its option applies to all others. Without it, llguidance forces tokens where only
# one text can follow: it tokenizes that text, turns parts that look like marks into marks, and then refuses them.
NO_FORCING = {"name": "free", "lark_grammar": '%llguidance {"no_forcing": true}\nstart: ""'}

MAX_MESSAGE_CHARS = 200  # longest part of llguidance's own messages that is passed on, in characters
TOO_COMPLEX = "it is too complex"
TOO_WIDE = f"an object in it has more than {schemas.MAX_PROPERTIES} properties"
# Token ids; also matches strings, to skip them.
TOKEN_IDS = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|<\[([^\]]*)\]>')
UNKNOWN_KEYWORDS = re.compile(r"Unimplemented keys: \[(.*)\]")
ERROR_REASONS = (
    ("NoExtension", "no text can match it"),
    ("oneOf constraints", "oneOf is supported only where its alternatives exclude one another"),
    ("min/maxProperties only", "minProperties and maxProperties are supported only where all properties are required"),
    ("anyOf is empty", "its enum or anyOf is empty"),
    ("lookarounds", "^ and $ are supported only at the beginning and end of the text, \\b and \\B nowhere"),
    ("invalid multiple of", "multipleOf must be greater than 0"),
    ("Token range end too large", "it names a token that is not in the vocabulary"),
    ("Regex is empty", "no text matches a pattern in it"),
    ("too deeply nested", TOO_DEEP),
    ("too large", TOO_LARGE),
    ("too big", TOO_LARGE),
    ("fuel", TOO_COMPLEX),
    ("determine if regex is empty", TOO_COMPLEX),
    ("too many expressions", TOO_COMPLEX),
    ("hex escape", "it contains half of a surrogate pair"),
    ("panic:", CRASHED),
    ("Default retriever", "references to other documents are not followed"),
)


class GrammarVocabulary(Protocol):
    """The facts about a tokenizer that grammars need, in the terms of ``Tokenizer``."""

    @property
    def marks(self) -> Mapping[str, int]:
        """The ids of the tokens that do not count as text, by their texts."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""

    @property
    def decodes_by_token(self) -> bool:
        """Whether a text is the concatenation of its tokens' bytes."""

    def find_token(self, token: int | str) -> int | None:
        """Return the id of a token given as its id or as the vocabulary writes it; None if there is no such token."""


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary and caches the results. All methods are thread-safe."""

    def __init__(self, vocabulary: GrammarVocabulary):
        self._test_vocabulary: llguidance.LLTokenizer | None = None
        self._vocabulary = vocabulary
        self.lark_writer = LarkWriter(vocabulary.marks)
        self._cache: OrderedDict[bytes, str | GrammarRefused] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()

    def find_compiled(self, grammar: Grammar) -> str | None:
        """Return the cached text, or None if there is none. Raises InvalidValue if the grammar was refused before."""
        result = self.cached_result(_grammar_key(grammar))
        if isinstance(result, GrammarRefused):
            raise _invalid_grammar(grammar, result)
        return result

    def compile_grammar(self, grammar: Grammar) -> str:
        """Return the engine's text of a grammar. Takes up to seconds. Raises InvalidValue."""
        key = _grammar_key(grammar)
        began = time.thread_time()
        try:
            result: str | GrammarRefused = self._write_and_test(grammar)
            if time.thread_time() - began > COMPILE_SECONDS:
                result = GrammarRefused(TOO_SLOW)
        except GrammarRefused as error:
            result = GrammarRefused(str(error))  # drop the traceback
        except RecursionError:
            result = GrammarRefused(TOO_DEEP)
        except UnicodeEncodeError:
            result = GrammarRefused("it contains half of a surrogate pair")
        self.cache_result(key, result)
        if isinstance(result, GrammarRefused):
            raise _invalid_grammar(grammar, result)
        return result

    def cached_result(self, key: bytes) -> str | GrammarRefused | None:
        """Return the cached result of a key: a text, a refusal, or None."""
        with self._lock:
            result = self._cache.get(key)
            if result is not None:
                self._cache.move_to_end(key)
            return result

    def cache_result(self, key: bytes, result: str | GrammarRefused) -> None:
        """Cache a result, and evict the least recently used ones while the cache exceeds CACHE_BYTES."""
        with self._lock:
            if key not in self._cache:
                self._cache[key] = result
                self._cached_bytes += len(key) + len(str(result))
            while self._cached_bytes > CACHE_BYTES:
                evicted_key, evicted = self._cache.popitem(last=False)
                self._cached_bytes -= len(evicted_key) + len(str(evicted))

    def find_or_compile(self, grammar: Grammar) -> str:
        """Return the cached text, or compile it now. Raises InvalidValue."""
        compiled = self.find_compiled(grammar)
        return self.compile_grammar(grammar) if compiled is None else compiled

    def allow_reasoning_before(self, compiled: str, reasoning_marks: tuple[str, str], starts_inside: bool) -> str:
        """Return a compiled grammar that allows reasoning, between ``reasoning_marks``, before the compiled one.

        ``starts_inside``: the answer starts in the reasoning, which is then required. Otherwise reasoning is optional.
        """
        opening = self.lark_writer.write_text(reasoning_marks[0])
        closing = self.lark_writer.write_text(reasoning_marks[1])
        lines = ["THOUGHT: " + ANY_TEXT_TERMINAL, r"GAP: /\n{0,2}/"]
        if reasoning_marks[1] in self.lark_writer.marks:
            reasoning = f"THOUGHT {closing}"
        else:
            reasoning = "thought"
            lines.append(f"thought[lazy]: THOUGHT {closing}")
        lines.append(f"start: {reasoning} GAP @form" if starts_inside else f"start: ({opening} {reasoning} GAP)? @form")
        first_grammar, *other_grammars = json.loads(compiled)["grammars"]
        start_grammar = {"name": "answer", "lark_grammar": "\n".join(lines)}
        return json.dumps({"grammars": [start_grammar, first_grammar | {"name": "form"}, *other_grammars]})

    def _write_and_test(self, grammar: Grammar) -> str:
        if not self._vocabulary.decodes_by_token:
            raise GrammarRefused("this model's tokenizer spells a token differently depending on its position")
        text = self._write_grammars(grammar)
        if len(text) > MAX_GRAMMAR_CHARS:
            raise GrammarRefused(f"it has {len(text)} characters, and at most {MAX_GRAMMAR_CHARS} are allowed")
        limits = llguidance.LLParserLimits(**COMPILE_LIMITS)
        matcher = llguidance.LLMatcher(self._build_test_vocabulary(), text, log_level=0, limits=limits)
        if not matcher.is_error():
            began = time.thread_time()
            matcher.compute_bitmask()
            if time.thread_time() - began > MAX_MASK_SECONDS:
                raise GrammarRefused(TOO_COMPLEX)
        if matcher.is_error():
            raise GrammarRefused(_explain_error(matcher.get_error()))
        return text

    def _write_grammars(self, grammar: Grammar) -> str:
        called: list[dict[str, Any]] = []
        parts = [self._write_part(grammar, called)]
        if grammar.kind == "around":
            parts.append({"name": "inner"} | self._write_part(grammar.value[1], called))
        return json.dumps({"grammars": [*parts, *called, NO_FORCING]})

    def _write_part(
        self, grammar: Grammar, called: list[dict[str, Any]], ends: list[str] | None = None
    ) -> dict[str, Any]:
        """Write one llguidance grammar. Grammars it calls are appended to ``called``; a GBNF one ends with ``ends``."""
        value = grammar.value
        match grammar.kind:
            case "json":
                return {"json_schema": self._prepare_schema(grammar)}
            case "regex":
                return _lark_grammar(f"start: /{_regex_to_lark(value)}/")
            case "choice" if not value:
                raise GrammarRefused("its list of choices is empty")
            case "choice":
                return _lark_grammar("start: " + " | ".join(map(quote_lark, value)))
            case "lark":
                _check_inner_schemas(grammar)
                _check_token_ids(grammar, self._vocabulary.vocab_size)
                return _lark_grammar(value)
            case "around":
                return _lark_grammar(value[0])
            case "ebnf":
                if len(value) > MAX_GBNF_CHARS:
                    raise GrammarRefused(f"it has {len(value)} characters, and at most {MAX_GBNF_CHARS} are allowed")
                return _lark_grammar(lexemes.write_lark(gbnf.parse_gbnf(value), ends or []))
            case "tags":
                return _lark_grammar(self._write_tags(grammar, called))

    def _prepare_schema(self, grammar: Grammar, value: Any = None) -> dict[str, Any]:
        """Return a schema with llguidance's options in it."""
        value = grammar.value if value is None else value
        if value is True:
            value = {}
        if not isinstance(value, dict):
            raise GrammarRefused("a JSON schema must be an object or true; false allows nothing")
        if schemas.too_deep(value):
            raise GrammarRefused(f"it is nested deeper than {schemas.MAX_SCHEMA_DEPTH} levels")
        if schemas.too_wide(value):
            raise GrammarRefused(TOO_WIDE)
        whitespace = DEFAULT_WHITESPACE if grammar.whitespace is None else grammar.whitespace
        options: dict[str, Any] = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
        prepared = schemas.prepare_for_llguidance(value)
        return prepared | {"x-guidance": options | {"json_allowed_escapes": schemas.allowed_escapes(prepared)}}

    def _write_tags(self, grammar: Grammar, called: list[dict[str, Any]]) -> str:
        def add_part(inner: Grammar, ends: list[str]) -> str:
            called.append({"name": f"part{len(called)}"} | self._write_part(inner, called, ends))
            return str(called[-1]["name"])

        def prepare_schema(value: Any) -> dict[str, Any]:
            return self._prepare_schema(grammar, value)

        return TagWriter(
            self.lark_writer, prepare_schema, _regex_to_lark, add_part, self._find_token_id
        ).write_tag_grammar(grammar.value)

    def _find_token_id(self, token: int | str) -> int:
        """Return the id of a token given as its id or as the vocabulary writes it."""
        token_id = self._vocabulary.find_token(token)
        if token_id is None:
            raise GrammarRefused(f"there is no token {excerpt(str(token))}")
        return token_id

    def _build_test_vocabulary(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._test_vocabulary is None:
                vocabulary = _ByteVocabulary(self._vocabulary)
                self._test_vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary))
            return self._test_vocabulary


class _ByteVocabulary:
    """A vocabulary of bytes and marks, as llguidance's TokenizerWrapper expects it. Marks keep the model's ids."""

    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary):
        self.first_byte_id = vocabulary.vocab_size
        self.tokens = [b""] * self.first_byte_id + [bytes([byte]) for byte in range(256)] + [b"<end of answer>"]
        self.eos_token_id = len(self.tokens) - 1
        for mark, token_id in vocabulary.marks.items():
            self.tokens[token_id] = mark.encode()
        self.special_token_ids = [*vocabulary.marks.values(), self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        return [self.first_byte_id + byte for byte in text]


def _grammar_key(grammar: Grammar) -> bytes:
    content = [grammar.kind, grammar.value, grammar.whitespace]
    try:
        return sha256(json.dumps(content, default=msgspec.to_builtins).encode()).digest()
    except RecursionError:
        raise _invalid_grammar(grammar, TOO_DEEP) from None


def _lark_grammar(text: str) -> dict[str, Any]:
    return {"lark_grammar": text}


def _regex_to_lark(value: str) -> str:
    return str(llguidance.regex_to_lark(to_rust_regex(value, schema=False), ""))


def _check_inner_schemas(grammar: Grammar) -> None:
    """Refuse a Lark grammar that contains a JSON schema with too many properties."""
    for match in re.finditer(r"%json\s*", grammar.value):
        try:
            value, _ = json.JSONDecoder().raw_decode(grammar.value, match.end())
        except ValueError:  # llguidance reports the error, or "%json" is only the end of a name
            continue
        if schemas.too_wide(value):
            raise GrammarRefused(TOO_WIDE)


def _check_token_ids(grammar: Grammar, vocab_size: int) -> None:
    """Refuse a Lark grammar with token ids that the model lacks; the test vocabulary here has more."""
    for match in TOKEN_IDS.finditer(grammar.value):
        if any(int(token_id) >= vocab_size for token_id in re.findall(r"0*([0-9]{1,10})", match[1] or "")):
            raise GrammarRefused("it names a token that is not in the vocabulary")


def _invalid_grammar(grammar: Grammar, reason: GrammarRefused | str) -> InvalidValue:
    return InvalidValue(f"{grammar.field} cannot be enforced: {reason}.", field=grammar.field)


def _explain_error(error: str) -> str:
    """Turn llguidance's message into the end of a sentence, without the parts meant for its own callers."""
    if match := UNKNOWN_KEYWORDS.search(error):
        return f"the keywords {match[1]} are not supported" if "," in match[1] else f"{match[1]} is not supported"
    for fragment, explanation in ERROR_REASONS:
        if fragment in error:
            return explanation
    lines = error.strip().splitlines() or ["it is wrong"]
    line = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    line = line.strip().rstrip(".:")
    return line if len(line) <= MAX_MESSAGE_CHARS else line[: MAX_MESSAGE_CHARS - 1] + "…"
