"""browser-use's models over three APIs: text, and an answer by schema. Arguments: HOST:PORT MODEL."""

import asyncio
import sys
from typing import Literal

from browser_use.llm import ChatAnthropic, ChatOllama, ChatOpenAI, SystemMessage, UserMessage
from pydantic import BaseModel

address, model = sys.argv[1:]
MESSAGES = [SystemMessage(content="Be short."), UserMessage(content="What is the capital of France?")]


class Rating(BaseModel):
    stars: Literal[1, 2, 3]
    mood: Literal["good", "bad"]


async def main() -> None:
    for client in (
        # its default, 4096 tokens of output, is all that the built-in model's context has
        ChatOpenAI(
            model=model, base_url=f"http://{address}/v1", api_key="none", temperature=0, max_completion_tokens=1000
        ),
        ChatOllama(model=model, host=f"http://{address}"),
        ChatAnthropic(model=model, base_url=f"http://{address}", api_key="none", max_tokens=200),
    ):
        assert "Paris" in (await client.ainvoke(MESSAGES)).completion, client
        assert (await client.ainvoke(MESSAGES, output_format=Rating)).completion.stars in (1, 2, 3), client


asyncio.run(main())
print("good")
