"""Carries special tokens that clients wrote through the chat template, so that it cannot confuse them with its own.

Each becomes one character that the conversation does not have, and its text again after rendering. Templates trim,
slice, compare and print such a text as they do with any other. Turns of the assistant keep their special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from parley.errors import BadRequest
from parley.text.tokens.special_token_search import SEARCH_SIZE, SpecialTokenSearch
from parley.text.tokens.template_encoder import TemplateEncoder

# Rare ideographs: they have no case, are no white space, and ``repr`` prints them as they are.
FIRST_PLACEHOLDER, LAST_PLACEHOLDER = 0x20000, 0x2A6DF
PLACEHOLDER_LIKE = re.compile("[\U00020000-\U0002a6df]|\\\\ud8[0-9a-f]{2}\\\\ud[c-f][0-9a-f]{2}")  # or as JSON escape
ESCAPE_START, ESCAPE_LENGTH = "\\ud8", 12
MAX_SPECIAL_TOKENS = 1 << 17  # of a conversation; each takes microseconds, also where the context is long
RESULTS_MEMBER = "tool_responses"  # results of calls that ``format_history`` moves into the turn that called


class ClientSpecialTokens:
    """The special tokens that clients wrote in one conversation. ``sources``: those of the chat templates."""

    def __init__(self, encoder: TemplateEncoder, sources: Collection[str]):
        self._encoder = encoder
        self._sources = sources
        self._placeholders: dict[str, str] = {}  # a token or its beginning -> its placeholder
        self._unused_characters: Iterator[str] = iter(())
        self._texts: dict[str, str] = {}  # a placeholder as the rendered text has it -> its token
        self._occurrences = 0
        self._normalized = False  # whether the normalizer makes special tokens of other texts

    def hide_tokens(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values that a template gets, with placeholders. Raises BadRequest if there are too many."""
        client_texts = _client_texts(values)
        self._normalized = self._encoder.normalize_to_special_token(client_texts)
        if not self._encoder.special_tokens.occur_in(client_texts):
            return values
        self._unused_characters = _unused_characters([*self._sources, *_texts_in(values.values())])
        messages = [self._hide_in_turn(turn) for turn in values["messages"]]
        return {
            **{name: self._hide_in(value) for name, value in values.items() if name != "messages"},
            "messages": messages,
        }

    def reveal_tokens(self, text: str) -> str:
        """Return a rendered text with the tokens in place of their placeholders."""
        if not self._texts:
            return text
        return SpecialTokenSearch(self._texts).replace_tokens(text, self._texts.__getitem__)

    def appear_in(self, text: str, rendered: str) -> bool:
        """Whether a text, revealed from a rendered one, has special tokens where the template wrote none."""
        if self._normalized or not self._texts:
            return self._normalized
        return self._encoder.special_tokens.replace_tokens(text, _blank_out) != self.reveal_tokens(
            self._encoder.special_tokens.replace_tokens(rendered, _blank_out)
        )

    def _hide_in_turn(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        if turn["role"] != "assistant":
            # A role is a word of the template's, even if it is a token.
            plain_members = {"role"} if turn["role"].isalpha() else set()
            return {name: entry if name in plain_members else self._hide_in(entry) for name, entry in turn.items()}
        new_turn = dict(turn)
        if RESULTS_MEMBER in turn:
            new_turn[RESULTS_MEMBER] = self._hide_in(turn[RESULTS_MEMBER])
        if "tool_calls" in turn:  # templates compare ids with those in turns of tools
            new_turn["tool_calls"] = [{**call, "id": self._hide_in(call["id"])} for call in turn["tool_calls"]]
        return new_turn

    def _hide_in(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._encoder.special_tokens.replace_tokens(value, self._choose_placeholder, beginnings=True)
        if isinstance(value, dict):
            return {self._hide_in_name(name): self._hide_in(entry) for name, entry in value.items()}
        return list(map(self._hide_in, value)) if isinstance(value, list | tuple) else value

    def _hide_in_name(self, name: Any) -> Any:
        return (
            self._encoder.special_tokens.replace_tokens(name, self._choose_placeholder)
            if isinstance(name, str)
            else name
        )

    def _choose_placeholder(self, token: str) -> str:
        self._occurrences += 1
        if self._occurrences > MAX_SPECIAL_TOKENS:
            raise BadRequest(
                f"The conversation has over {MAX_SPECIAL_TOKENS} special tokens of the model in its texts.",
                field="messages",
            )
        placeholder = self._placeholders.get(token)
        if placeholder is None:
            placeholder = next(self._unused_characters, None)
            if placeholder is None:
                raise BadRequest("The conversation has too many different characters.", field="messages")
            self._placeholders[token] = placeholder
            self._texts |= {placeholder: token, _json_escape(placeholder): token}
        return placeholder


def _blank_out(token: str) -> str:
    return "\0" * len(token)


def _client_texts(values: Mapping[str, Any]) -> list[str]:
    """Return all texts that are not the assistant's."""
    client_values = [value for name, value in values.items() if name != "messages"]
    for turn in values["messages"]:
        if turn["role"] != "assistant":
            client_values += turn.values()
            continue
        if RESULTS_MEMBER in turn:
            client_values.append(turn[RESULTS_MEMBER])
        if "tool_calls" in turn:
            client_values += [call["id"] for call in turn["tool_calls"]]
    return _texts_in(client_values)


def _texts_in(values: Iterable[Any]) -> list[str]:
    """Return all texts in values of any depth, names of members included."""
    texts: list[str] = []
    waiting = list(values)
    for value in waiting:  # it grows
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, dict):
            waiting += value.keys()
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
    return texts


def _unused_characters(texts: list[str]) -> Iterator[str]:
    """Return characters that none of the texts has, not even as JSON escapes."""
    used: set[str] = set()
    for text in texts:
        if text.isascii() and ESCAPE_START not in text:
            continue
        for start in range(0, len(text), SEARCH_SIZE):  # other threads run between the parts
            used.update(PLACEHOLDER_LIKE.findall(text, start, start + SEARCH_SIZE + ESCAPE_LENGTH))
    characters = map(chr, range(FIRST_PLACEHOLDER, LAST_PLACEHOLDER + 1))
    return (character for character in characters if used.isdisjoint((character, _json_escape(character))))


def _json_escape(character: str) -> str:
    """Return a character as JSON in ASCII writes it."""
    return json.dumps(character)[1:-1]
