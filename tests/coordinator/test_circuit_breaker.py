"""The circuit breaker: an instance that fails or times out repeatedly is left alone, and then probed."""

from __future__ import annotations

import asyncio

import pytest
from support.answer_scripts import CHAT_BODY, CHAT_SCRIPT, raw_answer
from support.scripted_instance import ReceivedRequest, ScriptedInstance
from support.simulated_cluster import ManualClock, report_status, simulated_cluster

from parley.coordinator.routing import circuit_breaker
from parley.coordinator.routing.circuit_breaker import FAILURE_LIMIT, PAUSE_BOUNDS, CircuitBreaker
from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.instance_scheduler import InstanceScheduler
from parley.coordinator.routing.policies import SchedulingRequest

REQUEST = SchedulingRequest(prompt_tokens=10)


def test_breaker_opens_after_failures_in_a_row():
    breaker = CircuitBreaker()
    for _ in range(FAILURE_LIMIT - 1):
        assert not breaker.record_failure(0.0)
    breaker.close_breaker()
    for _ in range(FAILURE_LIMIT - 1):
        assert not breaker.record_failure(0.0) and not breaker.is_open(0.0)
    assert breaker.record_failure(0.0) == PAUSE_BOUNDS[0] and breaker.is_open(0.0)


def test_pauses_grow_up_to_a_bound():
    breaker, now, pauses = CircuitBreaker(), 0.0, []
    for _ in range(FAILURE_LIMIT + 7):
        pauses.append(breaker.record_failure(now))
        if pauses[-1]:
            assert not breaker.record_failure(now)  # of a request that was sent before the pause
        now += pauses[-1]
    grown = [pause for pause in pauses if pause]
    assert grown == sorted(grown) and grown[0] == PAUSE_BOUNDS[0] and grown[-1] == PAUSE_BOUNDS[1]


def cluster_with_failing_instance() -> tuple[ManualClock, InstanceScheduler, ClusterInstance]:
    """Return two instances, the first of which has just failed so often that its breaker is open."""
    clock = ManualClock()
    table, scheduler = simulated_cluster("mixed", "mixed", clock=clock, algorithm_type="cache_affinity")
    failing = table.get_instance(1)
    assert failing is not None
    for _ in range(FAILURE_LIMIT):
        failing.breaker.record_failure(clock.now)
    return clock, scheduler, failing


async def test_one_request_at_a_time_probes_a_failing_instance():
    clock, scheduler, failing = cluster_with_failing_instance()
    assert {(await scheduler.place_request(REQUEST)).prefill_instance.id for _ in range(4)} == {2}
    clock.now += PAUSE_BOUNDS[0]
    placements = [await scheduler.place_request(REQUEST) for _ in range(6)]
    (probe,) = [placement for placement in placements if placement.prefill_instance is failing]
    probe.report_failure(failing, "again")
    probe.close_placement(False)
    assert {(await scheduler.place_request(REQUEST)).prefill_instance.id for _ in range(4)} == {2}
    clock.now += 2 * PAUSE_BOUNDS[0]
    placements = [await scheduler.place_request(REQUEST) for _ in range(6)]
    (probe,) = [placement for placement in placements if placement.prefill_instance is failing]
    probe.close_placement()
    assert {(await scheduler.place_request(REQUEST)).prefill_instance.id for _ in range(4)} == {1, 2}


async def test_cancelled_probe_is_followed_by_another():
    clock, scheduler, failing = cluster_with_failing_instance()
    clock.now += PAUSE_BOUNDS[0]
    for _ in range(2):
        placements = [await scheduler.place_request(REQUEST) for _ in range(4)]
        (probe,) = [placement for placement in placements if placement.prefill_instance is failing]
        probe.close_placement(False)


async def test_failing_instance_is_used_if_there_is_no_other():
    table, scheduler = simulated_cluster("mixed")
    (only,) = table
    for _ in range(FAILURE_LIMIT):
        only.breaker.record_failure(table.clock())
    assert scheduler.can_serve()
    assert (await scheduler.place_request(REQUEST)).prefill_instance is only


async def test_restart_closes_the_breaker():
    table, _ = simulated_cluster("mixed")
    (only,) = table
    for _ in range(FAILURE_LIMIT):
        only.breaker.record_failure(table.clock())
    report_status(table, only, epoch="e2")
    assert not only.breaker.is_open(table.clock())


async def test_slow_instance_is_avoided_after_a_few_timeouts(cluster):
    """Its status is fine, but no request gets a token: later requests go to the other instance."""
    slow, other = ScriptedInstance("prefill"), ScriptedInstance("prefill", script=CHAT_SCRIPT)
    running = await cluster(
        slow, other, ScriptedInstance("decode"), scheduler_type="default_scheduler", first_token_timeout=1
    )

    async def hang(request: ReceivedRequest) -> bytes:
        await asyncio.sleep(60)
        return b""

    slow.before_prefill = hang
    first_answers = await asyncio.gather(*(running.post(body=CHAT_BODY) for _ in range(6)))
    assert {answer.status for answer in first_answers} == {200, 408}
    for _ in range(10):
        await running.post(body=CHAT_BODY)
    assert len(slow.requests) <= 7  # those, and one probe


@pytest.mark.parametrize("way", ["status", "no answer"])
async def test_failing_plain_server_is_avoided(cluster, monkeypatch, way):
    monkeypatch.setattr(circuit_breaker, "PAUSE_BOUNDS", (60.0, 60.0))
    failing, other = (ScriptedInstance("mixed", plain=True) for _ in range(2))
    running = await cluster(failing, other, algorithm_type="cache_affinity")

    async def fail(request: ReceivedRequest) -> bytes:
        return raw_answer(500, b"oops") if way == "status" else b"nothing like HTTP\r\n\r\n"

    async def work(request: ReceivedRequest) -> bytes:
        return raw_answer(200, b"fine")

    failing.before_prefill, other.before_prefill = fail, work
    statuses = [(await running.post(body=CHAT_BODY)).status for _ in range(20)]
    assert statuses.count(500) == FAILURE_LIMIT and set(statuses) == {200, 500}


CLIENT_ERRORS = [
    ("/triton/v2/models/tiny/infer", {"a": 1}),  # Triton answers 500 to JSON that it cannot read
    ("/triton/v2/models/tiny/infer", b"{"),
    ("/tgi/vertex", {"instances": [{"inputs": ""}]}),
    ("/vllm/generate", {"prompt": "a", "max_tokens": -1}),
]


@pytest.mark.parametrize("roles", [("mixed",), ("prefill", "decode")], ids="-".join)
@pytest.mark.parametrize(("path", "body"), CLIENT_ERRORS)
async def test_client_errors_do_not_count_as_failures_of_an_instance(live_cluster, roles, path, body):
    """Some APIs answer them with status 500, so a client could close the instances to others."""
    cluster = await live_cluster(*roles)
    statuses = {(await cluster.front.post(path, body)).status for _ in range(FAILURE_LIMIT)}
    assert statuses == {500}
    now = cluster.coordinator.table.clock()
    assert not any(instance.breaker.is_open(now) for instance in cluster.coordinator.table)
    assert cluster.coordinator.scheduler.counters.failures == 0
