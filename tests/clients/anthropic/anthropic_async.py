"""The anthropic package's asynchronous client: messages at once, streams, and streams that are left in the middle."""

import asyncio
import json
import sys
import urllib.request

import anthropic

address, model = sys.argv[1:]
HELLO = [{"role": "user", "content": "Hello"}]
STORY = {"model": model, "max_tokens": 3000, "messages": [{"role": "user", "content": "Count to a million."}]}


def running_requests() -> int:
    with urllib.request.urlopen(f"http://{address}/load") as answer:
        return json.loads(answer.read())["server_load"]


async def wait_until_idle() -> None:
    async with asyncio.timeout(10):
        while await asyncio.to_thread(running_requests):
            await asyncio.sleep(0.02)


async def check_client(client) -> None:
    create = client.messages.create
    members = {"model": model, "max_tokens": 50, "messages": HELLO, "extra_body": {"temperature": 0}}
    answers = await asyncio.gather(*(create(**members) for _ in range(4)))
    assert len({answer.content[0].text for answer in answers}) == 1 and answers[0].stop_reason == "end_turn"
    async with client.messages.stream(**members) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == final.content[0].text == answers[0].content[0].text
    events = [event.type async for event in await create(**members, stream=True)]
    assert events[0] == "message_start" and events[-1] == "message_stop"
    counted = await client.messages.count_tokens(model=model, messages=HELLO)
    assert counted.input_tokens > 0

    try:
        await create(**members | {"model": "nothing"})
    except anthropic.NotFoundError:
        return
    raise AssertionError("it was not refused")


async def check_cancelled(client) -> None:
    """Leave a stream by the end of its block, and by the end of the task that reads it."""
    endless = STORY | {"extra_body": {"ignore_eos": True}}
    create = client.messages.create
    async with client.messages.stream(**endless) as stream:
        await anext(aiter(stream.text_stream))
    await wait_until_idle()
    for stream_members in ({"stream": True}, {}):
        task = asyncio.create_task(read_all(create(**endless, **stream_members)))
        while not await asyncio.to_thread(running_requests):
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await wait_until_idle()


async def read_all(answer) -> None:
    answer = await answer
    if isinstance(answer, anthropic.AsyncStream):
        async for _ in answer:
            pass


async def main() -> None:
    for base in ("", "/anthropic"):
        async with anthropic.AsyncAnthropic(
            base_url=f"http://{address}{base}", api_key="none", max_retries=0
        ) as client:
            await check_client(client)
            if not base:  # the strict API has no answer without an end
                await check_cancelled(client)


asyncio.run(main())
print("good")
