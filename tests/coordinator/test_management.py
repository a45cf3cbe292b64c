"""The management, status and metrics ports over real sockets: documented bytes, and refusals of bad requests.

The answers of instances come from a dictionary.
"""

import asyncio
import json
import math
import re
import time
from contextlib import asynccontextmanager

import msgspec
import pytest
from support.simulated_cluster import FakeHttp, ManualClock, lose_instance, report_status, simulated_cluster

from parley.coordinator.ports import port as plane
from parley.coordinator.ports.management import ManagementPort
from parley.coordinator.ports.metrics import MetricsPort
from parley.coordinator.ports.status import StatusPort
from parley.coordinator.routing.circuit_breaker import FAILURE_LIMIT
from parley.coordinator.routing.health import HealthChecker
from parley.coordinator.routing.instance_scheduler import InstanceScheduler
from parley.coordinator.routing.instance_table import InstanceTable
from parley.coordinator.routing.policies import SchedulingRequest
from parley.serving.server_options import ServerOptions
from parley.web.port import HttpServer, open_listener, uvicorn_config

LIST_ITEM = {
    "id": 1, "ip": "10.0.0.1", "port": "1025", "metric_port": "1027", "inter_comm_port": "1121", "model_name": "llama",
    "static_info": {"group_id": 0, "max_seq_len": 2560, "max_output_len": 512, "total_slots_num": 200,
                    "total_block_num": 1024, "block_size": 128, "label": 2, "role": 80, "virtual_id": 0,
                    "p_percentage": 0},
    "dynamic_info": {"avail_slots_num": 200, "avail_block_num": 1000, "waiting_request_num": 3,
                     "running_request_num": 4, "swapped_request_num": 0, "free_npu_block_nums": 0,
                     "free_cpu_block_nums": 0, "total_npu_block_nums": 0, "total_cpu_block_nums": 0, "peers": [2],
                     "prefix_hash": [7, 8]},
}  # fmt: skip


def list_item(instance_id=1, role=80, **static):
    new_item = json.loads(json.dumps(LIST_ITEM))
    new_item["id"], new_item["ip"] = instance_id, f"10.0.0.{instance_id}"
    new_item["static_info"] |= {"role": role, **static}
    new_item["dynamic_info"]["peers"] = [1, 2]
    return new_item


def list_body(*items, ids=None):
    return json.dumps({"ids": [item["id"] for item in items] if ids is None else ids, "instances": list(items)})


