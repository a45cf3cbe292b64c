"""Encodes texts of any length with a tokenizer of the ``tokenizers`` library, outside of the interpreter's lock."""

from __future__ import annotations

from functools import cached_property

import tokenizers

from parley.errors import InvalidValue
from parley.text.tokens import long_text

Spans = list[tuple[int, int]]


class TextEncoder:
    """Encodes with ``backend``. All methods may be called from several threads at once."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self.backend = backend

    def encode(self, text: str, add_special_tokens: bool = True, stop_after: int | None = None) -> list[int]:
        """Return the token ids of a text. ``add_special_tokens`` adds the special tokens that the model expects, such
        as BOS.

        Takes some seconds per million characters. Other threads run meanwhile, and a long text is abandoned if no
        caller waits for the result. With ``stop_after``, a long text may be encoded only until there are more tokens
        than that. Raises InvalidValue for a long text without any place to divide it, and for a text that the tokenizer
        cannot encode.
        """
        if len(text) > long_text.PIECE_SIZE:
            return self._encode_long(text, add_special_tokens, stop_after, with_spans=False)[0]
        try:
            return self._encode_batch(text, add_special_tokens)
        except TypeError:  # half of a surrogate pair: JSON can carry one, text cannot
            return TextEncoder.encode(self, replace_surrogates(text), add_special_tokens)
        except BaseException as error:
            raise refuse_panic(error) from None

    def _encode_batch(self, text: str, add_special_tokens: bool) -> list[int]:
        # Only the library's batch calls release the GIL.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def _encode_long(
        self, text: str, add_special_tokens: bool, stop_after: int | None, with_spans: bool
    ) -> tuple[list[int], Spans]:
        """Encode a text piece by piece, and return token ids and, if wanted, character spans."""
        opening, closing = self.special_around if add_special_tokens else ([], [])
        ids, spans = list(opening), [(0, 0)] * len(opening)
        for piece, token_range in long_text.encode_pieces(self._encode_piece, text):
            ids += piece.ids[token_range]
            if with_spans:
                spans += piece.spans(token_range)
            if stop_after is not None and len(ids) > stop_after:
                break
        return ids + closing, spans + [(0, 0)] * len(closing)

    def _encode_piece(self, text: str) -> tokenizers.Encoding:
        try:
            (encoding,) = self.backend.encode_batch([text], add_special_tokens=False)
        except TypeError:
            return self._encode_piece(replace_surrogates(text))
        except BaseException as error:
            raise refuse_panic(error) from None
        return encoding

    @cached_property
    def special_around(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        (encoding,) = self.backend.encode_batch(["a"], add_special_tokens=True)
        inner = [index for index, mark in enumerate(encoding.special_tokens_mask) if not mark]
        return encoding.ids[: inner[0]], encoding.ids[inner[-1] + 1 :]

    def encode_with_offsets(
        self, text: str, add_special_tokens: bool = True, stop_after: int | None = None
    ) -> tuple[list[int], Spans]:
        """Return the token ids of a text and each token's character span in it ((0, 0) for added special tokens).

        ``stop_after``: as in ``encode``.
        """
        if len(text) > long_text.PIECE_SIZE:
            return self._encode_long(text, add_special_tokens, stop_after, with_spans=True)
        try:
            (encoding,) = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        except TypeError:
            return self.encode_with_offsets(replace_surrogates(text), add_special_tokens)
        except BaseException as error:
            raise refuse_panic(error) from None
        return encoding.ids, encoding.offsets


def refuse_panic(error: BaseException) -> BaseException:
    """Return InvalidValue for a panic of the library, which is no Exception; return other errors as they are.

    The library panics where a regular expression of the tokenizer would need too many attempts for a text.
    """
    if type(error).__name__ != "PanicException":
        return error
    return InvalidValue("The tokenizer of the model cannot encode this text.", field="prompt")


def replace_surrogates(text: str) -> str:
    """Return the text with U+FFFD for each lone half of a surrogate pair."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
