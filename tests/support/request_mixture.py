"""Concurrent requests of several APIs, and a comparison of each answer with its undisturbed counterpart.

Ids, times and the grouping of steps into events differ from run to run. All else must be equal: every choice's text,
tokens, scores and finish reason.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx
from support.cluster_processes import Cluster

WORDS = "One two three four five six seven eight nine ten. "
QUESTION = [{"role": "user", "content": WORDS * 12 + "What is the capital of France?"}]
COMPLETION = {"model": "parley-demo", "ignore_eos": True}
CHAT = {"model": "parley-demo", "ignore_eos": True, "messages": QUESTION}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}

# Path and body. Prompts span several prefill chunks and end at different offsets of a page.
MIXTURE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**COMPLETION, "prompt": WORDS * 60, "max_tokens": 64, "temperature": 0, "stream": True}),
    ("/v1/completions", {**COMPLETION, "prompt": "A " + WORDS * 25, "max_tokens": 48, "seed": 7, "logprobs": 2,
                         "stream": True}),
    ("/v1/completions", {**COMPLETION, "prompt": ["To " + WORDS * 9, "We " + WORDS * 3], "max_tokens": 32, "seed": 9,
                         "n": 2, "stop": [" z"], "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {**COMPLETION, "prompt": "It " + WORDS * 10, "max_tokens": 32, "seed": 4, "n": 2,
                         "echo": True}),
    ("/v1/completions", {**COMPLETION, "prompt": "So " + WORDS * 5, "max_tokens": 12, "n": 2, "temperature": 0,
                         "use_beam_search": True, "best_of": 3}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 48, "seed": 5, "n": 2, "logprobs": True, "top_logprobs": 2,
                              "stream": True}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 48, "seed": 6, "stream": True, "response_format": {
        "type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}, "ignore_eos": False}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 40, "seed": 8}),
    ("/generate_stream", {"inputs": "Is " + WORDS * 8, "parameters": {
        "max_new_tokens": 40, "seed": 3, "do_sample": True, "details": True, "top_n_tokens": 2}}),
    ("/v2/models/parley-demo/generate_stream", {"text_input": "At " + WORDS * 8, "parameters": {
        "max_new_tokens": 40, "ignore_eos": True, "temperature": 0.7, "do_sample": True, "seed": 2}}),
]  # fmt: skip

Mixture = Sequence[tuple[str, dict[str, Any]]]

NOISE = re.compile(r"id|created|request_id|cached_tokens|system_fingerprint|.*(time|cost|batch_size).*")
PIECES = {"text", "content", "reasoning_content", "reasoning", "arguments", "text_output"}
PARTS = {"choices", "tool_calls"}  # lists whose members have an index

AnswerContents = dict[tuple[Any, ...], Any]  # path of member names → a text, a list or a value
Verdict = Literal["exact", "error", "cut", "wrong", "hang"]


@dataclass
class Answer:
    """An answer as received so far. ``whole``: it arrived completely; ``over``: the connection has ended."""

    status: int = 0
    body: bytes = b""
    stream: bool = False
    whole: bool = False
    over: bool = False

    @property
    def count(self) -> int:
        """The number of events."""
        pings = self.body.count(b"\n:\n\n") + self.body.startswith(b":\n\n")
        return self.body.count(b"\n\n") - pings if self.stream else int(self.whole)

    def events(self) -> Iterator[Any]:
        if not self.stream:
            yield json.loads(self.body)
            return
        for text in filter(None, self.body.split(b"\n\n")):
            if text != b"data: [DONE]" and not text.startswith(b":"):
                yield json.loads(text.removeprefix(b"data:"))

    def contents(self) -> AnswerContents:
        merged: AnswerContents = {}
        for event in self.events():
            merge_event(merged, event, ())
        return merged

    def verdict(self, expected: AnswerContents) -> Verdict:
        """Compares with the undisturbed answer: ``exact``; a prefix of it and one ``error``; or a prefix that was
        ``cut``. Anything else is wrong."""
        if not self.over:
            return "hang"
        if not self.whole:
            last = self.body.rfind(b"\n\n") + 2 if self.stream else 0
            complete_part = Answer(self.status, self.body[:last], True)
            return "cut" if is_prefix(expected, complete_part.contents()) else "wrong"
        try:
            events = list(self.events())
        except ValueError:
            return "wrong"
        failed = ["error" in event or self.status >= 400 for event in events]
        if not any(failed):
            return "exact" if self.contents() == expected else "wrong"
        if failed.index(True) != len(events) - 1:
            return "wrong"  # something follows the error
        partial: AnswerContents = {}
        for event in events[:-1]:
            merge_event(partial, event, ())
        return "error" if is_prefix(expected, partial) else "wrong"


def merge_event(contents: AnswerContents, part: Any, path: tuple[Any, ...]) -> None:
    """Adds an event's contents to those of the events before it."""
    name = path[-1] if path else ""
    if isinstance(part, dict):
        for key, inner in part.items():
            if inner is not None and not NOISE.fullmatch(key):
                merge_event(contents, inner, (*path, key))
    elif isinstance(part, list) and name in PARTS:
        for inner in part:
            merge_event(contents, inner, (*path, inner.get("index", 0)))
    elif isinstance(part, list):
        contents[path] = contents.get(path, []) + part
    elif isinstance(part, str) and name in PIECES:
        contents[path] = contents.get(path, "") + part
    else:
        contents[path] = part


