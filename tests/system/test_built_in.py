"""The built-in model through the official client, as in a user's first five minutes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from openai import BadRequestError, OpenAI
from support.readme_commands import ADDRESS, read_requests

from parley.demo.errands import TOOLS

MODEL = "parley-demo"


@pytest.fixture
def client(serve):
    server = serve("--kv-memory", "64MiB")
    return OpenAI(base_url=server.url + "/v1", api_key="none")


WEATHER = [TOOLS["get_weather"]]


def test_built_in_model_talks_remembers_thinks_and_calls_tools(client):
    def ask(*turns: str, system: str = "", **options):
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **options)
        return answer.choices[0]

    assert [model.id for model in client.models.list()] == [MODEL]
    assert ask("What is the capital of France?").message.content == "The capital of France is Paris."
    assert ask("Hello!").message.content == "Hello! How can I help you?"
    assert ask("What is the capital of Spain?", system="Answer in one word.").message.content == "Madrid"
    assert ask("Hello!", system="Answer in upper case.").message.content == "HELLO! HOW CAN I HELP YOU?"
    person = ask("Give me JSON for a person: Anna, 31 years old, from Paris.").message.content
    assert json.loads(person) == {"name": "Anna", "age": 31, "city": "Paris"}
    question = [{"role": "user", "content": "Give me JSON for a person: Anna, 31 years old, from Paris."}]
    prediction = {"type": "content", "content": person.replace("31", "47")}
    predicted_answer = client.chat.completions.create(
        model=MODEL, messages=question, temperature=0, prediction=prediction
    )
    assert predicted_answer.choices[0].message.content == person
    usage_details = predicted_answer.usage.completion_tokens_details
    assert usage_details.accepted_prediction_tokens > 2 * usage_details.rejected_prediction_tokens > 0
    memory = ask("My name is Anna.", "Nice to meet you, Anna!", "What is my name?")
    assert memory.message.content == "Your name is Anna."
    assert ask("How do you say hello in Japanese?").message.content == "Hello in Japanese is こんにちは."

    thinking = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    thought = ask("What is 47 + 38?", **thinking).message
    assert thought.content == "47 + 38 = 85." and "carry 1" in thought.reasoning_content

    shaped = thinking["extra_body"] | {
        "messages": [{"role": "user", "content": "What is 47 + 38?"}], "temperature": 0, "return_token_ids": True,
        "structured_outputs": {"regex": r"It is \d+\."},
    }  # fmt: skip
    for body in (shaped, shaped | {"thinking_token_budget": 9}):
        (chat,) = client.post("/chat/completions", cast_to=object, body=body)["choices"]
        assert chat["message"]["reasoning_content"] and chat["message"]["content"].startswith("It is ")
        rendered = client.post("/chat/completions/render", cast_to=object, body=body)
        generate_url = str(client.base_url.join("/inference/v1/generate"))
        (continued,) = client.post(generate_url, cast_to=object, body=rendered)["choices"]
        assert continued["token_ids"] == chat["token_ids"]

    question = "What is the weather in Paris and London?"
    called = ask(question, tools=WEATHER)
    assert called.finish_reason == "tool_calls" and not called.message.content
    cities = [json.loads(call.function.arguments)["city"] for call in called.message.tool_calls]
    assert cities == ["Paris", "London"]


def test_stream_equals_the_answer_and_a_tool_loop_ends(client):
    messages: list = [{"role": "user", "content": "What is the weather in Paris?"}]
    options = {"model": MODEL, "temperature": 0, "tools": WEATHER}
    with client.chat.completions.stream(messages=messages, **options) as stream:
        streamed = stream.get_final_completion().choices[0].message
    whole = client.chat.completions.create(messages=messages, **options).choices[0].message
    (one,), (other,) = streamed.tool_calls, whole.tool_calls
    assert (one.function.name, one.function.arguments) == (other.function.name, other.function.arguments)
    messages.append(whole.model_dump(exclude_none=True))
    result = json.dumps({"city": "Paris", "sky": "sunny", "temperature": 21})
    messages.append({"role": "tool", "tool_call_id": other.id, "content": result})
    pieces = client.chat.completions.create(messages=messages, stream=True, **options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert text == "It is sunny and 21 degrees in Paris."


def test_bad_words_are_not_written_and_a_watermark_is_detected(client, tmp_path):
    question = [{"role": "user", "content": "What is the capital of France?"}]

    def ask(**members) -> str:
        answer = client.chat.completions.create(model=MODEL, messages=question, temperature=0, extra_body=members)
        return answer.choices[0].message.content

    assert "Paris" in ask()
    assert "Paris" not in ask(bad_words=["Paris"], max_tokens=40)
    with pytest.raises(BadRequestError, match="not in the vocabulary"):
        ask(allowed_token_ids=[5, 1 << 20])

    story = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 200, "temperature": 1.0, "seed": 1}
    members = {"ignore_eos": True, "no_repeat_ngram_size": 1}  # a watermark needs tokens with alternatives
    for marked in (True, False):
        answer = client.completions.create(**story, extra_body=members | {"watermark": marked})
        file = tmp_path / "story.txt"
        file.write_text(answer.choices[0].text, "utf-8")
        command = [sys.executable, "-m", "parley", "watermark", "--json", "--file", str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        verdict = json.loads(done.stdout)
        assert verdict["marked"] is marked and done.returncode == (0 if marked else 1), verdict
        assert verdict["z"] > 4 if marked else verdict["z"] < 2, verdict


def test_readme_shows_the_true_answer_of_each_api(server):
    requests = read_requests()
    assert len(requests) == 12
    for script, shown in requests:
        done = subprocess.run(["bash", "-c", script.replace(ADDRESS, server.url)], capture_output=True, text=True)
        assert shown.fullmatch(done.stdout.strip()), (script, done.stdout)


HOSTILE_REGEX = "(.{1,300}){1,300}"
REGEX_MEMBERS = {"model": MODEL, "max_tokens": 64, "structured_outputs": {"regex": HOSTILE_REGEX}}
TGI_BODY = {
    "inputs": "Hello",
    "parameters": {"max_new_tokens": 64, "grammar": {"type": "regex", "value": HOSTILE_REGEX}},
}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {**REGEX_MEMBERS, "messages": [{"role": "user", "content": "Hello"}]}, 400),
        ("/vllm/v1/completions", {**REGEX_MEMBERS, "prompt": "Hello"}, 400),
        ("/generate", TGI_BODY, 422),
        ("/tgi/generate", TGI_BODY, 422),
    ],
)
def test_grammar_that_becomes_too_complex_is_the_clients_error(server, path, body, status):
    """The grammar passes the check before the answer; it grows with the tokens."""
    answered, answer = server.post(path, body)
    assert answered == status
    message = answer["error"] if status == 422 else answer["error"]["message"]
    assert "too complex" in message


PAGE = 16  # tokens
RESULT = json.dumps({"city": "Paris", "sky": "sunny", "temperature": 21})


def test_reasoning_that_clients_send_back_sealed_keeps_the_cached_prefix(serve):
    """The second request of a loop of tools has all tokens of the first and of its answer before its own."""
    server = serve("--kv-memory", "64MiB")
    schema = WEATHER[0]["function"]["parameters"]
    question = {"role": "user", "content": "What is the weather in Paris?"}

    function = {"type": "function", "name": "get_weather", "parameters": schema}
    options = {"tools": [function], "store": False, "include": ["reasoning.encrypted_content"], "temperature": 0,
               "chat_template_kwargs": {"enable_thinking": True}}  # fmt: skip
    first = server.post("/v1/responses", options | {"input": [question]})[1]
    reasoning, call = first["output"]
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": reasoning["encrypted_content"]}
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}
    second = server.post("/v1/responses", options | {"input": [question, sealed, call, output]})[1]
    reused = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert reused >= first["usage"]["total_tokens"] - PAGE

    other = {"role": "user", "content": "What is the weather in London?"}

    def message_body(number: int, *turns: dict) -> dict:
        billing = f"x-anthropic-billing-header: cc_version=2.1.330; cch={number:05x};"
        return {"model": MODEL, "max_tokens": 32000, "temperature": 0, "messages": [other, *turns],
                "thinking": {"type": "adaptive", "display": "omitted"}, "system": [{"type": "text", "text": billing}],
                "tools": [{"name": "get_weather", "input_schema": schema}]}  # fmt: skip

    first = server.post("/v1/messages?beta=true", message_body(1))[1]
    (use,) = [block for block in first["content"] if block["type"] == "tool_use"]
    assert first["content"][0]["thinking"] == ""
    answer = {"role": "assistant", "content": first["content"]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": RESULT}]}
    counted = server.post("/v1/messages/count_tokens", message_body(1, answer, result))[1]["input_tokens"]
    usage = server.post("/v1/messages?beta=true", message_body(2, answer, result))[1]["usage"]
    assert counted == sum(usage[f"{part}input_tokens"] for part in ("", "cache_creation_", "cache_read_"))
    spent = first["usage"]["input_tokens"] + first["usage"]["cache_read_input_tokens"] + first["usage"]["output_tokens"]
    assert usage["cache_read_input_tokens"] >= spent - PAGE
