"""Order of service: priorities, and equal shares for tenants.

test_random_schedules shows that the order changes no output.
"""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.invariant_ledger import LoopHarness, run_alone

from parley.core.sequence import Sequence
from parley.core.wait_queue import WaitQueue
from parley.types import EngineRequest


def make_request(
    request_id: str, tokens: int = 5, *, length: int = 3, priority: int = 0, tenant: str = "", own: int = 0, n: int = 1
) -> EngineRequest:
    ids = [(len(request_id) * 7 + sum(request_id.encode()) + i) % 50 for i in range(length)]
    return EngineRequest(request_id, ids, max_tokens=tokens, priority=priority, tenant=tenant, tenant_priority=own, n=n)


def finish_order(bench: LoopHarness) -> list[str]:
    """Return the ids of requests, sorted by their end."""
    return [output.id for _, _, outputs in bench.step_log for output in outputs if output.finish_reason]


def test_waiting_requests_run_by_priority_then_arrival() -> None:
    bench = LoopHarness(slots=1)
    for request_id, priority in (("a", 0), ("b", 3), ("c", -2), ("d", 0), ("e", -2), ("f", 2**63 - 1), ("g", -(2**63))):
        bench.loop.add_request(make_request(request_id, priority=priority))
    bench.drain()
    assert finish_order(bench) == list("gceadbf") and bench.stats.preemptions == 0


@pytest.mark.parametrize(("blocks", "slots"), [(64, 2), (4, 8)])
def test_higher_priority_preempts_youngest_of_lowest_priority(blocks: int, slots: int) -> None:
    bench = LoopHarness(blocks=blocks, slots=slots, budgets=(500,))
    requests = [
        make_request("older", 20, length=16),
        make_request("younger", 20, length=16),
        make_request("urgent", 3, length=16, priority=-1),
    ]
    bench.loop.add_request(requests[0])
    bench.loop.add_request(requests[1])
    bench.step()
    assert bench.stats.running == 2
    bench.loop.add_request(requests[2])
    bench.step()
    assert ("urgent", 0) in bench.step_log[-1][0] and ("younger", 0) not in bench.step_log[-1][0]
    assert ("older", 0) in bench.step_log[-1][0]
    bench.drain()
    assert finish_order(bench) == ["urgent", "older", "younger"]
    assert bench.outputs["older", 0][-1].preemptions == 0 < bench.outputs["younger", 0][-1].preemptions
    for request in requests:
        assert bench.merged_output(request.id).token_ids == run_alone(request).token_ids


def test_equal_priority_preempts_nothing() -> None:
    bench = LoopHarness(slots=1)
    bench.loop.add_request(make_request("first", 20))
    bench.step()
    bench.loop.add_request(make_request("second", 3))
    bench.drain()
    assert finish_order(bench) == ["first", "second"] and bench.stats.preemptions == 0


def test_higher_priority_prefills_before_rest_of_long_prompt() -> None:
    bench = LoopHarness(budgets=(16,))
    bench.loop.add_request(make_request("long", 1, length=200))
    bench.step()
    bench.loop.add_request(make_request("urgent", 1, length=40, priority=-1))
    bench.drain()
    assert finish_order(bench) == ["urgent", "long"] and bench.stats.preemptions == 0


def test_preempted_request_resumes_before_its_priority_peers() -> None:
    bench = LoopHarness(slots=1)
    bench.loop.add_request(make_request("first", 8))
    bench.step()
    for request_id, priority in (("second", 0), ("urgent", -1), ("late", 1)):
        bench.loop.add_request(make_request(request_id, priority=priority))
    bench.drain()
    assert finish_order(bench) == ["urgent", "first", "second", "late"]


def test_tenant_with_least_service_runs_next() -> None:
    bench = LoopHarness(slots=1)
    for number in range(6):
        bench.loop.add_request(make_request(f"heavy{number}", 10, tenant="heavy"))
    bench.step()
    for number in range(3):
        bench.loop.add_request(make_request(f"light{number}", 10, tenant="light"))
    bench.drain()
    assert finish_order(bench)[:6] == ["heavy0", "light0", "heavy1", "light1", "heavy2", "light2"]
    assert bench.stats.preemptions == 0


def test_idle_tenant_gains_no_credit() -> None:
    bench = LoopHarness(slots=1)
    for number in range(20):
        bench.loop.add_request(make_request(f"heavy{number}", 10, tenant="heavy"))
    for _ in range(100):
        bench.step()
    before = len(finish_order(bench))
    for number in range(8):
        bench.loop.add_request(make_request(f"light{number}", 10, tenant="light"))
    bench.drain()
    after = finish_order(bench)[before:]
    assert all(abs(sum(request_id.startswith("heavy") for request_id in after[:k]) - k / 2) <= 1.5 for k in range(16))


def test_priority_outranks_tenant_fairness() -> None:
    bench = LoopHarness(slots=1)
    bench.loop.add_request(make_request("running", 3, tenant="heavy", priority=-9))
    for number in range(3):
        bench.loop.add_request(make_request(f"heavy{number}", 10, tenant="heavy", priority=-1))
        bench.loop.add_request(make_request(f"light{number}", 10, tenant="light"))
    bench.drain()
    assert all(request_id.startswith("heavy") for request_id in finish_order(bench)[1:4])


