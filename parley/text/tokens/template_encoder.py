"""Encodes rendered conversations: the template's special tokens are special, the same texts from clients are text.

The library parses all special tokens in a text or none. So the template's are written as aliases, which no text
contains, and a second tokenizer knows only the aliases. It shares the model with the first one and takes little memory.
Where it finds no special tokens but the template's, its tokens are those of the first one.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import AddedToken

from parley.text.tokens.special_token_search import SpecialTokenSearch
from parley.text.tokens.text_encoder import Spans, TextEncoder, refuse_panic, replace_surrogates

# Noncharacters of Unicode, which are for use inside of programs. An alias is one opener and as many digits as make it
# as long as its token: spans are the same with aliases, and neighbouring aliases cannot be taken for another one.
OPENERS = tuple(map(chr, range(0xFDD0, 0xFDE0)))
DIGITS = tuple(map(chr, range(0xFDE0, 0xFDF0)))
NONCHARACTERS = re.compile("[\ufdd0-\ufdef]")
FILLER_LENGTH = 8  # digits of a token that only occupies an id


class TemplateEncoder(TextEncoder):
    """Encodes texts that ``write_aliases`` has prepared.

    ``vocab_size``: of ``backend``. ``special_ids``: of the added tokens that clients cannot write. ``unknown``: the
    token for text that the vocabulary cannot write.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, vocab_size: int, special_ids: Collection[int], unknown: str | None = None
    ):
        added_tokens = dict(sorted(backend.get_added_tokens_decoder().items()))
        special_tokens = {
            token.content: token_id
            for token_id, token in added_tokens.items()
            if token_id in special_ids and token.content.strip() and not NONCHARACTERS.search(token.content)
        }
        self.special_tokens = SpecialTokenSearch(special_tokens)
        self._aliases = _choose_aliases(special_tokens)
        super().__init__(_copy_without_added_tokens(backend))
        fillers = max(0, vocab_size - backend.get_vocab_size(with_added_tokens=False))
        self.backend.add_tokens(list(itertools.islice(_filler_tokens(), fillers)))
        known_tokens = {
            token_id: token
            for token_id, token in added_tokens.items()
            if token.content in self._aliases or token.content not in special_tokens
        }
        self.backend.add_tokens([self._as_plain_token(token) for token in known_tokens.values()])
        self._real_ids = {
            self.backend.token_to_id(self._alias_of(token.content)): token_id
            for token_id, token in known_tokens.items()
        }
        self._special_tokens = special_tokens
        self._source = backend
        self._unknown_tokens = {unknown, getattr(backend.model, "unk_token", None), "<unk>", "[UNK]"}

    def _alias_of(self, content: str) -> str:
        return self._aliases.get(content, content)

    def _as_plain_token(self, token: AddedToken) -> AddedToken:
        """Return an added token as this tokenizer has it. An alias is found however the text is normalized."""
        alias = self._alias_of(token.content)
        is_plain = alias == token.content
        return AddedToken(
            alias,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized and is_plain,
            single_word=token.single_word and is_plain,
        )

    def normalize_to_special_token(self, texts: Iterable[str]) -> bool:
        """Whether the tokenizer's normalizer makes a special token of one of the texts."""
        return self._may_normalize_to_special_token and any(
            self.special_tokens.count_in(self._normalize_text(text), limit=1) for text in texts
        )

    @cached_property
    def _may_normalize_to_special_token(self) -> bool:
        normalizer = self._source.normalizer
        if normalizer is None or _writes_no_special_token(
            json.loads(normalizer.__getstate__()), self.special_tokens.special_tokens
        ):
            return False
        added = self._source.get_added_tokens_decoder()
        return bool(self._written_by_model) or any(
            added[token_id].normalized for token_id in self._special_tokens.values()
        )

    def _normalize_text(self, text: str) -> str:
        try:
            normalized: str = self._source.normalizer.normalize_str(text)
        except TypeError:
            return self._normalize_text(replace_surrogates(text))
        except BaseException as error:
            raise refuse_panic(error) from None
        return normalized

    @cached_property
    def _written_by_model(self) -> frozenset[int]:
        """Ids of special tokens that the tokenizer's model could make of plain text: its vocabulary has them."""
        model = self._source.model
        return frozenset(
            token_id
            for content, token_id in self._special_tokens.items()
            if len(content) > 1 and content not in self._unknown_tokens and model.token_to_id(content) == token_id
        )

    def write_aliases(self, text: str) -> str:
        """Return a text with its special tokens written as aliases, of the same length."""
        return self.special_tokens.replace_tokens(NONCHARACTERS.sub("\ufffd", text), self._alias_of)

    def encode(self, text: str, add_special_tokens: bool = True, stop_after: int | None = None) -> list[int]:
        """Return the token ids of a text; like ``TextEncoder.encode``."""
        if self._written_by_model:  # spans are needed to spell those out
            return self.encode_with_offsets(text, add_special_tokens, stop_after)[0]
        return self._to_real_ids(super().encode(text, add_special_tokens, stop_after))

    def encode_with_offsets(
        self, text: str, add_special_tokens: bool = True, stop_after: int | None = None
    ) -> tuple[list[int], Spans]:
        """Return the token ids of a text and each token's character span; like ``TextEncoder.encode_with_offsets``."""
        ids, spans = super().encode_with_offsets(text, add_special_tokens, stop_after)
        if not self._written_by_model.isdisjoint(ids):
            ids, spans = self._spell_out(text, ids, spans)
        return self._to_real_ids(ids), spans

    def _to_real_ids(self, ids: list[int]) -> list[int]:
        return list(map(self._real_ids.get, ids, ids))  # without a step of the interpreter for each token

    def _spell_out(self, text: str, ids: list[int], spans: Spans) -> tuple[list[int], Spans]:
        """Return tokens with the special ones that the model has made of plain text replaced by their characters'."""
        spelled_tokens: list[tuple[int, tuple[int, int]]] = []
        for token_id, (start, end) in zip(ids, spans, strict=True):
            if start == end or token_id not in self._written_by_model:
                spelled_tokens.append((token_id, (start, end)))
                continue
            for position in range(start, end):
                inner_ids, _ = super().encode_with_offsets(text[position], add_special_tokens=False)
                spelled_tokens += [
                    (token_id, (position, position + 1))
                    for token_id in inner_ids
                    if token_id not in self._written_by_model
                ]
        return [token_id for token_id, _ in spelled_tokens], [span for _, span in spelled_tokens]


