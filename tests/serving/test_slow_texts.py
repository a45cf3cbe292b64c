"""A tokenizer or a chat template that is slow, even for a short prompt, does not hold up the event loop."""

import threading
import time

import pytest
from support.http_client import HELLO_CHAT

from parley.interrupt import BRIEF_SECONDS, run_briefly
from parley.text.parsing import chat_template
from parley.text.parsing.chat_template import ChatTemplate
from parley.text.tokens.tokenizer import Tokenizer
from parley.types import ChatPrompt, Message

BODIES = {
    "/v1/chat/completions": HELLO_CHAT | {"max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/v1/chat/completions/render": HELLO_CHAT,
}
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def encoding_threads(monkeypatch):
    """The threads in which texts are encoded."""
    threads, encode_batch = [], Tokenizer._encode_batch

    def encode_and_note(self, *arguments):
        threads.append(threading.current_thread())
        return encode_batch(self, *arguments)

    monkeypatch.setattr(Tokenizer, "_encode_batch", encode_and_note)
    return threads


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_quick", [True, False])
async def test_tokenizer_that_may_be_slow_encodes_in_a_thread(serve, encoding_threads, path, is_quick):
    server = await serve()
    server.model.text_pipeline.tokenizer.has_linear_time = is_quick
    answer = await server.post(path, BODIES[path])
    assert answer.status == 200, answer.body
    assert {thread is threading.current_thread() for thread in encoding_threads} == {is_quick}
    await server.wait_until_idle()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/render", "/tokenize"])
async def test_endless_template_is_rendered_in_a_thread_and_refused(serve, monkeypatch, path):
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.3)
    server = await serve()
    server.model.text_pipeline.template = ChatTemplate({"default": ENDLESS})
    threads, render = [], ChatTemplate._render_turns

    def render_and_note(self, *arguments):
        threads.append(threading.current_thread())
        return render(self, *arguments)

    monkeypatch.setattr(ChatTemplate, "_render_turns", render_and_note)
    for in_loop in ([True, False], [False]):  # the second request does not try again
        refused = await server.post(path, HELLO_CHAT)
        assert refused.status == 400
        assert "rendering took longer than 0.3 seconds" in refused.json["error"]["message"]
        assert [thread is threading.current_thread() for thread in threads] == in_loop
        threads.clear()
    await server.wait_until_idle()


def test_template_that_only_waits_for_a_processor_is_not_slow():
    template = ChatTemplate({"default": "{% for message in messages %}{{ message.content }}{% endfor %}"})

    def wait(values):
        time.sleep(2 * BRIEF_SECONDS)
        return values

    assert run_briefly(lambda: template.render_conversation(ChatPrompt([Message("user", "Hello")]), wait)) == "Hello"
    assert not template.is_slow