@asynccontextmanager
async def serve_app(app):
    """Yield a client: it sends one request and returns status, whole body, and whether the connection closed."""
    sock = open_listener("127.0.0.1", 0)
    server = HttpServer(uvicorn_config(ServerOptions(), app))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    port = sock.getsockname()[1]

    async def send_request(method, target, content="", *headers, length=None):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        size = len(content) if length is None else length
        lines = [f"{method} {target} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Content-Length: {size}", *headers]
        writer.write("\r\n".join([*lines, "", content]).encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(next(line for line in head.splitlines() if line.startswith("content-length")).split()[1])
        answer_body = await reader.readexactly(size)
        closed = "connection: close" in head
        if closed:
            assert await reader.read() == b""
        writer.close()
        return int(head.split()[1]), answer_body, closed

    try:
        yield send_request
    finally:
        server.should_exit = True
        await serving


def empty_cluster():
    table, scheduler = simulated_cluster(clock=ManualClock())
    return table, scheduler, ManagementPort(table, scheduler, FakeHttp())


async def test_instance_list_adds_keeps_changes_and_removes_instances():
    table, scheduler, management = empty_cluster()
    async with serve_app(management.app) as say:
        assert await say("GET", "/v1/coordinator_info") == (503, b"", False)
        assert await say("POST", "/v1/instances/offline", '{"ids":[1]}') == (503, b"", False)
        assert await say("POST", "/backup_info", '{"is_master":true,"is_abnormal":false}') == (503, b"", False)
        assert await say("POST", "/v1/instances/refresh", list_body(list_item(1), list_item(2, 68))) == (
            200,
            b"",
            False,
        )
        one, _ = table
        assert (one.role, one.url, one.peer, one.block_size) == (
            "prefill",
            "http://10.0.0.1:1025",
            "10.0.0.1;1121",
            128,
        )
        assert (one.used_blocks, one.waiting, one.running, one.cached_hashes) == (24, 3, 4, {7, 8})
        assert table.is_cluster_ready() and table.is_cluster_ready("llama") and not table.is_cluster_ready("other")
        placement = await scheduler.place_request(SchedulingRequest(1000))
        assert await say("GET", "/v1/coordinator_info") == (
            200,
            b'{"schedule_info":[{"id":1,"allocated_slots":1,"allocated_blocks":8},'
            b'{"id":2,"allocated_slots":1,"allocated_blocks":8}],"request_num":1,'
            b'"request_length_info":{"input_len":0,"output_len":0}}',
            False,
        )
        assert await say("GET", "/v1/instances/tasks?id=2&id=9&id=x&id=1&id=-1") == (
            200,
            b'{"tasks":[1,-1,-1,1,-1]}',
            False,
        )
        assert await say("GET", "/v1/instances/tasks") == (200, b'{"tasks":[]}', False)
        task_query = '{"p_id":1,"d_id":2,"role_change_type":%d}'
        assert await say("POST", "/v1/instances/query_tasks", task_query % 0) == (200, b'{"is_end":false}', False)
        placement.report_first_token()
        assert await say("POST", "/v1/instances/query_tasks", task_query % 0) == (200, b'{"is_end":true}', False)
        assert await say("POST", "/v1/instances/query_tasks", task_query % 1) == (200, b'{"is_end":false}', False)
        placement.close_placement()
        assert await say("POST", "/v1/instances/query_tasks", task_query % 1) == (200, b'{"is_end":true}', False)
        assert await say("GET", "/recvs_info") == (200, b'{"is_master":true,"recv_flow":1}', False)
        changed = list_item(1, 70, p_percentage=30)
        assert await say("POST", "/v1/instances/refresh", list_body(changed, list_item(3, 68), ids=[1, 2])) == (
            200,
            b"",
            False,
        )
        assert [instance.id for instance in table] == [1, 2] and table.get_instance(1) is one  # 3 is not among the ids
        assert (one.role, one.p_percentage) == ("flex", 30)
        await say("POST", "/v1/instances/refresh", list_body(list_item(2, 68)))
        assert [instance.id for instance in table] == [2] and not table.is_cluster_ready()


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{", '{"ids":[]}', '{"instances":[]}', '{"ids":{},"instances":[]}', '{"ids":[],"instances":5}',
        '{"ids":[1],"instances":[{"static_info":{"role":80}}]}', '{"ids":[1],"instances":[{"id":1,"static_info":{}}]}',
        '{"ids":[1],"instances":[{"id":1}]}', '{"ids":[1],"instances":[5]}',
        '{"ids":[1],"instances":[{"id":-1,"static_info":{"role":80}}]}',
        json.dumps({"ids": list(range(4097)), "instances": []}),
        '{"ids":["a"],"instances":[]}', '{"ids":[5,true],"instances":[]}', '{"ids":[5.0],"instances":[]}',
        '{"ids":[null],"instances":[]}',
        '{"ids":[1],"instances":[{"id":1,"static_info":{"role":80},"dynamic_info":5}]}',
        '{"ids":[1],"instances":[{"id":1,"static_info":{"role":80},"dynamic_info":{"peers":["2"]}}]}',
        '{"ids":[1],"instances":[{"id":1,"static_info":{"role":80},"dynamic_info":{"avail_slots_num":"2"}}]}',
        '{"ids":[1],"instances":[{"id":1,"static_info":{"role":80},"dynamic_info":{"running_request_num":-1}}]}',
        '{"ids":[1],"instances":[{"id":1,"static_info":{"role":80},"dynamic_info":{"prefix_hash":[{}]}}]}',
    ],
)  # fmt: skip
async def test_management_rejects_a_malformed_instance_list(content):
    table, _, management = empty_cluster()
    async with serve_app(management.app) as say:
        assert await say("POST", "/v1/instances/refresh", list_body(list_item(5))) == (200, b"", False)
        assert await say("POST", "/v1/instances/refresh", content) == (400, b"", False)
    assert [instance.id for instance in table] == [5]


