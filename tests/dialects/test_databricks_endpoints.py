"""Databricks endpoint management: effects of calls on the endpoints, their answers, and refusals."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from parley.dialects.admin_requests import EndpointChange
from parley.dialects.databricks import DIALECT, STRICT, endpoints, permissions
from parley.dialects.facts import Endpoint, EndpointShare, EndpointTable, ModelCard, ServerFacts
from parley.dialects.request_context import RequestContext
from parley.errors import ParleyError

FACTS = ServerFacts("1", [ModelCard("m", 1600000000, 100), ModelCard("org.v2", 1600000000, 100)], True)
ENTITY_A = {
    "name": "a",
    "entity_name": "m",
    "entity_version": "3",
    "workload_size": "Small",
    "scale_to_zero_enabled": True,
}
ENTITY_B = {"name": "b", "entity_name": "system.ai.org.v2"}
TRAFFIC = {
    "routes": [
        {"served_model_name": "a", "traffic_percentage": 70},
        {"served_entity_name": "b", "traffic_percentage": "30"},
    ]
}
CONFIG = {"served_entities": [ENTITY_A, ENTITY_B], "traffic_config": TRAFFIC}


class EndpointStore:
    """Keeps endpoints as the server does, and applies each change to them."""

    def __init__(self) -> None:
        self.made: dict[str, Endpoint] = {}

    def call(self, manage: Any, body: Any = None, created: int = 1700000000, **path: str) -> Any:
        context = RequestContext("f" * 32, created, "fp", path_parts=path)
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        result = manage(data, context, FACTS, dict(self.made))
        if isinstance(result, EndpointChange):
            self.made.pop(result.remove_endpoint, None)
            if result.put_endpoint is not None:
                self.made[result.put_endpoint.name] = result.put_endpoint
            result = result.answer
        assert (result.status, result.content_type) == (200, b"application/json")
        return json.loads(result.body)

    def refused(self, manage: Any, body: Any = None, **path: str) -> tuple[int, str, str]:
        before = dict(self.made)
        with pytest.raises(ParleyError) as caught:
            self.call(manage, body, **path)
        assert self.made == before
        answer = STRICT.render_error(caught.value)
        error_body = json.loads(answer.body)
        return answer.status, error_body["error_code"], error_body["message"]


@pytest.fixture
def world() -> EndpointStore:
    store = EndpointStore()
    store.call(
        endpoints.create_endpoint,
        {"name": "e", "config": CONFIG, "tags": [{"key": "k", "value": "v"}], "description": "d"},
    )
    return store


def test_created_endpoint_reports_config_and_traffic_split(world):
    assert world.made["e"].shares == [EndpointShare("a", "m", 70), EndpointShare("b", "org.v2", 30)]
    endpoint = world.call(endpoints.get_endpoint, endpoint="e")
    creation = {"creator": "parley", "creation_timestamp": 1700000000000}
    ready_state = {"deployment": "DEPLOYMENT_READY", "deployment_state_message": ""}
    model = {"name": "m", "display_name": "m", "docs": "", "description": ""}
    first = {**ENTITY_A, "foundation_model": model, **creation, "state": ready_state}
    assert endpoint["config"]["served_entities"][0] == first
    assert endpoint["config"]["served_entities"][1]["entity_version"] == "1"
    older = {
        "model_name": "m",
        "model_version": "3",
        **{k: v for k, v in ENTITY_A.items() if not k.startswith("entity")},
    }
    assert endpoint["config"]["served_models"][0] == {**older, **creation, "state": ready_state}
    assert endpoint["config"]["traffic_config"] == {
        "routes": [
            {"served_model_name": "a", "served_entity_name": "a", "traffic_percentage": 70},
            {"served_model_name": "b", "served_entity_name": "b", "traffic_percentage": 30},
        ]
    }
    assert endpoint["config"]["config_version"] == 1
    del endpoint["config"]
    assert endpoint == {
        "name": "e",
        "id": hashlib.sha256(b"e").hexdigest()[:32],  # the same on every instance of a cluster
        **creation,
        "last_updated_timestamp": 1700000000000,
        "state": {"ready": "READY", "config_update": "NOT_UPDATING"},
        "tags": [{"key": "k", "value": "v"}],
        "task": "llm/v1/chat",
        "permission_level": "CAN_MANAGE",
        "route_optimized": False,
        "description": "d",
    }


def test_each_model_is_a_read_only_endpoint(world):
    listed = world.call(endpoints.list_endpoints)["endpoints"]
    assert [endpoint["name"] for endpoint in listed] == ["e", "m", "org.v2"]
    assert all(list(endpoint["config"]) == ["served_entities"] for endpoint in listed)
    assert list(listed[0]["config"]["served_entities"][0]) == [
        "name",
        "entity_name",
        "entity_version",
        "foundation_model",
    ]
    model_endpoint = world.call(endpoints.get_endpoint, endpoint="m")
    assert model_endpoint["config"]["served_entities"][0]["entity_name"] == "system.ai.m"
    assert model_endpoint["config"]["traffic_config"]["routes"][0]["traffic_percentage"] == 100
    for change in (endpoints.update_endpoint, endpoints.delete_endpoint, endpoints.change_tags):
        assert world.refused(change, {}, endpoint="m")[:2] == (403, "PERMISSION_DENIED")


def test_endpoint_update_replaces_only_given_members(world):
    even_split = {"routes": [{"served_model_name": n, "traffic_percentage": 50} for n in "ab"]}
    endpoint = world.call(endpoints.update_endpoint, {"traffic_config": even_split}, 1700000009, endpoint="e")
    assert [share.percent for share in world.made["e"].shares] == [50, 50]
    assert endpoint["config"]["served_entities"][0]["workload_size"] == "Small"
    assert (endpoint["config"]["config_version"], endpoint["creation_timestamp"]) == (2, 1700000000000)
    assert endpoint["last_updated_timestamp"] == 1700000009000
    world.call(endpoints.update_endpoint, {"served_models": [{"model_name": "m", "model_version": "2"}]}, endpoint="e")
    assert world.made["e"].shares == [EndpointShare("m-2", "m", 100)]
    world.call(endpoints.update_endpoint, {"served_entities": [{"entity_name": "org.v2"}]}, endpoint="e")
    assert world.made["e"].shares == [EndpointShare("org-v2-1", "org.v2", 100)]
    only_a = {"routes": [{"served_model_name": "a", "traffic_percentage": 100}]}
    world.call(
        endpoints.update_endpoint, {"served_entities": [ENTITY_A, ENTITY_B], "traffic_config": only_a}, endpoint="e"
    )
    assert [share.percent for share in world.made["e"].shares] == [100, 0]
    assert world.made["e"].about["tags"], "what a configuration does not speak of stays"


def test_endpoint_repeats_machine_size_members(world):
    """Machine sizes have no effect here, but the answers repeat them as given."""
    sizes = {
        "workload_size": "Large",
        "workload_type": "GPU_SMALL",
        "instance_profile_arn": "arn",
        "min_provisioned_throughput": 0,
        "max_provisioned_throughput": 970,
        "min_provisioned_concurrency": 4,
        "max_provisioned_concurrency": 8,
        "provisioned_model_units": 50,
        "scale_to_zero_enabled": False,
        "burst_scaling_enabled": True,
    }
    creation = {
        "name": "n",
        "config": {"served_entities": [ENTITY_A | sizes]},
        "budget_policy_id": "p",
        "route_optimized": True,
    }
    endpoint = world.call(endpoints.create_endpoint, creation)
    assert endpoint["config"]["served_entities"][0].items() >= sizes.items()
    assert endpoint["config"]["served_models"][0].items() >= sizes.items()
    assert (endpoint["budget_policy_id"], endpoint["route_optimized"]) == ("p", True)


def test_endpoint_tags_are_added_and_deleted(world):
    body = {"add_tags": [{"key": "x"}, {"key": "k", "value": "w"}], "delete_tags": ["gone"]}
    assert world.call(endpoints.change_tags, body, endpoint="e") == {"tags": [{"key": "k", "value": "w"}, {"key": "x"}]}
    assert world.call(endpoints.change_tags, {"delete_tags": ["k"]}, endpoint="e") == {"tags": [{"key": "x"}]}
    assert world.call(endpoints.get_endpoint, endpoint="e")["tags"] == [{"key": "x"}]


def test_deleted_endpoint_is_not_found(world):
    assert world.call(endpoints.delete_endpoint, endpoint="e") == {}
    missing = (404, "RESOURCE_DOES_NOT_EXIST", "Endpoint with name 'e' does not exist.")
    for call in (
        endpoints.get_endpoint,
        endpoints.delete_endpoint,
        endpoints.update_endpoint,
        endpoints.change_tags,
        endpoints.endpoint_openapi,
    ):
        assert world.refused(call, {}, endpoint="e") == missing


def test_endpoint_answers_permissions_openapi_and_logs(world):
    endpoint_id = world.call(endpoints.get_endpoint, endpoint="e")["id"]
    assert world.call(permissions.list_permissions, id=endpoint_id)["access_control_list"] == []
    levels = world.call(permissions.list_permission_levels, id=endpoint_id)["permission_levels"]
    assert [level["permission_level"] for level in levels] == ["CAN_MANAGE", "CAN_QUERY", "CAN_VIEW"]
    by_name = world.refused(permissions.list_permissions, id="e")  # there is one of that name
    assert by_name == (404, "RESOURCE_DOES_NOT_EXIST", "Endpoint with id 'e' does not exist.")
    assert list(world.call(endpoints.endpoint_openapi, endpoint="e")["paths"]) == ["/serving-endpoints/e/invocations"]
    assert world.call(endpoints.empty_logs, endpoint="e", served="a") == {"logs": ""}
    assert world.refused(endpoints.empty_logs, endpoint="e", served="x")[:2] == (404, "RESOURCE_DOES_NOT_EXIST")


def test_endpoint_loads_from_minimal_hand_written_file():
    """An operator writes only names and shares; all other members get defaults."""
    world = EndpointStore()
    world.made["e"] = Endpoint("e", [EndpointShare("a", "m", 50), EndpointShare("b", "gone", 50)])
    endpoint = world.call(endpoints.get_endpoint, endpoint="e")
    assert endpoint["state"] == {"ready": "NOT_READY", "config_update": "NOT_UPDATING"}
    states = [entity["state"]["deployment"] for entity in endpoint["config"]["served_entities"]]
    assert states == ["DEPLOYMENT_READY", "DEPLOYMENT_FAILED"]
    assert world.call(endpoints.list_endpoints)["endpoints"][0]["name"] == "e"
    assert world.call(permissions.list_permissions, id=endpoint["id"])
    world.call(endpoints.update_endpoint, {"served_entities": [ENTITY_A]}, endpoint="e")
    assert world.call(endpoints.get_endpoint, endpoint="e")["config"]["config_version"] == 2


def route(name: Any, percent: Any) -> dict[str, Any]:
    return {"served_model_name": name, "traffic_percentage": percent}


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({}, '"served_entities" is a required property'),
        ({"served_entities": []}, "must not be empty"),
        ({"served_entities": "m"}, "'array' but got 'string'"),
        ({"served_entities": [ENTITY_A] * 11}, "at most 10 members"),
        ({"served_entities": [ENTITY_A, ENTITY_A]}, "already the name of another"),
        ({"served_entities": [{}]}, '"entity_name" is a required property'),
        ({"served_entities": [{"entity_name": "x"}]}, '"x" is not a model of this server, which has m, org.v2'),
        ({"served_entities": [{"entity_name": "m", "name": "a\nb"}]}, "printable"),
        ({"served_entities": [ENTITY_A | {"external_model": {"name": "x"}}]}, "not available"),
        ({"served_entities": [ENTITY_A | {"environment_vars": {"X": "1"}}]}, "not available"),
        ({"served_entities": [ENTITY_A | {"workload_size": 1}]}, "'string' but got 'integer'"),
        ({"served_entities": [ENTITY_A, ENTITY_B]}, '"traffic_config" is a required property'),
        ({"served_entities": [ENTITY_A, ENTITY_B], "traffic_config": {}}, '"routes" is a required property'),
        (
            {"served_entities": [ENTITY_A], "traffic_config": {"routes": [route("b", 100)]}},
            '"b" is not one of the served',
        ),
        (
            {"served_entities": [ENTITY_A], "traffic_config": {"routes": [route("a", 99)]}},
            "add up to 100, but they sum to 99",
        ),
        ({"served_entities": [ENTITY_A], "traffic_config": {"routes": [route("a", 50)] * 2}}, "already has a route"),
        ({"served_entities": [ENTITY_A], "traffic_config": {"routes": [route("a", 101)]}}, "at most 100"),
        (
            {"served_entities": [ENTITY_A], "traffic_config": {"routes": [route("a", "1e2")]}},
            "'integer' but got 'string'",
        ),
        (
            {"served_entities": [ENTITY_A], "traffic_config": {"routes": [route("a", None)]}},
            '"traffic_percentage" is a',
        ),
        ({"served_entities": [ENTITY_A], "traffic_config": {"routes": [route(None, 100)]}}, '"served_model_name" is a'),
        ({"served_entities": [ENTITY_A], "traffic_config": {"routes": []}}, "they sum to 0"),
        ({"served_entities": [ENTITY_A], "auto_capture_config": {}}, "--inference-tables FOLDER"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_endpoint_refuses_wrong_config(world, config, part):
    status, code, message = world.refused(endpoints.create_endpoint, {"name": "n", "config": config})
    assert (status, code) == (400, "INVALID_PARAMETER_VALUE")
    assert part in message
    assert world.refused(endpoints.update_endpoint, config, endpoint="e")[:2] == (400, "INVALID_PARAMETER_VALUE")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"name": "e", "config": CONFIG}, 409, "RESOURCE_ALREADY_EXISTS"),
        ({"name": "m", "config": CONFIG}, 409, "RESOURCE_ALREADY_EXISTS"),
        ({"config": CONFIG}, 400, "INVALID_PARAMETER_VALUE"),
        ({"name": "n"}, 400, "INVALID_PARAMETER_VALUE"),
        ({"name": "chat", "config": CONFIG}, 400, "INVALID_PARAMETER_VALUE"),
        ({"name": "a/b", "config": CONFIG}, 400, "INVALID_PARAMETER_VALUE"),
        ({"name": "n" * 64, "config": CONFIG}, 400, "INVALID_PARAMETER_VALUE"),
        ({"name": "n", "config": CONFIG, "rate_limits": [{}]}, 400, "INVALID_PARAMETER_VALUE"),
        (
            {"name": "n", "config": CONFIG, "ai_gateway": {"guardrails": {"input": {"safety": True}}}},
            400,
            "INVALID_PARAMETER_VALUE",
        ),
        (
            {"name": "n", "config": CONFIG, "email_notifications": {"on_update_success": ["a"]}},
            400,
            "INVALID_PARAMETER_VALUE",
        ),
        ({"name": "n", "config": CONFIG, "telemetry_config": {"a": 1}}, 400, "INVALID_PARAMETER_VALUE"),
        ({"name": "n", "config": CONFIG, "tags": [{}]}, 400, "INVALID_PARAMETER_VALUE"),
        (b"no", 400, "BAD_REQUEST"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_endpoint_refuses_wrong_creation(world, body, status, code):
    assert world.refused(endpoints.create_endpoint, body)[:2] == (status, code)


@pytest.mark.parametrize(
    ("limit", "part"),
    [
        ({"key": "user"}, '"calls" is a required property'),
        ({"calls": -1}, "at least 0"),
        ({"tokens": 1.5}, "'integer' but got 'number'"),
        ({"calls": 1, "key": "user_group"}, 'must be one of "user", "endpoint"'),
        ({"calls": 1, "renewal_period": "hour"}, 'must be one of "minute"'),
        ({"calls": 1, "principal": "a@b.c"}, "not available"),
    ],
)
def test_endpoint_refuses_wrong_rate_limits(world, limit, part):
    for manage in (endpoints.change_rate_limits, endpoints.change_gateway):
        assert part in world.refused(manage, {"rate_limits": [limit]}, endpoint="e")[2]
    created = {"name": "n", "config": CONFIG, "ai_gateway": {"rate_limits": [limit]}}
    assert part in world.refused(endpoints.create_endpoint, created)[2]


def test_endpoint_keeps_rate_limits_when_its_config_changes(world):
    limits = [{"calls": 5, "key": "user", "renewal_period": "minute"}]
    gateway = {"rate_limits": limits, "usage_tracking_config": {"enabled": False}}
    assert world.call(endpoints.change_gateway, gateway, endpoint="e") == {"rate_limits": limits}
    world.call(endpoints.update_endpoint, {"served_entities": [ENTITY_A]}, endpoint="e")
    assert world.call(endpoints.get_endpoint, endpoint="e")["ai_gateway"]["rate_limits"] == limits
    for part in ("usage_tracking_config", "fallback_config"):
        assert "not available" in world.refused(endpoints.change_gateway, {part: {"enabled": True}}, endpoint="e")[2]


OFF_FILTERS = {"pii": {"behavior": "NONE"}, "safety": False, "invalid_keywords": []}


def test_gateway_parts_that_are_off_are_accepted(world):
    """Clients such as Terraform's send back every part that they have read."""
    off = {
        "guardrails": {"input": OFF_FILTERS, "output": OFF_FILTERS},
        "fallback_config": {"enabled": False},
        "usage_tracking_config": {"enabled": False},
        "inference_table_config": {"enabled": False},
    }
    assert world.call(endpoints.change_gateway, off, endpoint="e") == {"rate_limits": []}
    creation = {"name": "n", "config": CONFIG, "ai_gateway": off, "email_notifications": {"on_update_failure": []}}
    assert "ai_gateway" not in world.call(endpoints.create_endpoint, creation)
    for on in ({"pii": {"behavior": "MASK"}}, {"safety": True}, {"valid_topics": ["sums"]}):
        for side in ("input", "output"):
            guarded = {"guardrails": {side: OFF_FILTERS | on}}
            assert "not available" in world.refused(endpoints.change_gateway, guarded, endpoint="e")[2]


