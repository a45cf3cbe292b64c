"""A cluster whose clients send in every way that HTTP allows, while its instances change their roles.

Requests arrive whole, in pieces, chunked, compressed, or with up to a megabyte of blanks; several on one connection
before the first is answered; some clients read slowly, and some disconnect early. A client that stays must receive
exactly the answers that it would get on a connection of its own for each request.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import time

import httpx
import pytest
from support.cluster_processes import SECRET, Cluster
from support.request_mixture import MIXTURE, Answer, check_recovered, judge_answers, read_answer, undisturbed_answers

pytestmark = pytest.mark.skipif(not os.environ.get("PARLEY_NIGHTLY"), reason="takes a minute: PARLEY_NIGHTLY=1")

SECONDS, CLIENTS = 45.0, 12
ROLE_BODY = {
    "server_ip": "127.0.0.1",
    "p_percentage": 50,
    "device": [{"device_id": "0", "device_logical_id": "0", "device_ip": "127.0.0.1"}],
}
ENCODINGS = ("plain", "plain", "chunked", "packed", "blanks")


def encode_request(way: str, number: int, rng: random.Random) -> bytes:
    """Encodes a request of the mixture in one of the ways."""
    path, body = MIXTURE[number]
    data, head = json.dumps(body).encode(), f"POST {path} HTTP/1.1\r\nhost: localhost\r\n"
    if way == "blanks":
        data = b"{" + b" " * rng.choice([1 << 16, 1 << 20]) + data[1:]
    if way == "packed":
        data, head = gzip.compress(data), head + "content-encoding: gzip\r\n"
    if way != "chunked":
        return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
    parts = [data[place : place + 100] for place in range(0, len(data), 100)]
    return f"{head}transfer-encoding: chunked\r\n\r\n".encode() + b"".join(
        b"%x\r\n%b\r\n" % (len(part), part) for part in [*parts, b""]
    )


async def send_on_one_connection(url: str, numbers: list[int], rng: random.Random) -> list[Answer]:
    """Returns the answers to several requests on one connection."""
    host, port = url.removeprefix("http://").split(":")
    answers = [Answer() for _ in numbers]
    reader, writer = await asyncio.open_connection(host, int(port))
    data = b"".join(encode_request(rng.choice(ENCODINGS), number, rng) for number in numbers)
    step = rng.choice([len(data), len(data), 1 + len(data) // 50])
    pause = rng.choice([0.0, 0.0, 0.02])

    async def write() -> None:
        for place in range(0, len(data), step):
            writer.write(data[place : place + step])
            await writer.drain()
            await asyncio.sleep(0.05)

    writing = asyncio.create_task(write())
    try:
        for answer in answers:
            await read_answer(reader, answer, pause)
            answer.over = True
    finally:
        writing.cancel()
        writer.transport.abort()
        await asyncio.wait([writing])
    return answers


async def test_answers_stay_exact_for_every_way_of_sending_during_role_changes(tmp_path) -> None:
    cluster = Cluster(tmp_path, *("prefill", "prefill", "decode", "decode"), separate="always", heartbeat=0.25)
    try:
        url = cluster.coordinator.url
        expected = [answer.contents() for answer in await undisturbed_answers(url)]
        until = time.monotonic() + SECONDS

        async def client(rng: random.Random) -> int:
            count = 0
            while time.monotonic() < until:
                numbers = [rng.randrange(len(MIXTURE)) for _ in range(rng.choice([1, 2, 4]))]
                sending = asyncio.create_task(send_on_one_connection(url, numbers, rng))
                if rng.random() < 0.3:  # disconnect
                    await asyncio.wait([sending], timeout=rng.random())
                    sending.cancel()
                    await asyncio.wait([sending])
                    continue
                answers = await asyncio.wait_for(sending, 120)
                found_verdicts = judge_answers(answers, [expected[number] for number in numbers])
                assert set(found_verdicts) == {"exact"}, (numbers, found_verdicts, answers)
                count += len(found_verdicts)
            return count

        async def change() -> int:
            """Switches one P and one D to another role and back, repeatedly; returns the number of changes."""
            count = 0
            async with httpx.AsyncClient(headers={"parley-secret": SECRET}) as http:
                while time.monotonic() < until:
                    for instance in cluster.instances[::2]:
                        for role in ("flex", instance.role):
                            url = f"{instance.url}/v1/role/{role}"
                            answer = await http.post(url, json={"local": ROLE_BODY, "peers": []})
                            assert answer.json() == {"result": "ok"}, answer.text
                            count += 1
                            await asyncio.sleep(3)
            return count

        clients = (client(random.Random(number)) for number in range(CLIENTS))
        changes, *counts = await asyncio.gather(change(), *clients)
        assert changes >= 4 and sum(counts) > 100, (changes, counts)
        await check_recovered(cluster, expected)
    finally:
        cluster.close()
