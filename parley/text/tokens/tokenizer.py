"""Text to token ids and back, from a model folder in Hugging Face format.

Uses the ``tokenizers`` library alone. Everything that Transformers adds on top (the tokens and flags of
tokenizer_config.json, the model's end tokens) is read here from the same files. A folder without tokenizer.json is
refused: ``hub`` has converted all formats that need no Transformers, which would import torch.

Special tokens written inside a text are parsed as special tokens. In conversations ``template_encoder`` parses only the
chat template's: a user's text cannot end its turn.

This module knows no requests, streams or templates. All methods may be called from several threads at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from parley.text.tokens.encoding_time import has_linear_time
from parley.text.tokens.json_files import BadTokenizer, read_json_object
from parley.text.tokens.segment_cache import SHORTEST_TEXT, SegmentCache, make_segment_cache
from parley.text.tokens.template_encoder import TemplateEncoder
from parley.text.tokens.text_encoder import TextEncoder
from parley.text.tokens.token_bytes import compile_decoder

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_UNUSED_IDS = 1 << 17  # without a token, below the highest id; each takes time and memory
MAX_REASON_LENGTH = 200  # characters
UNLIMITED_LENGTH = 10**9  # a larger model_max_length means that no limit was set


class Tokenizer(TextEncoder):
    """A loaded tokenizer.

    * ``eos_ids``: ids that end an answer.
    * ``names``: texts of the named special tokens ("bos_token": "<s>", …), as chat templates read them.
    * ``max_length``: the model's context length in tokens, None if the folder does not state it.
    * ``vocab_size``: one more than the highest id.
    * ``marks``: text to id of the tokens that do not count as text under a grammar: special ones, and added ones
      between angle brackets, which llguidance treats as special.
    * ``has_linear_time``: whether encoding a short text is sure to be quick.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        names: dict[str, str] | None = None,
        eos_ids: Iterable[int] = (),
        max_length: int | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        super().__init__(backend)
        self.names = names or {}
        self.max_length = max_length
        vocabulary = backend.get_vocab()
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.has_linear_time = has_linear_time(backend, vocabulary)
        self.eos_ids = frozenset(token_id for token_id in eos_ids if 0 <= token_id < self.vocab_size)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        angled = re.compile(r"<.*>", re.DOTALL).fullmatch
        self.marks = {
            token.content: token_id for token_id, token in added.items() if token.special or angled(token.content)
        }
        state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
        self._token_decoders = compile_decoder(state)
        # Filled as tokens occur; at most one entry per token of the vocabulary.
        self._token_bytes: dict[int, bytes] = {}
        self._token_texts: dict[int, str | None] = {}
        self._special_ids_in: dict[tuple[str, ...], frozenset[int]] = {}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Load the tokenizer of a model folder. Raises BadTokenizer."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise BadTokenizer(_explain_missing(folder))
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for any fault in the file
            reason = str(error)[:MAX_REASON_LENGTH].rstrip(".")  # may quote a whole member of the file
            raise BadTokenizer(f"tokenizer.json of the model cannot be read: {reason}.") from error
        _check_ids(backend)
        config = _read_token_config(folder)
        named_tokens = _named_tokens(config)
        _add_missing_tokens(backend, config, named_tokens)
        names = {key: _token_content(value) for key, value in named_tokens.items()}
        end_ids = _read_end_ids(folder)
        eos = backend.token_to_id(names.get("eos_token", ""))
        if eos is not None:
            end_ids.add(eos)
        limit = config.get("model_max_length")
        limit = int(limit) if isinstance(limit, int | float) and 0 < limit < UNLIMITED_LENGTH else None
        return cls(backend, names, end_ids, limit)

    @cached_property
    def _segment_cache(self) -> SegmentCache | None:
        return make_segment_cache(self.backend)

    def _encode_batch(self, text: str, add_special_tokens: bool) -> list[int]:
        if not add_special_tokens and len(text) >= SHORTEST_TEXT and self._segment_cache is not None:
            return self._segment_cache.encode(text)
        return super()._encode_batch(text, add_special_tokens)

    @cached_property
    def template_encoder(self) -> TemplateEncoder:
        """The encoder of conversations with special tokens that clients wrote: those become text."""
        named_ids = {self.backend.token_to_id(text) for text in self.names.values()}
        return TemplateEncoder(
            self.backend,
            self.vocab_size,
            self.special_ids | self.eos_ids | {token_id for token_id in named_ids if token_id is not None},
            self.names.get("unk_token"),
        )

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of the ids. Broken UTF-8 becomes one U+FFFD per broken sequence; unknown ids add nothing.

        If byte tokens (``<0xE2>``) do not spell UTF-8, the library turns their whole run into U+FFFD. Here the valid
        characters of the run remain, so that a text can be streamed character by character.
        """
        hidden = self.special_ids if skip_special else frozenset()
        shown_ids = [token_id for token_id in ids if token_id not in hidden]
        if self._token_decoders is None:
            return self.backend.decode(
                [token_id for token_id in shown_ids if 0 <= token_id < self.vocab_size], skip_special_tokens=False
            )
        start = next(
            (position for position, token_id in enumerate(shown_ids) if self.token_str(token_id) is not None), None
        )
        if start is None:
            return ""
        data = self.first_token_bytes(shown_ids[start]) + b"".join(map(self.token_bytes, shown_ids[start + 1 :]))
        return data.decode("utf-8", "replace")

    @property
    def decodes_by_token(self) -> bool:
        """Whether a text is the concatenation of its tokens' bytes. If not, tokens change with their neighbours."""
        return self._token_decoders is not None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds inside a text, maybe part of a character; b"" for an unknown id."""
        data = self._token_bytes.get(token_id)
        if data is None:
            data = self._token_bytes[token_id] = self._decode_token_bytes(token_id)
        return data

    def token_text(self, token_id: int) -> str | None:
        """Return the text that a token adds inside a text, or None if its bytes are only part of a character."""
        try:
            return self._token_texts[token_id]
        except KeyError:
            try:
                text = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                text = None
            self._token_texts[token_id] = text
            return text

    def first_token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token at the start of a text, where SentencePiece drops the blank."""
        token = self.token_str(token_id)
        return b"" if token is None or self._token_decoders is None else self._token_decoders[1](token)

    def token_str(self, token_id: int) -> str | None:
        """Return the token as the vocabulary writes it (``Ġthe``, ``▁the``), or None for an unknown id."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def find_token(self, token: int | str) -> int | None:
        """Return the id of a token given as its id or as the vocabulary writes it; None if there is no such token."""
        token_id = token if isinstance(token, int) else self.backend.token_to_id(token)
        return None if token_id is None or self.token_str(token_id) is None else token_id

    def is_special_token(self, token_id: int) -> bool:
        """Whether the token is a special token rather than text."""
        return token_id in self.special_ids

    def special_ids_in(self, texts: tuple[str, ...]) -> frozenset[int]:
        """Return the ids of the special tokens that occur in one of the texts."""
        cached_ids = self._special_ids_in.get(texts)
        if cached_ids is None:
            joined_text = "\0".join(texts)
            marks = ((token_id, self.token_str(token_id)) for token_id in self.special_ids)
            cached_ids = self._special_ids_in[texts] = frozenset(
                token_id for token_id, mark in marks if mark and mark in joined_text
            )
        return cached_ids

    def _decode_token_bytes(self, token_id: int) -> bytes:
        token = self.token_str(token_id)
        if token is None:
            return b""
        if self._token_decoders is None:
            return self.backend.decode([token_id], skip_special_tokens=False).encode()
        return self._token_decoders[0](token)


def _check_ids(backend: tokenizers.Tokenizer) -> None:
    """Raise BadTokenizer if a token has an id far beyond the number of tokens."""
    vocabulary = backend.get_vocab()
    token, token_id = max(vocabulary.items(), key=lambda entry: entry[1], default=("", -1))
    if token_id >= (limit := len(vocabulary) + MAX_UNUSED_IDS):
        raise BadTokenizer(
            f"tokenizer.json of the model gives the token {token[:50]!r} the id {token_id}; with {len(vocabulary)} "
            f"tokens, ids below {limit} are possible."
        )


def _explain_missing(folder: Path) -> str:
    if not folder.is_dir():
        return "The model folder does not exist."
    slow = [
        name for name in ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt") if (folder / name).is_file()
    ]
    if slow:
        return (
            f"The model folder has no tokenizer.json, only {', '.join(slow)}; save it once with Transformers "
            "(AutoTokenizer.from_pretrained(folder).save_pretrained(folder)) to get one."
        )
    return "The model folder has no tokenizer.json."


def _read_token_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json with the tokens that older releases of Transformers kept in files of their own."""
    config = read_json_object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    config |= read_json_object(folder / "special_tokens_map.json")
    special = {_token_content(token) for token in [*_named_tokens(config).values(), *_extra_tokens(config)]}
    added = read_json_object(folder / "added_tokens.json").items()
    ids = {str(token_id): {"content": text, "special": text in special} for text, token_id in added}
    return config | {"added_tokens_decoder": ids}