@pytest.mark.parametrize(
    "wrong",
    [
        {"ip": "somewhere"},
        {"ip": "0.0.0.0"},
        {"ip": 5},
        {"port": 1025},
        {"port": "0"},
        {"port": "70000"},
        {"port": "\u0661"},
        {"model_name": 5},
        {"inter_comm_port": None},
        {"total_slots_num": 0},
        {"total_slots_num": 5001},
        {"block_size": 129},
        {"block_size": "8"},
        {"role": 81},
        {"role": "P"},
        {"role": True},
        {"label": 5},
        {"p_percentage": 101},
        {"total_block_num": -1},
    ],
)
async def test_instance_list_skips_invalid_instances(wrong):
    table, _, management = empty_cluster()
    invalid_item = list_item(1)
    for name, value in wrong.items():
        (invalid_item if name in invalid_item else invalid_item["static_info"])[name] = value
    async with serve_app(management.app) as say:
        assert await say("POST", "/v1/instances/refresh", list_body(invalid_item, list_item(2))) == (200, b"", False)
    assert [instance.id for instance in table] == [2]


async def test_instances_go_offline_and_online():
    table, scheduler = simulated_cluster("prefill", "prefill", "decode")
    management = ManagementPort(table, scheduler, FakeHttp())
    async with serve_app(management.app) as say:
        for content in ("", "{}", '{"ids":5}', '{"ids":["1"]}', json.dumps({"ids": list(range(4097))})):
            assert await say("POST", "/v1/instances/offline", content) == (400, b"", False)
            assert await say("POST", "/v1/instances/online", content) == (400, b"", False)
        assert await say("POST", "/v1/instances/offline", '{"ids":[1,77]}') == (200, b"", False)
        assert {(await scheduler.place_request(SchedulingRequest(10))).prefill_instance.id for _ in range(4)} == {2}
        assert await say("POST", "/v1/instances/offline", '{"ids":[2]}') == (200, b"", False)
        assert not table.is_cluster_ready()
        assert await say("POST", "/v1/instances/online", '{"ids":[1]}') == (200, b"", False)
        assert (await scheduler.place_request(SchedulingRequest(10))).prefill_instance.id == 1


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"p_id":1,"d_id":2,"role_change_type":2}',
                '{"p_id":"1","d_id":2,"role_change_type":0}',
                '{"p_id":1,"d_id":2,"role_change_type":true}'],
)  # fmt: skip
async def test_malformed_task_query_answers_is_end(content):
    _, _, management = empty_cluster()
    async with serve_app(management.app) as say:
        assert await say("POST", "/v1/instances/query_tasks", content) == (400, b'{"is_end":true}', False)
        good = '{"p_id":1,"d_id":2,"role_change_type":0}'
        assert await say("POST", "/v1/instances/query_tasks", good) == (200, b'{"is_end":true}', False)


async def test_admin_ports_refuse_unknown_routes_and_close():
    table, scheduler = simulated_cluster("mixed")
    management = ManagementPort(table, scheduler, FakeHttp())
    apps = (management.app, StatusPort(table, scheduler, management).app, MetricsPort(table, scheduler, FakeHttp()).app)
    for app in apps:
        async with serve_app(app) as say:
            for method, path in (("GET", "/nothing"), ("DELETE", "/metrics"), ("POST", "/v2/models//ready")):
                assert await say(method, path) == (400, b"Invalid request\r\n", True)
            status, answer_body, _ = await say("GET", "/metrics", "", "Origin: http://elsewhere.example")
            assert status == 403 and b"elsewhere" not in answer_body


async def test_standby_coordinator_is_alive_but_not_ready():
    table, scheduler = simulated_cluster("prefill", "decode")
    report_status(table, table.instances[2], models=["llama"])
    management = ManagementPort(table, scheduler, FakeHttp())
    async with serve_app(management.app) as say, serve_app(StatusPort(table, scheduler, management).app) as ask:
        for path in ("/v1/readiness", "/v2/health/ready", "/health/ready"):
            assert await ask("GET", path) == (200, b"", False)
        assert (await ask("GET", "/v2/models/other/ready"))[0] == 503
        assert (await ask("GET", "/v2/models/llama/ready"))[0] == 200
        for content in ("", "{}", '{"is_master":1,"is_abnormal":false}'):
            assert await say("POST", "/backup_info", content) == (400, b'{"update_successfully":false}', False)
        good = '{"is_master":false,"is_abnormal":false}'
        assert await say("POST", "/backup_info", good) == (200, b'{"update_successfully":true}', False)
        for path in ("/v1/readiness", "/v2/health/ready", "/health/ready", "/v2/models/llama/ready"):
            assert await ask("GET", path) == (503, b"", False)
        for path in ("/v1/startup", "/v1/health", "/v2/health/live"):
            assert await ask("GET", path) == (200, b"", False)


