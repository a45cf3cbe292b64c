"""Kills or stops instances and coordinators at every point of a request's life, with requests of many kinds open.

A cluster of real processes gets the mixture of requests. At a chosen moment one process gets SIGKILL, or SIGSTOP and
later SIGCONT or SIGKILL; a killed process is started again, as a supervisor would. If a P or D dies, every answer must
be exact or end with one error. If a coordinator dies, connections may end, and its successor must be ready soon.
Afterwards nothing may be held anywhere, and the same requests must get the same answers. Each cell of the matrix runs
20 times, or ``PARLEY_KILLS`` times. test_losses.py covers losses without a replacement.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter

import httpx
import pytest
from support.cluster_processes import SECRET, Cluster, ParleyProcess
from support.request_mixture import (
    MIXTURE,
    Answer,
    check_recovered,
    judge_answers,
    send_request,
    undisturbed_answers,
    wait_until,
)

pytestmark = pytest.mark.skipif(not os.environ.get("PARLEY_NIGHTLY"), reason="takes an hour: PARLEY_NIGHTLY=1")

REPEATS = int(os.environ.get("PARLEY_KILLS", "20"))
MOMENTS = ("queued", "prefill", "transfer", "first", "middle", "last")
CELLS = [(who, how, when) for who in ("P", "D", "coordinator") for how in ("kill", "stop") for when in MOMENTS]
ANSWER_TIMEOUT_S = 60.0  # seconds until all answers must have ended
FLAGS = ("--kv-memory", "32MiB", "--max-batch", "6")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    cluster = Cluster(
        tmp_path_factory.mktemp("kills"),
        *("prefill", "prefill", "decode", "decode"),
        flags=FLAGS,
        separate="always",
        heartbeat=0.25,
    )
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Answer]:
    return asyncio.run(undisturbed_answers(cluster.coordinator.url))


class HeldWatcher:
    """Polls the counts of the resources that instances hold."""

    def __init__(self, instances: list[ParleyProcess]):
        self.held = [dict.fromkeys(("running", "waiting", "pinned", "reserved"), 0) for _ in instances]
        self._instances = instances

    def any_held(self, *names: str) -> bool:
        return any(counts[name] for counts in self.held for name in names)

    async def run(self) -> None:
        await asyncio.gather(*(self._poll_instance(number) for number in range(len(self._instances))))

    async def _poll_instance(self, number: int) -> None:
        async with httpx.AsyncClient(headers={"parley-secret": SECRET}, timeout=1.0) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
                    status = (await client.get(f"{self._instances[number].url}/v1/status")).json()["parley"]
                    self.held[number] = {name: status[name] for name in self.held[number]}
                await asyncio.sleep(0.004)


async def wait_for_moment(
    when: str, watch: HeldWatcher, answers: list[Answer], counts: list[int], rng: random.Random
) -> bool:
    """Waits for a moment; returns whether it came before the answers ended."""
    streams = [number for number, count in enumerate(counts) if count > 8]
    stream_number = rng.choice(streams)
    if when == "queued":
        await asyncio.sleep(rng.uniform(0, 0.01))
        return await wait_until(lambda: watch.any_held("waiting"), 1.0)
    if when == "prefill":
        reached = await wait_until(lambda: watch.any_held("running"), 1.0)
        await asyncio.sleep(rng.uniform(0, 0.1))
        return reached and not all(answer.count for answer in answers)
    if when == "transfer":
        return await wait_until(lambda: watch.any_held("pinned", "reserved"), 1.0)
    if when == "first":
        reached = await wait_until(lambda: any(answer.count for answer in answers))
        await asyncio.sleep(rng.uniform(0, 0.02))
        return reached
    goal = rng.randint(3, counts[stream_number] - 4) if when == "middle" else counts[stream_number] - rng.randint(1, 3)
    return (
        await wait_until(lambda: answers[stream_number].count >= goal or answers[stream_number].over)
        and not answers[stream_number].over
    )


def request_phase(answer: Answer, count: int) -> str:
    """Names the phase of a request as its client sees it."""
    if answer.over:
        return "over"
    if not answer.count:
        return "no event"
    return "first events" if answer.count < 3 else "last events" if answer.count > count - 4 else "between"


async def kill_or_stop(cluster: Cluster, victim: ParleyProcess, how: str, rng: random.Random) -> float:
    """Kills or stops a process and restarts it; returns a coordinator's recovery time in seconds, 0 for instances."""
    if how == "stop":
        victim.signal(signal.SIGSTOP)
        await asyncio.sleep(rng.choice([0.3, 1.0, 2.0, 4.0]))
        if rng.random() < 0.5:
            victim.signal(signal.SIGCONT)
            return 0.0
    await asyncio.to_thread(victim.kill_group)
    await asyncio.sleep(rng.choice([0.0, 0.5]))
    began = time.monotonic()
    await asyncio.to_thread(victim.start)
    if victim is not cluster.coordinator:
        return 0.0
    while (await asyncio.to_thread(victim.fetch, "/health/ready"))[0] != 200:
        assert time.monotonic() < began + 30, cluster.logs()
        await asyncio.sleep(0.01)
    return time.monotonic() - began


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
async def test_answers_stay_exact_when_a_process_dies_or_stops(
    cluster: Cluster, undisturbed: list[Answer], cell: tuple[str, str, str]
) -> None:
    who, how, when = cell
    expected, counts = [answer.contents() for answer in undisturbed], [answer.count for answer in undisturbed]
    tally, phases, held = Counter[str](), Counter[str](), Counter[str]()
    hits, times, longest = 0, list[float](), 0.0
    for number in range(REPEATS):
        rng = random.Random(f"{cell} {number}")
        answers = [Answer() for _ in MIXTURE]
        watch = HeldWatcher(cluster.instances)
        watching = asyncio.create_task(watch.run())
        url, began = cluster.coordinator.url, time.monotonic()
        sending = [
            asyncio.create_task(send_request(url, path, body, answer))
            for (path, body), answer in zip(MIXTURE, answers, strict=True)
        ]
        hits += await wait_for_moment(when, watch, answers, counts, rng)
        watching.cancel()
        phases.update(map(request_phase, answers, counts))
        victim = cluster.coordinator
        if who != "coordinator":  # choose the busiest instance
            role = {"P": "prefill", "D": "decode"}[who]
            busy = {
                n: sum(watch.held[n].values()) for n, instance in enumerate(cluster.instances) if instance.role == role
            }
            busiest = max(busy, key=lambda n: (busy[n], rng.random()))
            victim = cluster.instances[busiest]
            held.update(name for name, count in watch.held[busiest].items() if count)
        times.append(await kill_or_stop(cluster, victim, how, rng))
        await asyncio.wait(sending, timeout=ANSWER_TIMEOUT_S)
        longest = max(longest, time.monotonic() - began)
        found_verdicts = judge_answers(answers, expected)
        tally.update(found_verdicts)
        allowed_verdicts = {"exact", "error"} | ({"cut"} if who == "coordinator" else set())
        for verdict, answer, (path, _), expected_contents in zip(
            found_verdicts, answers, MIXTURE, expected, strict=True
        ):
            assert verdict in allowed_verdicts, (number, verdict, path, answer, expected_contents, cluster.logs())
        await check_recovered(cluster, expected)
    # For the record: repeats that reached the moment, verdicts, phases of requests and resources held at the kill, the
    # longest time until a coordinator was back, and the longest time until all answers had ended.
    print(json.dumps([*cell, hits, tally, phases, held, round(max(times), 2), round(longest, 2)]))