def _extra_tokens(config: dict[str, Any]) -> list[Any]:
    """Return the special tokens without a name, as texts or as descriptions."""
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    return [token for token in extra if _is_token_entry(token)] if isinstance(extra, list) else []


def _token_content(token: Any) -> str:
    result: str = token["content"] if isinstance(token, dict) else token
    return result


def _is_token_entry(token: Any) -> bool:
    return bool(isinstance(token, str) and token) or (isinstance(token, dict) and isinstance(token.get("content"), str))


def _named_tokens(config: dict[str, Any]) -> dict[str, Any]:
    """Return the named special tokens of a configuration, as texts or as descriptions."""
    names = [*NAMED_TOKENS, *(key for key in config if key.endswith("_token") and key not in NAMED_TOKENS)]
    return {key: config[key] for key in names if _is_token_entry(config.get(key))}


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], named_tokens: dict[str, Any]) -> None:
    """Add the tokens that only the configuration lists, and flag the named ones as special."""
    known_texts = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed_tokens = config.get("added_tokens_decoder")
    listed_tokens = listed_tokens if isinstance(listed_tokens, dict) else {}
    for _, token in sorted(listed_tokens.items(), key=lambda item: int(item[0]) if item[0].isdecimal() else 0):
        if isinstance(token, dict) and _is_token_entry(token) and token["content"] not in known_texts:
            _add_one_token(backend, token)
            known_texts.add(token["content"])
    for token in [*named_tokens.values(), *_extra_tokens(config)]:
        if _token_content(token) not in known_texts:
            _add_one_token(backend, {**(token if isinstance(token, dict) else {"content": token}), "special": True})
            known_texts.add(_token_content(token))


def _add_one_token(backend: tokenizers.Tokenizer, token: dict[str, Any]) -> None:
    options = {key: bool(token[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in token}
    special = bool(token.get("special"))
    added = AddedToken(token["content"], special=special, **({"normalized": not special} | options))
    (backend.add_special_tokens if special else backend.add_tokens)([added])


def _read_end_ids(folder: Path) -> set[int]:
    """Return the ids of end tokens from generation_config.json, else from config.json. Each has one id or a list."""
    config = read_json_object(folder / "config.json")
    for source in (read_json_object(folder / "generation_config.json"), config, config.get("text_config")):
        value = source.get("eos_token_id") if isinstance(source, dict) else None
        ids = {token_id for token_id in (value if isinstance(value, list) else [value]) if type(token_id) is int}
        if ids:
            return ids
    return set()