async def test_alarm_list_keeps_the_newest_own_and_received_alarms():
    table, scheduler = simulated_cluster("mixed", "mixed")
    management = ManagementPort(table, scheduler, FakeHttp())
    lose_instance(table, table.instances[2])
    table.mark_faulty(table.instances[1], "no connection")
    async with serve_app(management.app) as say:
        assert await say("POST", "/v1/alarm/llm_engine", '{"id":"x","level":"error"}') == (200, b"", False)
        assert (await say("POST", "/v1/alarm/coordinator", "5"))[0] == 400
        for path in ("/v1/startup", "/v1/health"):
            status, body, _ = await say("GET", path)
            assert (status, json.loads(body)) == (200, {"message": "", "status": "0"})
        alarms = json.loads((await say("GET", "/v1/alarms"))[1])["alarms"]
        assert [alarm["id"] for alarm in alarms] == ["instance-2-lost", "instance-1-faulty", "x"]
        assert "no connection" in alarms[1]["detail"]
        for _ in range(150):
            await say("POST", "/v1/alarm/llm_engine", "{}")
        assert len(json.loads((await say("GET", "/v1/alarms"))[1])["alarms"]) == 100


async def test_terminate_service_stops_an_instance():
    table, scheduler = simulated_cluster(clock=ManualClock())
    net = FakeHttp()
    async with serve_app(ManagementPort(table, scheduler, net).app) as say:
        assert (await say("POST", "/v1/instances/refresh", list_body(list_item(1), list_item(2))))[0] == 200
        table.instances[2].management = "http://10.0.0.2:1026"

        async def terminate(**members):
            return (await say("POST", "/v1/terminate-service", json.dumps(members)))[:2]

        for members in ({}, {"ip": "10.0.0.2"}, {"ip": "10.0.0.2", "port": 1025}, {"ip": ["10.0.0.2"], "port": "1"}):
            assert await terminate(**members) == (400, b"")
        assert (await say("POST", "/v1/terminate-service", "[]"))[0] == 400
        assert await terminate(ip="10.0.0.3", port="1025") == await terminate(ip="10.0.0.2", port="1026") == (500, b"")
        assert not net.requests
        where = "http://10.0.0.2:1026/stopService?mode=Force"
        for answer, status in ((None, 500), ((404, b""), 500), ((200, b""), 200)):
            net.answers[where] = answer
            assert (await terminate(ip="10.0.0.2", port="1025"))[0] == status
        assert net.requests == [("GET", where, b"")] * 3


METRICS_PAGE = """# HELP num_requests_running Sequences.
# TYPE num_requests_running gauge
num_requests_running{{model_name="m"}} {0}
# TYPE npu_cache_usage_perc gauge
npu_cache_usage_perc{{model_name="m"}} {1}
# TYPE npu_prefix_cache_hit_rate gauge
npu_prefix_cache_hit_rate{{model_name="m"}} 0.123
# TYPE all_radix_match_num gauge
all_radix_match_num{{model_name="m"}} {2}
# TYPE npu_radix_match_hit_num gauge
npu_radix_match_hit_num{{model_name="m"}} 30
# TYPE latency histogram
latency_bucket{{le="1"}} 2
latency_bucket{{le="+Inf"}} 3
latency_sum 1.5
latency_count 3
what is this
"""


