"""Clients that disconnect, engines that die, many streams at once: nothing hangs or leaks, answers stay the same."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal

CONTROL = {
    "model": "parley-demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 24,
}


def control_answer(server) -> str:
    status, answer = server.post("/v1/chat/completions", CONTROL)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


def encode_request(path: str, body: dict) -> bytes:
    data = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    ).encode() + data


async def send_and_disconnect(port: int, rng: random.Random) -> None:
    """Sends a request (perhaps only a part of it), reads a little, and disconnects."""
    stream = rng.random() < 0.7
    body = {
        "model": "parley-demo",
        "prompt": "The capital of France is " * rng.randint(1, 60),
        "max_tokens": rng.choice([1, 16, 400]),
        "ignore_eos": True,
        "stream": stream,
        "n": rng.choice([1, 1, 1, 3]),
    }
    data = encode_request("/v1/completions", body)
    if rng.random() < 0.1:
        data = data[: rng.randrange(1, len(data))]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        moment = rng.random()
        if moment < 0.3:
            pass
        elif moment < 0.6:
            await asyncio.sleep(rng.random() * 0.3)
        else:
            await asyncio.wait_for(reader.read(rng.randint(1, 2000)), rng.random() * 2)
    except (TimeoutError, ConnectionError):
        pass
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()


async def storm(port: int, clients: int, seed: int) -> None:
    rng = random.Random(seed)
    gate = asyncio.Semaphore(40)

    async def limited_client(seed: int) -> None:
        async with gate:
            await send_and_disconnect(port, random.Random(seed))

    await asyncio.gather(*(limited_client(rng.getrandbits(32)) for _ in range(clients)))


def is_idle(server) -> bool:
    return (
        server.metric("vllm:num_requests_running") == 0
        and server.metric("vllm:num_requests_waiting") == 0
        and server.metric("vllm:kv_cache_usage_perc") == 0
    )


def test_a_thousand_disconnecting_clients_leak_nothing(serve):
    server = serve("--kv-memory", "16MiB")
    expected = control_answer(server)
    asyncio.run(storm(server.port, 400, seed=1))  # warm-up: block pool, allocator and torch's caches reach their size
    assert server.wait_for(lambda: is_idle(server)), server.output()[-2000:]
    before = server.resident_bytes()
    asyncio.run(storm(server.port, 1000, seed=2))
    assert server.wait_for(lambda: is_idle(server)), server.output()[-2000:]
    assert server.resident_bytes() < before + (64 << 20)
    assert control_answer(server) == expected
    assert "Traceback" not in server.output()


async def read_stream(port: int, body: dict, first_event: asyncio.Semaphore | None = None) -> tuple[str, str]:
    """Reads one stream to its end: its text, and "done", "error: …" or "cut". Releases ``begun`` at the first event."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(encode_request("/v1/completions", body))
    text, end = "", "cut"
    try:
        while line := await reader.readline():
            line = line.strip()
            if line.startswith(b"data: [DONE]"):
                end = "done" if end == "cut" else end
                break
            if not line.startswith((b"data: ", b'{"error')):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                end = "error: " + event["error"]["message"]
                if not line.startswith(b"data:"):
                    break
            for choice in event.get("choices", []):
                text += choice["text"]
            if first_event is not None:
                first_event.release()
                first_event = None
    except ConnectionError:
        pass
    writer.close()
    return text, end


def stream_body(k: int, tokens: int) -> dict:
    return {
        "model": "parley-demo",
        "prompt": f"{k} and {k + 1} are numbers. The capital of France is",
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": k,
        "stream": True,
    }


def test_two_hundred_concurrent_streams_finish_and_repeat(serve):
    server = serve("--kv-memory", "128MiB")

    async def all_streams() -> list[tuple[str, str]]:
        return await asyncio.gather(*(read_stream(server.port, stream_body(k, 32)) for k in range(200)))

    first, second = asyncio.run(all_streams()), asyncio.run(all_streams())
    assert {end for _, end in first + second} == {"done"}
    assert first == second  # independent of the other requests in the batch


def test_server_ends_streams_and_recovers_when_its_engine_is_killed(serve):
    server = serve("--kv-memory", "128MiB")
    expected = control_answer(server)

    async def scenario() -> list[tuple[str, str]]:
        begun = asyncio.Semaphore(0)
        streams = [asyncio.create_task(read_stream(server.port, stream_body(k, 3000), begun)) for k in range(200)]
        for _ in streams:
            await begun.acquire()
        assert not any(s.done() for s in streams)
        (engine,) = server.children()
        os.kill(engine, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*streams), 30)

    for _, end in asyncio.run(scenario()):
        assert end.startswith("error: "), end
    assert server.wait_for(server.is_ready), server.output()
    assert control_answer(server) == expected
    assert "SIGKILL" in server.output() and "Traceback" not in server.output()


def test_sigterm_lets_running_streams_finish(serve):
    server = serve("--kv-memory", "64MiB", "--drain", "20")

    async def scenario() -> list[tuple[str, str]]:
        streams = [asyncio.create_task(read_stream(server.port, stream_body(k, 200))) for k in range(8)]
        await asyncio.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*streams)

    children = server.children()
    ends = asyncio.run(scenario())
    assert {end for _, end in ends} == {"done"}
    assert server.process.wait(30) == 0
    assert not any(os.path.exists(f"/proc/{pid}") for pid in children)


def test_drain_timeout_ends_streams_with_an_error(serve):
    server = serve("--kv-memory", "64MiB", "--drain", "1")

    async def scenario() -> list[tuple[str, str]]:
        streams = [asyncio.create_task(read_stream(server.port, stream_body(k, 3900))) for k in range(16)]
        await asyncio.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*streams)

    ends = {end for _, end in asyncio.run(scenario())}
    assert "cut" not in ends and any(end.startswith("error: ") for end in ends), ends
    assert server.process.wait(10) == 0
