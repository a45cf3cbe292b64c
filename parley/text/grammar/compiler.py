"""Compile the grammar of a response format into the text that the engine's matcher reads. Compiling is also checking.

A ``Grammar`` of any kind becomes one text: llguidance's JSON, which names tokens only by their ids. Before the text is
used, a matcher is built from it over a small vocabulary: the 256 bytes and the model's own marks. This finds every
error, costs the same for every model, and needs no large vocabulary in this process.

The cost of a hostile grammar is limited in three ways: by its size, by llguidance's fuel, and by the measured processor
time. The first two ensure that no single call runs much longer than the third allows. Compilation runs in a small
thread pool (``COMPILE_WORKERS``), and releases the interpreter's lock wherever it could take long. Results are cached,
refusals included.

Depends on tokenizers and neutral grammars, not on requests or engines.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import llguidance
import msgspec

from parley.errors import Invalid, excerpt
from parley.text.grammar import gbnf, lexemes
from parley.text.grammar import json_schema as schemas
from parley.text.grammar.lark import Lark, quoted
from parley.text.grammar.limits import BUDGET, READING, SIZE, SLOW
from parley.text.grammar.refused import Refused
from parley.text.grammar.regex import rust
from parley.text.grammar.structural_tags import TEXT, Writer
from parley.text.tokens.tokenizer import Tokenizer
from parley.types import Grammar

SIZE_GBNF = 32 << 10  # characters; smaller than MAX_GRAMMAR_CHARS because Python parses GBNF, which is slower
STEP = 0.03  # seconds for the first mask: a batch may have to wait this long for one
KEPT = 16 << 20  # bytes of cached grammars and their keys

USUAL = r" |\n[ \t]{0,32}"  # white space between JSON tokens: enough for readable output, without endless runs of it

# A grammar that nothing refers to; its option applies to all others. Without it, llguidance forces tokens where only
# one text can follow: it tokenizes that text, turns parts that look like marks into marks, and then refuses them.
FREE = {"name": "free", "lark_grammar": '%llguidance {"no_forcing": true}\nstart: ""'}

LINE = 200  # longest part of llguidance's own messages that is passed on, in characters
DEEP = "it is nested too deeply"
COMPLEX = "it is too complex"
WIDE = f"an object in it has more than {schemas.MEMBERS} properties"
IDS = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|<\[([^\]]*)\]>')  # token ids; also matches strings, to skip them
UNKNOWN = re.compile(r"Unimplemented keys: \[(.*)\]")
REASONS = (
    ("NoExtension", "no text can match it"),
    ("oneOf constraints", "oneOf is supported only where its alternatives exclude one another"),
    ("min/maxProperties only", "minProperties and maxProperties are supported only where all properties are required"),
    ("anyOf is empty", "its enum or anyOf is empty"),
    ("lookarounds", "^ and $ are supported only at the beginning and end of the text, \\b and \\B nowhere"),
    ("invalid multiple of", "multipleOf must be greater than 0"),
    ("Token range end too large", "it names a token that is not in the vocabulary"),
    ("Regex is empty", "no text matches a pattern in it"),
    ("too deeply nested", DEEP),
    ("too large", "it is too large"),
    ("too big", "it is too large"),
    ("fuel", COMPLEX),
    ("determine if regex is empty", COMPLEX),
    ("too many expressions", COMPLEX),
    ("hex escape", "it contains half of a surrogate pair"),
    ("panic:", "the grammar library crashed on it"),
    ("Default retriever", "references to other documents are not followed"),
)

WORKERS = ThreadPoolExecutor(2, "grammar")


class Compiler:
    """Compiles grammars for one model's tokenizer and caches the results. All methods are thread-safe."""

    def __init__(self, tokenizer: Tokenizer):
        self._alphabet: llguidance.LLTokenizer | None = None
        self._tokenizer = tokenizer
        self.lark = Lark(tokenizer.marks)
        self._made: OrderedDict[bytes, str | Refused] = OrderedDict()
        self._kept = 0
        self._lock = threading.Lock()

    def find(self, grammar: Grammar) -> str | None:
        """Return the cached text, or None if there is none. Raises Invalid if the grammar was refused before."""
        made = self.recall(_key(grammar))
        if isinstance(made, Refused):
            raise _wrong(grammar, made)
        return made

    def compile(self, grammar: Grammar) -> str:
        """Return the engine's text of a grammar. Takes up to seconds: run it in COMPILE_WORKERS. Raises Invalid."""
        key = _key(grammar)
        began = time.thread_time()
        try:
            made: str | Refused = self._compile(grammar)
            if time.thread_time() - began > BUDGET:
                made = Refused(SLOW)
        except Refused as error:
            made = Refused(str(error))  # drop the traceback
        except RecursionError:
            made = Refused(DEEP)
        except UnicodeEncodeError:
            made = Refused("it contains half of a surrogate pair")
        self.keep(key, made)
        if isinstance(made, Refused):
            raise _wrong(grammar, made)
        return made

    def recall(self, key: bytes) -> str | Refused | None:
        """Return the cached result of a key: a text, a refusal, or None."""
        with self._lock:
            made = self._made.get(key)
            if made is not None:
                self._made.move_to_end(key)
            return made

    def keep(self, key: bytes, made: str | Refused) -> None:
        """Cache a result, and evict the least recently used ones while the cache exceeds CACHE_BYTES."""
        with self._lock:
            if key not in self._made:
                self._made[key] = made
                self._kept += len(key) + len(str(made))
            while self._kept > KEPT:
                old, gone = self._made.popitem(last=False)
                self._kept -= len(old) + len(str(gone))

    def get(self, grammar: Grammar) -> str:
        """Return the cached text, or compile it now. Raises Invalid."""
        found = self.find(grammar)
        return self.compile(grammar) if found is None else found

    def behind(self, made: str, think: tuple[str, str], inside: bool) -> str:
        """Return a compiled grammar that allows reasoning, between ``reasoning_marks``, before the compiled one.

        ``starts_inside``: the answer starts in the reasoning, which is then required. Otherwise reasoning is optional.
        """
        opening, closing = self.lark.text(think[0]), self.lark.text(think[1])
        lines = ["THOUGHT: " + TEXT, r"GAP: /\n{0,2}/"]
        if think[1] in self.lark.marks:
            thought = f"THOUGHT {closing}"
        else:
            thought = "thought"
            lines.append(f"thought[lazy]: THOUGHT {closing}")
        lines.append(f"start: {thought} GAP @form" if inside else f"start: ({opening} {thought} GAP)? @form")
        form, *parts = json.loads(made)["grammars"]
        answer = {"name": "answer", "lark_grammar": "\n".join(lines)}
        return json.dumps({"grammars": [answer, form | {"name": "form"}, *parts]})

    def _compile(self, grammar: Grammar) -> str:
        if not self._tokenizer.by_piece:
            raise Refused("this model's tokenizer spells a token differently depending on its position")
        text = self._write(grammar)
        if len(text) > SIZE:
            raise Refused(f"it has {len(text)} characters, and at most {SIZE} are allowed")
        limits = llguidance.LLParserLimits(**READING)
        matcher = llguidance.LLMatcher(self._letters(), text, log_level=0, limits=limits)
        if not matcher.is_error():
            began = time.thread_time()
            matcher.compute_bitmask()
            if time.thread_time() - began > STEP:
                raise Refused(COMPLEX)
        if matcher.is_error():
            raise Refused(_reason(matcher.get_error()))
        return text

    def _write(self, grammar: Grammar) -> str:
        more: list[dict[str, Any]] = []
        parts = [self._part(grammar, more)]
        if grammar.kind == "around":
            parts.append({"name": "inner"} | self._part(grammar.value[1], more))
        return json.dumps({"grammars": [*parts, *more, FREE]})

    def _part(self, grammar: Grammar, more: list[dict[str, Any]], ends: list[str] | None = None) -> dict[str, Any]:
        """Write one llguidance grammar. Grammars it calls are appended to ``called``; a GBNF one ends with ``ends``."""
        value = grammar.value
        match grammar.kind:
            case "json":
                return {"json_schema": self._schema(grammar)}
            case "regex":
                return _lark(f"start: /{_regex(value)}/")
            case "choice" if not value:
                raise Refused("its list of choices is empty")
            case "choice":
                return _lark("start: " + " | ".join(map(quoted, value)))
            case "lark":
                _check_inner(grammar)
                _check_ids(grammar, self._tokenizer.vocab_size)
                return _lark(value)
            case "around":
                return _lark(value[0])
            case "ebnf":
                if len(value) > SIZE_GBNF:
                    raise Refused(f"it has {len(value)} characters, and at most {SIZE_GBNF} are allowed")
                return _lark(lexemes.lark(gbnf.read(value), ends or []))
            case "tags":
                return _lark(self._tags(grammar, more))

    def _schema(self, grammar: Grammar, value: Any = None) -> dict[str, Any]:
        """Return a schema with llguidance's options in it."""
        value = grammar.value if value is None else value
        if value is True:
            value = {}
        if not isinstance(value, dict):
            raise Refused("a JSON schema must be an object or true; false allows nothing")
        if schemas.too_deep(value):
            raise Refused(f"it is nested deeper than {schemas.DEPTH} levels")
        if schemas.too_wide(value):
            raise Refused(WIDE)
        white = USUAL if grammar.whitespace is None else grammar.whitespace
        options: dict[str, Any] = {"whitespace_pattern": white} if white else {"whitespace_flexible": False}
        made = schemas.ready(value, grammar.closed)
        return made | {"x-guidance": options | {"json_allowed_escapes": schemas.escapes(made)}}

    def _tags(self, grammar: Grammar, more: list[dict[str, Any]]) -> str:
        def part(each: Grammar, ends: list[str]) -> str:
            more.append({"name": f"part{len(more)}"} | self._part(each, more, ends))
            return str(more[-1]["name"])

        def schema(value: Any) -> dict[str, Any]:
            return self._schema(grammar, value)

        return Writer(self.lark, schema, _regex, part, self._id).write(grammar.value)

    def _id(self, token: int | str) -> int:
        """Return the id of a token given as its id or as the vocabulary writes it."""
        tokenizer = self._tokenizer
        id = token if isinstance(token, int) else tokenizer.backend.token_to_id(token)
        if id is None or tokenizer.token_str(id) is None:
            raise Refused(f"there is no token {excerpt(str(token))}")
        return id

    def _letters(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._alphabet is None:
                letters = _Letters(self._tokenizer)
                self._alphabet = llguidance.LLTokenizer(llguidance.TokenizerWrapper(letters))
            return self._alphabet


class _Letters:
    """A vocabulary of bytes and marks, as llguidance's TokenizerWrapper expects it. Marks keep the model's ids."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer):
        self.first = tokenizer.vocab_size
        self.tokens = [b""] * self.first + [bytes([byte]) for byte in range(256)] + [b"<end of answer>"]
        self.eos_token_id = len(self.tokens) - 1
        for mark, id in tokenizer.marks.items():
            self.tokens[id] = mark.encode()
        self.special_token_ids = [*tokenizer.marks.values(), self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        return [self.first + byte for byte in text]


def _key(grammar: Grammar) -> bytes:
    content = [grammar.kind, grammar.value, grammar.whitespace, grammar.closed]
    try:
        return sha256(json.dumps(content, default=msgspec.to_builtins).encode()).digest()
    except RecursionError:
        raise _wrong(grammar, DEEP) from None


def _lark(text: str) -> dict[str, Any]:
    return {"lark_grammar": text}


def _regex(value: str) -> str:
    return str(llguidance.regex_to_lark(rust(value, schema=False), ""))


def _check_inner(grammar: Grammar) -> None:
    """Refuse a Lark grammar that contains a JSON schema with too many properties."""
    for found in re.finditer(r"%json\s*", grammar.value):
        try:
            value, _ = json.JSONDecoder().raw_decode(grammar.value, found.end())
        except ValueError:  # llguidance reports the error, or "%json" is only the end of a name
            continue
        if schemas.too_wide(value):
            raise Refused(WIDE)


def _check_ids(grammar: Grammar, vocabulary: int) -> None:
    """Refuse a Lark grammar with token ids that the model lacks; the test vocabulary here has more."""
    for found in IDS.finditer(grammar.value):
        if any(int(id) >= vocabulary for id in re.findall(r"0*([0-9]{1,10})", found[1] or "")):
            raise Refused("it names a token that is not in the vocabulary")


def _wrong(grammar: Grammar, reason: Refused | str) -> Invalid:
    return Invalid(f"{grammar.field} cannot be followed: {reason}.", field=grammar.field)


def _reason(error: str) -> str:
    """Turn llguidance's message into the end of a sentence, without the parts meant for its own callers."""
    if found := UNKNOWN.search(error):
        return f"the keywords {found[1]} are not supported" if "," in found[1] else f"{found[1]} is not supported"
    for known, told in REASONS:
        if known in error:
            return told
    lines = error.strip().splitlines() or ["it is wrong"]
    line = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    line = line.strip().rstrip(".:")
    return line if len(line) <= LINE else line[: LINE - 1] + "…"
