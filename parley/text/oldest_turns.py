"""Conversations that lose their oldest turns because they are too long for the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec

from parley.errors import ContextLength
from parley.types import ChatPrompt

T = TypeVar("T")

log = logging.getLogger("parley.server")


def shorter_chats(chat: ChatPrompt) -> list[ChatPrompt]:
    """Return the conversation and its versions without the oldest turns, longest first.

    A turn begins with a message of the user. The last turn stays, and so do system messages before the first.
    """
    messages = chat.messages
    first = next((number for number, message in enumerate(messages) if message.role != "system"), len(messages))
    starts = [number for number in range(first + 1, len(messages)) if messages[number].role == "user"]
    shorter = [msgspec.structs.replace(chat, messages=[*messages[:first], *messages[start:]]) for start in starts]
    return [chat, *shorter]


def fit_chat(chat: ChatPrompt, prepare: Callable[[ChatPrompt], T]) -> T:
    """Call ``prepare`` with the longest of these conversations that it does not refuse as too long; return the result.

    Raises ContextLength if it refuses the last turn alone.
    """
    chats = shorter_chats(chat)
    try:
        return prepare(chats[0])
    except ContextLength:
        if len(chats) == 1:
            raise
    fitting, longest, shortest = prepare(chats[-1]), 1, len(chats) - 1
    while longest < shortest:
        middle = (longest + shortest) // 2
        try:
            fitting, shortest = prepare(chats[middle]), middle
        except ContextLength:
            longest = middle + 1
    dropped = len(chat.messages) - len(chats[shortest].messages)
    log.warning("A conversation lost its %d oldest messages, because it was too long.", dropped)
    return fitting
