"""One P and one D lose a process, an engine or their connection, and nothing replaces it.

The remaining process runs requests whole, as far as it can, or answers wait for a successor up to the coordinator's
recovery timeout. Answers are exact or end with one error; afterwards everything works as before.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster_processes import Cluster, ParleyProcess
from support.request_mixture import (
    MIXTURE,
    Answer,
    AnswerContents,
    check_recovered,
    judge_answers,
    send_request,
    undisturbed_answers,
    wait_until,
)

nightly = pytest.mark.skipif(not os.environ.get("PARLEY_NIGHTLY"), reason="takes a minute: PARLEY_NIGHTLY=1")


SILENCE_S = 40.0  # seconds: longer than any lease of instances and coordinators


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("losses"), "prefill", "decode", separate="always", heartbeat=0.25)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def expected_answers(pair: Cluster) -> list[AnswerContents]:
    return [answer.contents() for answer in asyncio.run(undisturbed_answers(pair.coordinator.url))]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts a cluster with other roles or options."""
    clusters: list[Cluster] = []

    def start(*roles: str, **options: Any) -> Cluster:
        clusters.append(Cluster(tmp_path, *roles, heartbeat=0.25, **options))
        return clusters[0]

    yield start
    for cluster in clusters:
        cluster.close()


async def answers_during(cluster: Cluster, harm: Callable[[], Any], pause: float = 0.0) -> list[Answer]:
    """Applies ``harm`` once some answers have made progress; returns the answers."""
    url, answers = cluster.coordinator.url, [Answer() for _ in MIXTURE]
    sending = [
        asyncio.create_task(send_request(url, path, body, answer, pause))
        for (path, body), answer in zip(MIXTURE, answers, strict=True)
    ]
    assert await wait_until(lambda: sum(answer.count > 3 for answer in answers) > 1, 30)
    await asyncio.to_thread(harm)
    await asyncio.wait(sending, timeout=90)
    return answers


def engine_pid(process: ParleyProcess) -> int:
    """Returns the process id of an instance's engine."""
    child_pids = Path(f"/proc/{process.process_group}/task/{process.process_group}/children").read_text().split()
    return next(int(pid) for pid in child_pids if b"parley" in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.mark.parametrize("number", [pytest.param(0, marks=nightly, id="prefill"), pytest.param(1, id="decode")])
async def test_remaining_instance_continues_alone(
    pair: Cluster, expected_answers: list[AnswerContents], number: int
) -> None:
    answers = await answers_during(pair, pair.instances[number].restart)
    assert set(judge_answers(answers, expected_answers)) == {"exact"}, answers
    await check_recovered(pair, expected_answers)


async def test_answers_after_a_coordinator_restart_are_exact_or_cut(
    pair: Cluster, expected_answers: list[AnswerContents]
) -> None:
    answers = await answers_during(pair, pair.coordinator.restart)
    assert set(judge_answers(answers, expected_answers)) <= {"exact", "cut"}, answers
    await check_recovered(pair, expected_answers)


@nightly
@pytest.mark.parametrize("number", [0, 1], ids=["prefill", "decode"])
async def test_answers_end_in_order_when_only_the_engine_dies(
    pair: Cluster, expected_answers: list[AnswerContents], number: int
) -> None:
    answers = await answers_during(pair, lambda: os.kill(engine_pid(pair.instances[number]), signal.SIGKILL))
    print(judge_answers(answers, expected_answers))
    assert set(judge_answers(answers, expected_answers)) <= {"exact", "error"}, answers
    await check_recovered(pair, expected_answers)


@nightly
@pytest.mark.parametrize("roles", [("mixed", "mixed"), ("prefill", "decode", "decode")], ids="-".join)
async def test_answers_move_away_from_an_engine_that_hangs(
    begin: Callable[..., Cluster], roles: tuple[str, ...]
) -> None:
    """The API process of the instance answers all along; only its engine is stopped."""
    idle_flags = ("--kv-memory", "24MiB", "--engine-timeout", "2s")
    cluster = begin(*roles, flags=idle_flags, separate="always")
    expected = [answer.contents() for answer in await undisturbed_answers(cluster.coordinator.url)]
    victim = cluster.instances[1]
    stopped = engine_pid(victim)
    answers = await answers_during(cluster, lambda: os.kill(stopped, signal.SIGSTOP))
    assert set(judge_answers(answers, expected)) == {"exact"}, (judge_answers(answers, expected), cluster.logs())
    await check_recovered(cluster, expected)
    assert await wait_until(lambda: not Path(f"/proc/{stopped}").exists(), 30)
    assert await wait_until(lambda: victim.fetch("/health/ready")[0] == 200, 30)
    assert engine_pid(victim) != stopped


@nightly
@pytest.mark.parametrize("number", [0, 1], ids=["prefill", "decode"])
async def test_resumed_instance_notices_that_it_was_presumed_dead(
    pair: Cluster, expected_answers: list[AnswerContents], number: int
) -> None:
    """A stopped process is presumed dead by all others; once it resumes it must find that out itself."""
    silent = pair.instances[number]
    began = time.monotonic()
    answers = await answers_during(pair, lambda: silent.signal(signal.SIGSTOP))
    print(judge_answers(answers, expected_answers), f"{time.monotonic() - began:.1f} s")
    await asyncio.sleep(max(0.0, began + SILENCE_S - time.monotonic()))
    silent.signal(signal.SIGCONT)
    assert set(judge_answers(answers, expected_answers)) <= {"exact", "error"}, answers
    await check_recovered(pair, expected_answers)


@nightly
async def test_slow_clients_get_exact_answers_when_d_dies(
    pair: Cluster, expected_answers: list[AnswerContents]
) -> None:
    answers = await answers_during(pair, pair.instances[1].restart, pause=0.05)
    assert set(judge_answers(answers, expected_answers)) == {"exact"}, answers
    await check_recovered(pair, expected_answers)


@nightly
@pytest.mark.parametrize("listening", [False, True], ids=["refused", "silent"])
async def test_requests_complete_when_handovers_cannot_connect(
    begin: Callable[..., Cluster], pair: Cluster, expected_answers: list[AnswerContents], listening: bool
) -> None:
    with socket.socket() as wall:
        wall.bind(("127.0.0.1", 0))
        if listening:
            wall.listen(1024)  # but never accept
        blocked = begin("prefill", "decode", peers={1: f"127.0.0.1;{wall.getsockname()[1]}"})
        answers = [Answer() for _ in MIXTURE]
        url = blocked.coordinator.url
        await asyncio.gather(
            *(send_request(url, *request, answer) for request, answer in zip(MIXTURE, answers, strict=True))
        )
        print(judge_answers(answers, expected_answers))
        assert set(judge_answers(answers, expected_answers)) == {"exact"}, answers
        await check_recovered(blocked, expected_answers)


@nightly
async def test_requests_end_when_d_has_hardly_any_kv_memory(
    begin: Callable[..., Cluster], pair: Cluster, expected_answers: list[AnswerContents]
) -> None:
    small = begin("prefill", "decode", instance_flags={1: ("--kv-memory", "2MiB")}, separate="always")
    answers = [Answer() for _ in MIXTURE]
    url = small.coordinator.url
    await asyncio.gather(
        *(send_request(url, *request, answer) for request, answer in zip(MIXTURE, answers, strict=True))
    )
    print(judge_answers(answers, expected_answers), [answer.body[-200:] for answer in answers])
    assert set(judge_answers(answers, expected_answers)) <= {"exact", "error"}, answers
    await asyncio.to_thread(small.wait_until_idle)
