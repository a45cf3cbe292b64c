"""Requests that come just after an instance has been restarted, when the coordinator's last check found it unusable.

Whoever restarts instances one by one goes on as soon as one says that it is ready. The coordinator learns that at its
next check at the latest, but no request may be refused until then.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket

import pytest
from support.answer_scripts import CHAT_BODY, CHAT_SCRIPT
from support.http_client import HELLO_CHAT, MODEL_INFO
from support.loop_clock import pass_time
from support.scripted_instance import ScriptedInstance
from support.simulated_cluster import lose_instance, report_status, simulated_cluster, status_body

from parley.coordinator.proxy.upstream import result_stream
from parley.coordinator.routing import recheck
from parley.coordinator.routing.health import RECHECK_TIMEOUT, HealthChecker, Unanswered
from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.instance_scheduler import InstanceScheduler, RequestRefused
from parley.coordinator.routing.instance_table import RECOVERY_CHECKS, InstanceTable
from parley.coordinator.routing.policies import SchedulingRequest
from parley.coordinator.routing.recheck import InstanceRecheck
from parley.web.http_client import InstanceHttpClient

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


async def ready_answer(url, method="GET", body=b"", timeout=5.0):
    return 200, json.dumps(status_body("mixed", ready=True)).encode()


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
    assert [(await placing).prefill_instance.id for placing in late] == [1] * 20
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


async def test_an_old_answer_ends_no_fault_of_an_instance_that_did_not_answer_since():
    table, _ = simulated_cluster("mixed")
    (one,) = table
    answers = HeldAnswers()
    scheduler, health, _ = recheck_of(table, answers)
    table.mark_faulty(one)
    placing = asyncio.create_task(scheduler.place_request(SchedulingRequest(10)))
    await answers.wait_for(1)
    regular = asyncio.create_task(health.check_instance(one))
    await answers.wait_for(2)
    answers.questions[1].set_exception(Unanswered(responded=True))
    assert not await regular
    answers.questions[0].set_result(True)
    with pytest.raises(RequestRefused):
        await placing
    assert not one.is_usable(table.clock())


async def test_a_flood_of_refused_requests_shares_few_checks():
    """Each request comes when the one before has been refused."""
    table, _ = simulated_cluster("mixed")
    (one,) = table
    report_status(table, one, ready=False)
    asked: list[float] = []
    loop = asyncio.get_running_loop()

    async def ask(url, method="GET", body=b"", timeout=5.0):
        asked.append(loop.time())
        raise Unanswered(responded=True)

    scheduler, _, _ = recheck_of(table, ask)
    for _ in range(4):
        with pytest.raises(RequestRefused):
            await scheduler.place_request(SchedulingRequest(10))
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert len(pauses) == 3 and min(pauses) >= recheck.PAUSE_SECONDS


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
    assert (placement.prefill_instance, placement.decode_instance) == (one, two) and asked == [
        "http://10.0.0.1:8000/v1/status"
    ]


async def test_a_retried_request_ends_the_fault_of_the_only_instance_that_failed_it():
    table, _ = simulated_cluster("mixed")
    (one,) = table
    scheduler, _, _ = recheck_of(table, ready_answer)
    table.mark_faulty(one)
    retried = SchedulingRequest(10, earlier_attempts=1, failed_instances=frozenset({one.id}))
    assert (await scheduler.place_request(retried)).prefill_instance is one


async def test_faults_remain_that_have_nothing_to_do_with_a_refused_request():
    """An instance whose links to others are broken answers status checks all the same."""
    table, _ = simulated_cluster("mixed", "mixed", "mixed")
    loading, healthy, faulty = table
    report_status(table, loading, ready=False, models=["a"])
    for instance in (healthy, faulty):
        report_status(table, instance, models=["b"])

    async def answer(url, method="GET", body=b"", timeout=5.0):
        is_loading = "10.0.0.1" in url
        return 200, json.dumps(status_body("mixed", ready=not is_loading, models=["ba"[is_loading]])).encode()

    scheduler, _, _ = recheck_of(table, answer)
    table.mark_faulty(faulty)
    for _ in range(2 * RECOVERY_CHECKS):
        with pytest.raises(RequestRefused):
            await scheduler.place_request(SchedulingRequest(10, model="a"))
        assert not faulty.is_usable(table.clock())
        report_status(table, healthy, models=["b"])
    assert (await scheduler.place_request(SchedulingRequest(10, model="b"))).prefill_instance is healthy


async def test_the_answer_of_an_instance_that_has_left_changes_nothing():
    """Its successor may have its id by then, and would get the connections of the one that has left."""
    table, _ = simulated_cluster("mixed")
    (one,) = table
    report_status(table, one, ready=False)
    events: list[tuple[object, str]] = []
    answers = HeldAnswers()
    scheduler, _, _ = recheck_of(table, answers)
    placing = asyncio.create_task(scheduler.place_request(SchedulingRequest(10)))
    await answers.wait_for(1)
    table.add_instance(ClusterInstance(one.id, "http://10.0.0.9:8000", "mixed"))
    table.watchers.append(lambda instance, event: events.append((instance, event)))
    answers.questions[0].set_result(True)
    with pytest.raises(RequestRefused):
        await placing
    assert not events and not one.accepts_requests


async def test_no_request_waits_longer_for_a_silent_instance_if_checks_are_rare():
    table, _ = simulated_cluster("mixed", heartbeat=60)
    (one,) = table
    report_status(table, one, ready=False)
    timeouts: list[float] = []

    async def ask(url, method="GET", body=b"", timeout=5.0):
        timeouts.append(timeout)
        raise Unanswered

    scheduler, health, _ = recheck_of(table, ask)
    with pytest.raises(RequestRefused):
        await scheduler.place_request(SchedulingRequest(10))
    await health.check_instance(one)
    assert timeouts == [RECHECK_TIMEOUT, 60]


async def test_no_request_waits_for_results_of_an_instance_that_does_not_respond():
    """A firewall may drop what is sent to the port of its results, but not to that of its status."""
    with socket.socket() as full:  # the kernel drops what arrives once its backlog is full
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(address)
        stream = result_stream.ResultStreamClient(
            InstanceHttpClient(f"http://127.0.0.1:{address[1]}"), "a", "b", lambda attached, reason: None
        )
        connecting = asyncio.create_task(stream.keep_connected())
        await asyncio.sleep(0)
        await pass_time(result_stream.STALLED_SECONDS + 0.1)
        async with asyncio.timeout(0.5):
            await stream.connect_now()
        assert not stream.connected
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        for sock in waiting:
            sock.close()


async def test_a_refusal_costs_one_question_to_those_that_respond_and_loses_no_instance():
    table, _ = simulated_cluster("mixed", "mixed", "mixed", "mixed")
    stopping, silent, offline, dead = table
    asked: list[str] = []

    async def ask(url, method="GET", body=b"", timeout=5.0):
        asked.append(url)
        raise Unanswered(responded="10.0.0.2" not in url)

    scheduler, health, checks = recheck_of(table, ask)
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
    await checks.close()