async def test_cluster_metrics_are_summed_and_cached_for_a_while():
    clock = ManualClock()
    table, scheduler = simulated_cluster("mixed", "mixed", "mixed", clock=clock)
    one, two, _ = table
    one.blocks, two.blocks = 300, 100
    net = FakeHttp()
    net.answers = {
        "http://10.0.0.1:8000/metrics": (200, METRICS_PAGE.format(2, 0.5, 100).encode()),
        "http://10.0.0.2:8000/metrics": (200, METRICS_PAGE.format(5, 0.1, 200).encode()),
    }
    with await scheduler.place_request(SchedulingRequest(100)) as placement:
        clock.now += 0.25
        placement.report_first_token()
        for _ in range(4):
            clock.now += 0.01
            placement.report_tokens()
    async with serve_app(MetricsPort(table, scheduler, net).app) as say:
        page = (await say("GET", "/metrics"))[1].decode()
        lines = page.splitlines()
        for expected in (
            'num_requests_running{model_name="m"} 7',
            'npu_cache_usage_perc{model_name="m"} 0.40000000000000002',
            'npu_prefix_cache_hit_rate{model_name="m"} 0.20000000000000001',
            'latency_bucket{le="+Inf"} 6',
            "latency_sum 3",
            "parley:cluster_requests_total 1",
            "parley:cluster_requests_failed_total 0",
            'parley:cluster_requests_ended_total{how="ok"} 1',
            "parley:cluster_ttft_seconds_count 1",
            'parley:cluster_ttft_seconds_bucket{le="0.25"} 1',
            'parley:cluster_tpot_seconds_bucket{le="0.025"} 1',
            'parley:cluster_instances{state="ready"} 3',
            'parley:cluster_instance_tasks{instance="1",role="mixed"} 0',
        ):
            assert expected in lines, page
        assert lines.count("# TYPE num_requests_running gauge") == 1 and "what is this" not in lines
        assert len(net.requests) == 3
        clock.now += 2.9
        await asyncio.gather(*(say("GET", "/metrics") for _ in range(3)))
        assert len(net.requests) == 3
        clock.now += 0.2
        await asyncio.gather(*(say("GET", "/metrics") for _ in range(3)))
        assert len(net.requests) == 6


OUTSIDE = b"http:", b"https:", b"@import", b"url("  # what would load something from elsewhere


async def test_status_page_is_self_contained_and_its_data_complete():
    table, scheduler = simulated_cluster("prefill", "decode", "flex")
    management = ManagementPort(table, scheduler, FakeHttp())
    await scheduler.place_request(SchedulingRequest(100))
    for _ in range(FAILURE_LIMIT):
        table.instances[2].breaker.record_failure(table.clock())
    async with serve_app(StatusPort(table, scheduler, management).app) as say:
        status, page, _ = await say("GET", "/")
        assert status == 200
        for name in re.findall(rb'(?:src|href)="(ui/[^"]+)"', page):
            status, part, _ = await say("GET", f"/{name.decode()}")
            part = part.replace(b"http://www.w3.org/2000/svg", b"")  # a namespace, which nothing loads
            assert status == 200 and not any(outside in part for outside in OUTSIDE), name
        assert not any(outside in page for outside in OUTSIDE)
        assert (await say("GET", "/ui/nothing.js"))[0] == 404
        script = (await say("GET", "/ui/cluster.js"))[1]
        data = json.loads((await say("GET", "/data"))[1])
    assert data["open"] == 1 and [instance["role"] for instance in data["instances"]] == ["prefill", "decode", "flex"]
    assert [instance["paused"] for instance in data["instances"]] == [False, True, False]
    assert set(re.findall(r"\bdata\.([a-z_]+)", script.decode())) <= set(data)
    members = re.findall(r"\binstance\.([a-z_]+)", script.decode())
    assert len(members) > 10 and set(members) <= set(data["instances"][0])


async def test_polls_listed_instances_without_dynamic_info():
    table, scheduler, management = empty_cluster()
    net = FakeHttp()
    health = HealthChecker(table, net)
    health.start_checks()
    static_item = {key: value for key, value in list_item(1, 85).items() if key != "dynamic_info"}
    url = "http://10.0.0.1:1025/v1/status"
    status = {"service": {"currentRole": "mixed"}, "parley": {"epoch": "a", "role": "mixed", "ready": False}}
    net.answers[url] = status
    async with serve_app(management.app) as say:
        assert (await say("POST", "/v1/instances/refresh", list_body(static_item)))[0] == 200
        async with asyncio.timeout(60):
            while not net.requests:
                await asyncio.sleep(0.01)
        assert not scheduler.can_serve()  # it is still loading
        status["parley"]["ready"] = True
        async with asyncio.timeout(60):
            while not scheduler.can_serve():
                await asyncio.sleep(0.01)
        assert (await say("POST", "/v1/instances/refresh", list_body(static_item)))[0] == 200
        assert scheduler.can_serve() and table.get_instance(1).native  # the status it reported is kept
    await health.stop_checks()


async def test_recently_heard_instance_is_not_lost():
    """A busy instance that misses status polls but sends other bytes must not be treated as lost."""
    table, _ = simulated_cluster("mixed", misses=3)
    (one,) = table
    last_heard = [math.inf]
    health = HealthChecker(table, FakeHttp(), lambda instance: last_heard[0])
    for _ in range(10):
        assert not await health.check_instance(one)
    assert one.is_usable(table.clock())
    last_heard[0] = time.monotonic()
    for missed in range(3):
        assert not one.lost and one.missed_checks == missed
        assert not await health.check_instance(one)
    assert one.lost


