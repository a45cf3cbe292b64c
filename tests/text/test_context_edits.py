"""Conversations that lose old results of tools and old reasoning: what stays, and what is counted."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parley.text.context_edits import CLEARED_RESULT, asks_for_summary, find_tool_uses, prepare_edited
from parley.text.grammar.answer_question import decode_question, encode_question
from parley.text.prepared_prompt import PreparedPrompt
from parley.types import (
    ChatPrompt,
    ClearReasoning,
    ClearToolUses,
    EncodedMedia,
    Media,
    Message,
    PlacedMedia,
    ProcessedMedia,
    SummarizeContext,
    ToolCall,
)

IMAGE_TOKENS = 50


def count_words(chat: ChatPrompt, media: Any) -> PreparedPrompt:
    """Return a token for each word of the conversation, and many for each image."""
    texts = [text for message in chat.messages for text in (message.content, message.reasoning) if text]
    texts += [call.arguments for message in chat.messages for call in message.tool_calls]
    assert len(media) == sum(len(message.media) for message in chat.messages) and not chat.edits
    return PreparedPrompt([0] * (sum(len(text.split()) for text in texts) + IMAGE_TOKENS * len(media)))


def use(number: int, name: str = "f", words: int = 20, reasoning: str | None = None) -> list[Message]:
    call = ToolCall(f"call_{number}", name, '{"a": "b c d"}')
    return [
        Message("assistant", None, reasoning=reasoning, tool_calls=[call]),
        Message("tool", f"r{number} " * words, tool_call_id=call.id),
    ]


def edited(messages: list[Message], *edits: Any) -> tuple[list[Message], int, int, list[tuple[int, int]]]:
    """Return the messages after the edits, the numbers of tokens before and after, and what each edit cleared."""
    media = [object() for message in messages for _ in message.media]
    versions: list[ChatPrompt] = []

    def prepare(chat: ChatPrompt, kept_media: Any) -> PreparedPrompt:
        versions.append(chat)
        prepared = count_words(chat, kept_media)
        prepared.media = [(chat, kept_media)]  # type: ignore[list-item]  # finds the version again
        return prepared

    result = prepare_edited(ChatPrompt(messages, edits=list(edits)), media, prepare)  # type: ignore[arg-type]
    ((chat, _),) = result.prepared.media  # type: ignore[misc]
    counts = [(applied.cleared, applied.cleared_tokens) for applied in result.applied]
    return chat.messages, result.original_tokens, len(result.prepared.token_ids), counts


TALK = [Message("system", "s"), Message("user", "do it"), *use(1), *use(2, "g"), *use(3), *use(4), *use(5, "g")]


@pytest.mark.parametrize(
    ("edit", "cleared"),
    [
        (ClearToolUses("tokens", 10, 3), [1, 2]),
        (ClearToolUses("tokens", 10_000, 3), []),
        (ClearToolUses("tool_uses", 5, 0), []),
        (ClearToolUses("tool_uses", 4, 0), [1, 2, 3, 4, 5]),
        (ClearToolUses("tool_uses", 0, 5), []),
        (ClearToolUses("tool_uses", 0, 1, excluded_tools=["f"]), [2]),
        (ClearToolUses("tool_uses", 0, 0, excluded_tools=["g"]), [1, 3, 4]),
        (ClearToolUses("tool_uses", 0, 3, min_cleared_tokens=32), [1, 2]),
        (ClearToolUses("tool_uses", 0, 3, min_cleared_tokens=33), []),
    ],
)
def test_the_oldest_results_are_cleared(edit: ClearToolUses, cleared: list[int]):
    messages, before, after, counts = edited(TALK, edit)
    gone = [int(m.tool_call_id[5:]) for m in messages if m.content == CLEARED_RESULT and m.tool_call_id]
    assert gone == cleared
    assert counts == ([(len(cleared), before - after)] if cleared else [])
    assert before - after == 16 * len(cleared)


@pytest.mark.parametrize(("inputs", "emptied"), [(False, ""), (True, "12"), (["g"], "2"), (["x"], "")])
def test_arguments_go_with_their_results_if_asked_for(inputs: bool | list[str], emptied: str):
    messages, *_ = edited(TALK, ClearToolUses("tokens", 10, 3, cleared_inputs=inputs))
    calls = [call for message in messages for call in message.tool_calls]
    assert [call.id[5:] for call in calls if call.arguments == "{}"] == list(emptied)
    assert [call.name for call in calls] == ["f", "g", "f", "f", "g"]


def test_calls_without_results_and_results_without_calls_do_not_count():
    open_call = Message("assistant", "", tool_calls=[ToolCall("open", "f", "{}")])
    stray = Message("tool", "stray", tool_call_id="other")
    messages, _, _, counts = edited([*TALK[:6], stray, open_call], ClearToolUses("tool_uses", 1, 1))
    assert counts[0][0] == 1 and messages[-2:] == [stray, open_call]
    # Ids may come again, with other calls.
    again = [*use(1), *use(1, "g"), *use(1)]
    assert [found.name for found in find_tool_uses(again)] == ["f", "g", "f"]
    messages, *_ = edited(again, ClearToolUses("tool_uses", 0, 1, excluded_tools=["f"]))
    assert [message.content == CLEARED_RESULT for message in messages[1::2]] == [False, True, False]


def test_images_of_cleared_results_leave_with_them():
    def image(call_id: str | None) -> PlacedMedia:
        return PlacedMedia(0, Media("image", EncodedMedia("aGk=", "image/png"), "f"), call_id)

    own = image(None)
    talk = [
        Message("user", "look", media=[own]),
        *use(1),
        Message("user", "", media=[image("call_1")]),
        *use(2),
        Message("user", "and?", media=[image("call_2"), own]),
        *use(3),
        Message("user", "", media=[kept := image("call_3")]),
    ]
    messages, before, after, counts = edited(talk, ClearToolUses("tokens", 1, 1))
    assert [message.media for message in messages if message.role == "user"] == [[own], [own], [kept]]
    assert counts == [(2, before - after)] and before - after == 2 * (16 + IMAGE_TOKENS)


@pytest.mark.parametrize("call_id", ["", "a"])
def test_images_of_the_user_stay_whatever_the_ids_of_calls(call_id: str):
    own, of_result = (
        PlacedMedia(0, Media("image", EncodedMedia("aGk=", "image/png"), "f"), owner) for owner in (None, call_id)
    )
    talk = [
        Message("assistant", None, tool_calls=[ToolCall(call_id, "f", "{}")]),
        Message("tool", "r " * 9, tool_call_id=call_id),
        Message("user", "look", media=[of_result, own]),
        Message("user", "and here", media=[own]),
    ]
    messages, _, _, counts = edited(talk, ClearToolUses("tool_uses", 0, 0))
    assert [message.media for message in messages] == [[], [], [own], [own]] and counts[0][0] == 1


def test_calls_of_one_message_are_emptied_each_for_itself():
    names = ["f", "g"] * 10_000
    calls = [ToolCall(str(number), name, '{"a": 1}') for number, name in enumerate(names)]
    results = [Message("tool", "r " * 9, tool_call_id=call.id) for call in calls]
    talk = [Message("assistant", "see", tool_calls=calls), *results]
    messages, *_ = edited(talk, ClearToolUses("tool_uses", 0, 1, excluded_tools=["x"], cleared_inputs=["f"]))
    assert messages[0].content == "see"
    assert messages[0].tool_calls == [
        msgspec.structs.replace(call, arguments="{}") if call.name == "f" else call for call in calls
    ]
    assert [message.content for message in messages[-2:]] == [CLEARED_RESULT, "r " * 9]
    assert all(call.arguments == '{"a": 1}' for call in calls)  # the original is as it was


def test_reasoning_of_old_turns_is_cleared_turn_by_turn():
    talk = [
        Message("user", "a"), *use(1, reasoning="first thought"), Message("user", "reminder"), *use(2, reasoning="b c"),
        Message("assistant", "done", reasoning="d"),
        Message("user", "b"), Message("assistant", "ok", reasoning="e f g"),
        Message("user", "c"), Message("assistant", "no thought"),
        Message("user", "d"), *use(3, reasoning="h"),
    ]  # fmt: skip
    for kept, left, cleared in ((1, ["h"], (2, 8)), (2, ["e f g", "h"], (1, 5)), (3, None, None), (9, None, None)):
        messages, before, after, counts = edited(talk, ClearReasoning(kept))
        everything = [message.reasoning for message in talk if message.reasoning]
        assert [message.reasoning for message in messages if message.reasoning] == (left or everything)
        assert counts == ([cleared] if cleared else []) and before - after == (cleared[1] if cleared else 0)


def test_each_edit_sees_the_result_of_those_before_it():
    answer = Message("assistant", "done")
    talk = [Message("user", "a"), *use(1, reasoning="x " * 500), answer, Message("user", "b"), *use(2, reasoning="y")]
    tool_edit = ClearToolUses("tokens", 100, 0)
    assert [cleared for cleared, _ in edited(talk, tool_edit)[3]] == [2]
    assert [tokens for _, tokens in edited(talk, ClearReasoning(1), tool_edit)[3]] == [500]


USES = st.lists(st.tuples(st.sampled_from("fgh"), st.integers(1, 30)), max_size=9)


@given(USES, st.integers(0, 9), st.integers(0, 9), st.sets(st.sampled_from("fgh")), st.integers(0, 60))
def test_an_edit_clears_old_uses_and_nothing_else(uses, threshold, kept, excluded, least):
    talk = [Message("user", "a")]
    for number, (name, words) in enumerate(uses):
        talk += use(number, name, words)
    edit = ClearToolUses("tool_uses", threshold, kept, least, sorted(excluded))
    messages, before, after, counts = edited(talk, edit)
    changed = [number for number, (old, new) in enumerate(zip(talk, messages, strict=True)) if old != new]
    assert all(messages[number].content == CLEARED_RESULT for number in changed)
    if not counts:
        assert not changed and before == after
        return
    ((cleared, tokens),) = counts
    expected = [2 * n + 2 for n, (name, _) in enumerate(uses[: len(uses) - kept]) if name not in excluded]
    assert changed == expected and cleared == len(expected) and len(uses) > threshold
    assert tokens >= least and tokens == max(0, before - after)


def test_the_grammar_of_an_answer_does_not_depend_on_edits():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    chat = ChatPrompt(TALK, tools=tools, tool_choice="required")
    edits = [ClearReasoning(1), ClearToolUses("tokens", 1, 1), SummarizeContext(0, "?")]
    question = encode_question(msgspec.structs.replace(chat, edits=edits), None)
    assert question == encode_question(chat, None) and decode_question(question)[0] is not None


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("threshold", [0, 3, 4])
def test_a_summary_is_asked_for_in_place_of_an_answer(threshold: int):
    versions: list[ChatPrompt] = []

    def prepare(chat: ChatPrompt, media: Any) -> PreparedPrompt:
        versions.append(chat)
        return count_words(chat, media)

    chat = ChatPrompt(
        [Message("user", "a b c"), Message("assistant", "d")],
        tools=TOOLS,
        tool_choice="required",
        forced_tool="f",
        add_generation_prompt=False,
        continue_final=True,
        edits=[SummarizeContext(threshold, "Sum up!"), ClearReasoning(1)],
    )
    result = prepare_edited(chat, [], prepare)
    if threshold == 4:
        assert len(versions) == 1 and not result.applied and not asks_for_summary(result.applied)
        return
    assert asks_for_summary(result.applied)
    assert versions[1] == ChatPrompt([*chat.messages, Message("user", "Sum up!")], tools=TOOLS, tool_choice="none")
    assert (result.original_tokens, len(result.prepared.token_ids)) == (4, 6)


def test_the_question_for_a_summary_follows_what_the_user_said():
    chat = ChatPrompt([Message("user", "a b c")], edits=[SummarizeContext(0, "Sum up!")])
    versions: list[ChatPrompt] = []
    prepare_edited(chat, [], lambda version, media: versions.append(version) or count_words(version, media))
    assert versions[1].messages == [Message("user", "a b c\n\nSum up!")]


def test_processed_media_follow_their_places():
    images = [PlacedMedia(0, Media("image", EncodedMedia(name, ""), name), f"call_{name}") for name in "123"]
    talk = [Message("user", "a")]
    for number, placed in enumerate(images, 1):
        talk += [*use(number), Message("user", "b", media=[placed])]
    items: list[Any] = ["one", "two", "three"]
    seen: list[list[ProcessedMedia]] = []

    def prepare(chat: ChatPrompt, media: Any) -> PreparedPrompt:
        seen.append(list(media))
        return count_words(chat, media)

    prepare_edited(ChatPrompt(talk, edits=[ClearToolUses("tool_uses", 0, 1)]), items, prepare)
    assert seen == [["one", "two", "three"], ["three"]]
