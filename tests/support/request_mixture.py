"""Concurrent requests of several APIs, and a comparison of each answer with its undisturbed counterpart.

Ids, times and the grouping of steps into events differ from run to run. All else must be equal: every choice's text,
tokens, scores and finish reason.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
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

NOISE = re.compile(r"id|created|request_id|cached_tokens|system_fingerprint|.*(time|cost|batch_size).*")
PIECES = {"text", "content", "reasoning_content", "reasoning", "arguments", "text_output"}
PARTS = {"choices", "tool_calls"}  # lists whose members have an index

Told = dict[tuple[Any, ...], Any]  # path of member names → a text, a list or a value
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
        return self.body.count(b"\n\n") if self.stream else int(self.whole)

    def events(self) -> Iterator[Any]:
        if not self.stream:
            yield json.loads(self.body)
            return
        for text in filter(None, self.body.split(b"\n\n")):
            if text != b"data: [DONE]":
                yield json.loads(text.removeprefix(b"data:"))

    def told(self) -> Told:
        made: Told = {}
        for event in self.events():
            gather(made, event, ())
        return made

    def verdict(self, wanted: Told) -> Verdict:
        """Compares with the undisturbed answer: ``exact``; a prefix of it and one ``error``; or a prefix that was
        ``cut``. Anything else is wrong."""
        if not self.over:
            return "hang"
        if not self.whole:
            last = self.body.rfind(b"\n\n") + 2 if self.stream else 0
            known = Answer(self.status, self.body[:last], True)
            return "cut" if begins(wanted, known.told()) else "wrong"
        try:
            told = list(self.events())
        except ValueError:
            return "wrong"
        failed = ["error" in each or self.status >= 400 for each in told]
        if not any(failed):
            return "exact" if self.told() == wanted else "wrong"
        if failed.index(True) != len(told) - 1:
            return "wrong"  # something follows the error
        made: Told = {}
        for event in told[:-1]:
            gather(made, event, ())
        return "error" if begins(wanted, made) else "wrong"


def gather(made: Told, value: Any, path: tuple[Any, ...]) -> None:
    """Adds an event's contents to those of the events before it."""
    name = path[-1] if path else ""
    if isinstance(value, dict):
        for key, inner in value.items():
            if inner is not None and not NOISE.fullmatch(key):
                gather(made, inner, (*path, key))
    elif isinstance(value, list) and name in PARTS:
        for inner in value:
            gather(made, inner, (*path, inner.get("index", 0)))
    elif isinstance(value, list):
        made[path] = made.get(path, []) + value
    elif isinstance(value, str) and name in PIECES:
        made[path] = made.get(path, "") + value
    else:
        made[path] = value


def begins(whole: Told, part: Told) -> bool:
    """Whether every text and list of ``part`` is a prefix of the one in ``whole``."""
    for path, value in part.items():
        known = whole.get(path)
        if isinstance(value, str) and path[-1] in PIECES:
            if value and not (isinstance(known, str) and known.startswith(value)):
                return False
        elif value and isinstance(value, list) and not (isinstance(known, list) and known[: len(value)] == value):
            return False
    return True


async def ask(url: str, path: str, body: dict[str, Any], answer: Answer | None = None, pause: float = 0.0) -> Answer:
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
        await read(reader, answer, pause)
    except (OSError, EOFError, ValueError, IndexError):
        pass
    finally:
        answer.over = True
        if writer is not None:
            writer.close()
    return answer


async def read(reader: asyncio.StreamReader, answer: Answer, pause: float = 0.0) -> None:
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


async def until(what: Callable[[], Any], seconds: float = 5.0) -> bool:
    """Waits for a condition up to ``seconds``; returns whether it came true."""
    deadline = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < deadline:
        await asyncio.sleep(0.002)
    return bool(found)


async def undisturbed(url: str) -> list[Answer]:
    """Sends the requests one by one while nothing is disturbed, and returns the answers."""
    answers = [await ask(url, path, body) for path, body in MIXTURE]
    assert all(answer.status == 200 and answer.whole for answer in answers), answers
    return answers


def verdicts(answers: list[Answer], wanted: list[Told]) -> list[Verdict]:
    return [answer.verdict(told) for answer, told in zip(answers, wanted, strict=True)]


async def well(cluster: Cluster, wanted: list[Told]) -> None:
    """Waits until all processes serve and nothing is held; then every answer must be as it was before."""
    await asyncio.to_thread(cluster.ready)
    await asyncio.to_thread(cluster.idle)
    url = cluster.coordinator.url
    answers = await asyncio.gather(*(ask(url, path, body) for path, body in MIXTURE))
    assert set(verdicts(answers, wanted)) == {"exact"}, answers
    async with httpx.AsyncClient() as client:
        await client.post(f"{url}/reset_prefix_cache")
