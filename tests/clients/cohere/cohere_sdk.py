"""The cohere package: chats of both versions, streams, tool loops, forms, documents, errors, models.

Takes HOST:PORT MODEL.
"""

import asyncio
import json
import sys

import cohere

address, model = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city"}},
            "required": ["city"],
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
}
OFF = cohere.Thinking(type="disabled")


def texts_of(message):
    return "".join(block.text for block in message.content or () if block.type == "text")


def refused(error_class, part, **members):
    try:
        client.chat(**{"model": model, "messages": QUESTION} | members)
    except error_class as error:
        assert part in error.body["message"] and error.body["id"], error.body
    else:
        raise AssertionError(f"{part}: it was not refused")


def collect(events):
    """Return the text, the thinking, the calls and the last event of a stream."""
    text = thinking = ""
    calls, last = [], None
    for event in events:
        if event.type == "content-delta":
            text += event.delta.message.content.text or ""
            thinking += event.delta.message.content.thinking or ""
        elif event.type == "tool-call-start":
            calls.append(event.delta.message.tool_calls)
        elif event.type == "tool-call-delta":
            calls[event.index].function.arguments += event.delta.message.tool_calls.function.arguments
        last = event
    return text, thinking, calls, last


FIRST_WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameter_definitions": {"city": {"description": "The city", "type": "str", "required": True}},
}


def check_first_version(base_url):
    """Check the chat of the first version."""
    client = cohere.Client(api_key="none", base_url=base_url)
    question = QUESTION[0]["content"]
    whole = client.chat(model=model, message=question, temperature=0)
    assert (whole.text, whole.finish_reason) == (ANSWER, "COMPLETE") and whole.meta.tokens.input_tokens > 0, whole
    assert [turn.role for turn in whole.chat_history] == ["USER", "CHATBOT"], whole
    *pieces, last = client.chat_stream(model=model, message=question, temperature=0)
    assert "".join(piece.text for piece in pieces[1:]) == last.response.text == ANSWER, last
    assert pieces[0].event_type == "stream-start" and last.event_type == "stream-end", last

    weather = {"model": model, "tools": [FIRST_WEATHER], "temperature": 0}
    asked = client.chat(message="What is the weather in Paris and London?", **weather)
    assert [call.parameters for call in asked.tool_calls] == [{"city": "Paris"}, {"city": "London"}], asked
    events = list(client.chat_stream(message="What is the weather in Paris and London?", **weather))
    (calls,) = (event.tool_calls for event in events if event.event_type == "tool-calls-generation")
    assert calls == asked.tool_calls and any(event.event_type == "tool-calls-chunk" for event in events), events
    results = [{"call": call, "outputs": [{"sky": "sunny", "temperature": 21}]} for call in asked.tool_calls]
    final = client.chat(message="", chat_history=asked.chat_history, tool_results=results, **weather)
    assert "sunny" in final.text and [turn.role for turn in final.chat_history][2:] == ["TOOL", "CHATBOT"], final
    form = cohere.JsonObjectResponseFormat(schema=PERSON)
    person = client.chat(model=model, message="Give me JSON for a person: Anna.", response_format=form, max_tokens=200)
    assert set(json.loads(person.text)) == {"name", "age", "city"}, person
    try:
        client.chat(model=model, message=question, connectors=[{"id": "web-search"}])
    except cohere.BadRequestError as error:
        assert "connectors" in error.body["message"], error.body
    else:
        raise AssertionError("connectors were not refused")


