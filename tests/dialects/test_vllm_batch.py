"""Several conversations in one vLLM request: each gets the choice that it would get in a request of its own."""

import json

import pytest

from parley.dialects.request_context import RequestContext
from parley.dialects.vllm import batch, chat
from parley.errors import BadRequest, Unsupported
from parley.types import ChoiceDelta, ChoiceDone, TokenInfo, Usage

CONTEXT = RequestContext("0f", 1700000000, "fp_1", context_length=100, headers={b"content-type": b"application/json"})
TURNS = [[{"role": "user", "content": text}] for text in ("a", "b", "c")]
USAGE = Usage(prompt_tokens=9, completion_tokens=3)


def read_batch(**body):
    return batch.read_batch_request(json.dumps(body).encode(), CONTEXT)


def events(index, text):
    token = TokenInfo(5, text, text.encode(), False, -0.5)
    return [ChoiceDelta(index, text, "content", [token]), ChoiceDone(index, "stop", None)]


def test_vllm_batch_answers_like_separate_chats():
    """Guards against mixing up choices when conversations finish out of order."""
    members = {"model": "m", "max_tokens": 3, "logprobs": True, "return_token_ids": True, "request_id": "r"}
    reply = read_batch(messages=TURNS, **members)
    chat_replies = [chat.read_vllm_chat(json.dumps({"messages": turns} | members).encode(), CONTEXT) for turns in TURNS]
    assert (
        reply.request.prompts == [chat_reply.request.prompts[0] for chat_reply in chat_replies] and reply.request.n == 1
    )
    for index in (2, 0, 1):
        reply.add_events(events(index, "xyz"[index]))
        chat_replies[index].add_events(events(0, "xyz"[index]))
    batch_body = json.loads(reply.render_body(USAGE))
    for index, chat_reply in enumerate(chat_replies):
        choice = json.loads(chat_reply.render_body(USAGE))["choices"][0]
        assert batch_body["choices"][index] == choice | {"index": index}
    assert (
        batch_body.keys() == json.loads(chat_replies[0].render_body(USAGE)).keys() and len(batch_body["choices"]) == 3
    )
    assert (batch_body["id"], batch_body["object"], batch_body["usage"]["total_tokens"]) == (
        "chatcmpl-r",
        "chat.completion",
        12,
    )


def test_vllm_batch_echoes_only_assistant_messages():
    continued = [*TURNS[1], {"role": "assistant", "content": "So "}]
    reply = read_batch(messages=[TURNS[0], continued], echo=True, add_generation_prompt=False)
    assert reply.request.output_options.prompt_logprobs is None
    reply.add_events([*events(0, "x"), *events(1, "y")])
    assert [choice["message"]["content"] for choice in json.loads(reply.render_body(USAGE))["choices"]] == ["x", "So y"]


@pytest.mark.parametrize(
    "members",
    [
        {"stream": True},
        {"use_beam_search": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"functions": [{"name": "f"}]},
        {"prompt_logprobs": 0},
        {"return_prompt_text": True},
        {"n": 2},
    ],
)
def test_vllm_batch_refuses_members_for_single_chats(members):
    with pytest.raises(Unsupported) as caught:
        read_batch(messages=TURNS, **members)
    assert caught.value.field == next(iter(members))
    read_batch(messages=TURNS, **{name: False if value is True else None for name, value in members.items()})


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        (None, "body.messages"),
        ([], "empty conversation"),
        ([[]], "Provide at least one message. (messages[0])"),
        ([TURNS[0], []], "Provide at least one message. (messages[1])"),
        (TURNS[0], "body.messages.0"),
        ([TURNS[0], "a"], "body.messages.1"),
        (
            [[{"content": "a"}]],
            "'loc': 'body.messages.0.0.role', 'msg': 'Field required', 'input': '<dict of 1 items>'",
        ),
        ([TURNS[0], [{"role": "user", "content": 5}]], "body.messages.1.0.content"),
        ([TURNS[0], [{"role": "user", "content": [{"type": "none"}]}]], "messages[1][0].content[0].type"),
    ],
)
def test_vllm_batch_refuses_wrong_message_lists(messages, sentence):
    with pytest.raises(BadRequest) as caught:
        read_batch(messages=messages)
    assert sentence in caught.value.message


def test_vllm_batch_names_no_conversation_for_a_member_of_all():
    with pytest.raises(BadRequest) as caught:
        read_batch(messages=TURNS, temperature=9)
    assert "temperature" in caught.value.message and "messages" not in caught.value.message