def test_tenants_own_priority_cannot_starve_others() -> None:
    bench = LoopHarness(slots=1)
    for number in range(6):
        bench.loop.add_request(make_request(f"heavy{number}", 10, tenant="heavy", own=-(2**31)))
    bench.step()
    for number in range(3):
        bench.loop.add_request(make_request(f"light{number}", 10, tenant="light", own=2**31))
    bench.drain()
    assert finish_order(bench)[:6] == ["heavy0", "light0", "heavy1", "light1", "heavy2", "light2"]
    assert bench.stats.preemptions == 0


def test_tenants_own_priority_orders_only_its_own_requests() -> None:
    bench = LoopHarness(slots=1)
    bench.loop.add_request(make_request("running", 3, tenant="a"))
    bench.step()
    for request_id, own in (("a", 0), ("b", 3), ("c", -2), ("d", 0), ("e", -2)):
        bench.loop.add_request(make_request(request_id, tenant="a", own=own))
    bench.loop.cancel_request("d")
    bench.drain()
    assert finish_order(bench) == ["running", *"ceab"] and bench.stats.preemptions == 0


JOB = st.tuples(st.sampled_from("abc"), st.integers(1, 30), st.integers(1, 40), st.integers(-1, 1))


@given(st.lists(JOB, min_size=3, max_size=60))
@settings(deadline=None, max_examples=60)
def test_overloaded_tenants_differ_by_at_most_running_requests(jobs: list[tuple[str, int, int, int]]) -> None:
    """While a tenant waits, no other tenant has had more service than it by more than full slots can hold, whatever
    the tenants' own priorities are."""
    bench = LoopHarness(slots=2, prefix_cache=False)
    for number, (tenant, tokens, length, own) in enumerate(jobs):
        bench.loop.add_request(make_request(f"w{number}", tokens, length=length, tenant=tenant, own=own))
    max_gap = 2 * max(2 * tokens + length for _, tokens, length, _ in jobs)
    while bench.step():
        service, waiting = bench.loop.scheduler.waiting.tenant_service, bench.loop.scheduler.waiting
        for waiting_tenant in {sequence.request.tenant for sequence in waiting}:
            assert all(server - service[waiting_tenant] <= max_gap for server in service.values())
    spent = {tenant: 0 for tenant, *_ in jobs}
    for tenant, tokens, length, _ in jobs:
        spent[tenant] += 2 * tokens + length - 1  # the last token is never computed
    assert bench.loop.scheduler.waiting.tenant_service == spent


class ReferenceQueue:
    """Reference queue that looks at every waiting sequence."""

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []

    def head(self, service: dict[str, int]) -> Sequence:
        best = min(sequence.request.priority for sequence in self.waiting)
        level = [sequence for sequence in self.waiting if sequence.request.priority == best]
        back = [sequence for sequence in level if sequence.admission_number >= 0]
        if back:
            return min(back, key=lambda sequence: sequence.admission_number)
        level.sort(key=lambda sequence: (sequence.request.tenant_priority, sequence.arrival_number))
        firsts = {sequence.request.tenant: sequence for sequence in reversed(level)}
        return min(firsts.values(), key=lambda sequence: (service[sequence.request.tenant], sequence.arrival_number))


@given(st.data())
@settings(deadline=None)
def test_wait_queue_agrees_with_reference_queue(data: st.DataObject) -> None:
    queue, model, orders, turns = WaitQueue(), ReferenceQueue(), count(), count()
    admitted: list[Sequence] = []
    for _ in range(data.draw(st.integers(0, 60))):
        action = data.draw(st.sampled_from(["add", "add", "pop", "remove", "back", "serve"]))
        if action == "add":
            priority, own = data.draw(st.integers(-1, 1)), data.draw(st.integers(-1, 1))
            request = make_request("w", priority=priority, tenant=data.draw(st.sampled_from("abc")), own=own)
            sequence = Sequence("w", 0, request, [1], 1, 0, next(orders))
            queue.enqueue(sequence)
            model.waiting.append(sequence)
        elif action == "pop" and model.waiting:
            sequence = model.head(queue.tenant_service)
            assert queue.pop_head() is sequence
            model.waiting.remove(sequence)
            sequence.admission_number = next(turns) if sequence.admission_number < 0 else sequence.admission_number
            admitted.append(sequence)
        elif action == "remove" and model.waiting:
            sequence = model.waiting.pop(data.draw(st.integers(0, len(model.waiting) - 1)))
            queue.remove_waiting(sequence)
        elif action == "back" and admitted:
            sequence = admitted.pop()
            queue.enqueue(sequence)
            model.waiting.append(sequence)
        elif action == "serve" and admitted:
            queue.record_service(admitted[-1], data.draw(st.integers(0, 9)))
        assert len(queue) == len(model.waiting) and set(queue) == set(model.waiting)
