"""Several conversations in one vLLM request: each gets the choice that it would get in a request of its own."""

import json

import pytest

from parley.dialects.dialect import Head
from parley.dialects.vllm import batch, chat
from parley.errors import BadRequest, Unsupported
from parley.types import Delta, Done, Token, Usage

HEAD = Head("0f", 1700000000, "fp_1", context=100, headers={b"content-type": b"application/json"})
TURNS = [[{"role": "user", "content": text}] for text in ("a", "b", "c")]
USAGE = Usage(prompt_tokens=9, completion_tokens=3)


def read(**body):
    return batch.read(json.dumps(body).encode(), HEAD)


def events(index, text):
    token = Token(5, text, text.encode(), False, -0.5)
    return [Delta(index, text, "content", [token]), Done(index, "stop", None)]


def test_vllm_batch_answers_like_separate_chats():
    """Guards against mixing up choices when conversations finish out of order."""
    wish = {"model": "m", "max_tokens": 3, "logprobs": True, "return_token_ids": True, "request_id": "r"}
    reply = read(messages=TURNS, **wish)
    alone = [chat.read(json.dumps({"messages": turns} | wish).encode(), HEAD) for turns in TURNS]
    assert reply.request.prompts == [each.request.prompts[0] for each in alone] and reply.request.n == 1
    for index in (2, 0, 1):
        reply.add(events(index, "xyz"[index]))
        alone[index].add(events(0, "xyz"[index]))
    told = json.loads(reply.body(USAGE))
    for index, each in enumerate(alone):
        choice = json.loads(each.body(USAGE))["choices"][0]
        assert told["choices"][index] == choice | {"index": index}
    assert told.keys() == json.loads(alone[0].body(USAGE)).keys() and len(told["choices"]) == 3
    assert (told["id"], told["object"], told["usage"]["total_tokens"]) == ("chatcmpl-r", "chat.completion", 12)


def test_vllm_batch_echoes_only_assistant_messages():
    begun = [*TURNS[1], {"role": "assistant", "content": "So "}]
    reply = read(messages=[TURNS[0], begun], echo=True, add_generation_prompt=False)
    assert reply.request.want.prompt_logprobs is None
    reply.add([*events(0, "x"), *events(1, "y")])
    assert [each["message"]["content"] for each in json.loads(reply.body(USAGE))["choices"]] == ["x", "So y"]


@pytest.mark.parametrize(
    "wish",
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
def test_vllm_batch_refuses_members_for_single_chats(wish):
    with pytest.raises(Unsupported) as caught:
        read(messages=TURNS, **wish)
    assert caught.value.field == next(iter(wish))
    read(messages=TURNS, **{name: False if value is True else None for name, value in wish.items()})


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (None, "body.messages"),
        ([], "empty conversation"),
        ([[]], "empty conversation"),
        (TURNS[0], "body.messages.0"),
        ([TURNS[0], "a"], "body.messages.1"),
        ([[{"content": "a"}]], "messages.0.role"),
    ],
)
def test_vllm_batch_refuses_wrong_message_lists(messages, said):
    with pytest.raises(BadRequest) as caught:
        read(messages=messages)
    assert said in caught.value.message
