"""Write XGrammar's structural tags as a Lark grammar: free text, tags with a grammar inside, and combinations of them.

llguidance splits text into lexemes, and a lexeme of free text would consume everything after it. An open-ended piece is
therefore written together with the text that ends it, and refused if that text is not known. Marks need no such care,
because no text matches them. This module combines pieces; the caller handles schemas, spelling and other grammars.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from parley.errors import excerpt
from parley.text.grammar.lark import Lark, quoted
from parley.text.grammar.refused import Refused
from parley.types import AnyText, Either, Exactly, Grammar, Piece, Repeat, Sequence, Tag, TagList, Tags

TEXT = r"/(.|\n)*/"
OPEN = "free text or an expression has to be followed by a tag, by a constant, or by the end of the answer"

Ends = list[str] | None  # possible next texts; empty: the end of the answer; None: anything else


class Writer:
    """Writes one structural tag. ``lark`` spells texts that contain marks.

    ``prepare_schema`` prepares a JSON schema, and ``regex_to_lark`` an expression. ``add_part`` adds another grammar
    (a GBNF one with the texts that can end it) and returns its name. ``find_token_id`` returns a token's id. All of
    them raise GrammarRefused.
    """

    def __init__(
        self,
        lark: Lark,
        schema: Callable[[Any], dict[str, Any]],
        regex: Callable[[str], str],
        part: Callable[[Grammar, list[str]], str],
        number: Callable[[int | str], int],
    ):
        self._lark = lark
        self._schema, self._regex, self._part, self._number = schema, regex, part, number
        self._lines = [f"TEXT: {TEXT}"]

    def write(self, piece: Piece) -> str:
        """Return the whole grammar. Raises GrammarRefused."""
        start = self._piece(piece, [])
        return "\n".join([f"start: {start}", *self._lines])

    def _piece(self, piece: Piece, ends: Ends) -> str:
        """Write a piece together with the text that ends it."""
        match piece:
            case AnyText():
                return self._until(self._free(piece.excludes), ends)
            case Tag():
                return f"{self._spell(piece.begin)} {self._inside(piece, ends)}"
            case Tags():
                return self._triggered(piece, ends)
            case TagList():
                return self._list(piece, ends)
            case Sequence():
                return self._sequence(list(piece.pieces), ends)
            case Either():
                if not piece.pieces:
                    raise Refused("its list of alternatives is empty")
                return self._either([self._piece(each, ends) for each in piece.pieces])
            case Repeat():
                return self._repeated(piece, ends)
            case Exactly():
                return f"<[{self._number(piece.token)}]> {self._ended(ends)}"
            case Grammar():
                return self._grammar(piece, ends)

    def _grammar(self, piece: Grammar, ends: Ends) -> str:
        match piece.kind:
            case "json":
                return f"%json {json.dumps(self._schema(piece.value))} {self._ended(ends)}"
            case "choice":
                return self._either([self._spell(text + end) for text in piece.value for end in ends or [""]])
            case "regex":
                return self._until(self._name("FORM", f"/{self._regex(piece.value)}/"), ends, lazy=False)
            case "tags":
                return self._piece(piece.value, ends)
            case "ebnf":
                return self._rules(piece, ends or [""])
        return f"@{self._part(piece, [])} {self._ended(ends)}"

    def _rules(self, piece: Grammar, ends: list[str]) -> str:
        """Write a GBNF grammar. It includes the end text up to the first mark."""
        marks = {end: mark.start() if (mark := self._lark.mark(end)) else len(end) for end in ends}
        plain = [end for end in ends if end and marks[end] == len(end)]
        made = [f"@{self._part(piece, plain)}"] if plain else []
        for end in ends:
            if end not in plain:
                lead, rest = end[: marks[end]], end[marks[end] :]
                made.append(f"@{self._part(piece, [lead] if lead else [])} {self._spell(rest)}")
        return self._either(made)

    def _inside(self, tag: Tag, ends: Ends) -> str:
        """Write everything after the beginning of a tag, and the text after the tag."""
        own = [tag.end] if isinstance(tag.end, str) else list(tag.end)
        inside = Grammar("json", tag.inside) if isinstance(tag.inside, dict | bool) else tag.inside
        if not any(own):
            return self._piece(inside, ends)
        if not all(own):
            raise Refused("a tag with several ends has an empty one")
        return f"{self._piece(inside, own)} {self._ended(ends)}"

    def _triggered(self, tags: Tags, ends: Ends) -> str:
        groups: dict[str, list[Tag]] = {}
        for tag in tags.tags:
            found = sorted((each for each in tags.triggers if each and tag.begin.startswith(each)), key=len)
            if not found:
                raise Refused(f"the tag {excerpt(tag.begin)} begins with none of the triggers")
            groups.setdefault(found[0], []).append(tag)
        if not groups:
            raise Refused("its list of tags is empty")
        text = self._free(tags.excludes)
        heads, bare = [], []
        for trigger, begun in groups.items():
            follow: Ends = ends if tags.single else None
            bodies = [f"{self._spell(tag.begin[len(trigger) :])} {self._inside(tag, follow)}" for tag in begun]
            body = self._name("body", self._either(bodies))
            heads.append(f"{self._until(text, [trigger])} {body}")
            bare.append(f"{self._spell(trigger)} {body}")
        later, first = self._either(heads), self._either(bare)
        if tags.single:
            return first if tags.some else self._either([later, self._until(text, ends)])
        return f"{first if tags.some else ''} ({later})* {self._until(text, ends)}"

    def _list(self, tags: TagList, ends: Ends) -> str:
        if not tags.tags:
            raise Refused("its list of tags is empty")
        tag = self._name("tag", self._either([self._piece(each, None) for each in tags.tags]))
        more = "" if tags.single else f"({self._spell(tags.separator)} {tag})*"
        return f"({tag} {more}){'' if tags.some else '?'} {self._ended(ends)}"

    def _repeated(self, again: Repeat, ends: Ends) -> str:
        least, most = again.least, again.most
        if most == 0:
            return self._ended(ends) or '""'
        if (least, most) == (0, 1):
            return self._either([self._piece(again.piece, ends), self._ended(ends) or '""'])
        piece = self._name("again", self._piece(again.piece, None))
        times = f"{{{least},{'' if most is None else most}}}"
        return f"{piece}{times} {self._ended(ends)}"

    def _sequence(self, pieces: list[Piece], ends: Ends) -> str:
        """Write pieces in order. The beginning of the next piece ends an open-ended one, if it is a text."""
        parts = []
        while pieces:
            piece, *pieces = pieces
            follow: Ends = ends if not pieces else None
            match pieces[0] if pieces else None:
                case Tag(begin, inside, end) if begin and _open(piece):
                    follow, pieces[0] = [begin], Tag("", inside, end)
                case Grammar("choice", [str(text)]) if text and _open(piece):
                    follow = [text]
                    del pieces[0]
                    if not pieces and ends:
                        pieces = [Grammar("choice", [""])]
            parts.append(self._piece(piece, follow))
        return " ".join(parts) or self._ended(ends) or '""'

    def _until(self, text: str, ends: Ends, lazy: bool = True) -> str:
        """Write a terminal together with the text that ends it; ``lazy``: at the first occurrence of an end."""
        if ends is None:
            raise Refused(OPEN)
        if not ends:
            return text
        made, plain = [], []
        for end in ends:
            mark = self._lark.mark(end)
            if mark is None:
                plain.append(quoted(end))
                continue
            lead = end[: mark.start()]
            before = self._name("LEAD", f"{text} {quoted(lead)}") if lead else text
            made.append(f"{before} {self._spell(end[mark.start() :])}")
        if plain:
            body = f"{text} ({' | '.join(plain)})"
            made.append(self._name("lazy", body, "[lazy]") if lazy else self._name("ENDED", body))
        return self._either(made)

    def _free(self, excludes: list[str]) -> str:
        """Return the terminal of any text that contains none of ``excludes``."""
        if not excludes:
            return "TEXT"
        never = " | ".join(f"{TEXT} {quoted(text)} {TEXT}" for text in excludes)
        return self._name("FREE", f"{TEXT} & ~({never})")

    def _ended(self, ends: Ends) -> str:
        return self._either([self._spell(end) for end in ends]) if ends else ""

    def _either(self, made: list[str]) -> str:
        return made[0] if len(made) == 1 else f"({' | '.join(made)})"

    def _name(self, stem: str, body: str, how: str = "") -> str:
        name = f"{stem}{len(self._lines)}" if stem.islower() else f"{stem}_{len(self._lines)}"
        self._lines.append(f"{name}{how}: {body}")
        return name

    def _spell(self, text: str) -> str:
        return self._lark.text(text) or '""'


def _open(piece: Piece) -> bool:
    """Whether a piece can continue where the next one begins."""
    match piece:
        case Grammar():
            return piece.kind in ("regex", "ebnf") or (piece.kind == "tags" and _open(piece.value))
        case Tag():
            return not any([piece.end] if isinstance(piece.end, str) else piece.end)
        case Sequence():
            return bool(piece.pieces) and _open(piece.pieces[-1])
        case Either():
            return any(map(_open, piece.pieces))
        case Repeat():
            return (piece.least, piece.most) == (0, 1) and _open(piece.piece)
        case TagList() | Exactly():
            return False
    return True
