"""Requests that come just after an instance has been restarted, when the coordinator's last check found it unusable.

Whoever restarts instances one by one goes on as soon as one says that it is ready. The coordinator learns that at its
next check at the latest, but no request may be refused until then.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from support.answer_scripts import CHAT_BODY, CHAT_SCRIPT
from support.http_client import HELLO_CHAT, MODEL_INFO
from support.scripted_instance import ScriptedInstance
from support.simulated_cluster import lose_instance, report_status, simulated_cluster, status_body

from parley.coordinator.proxy.upstream import result_stream
from parley.coordinator.routing.health import HealthChecker, Unanswered
from parley.coordinator.routing.instance_scheduler import InstanceScheduler, RequestRefused
from parley.coordinator.routing.instance_table import InstanceTable
from parley.coordinator.routing.policies import SchedulingRequest
from parley.coordinator.routing.recheck import InstanceRecheck

REQUESTS = [
    ("/v1/chat/completions", HELLO_CHAT),
    ("/v1/chat/completions", HELLO_CHAT | {"stream": True}),
    ("/tgi/generate", {"inputs": "a", "parameters": {"max_new_tokens": 2}}),
    ("/v1/embeddings", {"model": "tiny", "input": "a"}),
    ("/tokenize", {"model": "tiny", "prompt": "a"}),
    ("/v1/models", None),
]


async def connect_nothing(instance):
    """Results need no connection."""


def recheck_of(table: InstanceTable, ask) -> tuple[InstanceScheduler, HealthChecker, InstanceRecheck]:
    health = HealthChecker(table, ask)
    recheck = InstanceRecheck(table, health, connect_nothing)
    return InstanceScheduler(table, check_unusable=recheck.check_unusable), health, recheck


class HeldAnswers:
    """An instance whose status answers wait until the test releases them, the newest first if it likes."""

    def __init__(self) -> None:
        self.questions: list[asyncio.Future[bool]] = []

    async def __call__(self, url, method="GET", body=b"", timeout=5.0):
        self.questions.append(asyncio.get_running_loop().create_future())
        ready = await self.questions[-1]
        return 200, json.dumps(status_body("mixed", ready=ready)).encode()

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.questions) < count:
                await asyncio.sleep(0)


@pytest.mark.parametrize("roles", [("mixed", "mixed"), ("prefill", "decode", "prefill", "decode")], ids="-".join)
@pytest.mark.parametrize("is_noticed", [True, False], ids=["noticed", "unnoticed"])
async def test_no_request_fails_when_the_next_instances_stop_before_the_first_are_known_to_be_ready(
    live_cluster, roles, is_noticed
):
    """``is_noticed``: the coordinator knows that the next ones stop."""
    cluster = await live_cluster(*roles, info=MODEL_INFO)
    await cluster.coordinator.health.stop_checks()
    table = list(cluster.coordinator.table)
    half = len(roles) // 2
    for server in cluster.instances[half:]:
        server.service.stop_admission()
    for path, body in REQUESTS:
        for instance in table[:half]:
            lose_instance(cluster.coordinator.table, instance)  # as its last checks found it
        for instance in table[half:]:
            instance.accepts_requests = not is_noticed
        answer = await cluster.front.call("POST" if body else "GET", path, body)
        assert answer.status == 200, (path, answer.body)
    await cluster.wait_until_idle()


async def test_a_restarted_instance_is_used_as_soon_as_its_results_can_be_received(cluster, monkeypatch):
    monkeypatch.setattr(result_stream, "RECONNECT_DELAYS", (600.0,))
    restarted, stopped = ScriptedInstance(script=CHAT_SCRIPT), ScriptedInstance(script=CHAT_SCRIPT)
    running = await cluster(restarted, stopped)
    await running.coordinator.health.stop_checks()
    first, _ = running.coordinator.table
    port, restarted.epoch = restarted.port, "another"
    await restarted.kill_instance()
    await running.wait_until(lambda: not running.coordinator.connections.result_stream(first).connected)
    lose_instance(running.coordinator.table, first)
    first.has_result_stream = False  # as after the next attempt to connect
    await restarted.start_serving(port)
    await stopped.kill_instance()
    answer = await running.post(body=CHAT_BODY)
    assert (answer.status, answer.body) == (200, b"".join(CHAT_SCRIPT.parts))
    assert first.is_usable(running.coordinator.table.clock())


async def test_requests_that_come_during_a_check_share_the_next_one():
    """The answer to an earlier question may be older than the request."""
    table, _ = simulated_cluster("mixed")
    (one,) = table
    report_status(table, one, ready=False)
    answers = HeldAnswers()
    scheduler, _, _ = recheck_of(table, answers)
    early = asyncio.create_task(scheduler.place_request(SchedulingRequest(10)))
    await answers.wait_for(1)
    late = [asyncio.create_task(scheduler.place_request(SchedulingRequest(10))) for _ in range(20)]
    await asyncio.sleep(0)
    answers.questions[0].set_result(False)
    with pytest.raises(RequestRefused):
        await early
    await answers.wait_for(2)
    answers.questions[1].set_result(True)
    assert [(await placing).p.id for placing in late] == [1] * 20
    assert len(answers.questions) == 2


async def test_an_old_answer_does_not_replace_a_newer_one():
    table, _ = simulated_cluster("mixed")
    (one,) = table
    answers = HeldAnswers()
    health = HealthChecker(table, answers)
    checks = [asyncio.create_task(health.check_instance(one)) for _ in range(2)]
    await answers.wait_for(2)
    answers.questions[1].set_result(True)
    assert await checks[1]
    answers.questions[0].set_result(False)
    assert await checks[0]
    assert one.is_usable(table.clock())


async def test_the_only_instance_is_used_again_after_a_fault_as_soon_as_it_answers():
    """A coordinator that gets no processor time for some seconds takes a connection for one that timed out."""
    table, _ = simulated_cluster("prefill", "decode")
    one, two = table
    asked: list[str] = []

    async def answer(url, method="GET", body=b"", timeout=5.0):
        asked.append(url)
        return 200, json.dumps(status_body("prefill", ready=True)).encode()

    scheduler, _, _ = recheck_of(table, answer)
    table.mark_faulty(one)
    placement = await scheduler.place_request(SchedulingRequest(10))
    assert (placement.p, placement.d) == (one, two) and asked == ["http://10.0.0.1:8000/v1/status"]


async def test_a_refusal_costs_one_question_to_those_that_respond_and_loses_no_instance():
    table, _ = simulated_cluster("mixed", "mixed", "mixed", "mixed")
    stopping, silent, offline, dead = table
    asked: list[str] = []

    async def ask(url, method="GET", body=b"", timeout=5.0):
        asked.append(url)
        raise Unanswered(responded="10.0.0.2" not in url)

    scheduler, health, recheck = recheck_of(table, ask)
    for instance in (stopping, silent, dead):
        report_status(table, instance, ready=False)
    table.set_instance_offline(offline, True)
    await health.check_instance(silent)
    asked.clear()
    for count in range(1, 10):
        with pytest.raises(RequestRefused) as refused:
            await scheduler.place_request(SchedulingRequest(10))
        assert (refused.value.status, refused.value.retry_after) == (503, 1)
        assert asked == ["http://10.0.0.1:8000/v1/status", "http://10.0.0.4:8000/v1/status"] * count
    assert not stopping.lost and not stopping.missed_checks
    await recheck.close()