async def test_stopping_instance_gets_no_requests_and_is_not_lost():
    """It still finishes its running requests."""
    table, _ = simulated_cluster("mixed", misses=1)
    (one,) = table
    net = FakeHttp()
    stopped = {"error": "The service has been stopped.", "error_type": "Service Unavailable"}
    net.answers["http://10.0.0.1:8000/v1/status"] = (503, msgspec.json.encode(stopped))
    health = HealthChecker(table, net)
    for _ in range(3):
        assert await health.check_instance(one)
    assert not one.lost and not one.is_usable(table.clock())
    net.answers["http://10.0.0.1:8000/v1/status"] = (503, b"")  # from something in between
    assert not await health.check_instance(one)
    assert one.lost


async def test_silent_instance_is_lost_and_recovers():
    table = InstanceTable(simulated_cluster("mixed", heartbeat=0.05, misses=3)[0].options)
    scheduler = InstanceScheduler(table)
    (one,) = table
    news = []
    table.watchers.append(lambda instance, what: news.append(what))
    net = FakeHttp()
    health = HealthChecker(table, net)
    status = {
        "service": {"roleStatus": "RoleReady", "currentRole": "decode"},
        "parley": {"epoch": "a", "role": "mixed"},
    }

    async def wait_for_news(event):
        async with asyncio.timeout(60):
            while event not in news:
                await asyncio.sleep(0.01)

    health.start_checks()
    await asyncio.sleep(0.3)
    assert one.phase_at(table.clock()) == "joining" and not table.is_cluster_ready()
    net.answers["http://10.0.0.1:8000/v1/status"] = status
    await wait_for_news("ready")
    assert one.native and scheduler.can_serve()
    net.answers["http://10.0.0.1:8000/v1/status"] = (500, b"")
    await wait_for_news("lost")
    assert not scheduler.can_serve()
    status["parley"]["epoch"] = "b"
    net.answers["http://10.0.0.1:8000/v1/status"] = status
    await wait_for_news("restarted")
    assert scheduler.can_serve()
    table.mark_faulty(one)
    assert not scheduler.can_serve()
    news.clear()
    await wait_for_news("ready")
    table.remove_instance(1)
    request_count = len(net.requests)
    await asyncio.sleep(0.2)
    assert len(net.requests) <= request_count + 1
    await health.stop_checks()


async def test_management_needs_the_cluster_secret():
    table, scheduler = simulated_cluster("mixed", clock=ManualClock(), secret="s")
    async with serve_app(ManagementPort(table, scheduler, FakeHttp()).app) as say:
        for headers in ((), ("parley-secret: t",)):
            status, answer_body, _ = await say("POST", "/v1/instances/refresh", '{"ids":[],"instances":[]}', *headers)
            assert status == 401 and b"parley-secret" in answer_body
        for path in ("/v1/coordinator_info", "/recvs_info", "/v1/alarms", "/v1/instances/tasks?id=1"):
            assert (await say("GET", path))[0] == 401
            for shown in ("parley-secret: s", "authorization: Bearer s", "authorization: Basic dG9rZW46cw=="):
                assert (await say("GET", path, "", shown))[0] == 200
        for probe in ("/v1/startup", "/v1/health", "/v1/readiness"):
            assert (await say("GET", probe))[0] != 401
        assert (await say("POST", "/v1/instances/refresh", '{"ids":[],"instances":[]}', "parley-secret: s"))[0] == 200
    clients = simulated_cluster(
        "mixed", clock=ManualClock(), secret="s", tls={"certificate": "c", "key": "k", "clients": "a"}
    )
    async with serve_app(ManagementPort(*clients, FakeHttp()).app) as say:  # clients are known by their certificates
        assert (await say("POST", "/v1/instances/refresh", '{"ids":[],"instances":[]}'))[0] == 200


async def test_management_times_out_waiting_for_a_body(monkeypatch):
    monkeypatch.setattr(plane, "PATIENCE", 0.05)
    _, _, management = empty_cluster()
    async with serve_app(management.app) as say:
        status, answer_body, closed = await say("POST", "/v1/instances/refresh", "{", length=9)
        assert (status, answer_body, closed) == (408, b"The body did not come within 0.05 seconds.\r\n", True)