def test_update_of_a_provisioned_endpoint_has_its_config_in_a_member(world):
    """As the SDK sends it, in this call only."""
    update = {route.path: route.reader for route in STRICT.routes}["/api/2.0/serving-endpoints/pt/{endpoint}/config"]
    entity = {"entity_name": "m", "name": "units", "provisioned_model_units": 100}
    world.call(update, {"config": {"served_entities": [entity]}}, endpoint="e")
    assert world.made["e"].shares == [EndpointShare("units", "m", 100)]
    assert "'config'" in world.refused(update, {"served_entities": [entity]}, endpoint="e")[2]
    assert "served_entities" in world.refused(update, {"config": {}}, endpoint="e")[2]


def test_databricks_unavailable_routes_say_so():
    for unavailable in DIALECT.routes:
        if unavailable.kind == "info":
            with pytest.raises(ParleyError) as caught:
                unavailable.reader(b"{}", RequestContext("0f", 1, "fp"), FACTS)
            answer = DIALECT.render_error(caught.value)
            assert answer.status == 400 and b"not available on this server" in answer.body


TABLE = {"catalog_name": "main", "schema_name": "logs"}


def test_inference_tables_need_the_operators_folder(world, monkeypatch):
    on = {"inference_table_config": TABLE | {"enabled": True}}
    status, code, message = world.refused(endpoints.change_gateway, on, endpoint="e")
    assert (status, code) == (400, "INVALID_PARAMETER_VALUE") and "--inference-tables FOLDER" in message
    assert world.call(endpoints.change_gateway, {"inference_table_config": TABLE}, endpoint="e") == {"rate_limits": []}
    monkeypatch.setattr(f"{__name__}.FACTS", replace(FACTS, keeps_tables=True))
    shown = TABLE | {"table_name_prefix": "e", "enabled": True}
    expected = {"rate_limits": [], "inference_table_config": shown}
    assert world.call(endpoints.change_gateway, on, endpoint="e") == expected
    assert world.call(endpoints.get_endpoint, endpoint="e")["ai_gateway"] == {"inference_table_config": shown}
    world.call(endpoints.update_endpoint, {"served_entities": [ENTITY_A]}, endpoint="e")
    assert world.made["e"].table == EndpointTable("main", "logs", "e")
    capture = {"served_entities": [ENTITY_A], "auto_capture_config": TABLE | {"table_name_prefix": "p"}}
    world.call(endpoints.update_endpoint, capture, endpoint="e")
    assert world.made["e"].table == EndpointTable("main", "logs", "p")
    world.call(endpoints.change_gateway, {}, endpoint="e")
    assert world.made["e"].table is None
    for wrong, member in (({"catalog_name": ".."}, "catalog_name"), ({"schema_name": "a/b"}, "schema_name")):
        bad = {"inference_table_config": TABLE | {"enabled": True} | wrong}
        assert member in world.refused(endpoints.change_gateway, bad, endpoint="e")[2]
    missing = {"inference_table_config": {"enabled": True, "catalog_name": "a"}}
    assert "schema_name" in world.refused(endpoints.change_gateway, missing, endpoint="e")[2]
