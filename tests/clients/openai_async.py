"""OpenAI's asynchronous client, at OpenAI's, vLLM's and Azure's paths: requests at once, streams, and streams that are
left in the middle. Arguments: HOST:PORT MODEL."""

import asyncio
import json
import sys
import urllib.request

import openai
from openai import AsyncAzureOpenAI, AsyncOpenAI, AzureOpenAI

address, model = sys.argv[1:]
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
MESSAGES = [{"role": "user", "content": QUESTION}]
ENDLESS = {"max_tokens": 3000, "extra_body": {"ignore_eos": True, "stop_token_ids": []}}
AZURE = {"azure_endpoint": f"http://{address}", "api_version": "2024-10-21", "api_key": "none", "max_retries": 0}


def running_requests() -> int:
    with urllib.request.urlopen(f"http://{address}/load") as answer:
        return json.loads(answer.read())["server_load"]


async def wait_until_idle() -> None:
    async with asyncio.timeout(10):
        while await asyncio.to_thread(running_requests):
            await asyncio.sleep(0.02)


async def check_chat(client) -> None:
    create = client.chat.completions.create
    answers = await asyncio.gather(*(create(model=model, messages=MESSAGES, temperature=0) for _ in range(4)))
    assert [answer.choices[0].message.content for answer in answers] == [ANSWER] * 4
    stream = await create(model=model, messages=MESSAGES, temperature=0, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == ANSWER
    text = {"model": model, "prompt": "Hello", "max_tokens": 4, "temperature": 0}
    pieces = [piece.choices[0].text async for piece in await client.completions.create(**text, stream=True)]
    assert "".join(pieces) == (await client.completions.create(**text)).choices[0].text
    vectors = await client.embeddings.create(model=model, input=["Hello", "World"])
    assert len(vectors.data) == 2
    assert [card.id async for card in client.models.list()] == [model]


async def check_cancelled(client) -> None:
    """Leave a stream by its end of the connection, by ``close``, and by the end of the task that reads it."""
    create = client.chat.completions.create
    async with await create(model=model, messages=MESSAGES, stream=True, **ENDLESS) as stream:
        await anext(aiter(stream))
        assert await asyncio.to_thread(running_requests)
    await wait_until_idle()
    stream = await create(model=model, messages=MESSAGES, stream=True, **ENDLESS)
    await anext(aiter(stream))
    await stream.close()
    await wait_until_idle()
    for stream_members in ({"stream": True}, {}):
        task = asyncio.create_task(read_all(create(model=model, messages=MESSAGES, **stream_members, **ENDLESS)))
        while not await asyncio.to_thread(running_requests):
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await wait_until_idle()


async def read_all(answer) -> None:
    answer = await answer
    if isinstance(answer, openai.AsyncStream):
        async for _ in answer:
            pass


async def check_responses(client) -> None:
    create = client.responses.create
    answers = await asyncio.gather(*(create(model=model, input=QUESTION, temperature=0) for _ in range(3)))
    assert [answer.output_text for answer in answers] == [ANSWER] * 3
    async with client.responses.stream(model=model, input=QUESTION, temperature=0) as stream:
        texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        assert "".join(texts) == (await stream.get_final_response()).output_text == ANSWER
    async with await create(model=model, input=QUESTION, stream=True, max_output_tokens=3000) as stream:
        await anext(aiter(stream))
    await wait_until_idle()


async def expect_error(kind, answer) -> None:
    try:
        await answer
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


async def main() -> None:
    for base in ("/v1", "/openai/v1", "/vllm/v1"):
        async with AsyncOpenAI(base_url=f"http://{address}{base}", api_key="none", max_retries=0) as client:
            await check_chat(client)
            await check_cancelled(client)
            await check_responses(client)
    for options in ({}, {"azure_deployment": model}):
        async with AsyncAzureOpenAI(**AZURE, **options) as client:
            create = client.chat.completions.create
            whole = await create(model=model, messages=MESSAGES, temperature=0)
            assert whole.choices[0].message.content == ANSWER and whole.model == model
            if not options:
                await check_chat(client)
                await check_cancelled(client)
                await check_responses(client)
                await expect_error(openai.NotFoundError, create(model="nothing", messages=MESSAGES))
                await expect_error(openai.BadRequestError, create(model=model, messages=MESSAGES, temperature=9))


asyncio.run(main())
azure = AzureOpenAI(**AZURE)
assert azure.chat.completions.create(model=model, messages=MESSAGES, temperature=0).choices[0].message.content == ANSWER
print("good")
