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
from parley.text.grammar.grammar_refused import GrammarRefused
from parley.text.grammar.lark import LarkWriter, quote_lark
from parley.types import (
    Grammar,
    SeparatedTags,
    StructuralChoice,
    StructuralPiece,
    StructuralRepeat,
    StructuralSequence,
    StructuralTag,
    StructuralText,
    StructuralToken,
    TriggeredTags,
)

ANY_TEXT_TERMINAL = r"/(.|\n)*/"
OPEN_ENDED = "free text or an expression has to be followed by a tag, by a constant, or by the end of the answer"

PieceEnds = list[str] | None  # possible next texts; empty: the end of the answer; None: anything else


class TagWriter:
    """Writes one structural tag. ``lark`` spells texts that contain marks.

    ``prepare_schema`` prepares a JSON schema, and ``regex_to_lark`` an expression. ``add_part`` adds another grammar
    (a GBNF one with the texts that can end it) and returns its name. ``find_token_id`` returns a token's id. All of
    them raise GrammarRefused.
    """

    def __init__(
        self,
        lark: LarkWriter,
        prepare_schema: Callable[[Any], dict[str, Any]],
        regex_to_lark: Callable[[str], str],
        add_part: Callable[[Grammar, list[str]], str],
        find_token_id: Callable[[int | str], int],
    ):
        self._lark = lark
        self._prepare_schema = prepare_schema
        self._regex_to_lark = regex_to_lark
        self._add_part = add_part
        self._find_token_id = find_token_id
        self._lines = [f"TEXT: {ANY_TEXT_TERMINAL}"]

    def write_tag_grammar(self, piece: StructuralPiece) -> str:
        """Return the whole grammar. Raises GrammarRefused."""
        start = self._write_piece(piece, [])
        return "\n".join([f"start: {start}", *self._lines])

    def _write_piece(self, piece: StructuralPiece, ends: PieceEnds) -> str:
        """Write a piece together with the text that ends it."""
        match piece:
            case StructuralText():
                return self._write_until(self._free_text(piece.excludes), ends)
            case StructuralTag():
                return f"{self._spell_text(piece.begin)} {self._write_tag_body(piece, ends)}"
            case TriggeredTags():
                return self._write_triggered(piece, ends)
            case SeparatedTags():
                return self._write_tag_list(piece, ends)
            case StructuralSequence():
                return self._write_pieces(list(piece.pieces), ends)
            case StructuralChoice():
                if not piece.pieces:
                    raise GrammarRefused("its list of alternatives is empty")
                return self._join_alternatives([self._write_piece(alternative, ends) for alternative in piece.pieces])
            case StructuralRepeat():
                return self._write_repeated(piece, ends)
            case StructuralToken():
                return f"<[{self._find_token_id(piece.token)}]> {self._write_end(ends)}"
            case Grammar():
                return self._write_inner_grammar(piece, ends)

    def _write_inner_grammar(self, piece: Grammar, ends: PieceEnds) -> str:
        match piece.kind:
            case "json":
                return f"%json {json.dumps(self._prepare_schema(piece.value))} {self._write_end(ends)}"
            case "choice":
                return self._join_alternatives(
                    [self._spell_text(text + end) for text in piece.value for end in ends or [""]]
                )
            case "regex":
                return self._write_until(
                    self._add_line("FORM", f"/{self._regex_to_lark(piece.value)}/"), ends, lazy=False
                )
            case "tags":
                return self._write_piece(piece.value, ends)
            case "ebnf":
                return self._write_gbnf(piece, ends or [""])
        return f"@{self._add_part(piece, [])} {self._write_end(ends)}"

    def _write_gbnf(self, piece: Grammar, ends: list[str]) -> str:
        """Write a GBNF grammar. It includes the end text up to the first mark."""
        marks = {end: mark.start() if (mark := self._lark.find_mark(end)) else len(end) for end in ends}
        text_ends = [end for end in ends if end and marks[end] == len(end)]
        alternatives = [f"@{self._add_part(piece, text_ends)}"] if text_ends else []
        for end in ends:
            if end not in text_ends:
                lead, tail = end[: marks[end]], end[marks[end] :]
                alternatives.append(f"@{self._add_part(piece, [lead] if lead else [])} {self._spell_text(tail)}")
        return self._join_alternatives(alternatives)

    def _write_tag_body(self, tag: StructuralTag, ends: PieceEnds) -> str:
        """Write everything after the beginning of a tag, and the text after the tag."""
        own_ends = [tag.end] if isinstance(tag.end, str) else list(tag.end)
        content = Grammar("json", tag.content) if isinstance(tag.content, dict | bool) else tag.content
        if not any(own_ends):
            return self._write_piece(content, ends)
        if not all(own_ends):
            raise GrammarRefused("a tag with several ends has an empty one")
        return f"{self._write_piece(content, own_ends)} {self._write_end(ends)}"

    def _write_triggered(self, tags: TriggeredTags, ends: PieceEnds) -> str:
        groups: dict[str, list[StructuralTag]] = {}
        for tag in tags.tags:
            triggers = sorted(
                (trigger for trigger in tags.triggers if trigger and tag.begin.startswith(trigger)), key=len
            )
            if not triggers:
                raise GrammarRefused(f"the tag {excerpt(tag.begin)} begins with none of the triggers")
            groups.setdefault(triggers[0], []).append(tag)
        if not groups:
            raise GrammarRefused("its list of tags is empty")
        text = self._free_text(tags.excludes)
        after_text, at_start = [], []
        for trigger, triggered_tags in groups.items():
            follow: PieceEnds = ends if tags.stop_after_first else None
            bodies = [
                f"{self._spell_text(tag.begin[len(trigger) :])} {self._write_tag_body(tag, follow)}"
                for tag in triggered_tags
            ]
            body = self._add_line("body", self._join_alternatives(bodies))
            after_text.append(f"{self._write_until(text, [trigger])} {body}")
            at_start.append(f"{self._spell_text(trigger)} {body}")
        later, first = self._join_alternatives(after_text), self._join_alternatives(at_start)
        if tags.stop_after_first:
            return first if tags.at_least_one else self._join_alternatives([later, self._write_until(text, ends)])
        return f"{first if tags.at_least_one else ''} ({later})* {self._write_until(text, ends)}"

    def _write_tag_list(self, tags: SeparatedTags, ends: PieceEnds) -> str:
        if not tags.tags:
            raise GrammarRefused("its list of tags is empty")
        tag = self._add_line(
            "tag", self._join_alternatives([self._write_piece(alternative, None) for alternative in tags.tags])
        )
        more_tags = "" if tags.stop_after_first else f"({self._spell_text(tags.separator)} {tag})*"
        return f"({tag} {more_tags}){'' if tags.at_least_one else '?'} {self._write_end(ends)}"

    def _write_repeated(self, repeat: StructuralRepeat, ends: PieceEnds) -> str:
        min_count, max_count = repeat.min_count, repeat.max_count
        if max_count == 0:
            return self._write_end(ends) or '""'
        if (min_count, max_count) == (0, 1):
            return self._join_alternatives([self._write_piece(repeat.piece, ends), self._write_end(ends) or '""'])
        piece = self._add_line("again", self._write_piece(repeat.piece, None))
        times = f"{{{min_count},{'' if max_count is None else max_count}}}"
        return f"{piece}{times} {self._write_end(ends)}"

    def _write_pieces(self, pieces: list[StructuralPiece], ends: PieceEnds) -> str:
        """Write pieces in order. The beginning of the next piece ends an open-ended one, if it is a text."""
        parts = []
        while pieces:
            piece, *pieces = pieces
            follow: PieceEnds = ends if not pieces else None
            match pieces[0] if pieces else None:
                case StructuralTag(begin, inside, end) if begin and _is_open_ended(piece):
                    follow, pieces[0] = [begin], StructuralTag("", inside, end)
                case Grammar("choice", [str(text)]) if text and _is_open_ended(piece):
                    follow = [text]
                    del pieces[0]
                    if not pieces and ends:
                        pieces = [Grammar("choice", [""])]
            parts.append(self._write_piece(piece, follow))
        return " ".join(parts) or self._write_end(ends) or '""'

    def _write_until(self, text: str, ends: PieceEnds, lazy: bool = True) -> str:
        """Write a terminal together with the text that ends it; ``lazy``: at the first occurrence of an end."""
        if ends is None:
            raise GrammarRefused(OPEN_ENDED)
        if not ends:
            return text
        alternatives, plain = [], []
        for end in ends:
            mark = self._lark.find_mark(end)
            if mark is None:
                plain.append(quote_lark(end))
                continue
            lead = end[: mark.start()]
            text_and_lead = self._add_line("LEAD", f"{text} {quote_lark(lead)}") if lead else text
            alternatives.append(f"{text_and_lead} {self._spell_text(end[mark.start() :])}")
        if plain:
            body = f"{text} ({' | '.join(plain)})"
            alternatives.append(self._add_line("lazy", body, "[lazy]") if lazy else self._add_line("ENDED", body))
        return self._join_alternatives(alternatives)

    def _free_text(self, excludes: list[str]) -> str:
        """Return the terminal of any text that contains none of ``excludes``."""
        if not excludes:
            return "TEXT"
        never = " | ".join(f"{ANY_TEXT_TERMINAL} {quote_lark(text)} {ANY_TEXT_TERMINAL}" for text in excludes)
        return self._add_line("FREE", f"{ANY_TEXT_TERMINAL} & ~({never})")

    def _write_end(self, ends: PieceEnds) -> str:
        return self._join_alternatives([self._spell_text(end) for end in ends]) if ends else ""

    def _join_alternatives(self, alternatives: list[str]) -> str:
        return alternatives[0] if len(alternatives) == 1 else f"({' | '.join(alternatives)})"

    def _add_line(self, stem: str, body: str, option: str = "") -> str:
        name = f"{stem}{len(self._lines)}" if stem.islower() else f"{stem}_{len(self._lines)}"
        self._lines.append(f"{name}{option}: {body}")
        return name

    def _spell_text(self, text: str) -> str:
        return self._lark.write_text(text) or '""'


def _is_open_ended(piece: StructuralPiece) -> bool:
    """Whether a piece can continue where the next one begins."""
    match piece:
        case Grammar():
            return piece.kind in ("regex", "ebnf") or (piece.kind == "tags" and _is_open_ended(piece.value))
        case StructuralTag():
            return not any([piece.end] if isinstance(piece.end, str) else piece.end)
        case StructuralSequence():
            return bool(piece.pieces) and _is_open_ended(piece.pieces[-1])
        case StructuralChoice():
            return any(map(_is_open_ended, piece.pieces))
        case StructuralRepeat():
            return (piece.min_count, piece.max_count) == (0, 1) and _is_open_ended(piece.piece)
        case SeparatedTags() | StructuralToken():
            return False
    return True
