"""Conversations that lose their oldest turns: what stays, and how many are tried."""

import pytest

from parley.errors import ContextLength
from parley.text.oldest_turns import fit_chat, shorter_chats
from parley.types import ChatPrompt, Message

TURNS = [Message(role, f"{role} {number}") for number in range(8) for role in ("user", "assistant", "tool")]
CHAT = ChatPrompt([Message("system", "s"), *TURNS, Message("user", "last")])


def prepare_within(limit: int, tried: list[int]):
    def prepare(chat: ChatPrompt) -> ChatPrompt:
        tried.append(len(chat.messages))
        if len(chat.messages) > limit:
            raise ContextLength("Too long.")
        return chat

    return prepare


def test_a_shorter_conversation_begins_with_a_whole_turn_behind_the_system_message():
    for chat in shorter_chats(CHAT):
        assert chat.messages[0].role == "system" and chat.messages[1].role == "user"
        assert chat.messages[-1].content == "last"
    assert [len(chat.messages) for chat in shorter_chats(CHAT)] == [26, 23, 20, 17, 14, 11, 8, 5, 2]


@pytest.mark.parametrize(("limit", "kept"), [(30, 26), (26, 26), (25, 23), (12, 11), (5, 5), (4, 2), (2, 2)])
def test_keeps_as_many_turns_as_fit(limit, kept):
    tried: list[int] = []
    assert len(fit_chat(CHAT, prepare_within(limit, tried)).messages) == kept
    assert len(tried) <= 6


def test_refuses_a_last_turn_that_alone_is_too_long():
    for chat in (CHAT, ChatPrompt([Message("user", "a")])):
        with pytest.raises(ContextLength):
            fit_chat(chat, prepare_within(0, []))