def _choose_aliases(contents: Collection[str]) -> dict[str, str]:
    """Return an alias for each token. Where the aliases of a length do not suffice, the rest of the tokens have none
    and become text."""
    unused_aliases: dict[int, Iterator[tuple[str, ...]]] = {}
    aliases = {}
    for content in contents:
        size = len(content)
        if size not in unused_aliases:
            unused_aliases[size] = itertools.product(OPENERS, *[DIGITS] * (size - 1))
        alias = next(unused_aliases[size], None)
        if alias is not None:
            aliases[content] = "".join(alias)
    return aliases


def _filler_tokens() -> Iterator[AddedToken]:
    """Yield tokens that no text contains. They occupy ids, so that those after them are not ids of the original."""
    for digits in itertools.product(DIGITS, repeat=FILLER_LENGTH):
        yield AddedToken("".join(digits), normalized=False)


def _copy_without_added_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer with the parts of another one, which they share."""
    copy = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor"):
        if getattr(backend, part) is not None:
            setattr(copy, part, getattr(backend, part))
    return copy


def _writes_no_special_token(normalizer: Mapping[str, Any], special_tokens: Collection[str]) -> bool:
    """Whether a normalizer surely writes no character that a special token has; it need not be run then."""
    kind, inserted_text = normalizer.get("type"), ""
    if kind == "Sequence":
        return all(_writes_no_special_token(part, special_tokens) for part in normalizer["normalizers"])
    if kind == "Prepend":
        inserted_text = normalizer["prepend"]
    elif kind == "Replace" and "String" in normalizer["pattern"]:
        inserted_text = normalizer["content"]  # without any, the characters around would become neighbours
    return bool(inserted_text) and not any(
        character in token for character in inserted_text for token in special_tokens
    )