async def test_answers_survive_successive_losses_of_instances(cluster: Cluster, undisturbed: list[Answer]) -> None:
    """Ten clients send requests for a minute while instances die and stop, some before others are back."""
    expected, rng, tally = [answer.contents() for answer in undisturbed], random.Random(1), Counter[str]()
    over = False

    async def client(own: random.Random) -> None:
        while not over:
            number = own.randrange(len(MIXTURE))
            answer = Answer()
            sending = send_request(cluster.coordinator.url, *MIXTURE[number], answer, own.choice([0.0, 0.02]))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(sending, 2 * ANSWER_TIMEOUT_S)
            verdict = answer.verdict(expected[number])
            tally[verdict] += 1
            assert verdict in ("exact", "error"), (verdict, MIXTURE[number], answer, expected[number])
            await asyncio.sleep(own.uniform(0, 0.5) if verdict == "exact" else 1.0)

    clients = [asyncio.create_task(client(random.Random(number))) for number in range(10)]
    until = time.monotonic() + 60
    while time.monotonic() < until and not any(client.done() for client in clients):
        await asyncio.sleep(rng.uniform(0, 5))
        await kill_or_stop(cluster, rng.choice(cluster.instances), rng.choice(["kill", "stop"]), rng)
    over = True
    await asyncio.gather(*clients)
    await check_recovered(cluster, expected)
    print(json.dumps(tally))
