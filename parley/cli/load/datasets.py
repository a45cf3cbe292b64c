"""Prompts for ``parley bench`` from a file: ShareGPT's JSON list of conversations, or lines of JSON.

A line has ``prompt`` (a text) or ``messages`` (a conversation), and may have its output length in tokens as
``output_tokens`` or ``max_tokens``. Of a conversation of ShareGPT the first question is the prompt, and the length of
its answer is the output length, as in vLLM's ``bench serve --dataset-name sharegpt``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ASKING, ANSWERING = ("human", "user"), ("gpt", "chatgpt", "bard", "bing", "assistant")  # ShareGPT's names of speakers
LENGTHS = ("output_tokens", "max_tokens")


class DatasetError(Exception):
    """A file that is no data set. The message is one sentence that says where and why."""


@dataclass(frozen=True)
class DatasetRow:
    """One request of a data set: a ``text`` or ``messages``, and its output length in tokens or the known answer."""

    text: str = ""
    messages: list[dict[str, Any]] | None = None
    output_tokens: int | None = None
    answer: str = ""


def read_dataset(path: str) -> list[DatasetRow]:
    """Return the requests of a file. Conversations without a question and its answer are left out.

    Raises DatasetError.
    """
    rows = [row for place, entry in _read_entries(path) if (row := _parse_entry(place, entry)) is not None]
    if not rows:
        raise DatasetError(f"{path} has no request.")
    return rows


def _read_entries(path: str) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a file, each with its place in words."""
    try:
        content = Path(path).read_text("utf-8-sig")
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise DatasetError(f"{path} is not text in UTF-8.") from None
    if content.lstrip().startswith("["):
        for number, entry in enumerate(_parse_json(path, content), 1):
            yield f"{path}, entry {number}", entry
        return
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            place = f"{path}, line {number}"
            yield place, _parse_json(place, line)


def _parse_json(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{place}: this is not JSON ({error}).") from None


def _parse_entry(place: str, entry: Any) -> DatasetRow | None:
    """Return the request of an entry, or None for a conversation without a question and its answer."""
    kinds = [name for name in ("prompt", "messages", "conversations") if isinstance(entry, dict) and name in entry]
    if len(kinds) != 1:
        raise DatasetError(f'{place}: an entry is an object with one of "prompt", "messages" and "conversations".')
    if kinds == ["conversations"]:
        return _first_exchange(place, entry["conversations"])
    output_tokens = _read_length(place, entry)
    if kinds == ["messages"]:
        return DatasetRow(messages=_read_messages(place, entry["messages"]), output_tokens=output_tokens)
    if not isinstance(entry["prompt"], str) or not entry["prompt"]:
        raise DatasetError(f'{place}: "prompt" must be a text that is not empty.')
    return DatasetRow(entry["prompt"], output_tokens=output_tokens)


def _read_length(place: str, entry: dict[str, Any]) -> int | None:
    for name in LENGTHS:
        value = entry.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise DatasetError(f'{place}: "{name}" must be a whole number of at least 1.')
            return value
    return None


def _read_messages(place: str, messages: Any) -> list[dict[str, Any]]:
    valid = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
        for message in messages
    )
    if not valid or not messages:
        raise DatasetError(f'{place}: "messages" must be a list of objects with "role" and "content".')
    return list(messages)


def _first_exchange(place: str, turns: Any) -> DatasetRow | None:
    valid = isinstance(turns, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("from"), str) and isinstance(turn.get("value"), str)
        for turn in turns
    )
    if not valid:
        raise DatasetError(f'{place}: "conversations" must be a list of objects with the texts "from" and "value".')
    for question, answer in pairwise(turns):
        if question["from"] in ASKING and answer["from"] in ANSWERING and question["value"] and answer["value"]:
            return DatasetRow(question["value"], answer=answer["value"])
    return None


class DatasetOrder:
    """The rows in a random order that the seed determines, over and over. ``repeats``: a row was drawn again."""

    def __init__(self, rows: Sequence[DatasetRow], seed: int):
        self._rows = random.Random(seed).sample(rows, len(rows))
        self._drawn = 0

    @property
    def repeats(self) -> bool:
        """Whether more rows were drawn than there are, so that the server may have them in its prefix cache."""
        return self._drawn > len(self._rows)

    def draw_rows(self, count: int) -> list[DatasetRow]:
        """Return the next ``count`` rows."""
        first, self._drawn = self._drawn, self._drawn + count
        return [self._rows[number % len(self._rows)] for number in range(first, self._drawn)]


def output_length(row: DatasetRow, default: int, count_tokens: Callable[[str], int]) -> int:
    """Return how many tokens to ask for: the row's own length, that of the known answer, or the default."""
    if row.output_tokens is not None:
        return row.output_tokens
    return max(1, count_tokens(row.answer)) if row.answer else default
