"""Odd bodies for every route of the management port: no server error, and no change unless the answer is 200."""

import json

from hypothesis import given
from hypothesis import strategies as st
from support.fuzz import encode, fuzz_settings, raw_bytes, run_in_loop
from support.member_strategies import json_values, scalars
from support.simulated_cluster import FakeHttp, simulated_cluster
from test_management import LIST_ITEM, list_body, list_item

from parley.coordinator.ports.management import ManagementPort

ROUTES = [
    "/v1/instances/refresh",
    "/v1/instances/offline",
    "/v1/instances/online",
    "/v1/instances/query_tasks",
    "/backup_info",
    "/v1/alarm/coordinator",
    "/v1/terminate-service",
]
numbers = st.integers(0, 5) | scalars


def with_odd_members(members: dict) -> st.SearchStrategy[dict]:
    """Return objects that have some of these members, and some with any other value."""
    changes = st.dictionaries(st.sampled_from(sorted(members)), json_values, max_size=2)
    return st.builds(lambda changed: members | changed, changes)


list_items = st.builds(
    lambda item, static, load: item | {"static_info": static, "dynamic_info": load},
    with_odd_members(list_item(1)),
    with_odd_members(LIST_ITEM["static_info"]) | json_values,
    with_odd_members(LIST_ITEM["dynamic_info"]) | json_values,
)
bodies = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "ids": st.lists(numbers, max_size=3) | json_values,
            "instances": st.lists(list_items | with_odd_members(LIST_ITEM) | json_values, max_size=2) | json_values,
        },
    ),
    st.fixed_dictionaries({"p_id": numbers, "d_id": numbers, "role_change_type": numbers}),
    st.fixed_dictionaries({"is_master": st.booleans() | scalars, "is_abnormal": st.booleans() | scalars}),
    st.fixed_dictionaries({"ip": st.just("10.0.0.1") | scalars, "port": st.just("1025") | scalars}),
    json_values,
)
contents = bodies.map(encode) | raw_bytes


async def send(app, path: str, content: bytes) -> tuple[int, bytes]:
    sent = []

    async def receive():
        return {"type": "http.request", "body": content}

    async def keep(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [(b"host", b"localhost")]}
    await app(scope, receive, keep)
    return sent[0]["status"], sent[1]["body"]


def state_of(management: ManagementPort) -> object:
    instances = [{**vars(instance), "seen": 0} for instance in management.table]
    return management.master, repr(instances), len(management.alarms)


async def test_management_never_answers_odd_bodies_with_500_and_changes_nothing_it_refuses():
    table, scheduler = simulated_cluster()
    management = ManagementPort(table, scheduler, FakeHttp())

    @fuzz_settings(5)
    @given(path=st.sampled_from(ROUTES), content=contents)
    async def fuzz(path, content):
        assert (await send(management.app, ROUTES[0], list_body(list_item(1), list_item(2, 68)).encode()))[0] == 200
        before = state_of(management)
        status, answer = await send(management.app, path, content)
        assert status in (200, 400) or (path, status, answer) == (ROUTES[-1], 500, b""), (path, content, answer)
        if status != 200:
            assert state_of(management) == before, (path, content)
        if answer:
            json.loads(answer)

    await run_in_loop(fuzz)
