"""The built-in model: its generated text and the split of it, the chat template and its twin, the shipped folder."""

from __future__ import annotations

import json
import random
import re
import unicodedata
from functools import cache
from itertools import islice
from typing import Any

import pytest
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from parley import demo
from parley.demo import corpus, export, questions, template
from parley.demo.errands import TOOLS
from parley.demo.evaluate import generate_greedy, is_story, prompt_and_answer
from parley.demo.tokenizer import encode_sample

SIZE_LIMIT = 30 * 1024 * 1024


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo.model_folder() / "tokenizer.json"))


@cache
def _chat_template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    return environment.from_string((demo.model_folder() / "chat_template.jinja").read_text(encoding="utf-8"))


def _render_chat(messages: list[dict[str, Any]], **variables: Any) -> str:
    return _chat_template().render(messages=messages, **variables)


def _client_messages(sample: corpus.Sample) -> list[dict[str, Any]]:
    """Return the messages of a sample as a client of the chat API sends them."""
    messages = []
    for message in sample.messages:
        message = dict(message)
        if not sample.thinking:
            message.pop("reasoning_content", None)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{"type": "function", "id": "call_1", "function": call} for call in calls]
        messages.append(message)
    return messages


def test_corpus_is_reproducible_from_seed() -> None:
    first, again, other = (list(islice(corpus.draw_training(seed), 300)) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_every_task_has_held_out_questions() -> None:
    for task in corpus.TASKS:
        samples = corpus.draw_held_out(task, 15)
        assert len(samples) == 15, task
        assert samples == corpus.draw_held_out(task, 15), task
        assert all(corpus.is_held_out(sample.keys[-1]) for sample in samples), task


def test_training_text_contains_no_held_out_question() -> None:
    shown_keys: set[str] = set()
    shown_questions: set[str] = set()

    def plain(question: str) -> str:
        return question.lower().rstrip("?.! ")

    for sample in islice(corpus.draw_training(1), 8000):
        shown_keys.update(sample.keys)
        shown_questions.update(plain(message["content"]) for message in sample.messages if message["role"] == "user")
    assert not any(corpus.is_held_out(key) for key in shown_keys)
    # In memory tasks only the earlier turns are new, and plain prompts have no messages.
    for task in corpus.TASKS.keys() - {"memory", "plain text", "plain question"}:
        for sample in corpus.draw_held_out(task, 20):
            last = [message["content"] for message in sample.messages if message["role"] == "user"][-1]
            assert plain(last) not in shown_questions, (task, last)


def test_corpus_sums_are_correct() -> None:
    rng = random.Random(2)
    for make in (questions.small_sum, questions.large_sum):
        for _ in range(500):
            turn = make(rng)
            match = re.fullmatch(r"(\d+) ([-+*]) (\d+) = (\d+)\.", turn.answer)
            assert match is not None, turn.answer
            a, operator, b, result = int(match[1]), match[2], int(match[3]), int(match[4])
            assert result == {"+": a + b, "-": a - b, "*": a * b}[operator]
            if make is questions.large_sum:
                assert turn.thought.endswith(f"Together {result}.")


def test_story_check_accepts_only_generated_stories() -> None:
    rng = random.Random(3)
    for long in (False, True):
        story = questions.story_text(rng, "fox", "Tom", long)
        assert is_story(story, story)
        assert not is_story(story.removesuffix(" The end."), story)
        assert not is_story(story.replace("Tom", "Anna"), story)


def test_demo_template_agrees_with_python_twin(tokenizer: Tokenizer) -> None:
    for sample in islice(corpus.draw_training(4), 600):
        if sample.text:
            assert encode_sample(tokenizer, sample)[0] == tokenizer.encode(sample.text).ids
            continue
        pieces = template.render_pieces(sample.messages, sample.tools, sample.thinking)
        whole = "".join(text for text, _ in pieces)
        messages = _client_messages(sample)
        assert _render_chat(messages, tools=sample.tools, enable_thinking=sample.thinking) == whole
        prompt, answer = prompt_and_answer(sample)
        variables = {"tools": sample.tools, "enable_thinking": sample.thinking, "add_generation_prompt": True}
        assert _render_chat(messages[:-1], **variables) == prompt
        assert whole == prompt + answer + "\n"
        # Training encodes piece by piece, a server the whole prompt.
        assert encode_sample(tokenizer, sample)[0] == tokenizer.encode(whole).ids


def test_demo_template_accepts_client_messages() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Spell "}, {"type": "text", "text": "cat."}]}]
    assert _render_chat(parts, add_generation_prompt=True) == (
        "<|im_start|>user\nSpell cat.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    call = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": '{"city": "Oslo"}'}}
    call_messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Time in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "12:00"},
    ]
    assert _render_chat(call_messages, add_generation_prompt=True, enable_thinking=True) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nTime in Oslo?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        '<tool_call>\n{"name": "get_time", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n12:00\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_next_demo_prompt_begins_with_previous_conversation() -> None:
    """The prefix cache relies on this: an answer and the next question only append."""
    first = [{"role": "user", "content": "Hello!"}]
    prompt = _render_chat(first, add_generation_prompt=True)
    longer = [*first, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Spell cat."}]
    assert _render_chat(longer, add_generation_prompt=True).startswith(prompt + "Hi.<|im_end|>\n")


def test_demo_tokenizer_round_trips_any_unicode(tokenizer: Tokenizer) -> None:
    rng = random.Random(8)
    planes = [chr(code) for code in range(1, 0x30000, 7) if not 0xD800 <= code < 0xE000]
    texts = ["", " ", "\n\n\t ", "naïve “quotes”", "日本語 한국어 العربية हिन्दी", "👩‍👩‍👧‍👦🏳️‍🌈", "\x00\x7f"]
    texts += ["".join(rng.sample(planes, 30)) for _ in range(100)]
    for text in texts:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


def test_demo_model_folder_is_complete_and_small(tokenizer: Tokenizer) -> None:
    folder = demo.model_folder()
    assert {path.name for path in folder.iterdir()} == set(export.MODEL_FILES)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= SIZE_LIMIT
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert config["eos_token_id"] == tokenizer.token_to_id("<|im_end|>")
    shipped = (folder / "chat_template.jinja").read_text(encoding="utf-8").rstrip("\n")
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert shipped == template.CHAT_TEMPLATE == tokenizer_config["chat_template"]


ANSWERS: tuple[tuple[list[dict[str, Any]], dict[str, Any], str], ...] = (
    ([{"role": "user", "content": "What is the capital of France?"}], {}, "The capital of France is Paris."),
    ([{"role": "user", "content": "Hello!"}], {}, "Hello! How can I help you?"),
    (
        [
            {"role": "system", "content": "Answer in upper case."},
            {"role": "user", "content": "What is the capital of France?"},
        ],
        {},
        "THE CAPITAL OF FRANCE IS PARIS.",
    ),
    (
        [{"role": "user", "content": "What is 47 + 38?"}],
        {"enable_thinking": True},
        "<think>\nOnes: 7 + 8 = 15, write 5, carry 1. Tens: 4 + 3 + 1 = 8. Together 85.\n</think>\n\n47 + 38 = 85.",
    ),
    (
        [{"role": "user", "content": "What is the weather in Paris?"}],
        {"tools": [TOOLS["get_weather"]]},
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    ),
)


# Prompts without a chat template. Odd ones have no right answer, but they must end.
PLAIN_ANSWERS = (
    ("What is the capital of France?", " The capital of France is Paris."),
    ("what is the capital of france?", " The capital of France is Paris."),
    ("What is the capital of Italy?\n", "The capital of Italy is Rome."),
    ("Question: What is 7 + 8?\nAnswer:", " 7 + 8 = 15."),
    ("Hello!", " Hello! How can I help you?"),
    ("Explain quantum computing in simple terms.", " I am a small demo model and know only a few things."),
)
ODD_PROMPTS = ("What is Deep Learning?", "Hello, my name is", "San Francisco is a", "def fib(n):", "1 2 3", "a")


def test_demo_model_answers_plain_prompts_and_ends() -> None:
    network, tokenizer = export.load_demo_network(demo.model_folder())
    for prompt, answer in PLAIN_ANSWERS:
        assert generate_greedy(network, tokenizer, prompt) == answer + template.END_OF_TEXT
    for prompt in ODD_PROMPTS:
        text = generate_greedy(network, tokenizer, prompt, limit=100)
        assert text.endswith(template.END_OF_TEXT) and len(text) > len(template.END_OF_TEXT), (prompt, text)


def test_demo_model_gives_expected_answers() -> None:
    network, tokenizer = export.load_demo_network(demo.model_folder())
    for messages, variables, answer in ANSWERS:
        prompt = _render_chat(messages, add_generation_prompt=True, **variables)
        assert generate_greedy(network, tokenizer, prompt) == answer + "<|im_end|>"
    assert generate_greedy(network, tokenizer, "The capital of France is", limit=1) == " Paris"