def is_prefix(whole: AnswerContents, part: AnswerContents) -> bool:
    """Whether every text and list of ``part`` is a prefix of the one in ``whole``."""
    for path, value in part.items():
        whole_value = whole.get(path)
        if isinstance(value, str) and path[-1] in PIECES:
            if value and not (isinstance(whole_value, str) and whole_value.startswith(value)):
                return False
        elif (
            value
            and isinstance(value, list)
            and not (isinstance(whole_value, list) and whole_value[: len(value)] == value)
        ):
            return False
    return True


async def send_request(
    url: str, path: str, body: dict[str, Any], answer: Answer | None = None, pause: float = 0.0
) -> Answer:
    """Sends one request over its own connection; ``answer`` can be watched meanwhile. ``pause``: seconds between reads,
    for a slow client."""
    answer = answer or Answer()
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer = None
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        await read_answer(reader, answer, pause)
    except (OSError, EOFError, ValueError, IndexError):
        pass
    finally:
        answer.over = True
        if writer is not None:
            writer.close()
    return answer


async def read_answer(reader: asyncio.StreamReader, answer: Answer, pause: float = 0.0) -> None:
    """Reads the next answer of a connection; raises OSError, EOFError, ValueError or IndexError if none arrives."""
    while (status := int((await reader.readline()).split()[1])) == 100:
        await reader.readline()
    answer.status = status
    headers = (await reader.readuntil(b"\r\n\r\n")).lower()
    answer.stream = b"text/event-stream" in headers
    if b"transfer-encoding: chunked" in headers:
        while size := int(await reader.readline(), 16):
            answer.body += (await reader.readexactly(size + 2))[:-2]
            await asyncio.sleep(pause)
        await reader.readexactly(2)
    else:
        length = re.search(rb"content-length: (\d+)", headers)
        assert length is not None, headers
        answer.body = await reader.readexactly(int(length[1]))
    answer.whole = True


async def wait_until(condition: Callable[[], Any], seconds: float = 5.0) -> bool:
    """Waits for a condition up to ``seconds``; returns whether it came true."""
    deadline = time.monotonic() + seconds
    while not (result := condition()) and time.monotonic() < deadline:
        await asyncio.sleep(0.002)
    return bool(result)


async def undisturbed_answers(url: str, mixture: Mixture = MIXTURE) -> list[Answer]:
    """Sends the requests one by one while nothing is disturbed, and returns the answers."""
    answers = [await send_request(url, path, body) for path, body in mixture]
    assert all(answer.status == 200 and answer.whole for answer in answers), answers
    return answers


def judge_answers(answers: list[Answer], expected: list[AnswerContents]) -> list[Verdict]:
    return [answer.verdict(contents) for answer, contents in zip(answers, expected, strict=True)]


async def check_recovered(
    cluster: Cluster, expected: list[AnswerContents], mixture: Mixture = MIXTURE, seconds: float = 90.0
) -> None:
    """Waits until all processes serve and nothing is held; then every answer must be as it was before."""
    await asyncio.to_thread(cluster.ready, seconds)
    await asyncio.to_thread(cluster.wait_until_idle)
    url = cluster.coordinator.url
    answers = await asyncio.gather(*(send_request(url, path, body) for path, body in mixture))
    assert set(judge_answers(answers, expected)) == {"exact"}, answers
    async with httpx.AsyncClient() as client:
        await client.post(f"{url}/reset_prefix_cache")
