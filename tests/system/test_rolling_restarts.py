"""Instances of a cluster, all real processes, are updated one after another while clients send requests.

The next instance is stopped as soon as the one before answers that it is ready, as Kubernetes does. The coordinator may
not have noticed yet. No request may fail, and every answer is the same as without the restarts.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.cluster_processes import Cluster, ParleyProcess
from support.request_mixture import Mixture, send_request, undisturbed_answers

pytestmark = pytest.mark.skipif(not os.environ.get("PARLEY_NIGHTLY"), reason="takes a minute: PARLEY_NIGHTLY=1")

ROUND_COUNT = int(os.environ.get("PARLEY_RESTART_ROUNDS", "2"))  # how often each instance is restarted
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "One two three"}], "max_tokens": 200}
REQUESTS: Mixture = [
    ("/v1/chat/completions", CHAT | {"ignore_eos": True, "stream": True}),
    ("/v1/chat/completions", CHAT | {"ignore_eos": True}),
    ("/v1/completions", {"model": "tiny", "prompt": "One two", "max_tokens": 300, "stream": True, "n": 2}),
    ("/v1/embeddings", {"model": "tiny", "input": ["One", "two"]}),
    ("/v1/messages", CHAT | {"max_tokens": 50}),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": CHAT["messages"]}),
    ("/tokenize", {"model": "tiny", "prompt": "One two three"}),
    ("/tgi/generate", {"inputs": "One two", "parameters": {"max_new_tokens": 20}}),
]


async def restart_in_order(instance: ParleyProcess) -> None:
    """Stop an instance as a service manager does, start it again, and return as soon as it says that it is ready."""
    process = instance.process
    assert process is not None
    os.kill(process.pid, signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 120) == 0
    await asyncio.to_thread(instance.start)
    async with asyncio.timeout(300):
        while (await asyncio.to_thread(instance.fetch, "/health/ready"))[0] != 200:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("roles", [("mixed",) * 3, ("prefill", "decode") * 2], ids="-".join)
async def test_no_request_fails_while_all_instances_are_restarted(
    folder: Path, tmp_path: Path, roles: tuple[str, ...]
) -> None:
    cluster = await asyncio.to_thread(
        Cluster, tmp_path, *roles, flags=(str(folder), "--scripted-engine"), ready_seconds=300, separate="always"
    )
    try:
        url, failures, sent, ended = cluster.coordinator.url, [], 0, False
        expected = [answer.contents() for answer in await undisturbed_answers(url, REQUESTS)]

        async def send_requests(place: int) -> None:
            """Send the requests again and again, each client from another one on."""
            nonlocal sent
            while not ended:
                path, body = REQUESTS[place % len(REQUESTS)]
                answer = await send_request(url, path, body)
                if answer.verdict(expected[place % len(REQUESTS)]) != "exact":
                    failures.append((path, answer.status, answer.body[-300:]))
                place, sent = place + 1, sent + 1

        clients = [asyncio.create_task(send_requests(2 * number)) for number in range(4)]
        for _ in range(ROUND_COUNT):
            for instance in cluster.instances:
                await restart_in_order(instance)
        ended = True
        await asyncio.gather(*clients)
        print(f"{sent} requests, {len(failures)} failed")
        assert not failures, (failures[:5], cluster.logs())
        await asyncio.to_thread(cluster.wait_until_idle)
    finally:
        await asyncio.to_thread(cluster.close)
