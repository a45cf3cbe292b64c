"""The form that a request asks for, as the grammar that the engine follows. Compiling is checking.

A ``Grammar`` of any kind becomes one text, llguidance's JSON, which names no tokens but by their ids. Before it goes
anywhere a matcher is made of it, over an alphabet of bytes and the model's own marks instead of the whole vocabulary:
that tells all that can be wrong, costs the same for every model, and needs nothing large in this process.

What a hostile grammar may take is bounded three times: by its size, by llguidance's fuel, and by the processor time
that it took, measured. The first two see to it that nothing goes on for much longer than the last allows. It happens in
a few threads of its own (``WORKERS``), without the interpreter's lock where it could last. What came out is kept,
refusals as well.

Knows tokenizers and neutral grammars; no requests, no engines.
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
from parley.types import Grammar

from . import gbnf, lexemes
from . import schema as schemas
from .bounds import BUDGET, READING, SIZE, SLOW
from .expression import rust
from .lark import Lark, quoted
from .refused import Refused
from .tags import TEXT, Writer
from .tokenizer import Tokenizer

SIZE_GBNF = 32 << 10  # read by Python, which takes longer
STEP = 0.03  # of them for the first mask: a batch may have to wait so long for one
KEPT = 16 << 20  # bytes of grammars, each with what it is known by

USUAL = r" |\n[ \t]{0,32}"  # between JSON's marks: enough to be read by people, and nothing to get lost in

# A part that nothing refers to; its option holds for all. Where only one text can follow, llguidance would otherwise
# force tokens by having that text tokenised, which makes marks of what is spelt like them and then refuses these.
FREE = {"name": "free", "lark_grammar": '%llguidance {"no_forcing": true}\nstart: ""'}

LINE = 200  # characters of llguidance's own messages that are passed on
DEEP = "it is nested too deeply"
COMPLEX = "it is too complex"
WIDE = f"an object in it has more than {schemas.MEMBERS} properties"
IDS = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|<\[([^\]]*)\]>')  # of tokens; strings are passed over
UNKNOWN = re.compile(r"Unimplemented keys: \[(.*)\]")
REASONS = (
    ("NoExtension", "no text has this form"),
    ("oneOf constraints", "oneOf is supported only where its alternatives exclude one another"),
    ("min/maxProperties only", "minProperties and maxProperties are supported only where all properties are required"),
    ("anyOf is empty", "enum or anyOf has nothing to choose from"),
    ("lookarounds", "^ and $ are supported only where the text begins and ends, \\b and \\B nowhere"),
    ("invalid multiple of", "multipleOf must be greater than 0"),
    ("Token range end too large", "it names a token that is not in the vocabulary"),
    ("Regex is empty", "no text matches a pattern in it"),
    ("too deeply nested", DEEP),
    ("too large", "it is too large"),
    ("too big", "it is too large"),
    ("fuel", COMPLEX),
    ("determine if regex is empty", COMPLEX),
    ("too many expressions", COMPLEX),
    ("hex escape", "it holds half of a surrogate pair"),
    ("panic:", "what reads it fails at it"),
    ("Default retriever", "references to other documents are not followed"),
)

WORKERS = ThreadPoolExecutor(2, "grammar")


class Compiler:
    """Grammars for one model's tokenizer. All methods may be called from several threads at once."""

    def __init__(self, tokenizer: Tokenizer):
        self._alphabet: llguidance.LLTokenizer | None = None
        self._tokenizer = tokenizer
        self.lark = Lark(tokenizer.marks)
        self._made: OrderedDict[bytes, str | Refused] = OrderedDict()
        self._kept = 0
        self._lock = threading.Lock()

    def find(self, grammar: Grammar) -> str | None:
        """What was compiled before, None if it was not or is forgotten. Raises Invalid if it was refused."""
        made = self.recall(_key(grammar))
        if isinstance(made, Refused):
            raise _wrong(grammar, made)
        return made

    def compile(self, grammar: Grammar) -> str:
        """The engine's text of a grammar. Takes up to seconds: for WORKERS. Raises Invalid."""
        key = _key(grammar)
        began = time.thread_time()
        try:
            made: str | Refused = self._compile(grammar)
            if time.thread_time() - began > BUDGET:
                made = Refused(SLOW)
        except Refused as error:
            made = Refused(str(error))  # without its traceback
        except RecursionError:
            made = Refused(DEEP)
        except UnicodeEncodeError:
            made = Refused("it holds half of a surrogate pair")
        self.keep(key, made)
        if isinstance(made, Refused):
            raise _wrong(grammar, made)
        return made

    def recall(self, key: bytes) -> str | Refused | None:
        """What is kept under a digest."""
        with self._lock:
            made = self._made.get(key)
            if made is not None:
                self._made.move_to_end(key)
            return made

    def keep(self, key: bytes, made: str | Refused) -> None:
        """Keep it until others need the room."""
        with self._lock:
            if key not in self._made:
                self._made[key] = made
                self._kept += len(key) + len(str(made))
            while self._kept > KEPT:
                old, gone = self._made.popitem(last=False)
                self._kept -= len(old) + len(str(gone))

    def get(self, grammar: Grammar) -> str:
        """What was compiled before, or is now."""
        found = self.find(grammar)
        return self.compile(grammar) if found is None else found

    def behind(self, made: str, think: tuple[str, str], inside: bool) -> str:
        """A compiled grammar for what follows the reasoning, which stands between the marks of ``think``.

        ``inside``: the answer begins in the reasoning. Otherwise it may begin with it.
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
            raise Refused("this model's tokenizer spells a token differently from place to place")
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
        """A grammar as one of llguidance's; others that it calls are put to ``more``, and ``ends`` end one in GBNF."""
        value = grammar.value
        match grammar.kind:
            case "json":
                return {"json_schema": self._schema(grammar)}
            case "regex":
                return _lark(f"start: /{_regex(value)}/")
            case "choice" if not value:
                raise Refused("there is nothing to choose from")
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
        """A schema with the options that llguidance reads in it."""
        value = grammar.value if value is None else value
        if value is True:
            value = {}
        if not isinstance(value, dict):
            raise Refused("a JSON schema is an object or true, for false allows nothing")
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
        """The id of a token that is named by it or as the vocabulary writes it."""
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
    """Bytes and marks as a vocabulary, in the form that llguidance asks for; marks have the ids that they have."""

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
    """Whether JSON schemas within a grammar in Lark are of a size that can be read."""
    for found in re.finditer(r"%json\s*", grammar.value):
        try:
            value, _ = json.JSONDecoder().raw_decode(grammar.value, found.end())
        except ValueError:  # llguidance says what is wrong with it, or it is no schema but the end of a name
            continue
        if schemas.too_wide(value):
            raise Refused(WIDE)


def _check_ids(grammar: Grammar, vocabulary: int) -> None:
    """Whether tokens that a grammar in Lark names by their ids are the model's; the alphabet here has more."""
    for found in IDS.finditer(grammar.value):
        if any(int(id) >= vocabulary for id in re.findall(r"0*([0-9]{1,10})", found[1] or "")):
            raise Refused("it names a token that is not in the vocabulary")


def _wrong(grammar: Grammar, reason: Refused | str) -> Invalid:
    return Invalid(f"{grammar.field} cannot be followed: {reason}.", field=grammar.field)


def _reason(error: str) -> str:
    """llguidance's message as the end of a sentence, without what only its own callers understand."""
    if found := UNKNOWN.search(error):
        return f"the keywords {found[1]} are not supported" if "," in found[1] else f"{found[1]} is not supported"
    for known, told in REASONS:
        if known in error:
            return told
    lines = error.strip().splitlines() or ["it is wrong"]
    line = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    line = line.strip().rstrip(".:")
    return line if len(line) <= LINE else line[: LINE - 1] + "…"