for base_url in (f"http://{address}", f"http://{address}/cohere"):
    check_first_version(base_url)
    client = cohere.ClientV2(api_key="none", base_url=base_url)
    whole = client.chat(model=model, messages=QUESTION, temperature=0, thinking=OFF, logprobs=True)
    assert texts_of(whole.message) == ANSWER and whole.finish_reason == "COMPLETE", whole
    assert "".join(item.text for item in whole.logprobs) == ANSWER and whole.usage.tokens.input_tokens > 0
    events = client.chat_stream(model=model, messages=QUESTION, temperature=0, thinking=OFF, logprobs=True)
    text, thinking, _, last = collect(events)
    assert (text, thinking, last.delta.finish_reason) == (ANSWER, "", "COMPLETE"), (text, last)
    assert last.delta.usage.tokens == whole.usage.tokens

    thought = client.chat(
        model=model, messages=QUESTION, temperature=0, thinking=cohere.Thinking(type="enabled", token_budget=200)
    )
    assert [block.type for block in thought.message.content] == ["thinking", "text"], thought
    _, thinking, _, _ = collect(
        client.chat_stream(model=model, messages=QUESTION, temperature=0, thinking=cohere.Thinking(type="enabled"))
    )
    assert thinking == thought.message.content[0].thinking

    for is_stream in (False, True):  # a loop over a tool
        messages = [{"role": "user", "content": "What is the weather in Paris and London?"}]
        members = {"model": model, "tools": [WEATHER], "temperature": 0, "thinking": OFF}
        if is_stream:
            _, _, calls, last = collect(client.chat_stream(messages=messages, **members))
            reason = last.delta.finish_reason
        else:
            answer = client.chat(messages=messages, **members)
            calls, reason = answer.message.tool_calls, answer.finish_reason
        assert reason == "TOOL_CALL" and all(call.id.startswith("get_weather_") for call in calls), calls
        assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Paris", "London"], calls
        messages.append({"role": "assistant", "tool_plan": "I look it up.", "tool_calls": calls})
        for call in calls:
            city = json.loads(call.function.arguments)["city"]
            data = json.dumps({"city": city, "sky": "sunny", "temperature": 21})
            content = [{"type": "document", "document": {"data": data}}]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        final = client.chat(messages=messages, **members)
        assert "sunny" in texts_of(final.message), final

    forced = client.chat(
        model=model, messages=QUESTION, tools=[WEATHER], tool_choice="REQUIRED", strict_tools=True, thinking=OFF,
        max_tokens=100,
    )  # fmt: skip
    assert forced.message.tool_calls and json.loads(forced.message.tool_calls[0].function.arguments)["city"], forced
    form = cohere.JsonObjectResponseFormatV2(json_schema=PERSON)
    person = client.chat(
        model=model,
        messages=[{"role": "user", "content": "Give me JSON for a person: Anna, 31 years old, from Paris."}],
        response_format=form,
        temperature=0,
        thinking=OFF,
        max_tokens=200,
    )
    assert set(json.loads(texts_of(person.message))) == {"name", "age", "city"}, person
    with_documents = client.chat(
        model=model,
        messages=QUESTION,
        documents=["Paris is large.", cohere.Document(id="b", data={"title": "Rome", "snippet": "Rome is old."})],
        max_tokens=5,
        thinking=OFF,
    )
    assert with_documents.usage.tokens.input_tokens > whole.usage.tokens.input_tokens
    stopped = client.chat(model=model, messages=QUESTION, stop_sequences=["France"], temperature=0, thinking=OFF)
    assert (texts_of(stopped.message), stopped.finish_reason) == ("The capital of ", "STOP_SEQUENCE"), stopped
    assert client.chat(model=model, messages=QUESTION, max_tokens=1).finish_reason == "MAX_TOKENS"

    for input_type in ("search_document", "search_query"):  # the model has no prompts
        vectors = client.embed(model=model, texts=["a"], input_type=input_type, embedding_types=["float"])
        plain = cohere.Client(api_key="none", base_url=base_url).embed(model=model, texts=["a"], input_type=input_type)
        assert plain.embeddings == vectors.embeddings.float_, plain
    refused(cohere.NotFoundError, "model 'none' not found", model="none")
    refused(cohere.BadRequestError, "temperature must be between", temperature=-1)
    refused(cohere.UnprocessableEntityError, "invalid type: parameter 'max_tokens'", max_tokens="1")
    refused(cohere.BadRequestError, "citation_options.mode 'FAST'", citation_options={"mode": "FAST"})

models = client.models.list(endpoint="chat").models
assert model in [card.name for card in models] and client.models.get(model).context_length, models


async def ask_several():
    several = cohere.AsyncClientV2(api_key="none", base_url=f"http://{address}")
    asked = (several.chat(model=model, messages=QUESTION, temperature=0, thinking=OFF) for _ in range(4))
    assert {texts_of(answer.message) for answer in await asyncio.gather(*asked)} == {ANSWER}


asyncio.run(ask_several())
print("good")
