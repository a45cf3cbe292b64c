"""Remembers the tokens of the texts between special tokens: of a conversation, only the new turns are encoded.

A tokenizer of the ``tokenizers`` library first divides a text at its added tokens, and encodes each part for itself. So
the tokens of a text are those of its parts, which conversations and system prompts repeat with every request.
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections import OrderedDict

import tokenizers

from parley.text.tokens.encoding_time import nested_steps

SHORTEST_TEXT = 1 << 10  # characters of a text that is divided; a shorter one is encoded in less than a millisecond
MAX_CHARACTERS = 8 << 20  # of all parts together
PART_OVERHEAD = 256  # characters that an entry counts in addition


class SegmentCache:
    """Encodes texts of ``backend`` without special tokens around them. May be used by several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, marks: dict[str, int]):
        self._backend = backend
        self._marks = marks
        by_length = sorted(marks, key=len, reverse=True)  # the library takes the longest one, too
        self._any_mark = re.compile("(" + "|".join(map(re.escape, by_length)) + ")")
        self._parts: OrderedDict[str, array[int]] = OrderedDict()  # least recently used first
        self._characters = 0
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. Raises TypeError for half of a surrogate pair."""
        pieces = self._any_mark.split(text)  # every second one is a mark
        ids_by_part = self._find_tokens(pieces[::2])
        if missing := [part for part, ids in ids_by_part.items() if ids is None]:
            encodings = self._backend.encode_batch_fast(missing, add_special_tokens=False)
            ids_by_part.update(
                {part: array("I", encoding.ids) for part, encoding in zip(missing, encodings, strict=True)}
            )
            self._keep_segments({part: ids_by_part[part] for part in missing})
        ids: list[int] = []
        for number, piece in enumerate(pieces):
            if number % 2:
                ids.append(self._marks[piece])
            elif piece:
                ids += ids_by_part[piece] or ()
        return ids

    def _find_tokens(self, parts: list[str]) -> dict[str, array[int] | None]:
        """Return the tokens of each part, None if they are not known."""
        with self._lock:
            ids_by_part = {part: self._parts.get(part) for part in parts if part}
            for part, ids in ids_by_part.items():
                if ids is not None:
                    self._parts.move_to_end(part)
        return ids_by_part

    def _keep_segments(self, encoded: dict[str, array[int] | None]) -> None:
        with self._lock:
            for part, ids in encoded.items():
                if ids is not None and part not in self._parts:
                    self._parts[part] = ids
                    self._characters += len(part) + PART_OVERHEAD
            while self._characters > MAX_CHARACTERS:
                part, _ = self._parts.popitem(last=False)
                self._characters -= len(part) + PART_OVERHEAD


def make_segment_cache(backend: tokenizers.Tokenizer) -> SegmentCache | None:
    """Return the cache of a tokenizer; None if a part of a text may have other tokens for itself."""
    added = backend.get_added_tokens_decoder()
    marks = {token.content: token_id for token_id, token in added.items() if not token.normalized}
    if not marks or any(token.lstrip or token.rstrip or token.single_word for token in added.values()):
        return None
    pre_tokenizer = backend.pre_tokenizer
    state = json.loads(pre_tokenizer.__getstate__()) if pre_tokenizer is not None else {}
    if any(part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first" for part in nested_steps(state)):
        return None  # it marks the start of the whole text
    return SegmentCache(backend, marks)
