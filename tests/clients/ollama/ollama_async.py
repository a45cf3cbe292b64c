"""Ollama's asynchronous Python client: requests at once, streams, and streams that are left in the middle."""

import asyncio
import json
import sys
import urllib.request

import ollama

address, model = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
GREEDY = {"temperature": 0, "num_predict": 300}
LONG = {"model": model, "messages": [{"role": "user", "content": "Count to a million."}]}
PENALTIES = {"repeat_penalty": 1.0, "repeat_last_n": 64, "presence_penalty": -2.0}  # repeats, and so does not end soon


def running_requests() -> int:
    with urllib.request.urlopen(f"http://{address}/load") as answer:
        return json.loads(answer.read())["server_load"]


async def wait_until_idle() -> None:
    async with asyncio.timeout(10):
        while await asyncio.to_thread(running_requests):
            await asyncio.sleep(0.02)


async def main() -> None:
    client = ollama.AsyncClient(host=f"http://{address}")
    chats = [client.chat(model=model, messages=QUESTION, options=GREEDY, think=False) for _ in range(4)]
    assert [answer.message.content for answer in await asyncio.gather(*chats)] == [ANSWER] * 4
    pieces = await client.chat(model=model, messages=QUESTION, options=GREEDY, think=False, stream=True)
    assert "".join([piece.message.content async for piece in pieces]) == ANSWER
    streamed = await client.generate(
        model=model, prompt="The capital of", raw=True, stream=True, options=GREEDY | {"num_predict": 4}
    )
    assert "".join([piece.response async for piece in streamed])
    vectors = await client.embed(model=model, input=["Hello", "World"])
    assert len(vectors.embeddings) == 2
    assert f"{model}:latest" in [entry.model for entry in (await client.list()).models]
    assert (await client.show(model)).capabilities and (await client.ps()).models
    assert [line.status async for line in await client.pull(model, stream=True)][-1] == "success"

    stream = await client.chat(**LONG, options=PENALTIES, stream=True)
    await anext(aiter(stream))
    await stream.aclose()
    await wait_until_idle()
    for is_streamed in (True, False):
        task = asyncio.create_task(read_all(client.chat(**LONG, options=PENALTIES, stream=is_streamed)))
        while not await asyncio.to_thread(running_requests):
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await wait_until_idle()
    try:
        await client.chat(model="x", messages=QUESTION)
    except ollama.ResponseError as error:
        assert error.status_code == 404
    else:
        raise AssertionError("it was not refused")


async def read_all(answer) -> None:
    answer = await answer
    if not isinstance(answer, ollama.ChatResponse):
        async for _ in answer:
            pass


asyncio.run(main())
print("good")
