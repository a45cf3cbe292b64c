"""Databricks endpoint management: effects of calls on the endpoints, their answers, and refusals."""

import json
from typing import Any

import pytest

from parley.dialects.databricks import DIALECT, STRICT, endpoints
from parley.dialects.dialect import Head
from parley.dialects.facts import Card, Endpoint, Facts, Share
from parley.dialects.wishes import Change
from parley.errors import ParleyError

FACTS = Facts("1", [Card("m", 1600000000, 100), Card("org.v2", 1600000000, 100)], True)
A = {"name": "a", "entity_name": "m", "entity_version": "3", "workload_size": "Small", "scale_to_zero_enabled": True}
B = {"name": "b", "entity_name": "system.ai.org.v2"}
SPLIT = {
    "routes": [
        {"served_model_name": "a", "traffic_percentage": 70},
        {"served_entity_name": "b", "traffic_percentage": "30"},
    ]
}
CONFIG = {"served_entities": [A, B], "traffic_config": SPLIT}


class World:
    """Keeps endpoints as the server does, and applies each change to them."""

    def __init__(self) -> None:
        self.made: dict[str, Endpoint] = {}

    def call(self, manage: Any, body: Any = None, created: int = 1700000000, **path: str) -> Any:
        head = Head("f" * 32, created, "fp", path=path)
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        told = manage(data, head, FACTS, dict(self.made))
        if isinstance(told, Change):
            self.made.pop(told.drop, None)
            if told.put is not None:
                self.made[told.put.name] = told.put
            told = told.answer
        assert (told.status, told.type) == (200, b"application/json")
        return json.loads(told.body)

    def refused(self, manage: Any, body: Any = None, **path: str) -> tuple[int, str, str]:
        before = dict(self.made)
        with pytest.raises(ParleyError) as caught:
            self.call(manage, body, **path)
        assert self.made == before
        answer = STRICT.error(caught.value)
        told = json.loads(answer.body)
        return answer.status, told["error_code"], told["message"]


@pytest.fixture
def world() -> World:
    made = World()
    made.call(
        endpoints.create, {"name": "e", "config": CONFIG, "tags": [{"key": "k", "value": "v"}], "description": "d"}
    )
    return made


def test_created_endpoint_reports_config_and_traffic_split(world):
    assert world.made["e"].shares == [Share("a", "m", 70), Share("b", "org.v2", 30)]
    told = world.call(endpoints.get, endpoint="e")
    moment = {"creator": "parley", "creation_timestamp": 1700000000000}
    good = {"deployment": "DEPLOYMENT_READY", "deployment_state_message": ""}
    model = {"name": "m", "display_name": "m", "docs": "", "description": ""}
    first = {**A, "foundation_model": model, **moment, "state": good}
    assert told["config"]["served_entities"][0] == first
    assert told["config"]["served_entities"][1]["entity_version"] == "1"
    older = {"model_name": "m", "model_version": "3", **{k: v for k, v in A.items() if not k.startswith("entity")}}
    assert told["config"]["served_models"][0] == {**older, **moment, "state": good}
    assert told["config"]["traffic_config"] == {
        "routes": [
            {"served_model_name": "a", "served_entity_name": "a", "traffic_percentage": 70},
            {"served_model_name": "b", "served_entity_name": "b", "traffic_percentage": 30},
        ]
    }
    assert told["config"]["config_version"] == 1
    del told["config"]
    assert told == {
        "name": "e",
        "id": "f" * 32,
        **moment,
        "last_updated_timestamp": 1700000000000,
        "state": {"ready": "READY", "config_update": "NOT_UPDATING"},
        "tags": [{"key": "k", "value": "v"}],
        "task": "llm/v1/chat",
        "permission_level": "CAN_MANAGE",
        "route_optimized": False,
        "description": "d",
    }


def test_each_model_is_a_read_only_endpoint(world):
    listed = world.call(endpoints.list_)["endpoints"]
    assert [each["name"] for each in listed] == ["e", "m", "org.v2"]
    assert all(list(each["config"]) == ["served_entities"] for each in listed)
    assert list(listed[0]["config"]["served_entities"][0]) == [
        "name",
        "entity_name",
        "entity_version",
        "foundation_model",
    ]
    told = world.call(endpoints.get, endpoint="m")
    assert told["config"]["served_entities"][0]["entity_name"] == "system.ai.m"
    assert told["config"]["traffic_config"]["routes"][0]["traffic_percentage"] == 100
    for change in (endpoints.update, endpoints.delete, endpoints.tag):
        assert world.refused(change, {}, endpoint="m")[:2] == (403, "PERMISSION_DENIED")


def test_endpoint_update_replaces_only_given_members(world):
    half = {"routes": [{"served_model_name": n, "traffic_percentage": 50} for n in "ab"]}
    told = world.call(endpoints.update, {"traffic_config": half}, 1700000009, endpoint="e")
    assert [share.percent for share in world.made["e"].shares] == [50, 50]
    assert told["config"]["served_entities"][0]["workload_size"] == "Small"
    assert (told["config"]["config_version"], told["creation_timestamp"]) == (2, 1700000000000)
    assert told["last_updated_timestamp"] == 1700000009000
    world.call(endpoints.update, {"served_models": [{"model_name": "m", "model_version": "2"}]}, endpoint="e")
    assert world.made["e"].shares == [Share("m-2", "m", 100)]
    world.call(endpoints.update, {"served_entities": [{"entity_name": "org.v2"}]}, endpoint="e")
    assert world.made["e"].shares == [Share("org-v2-1", "org.v2", 100)]
    none = {"routes": [{"served_model_name": "a", "traffic_percentage": 100}]}
    world.call(endpoints.update, {"served_entities": [A, B], "traffic_config": none}, endpoint="e")
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
    made = {"name": "n", "config": {"served_entities": [A | sizes]}, "budget_policy_id": "p", "route_optimized": True}
    told = world.call(endpoints.create, made)
    assert told["config"]["served_entities"][0].items() >= sizes.items()
    assert told["config"]["served_models"][0].items() >= sizes.items()
    assert (told["budget_policy_id"], told["route_optimized"]) == ("p", True)


def test_endpoint_tags_are_added_and_deleted(world):
    body = {"add_tags": [{"key": "x"}, {"key": "k", "value": "w"}], "delete_tags": ["gone"]}
    assert world.call(endpoints.tag, body, endpoint="e") == {"tags": [{"key": "k", "value": "w"}, {"key": "x"}]}
    assert world.call(endpoints.tag, {"delete_tags": ["k"]}, endpoint="e") == {"tags": [{"key": "x"}]}
    assert world.call(endpoints.get, endpoint="e")["tags"] == [{"key": "x"}]


def test_deleted_endpoint_is_not_found(world):
    assert world.call(endpoints.delete, endpoint="e") == {}
    missing = (404, "RESOURCE_DOES_NOT_EXIST", "Endpoint with name 'e' does not exist.")
    for call in (endpoints.get, endpoints.delete, endpoints.update, endpoints.tag, endpoints.describe):
        assert world.refused(call, {}, endpoint="e") == missing


def test_endpoint_answers_permissions_openapi_and_logs(world):
    id = world.call(endpoints.get, endpoint="e")["id"]
    assert world.call(endpoints.permissions, id=id)["access_control_list"] == []
    levels = world.call(endpoints.levels, id=id)["permission_levels"]
    assert [each["permission_level"] for each in levels] == ["CAN_MANAGE", "CAN_QUERY", "CAN_VIEW"]
    assert world.refused(endpoints.permissions, id="none")[0] == 404
    assert list(world.call(endpoints.describe, endpoint="e")["paths"]) == ["/serving-endpoints/e/invocations"]
    assert world.call(endpoints.logs, endpoint="e", served="a") == {"logs": ""}
    assert world.refused(endpoints.logs, endpoint="e", served="x")[:2] == (404, "RESOURCE_DOES_NOT_EXIST")


def test_endpoint_loads_from_minimal_hand_written_file():
    """An operator writes only names and shares; all other members get defaults."""
    world = World()
    world.made["e"] = Endpoint("e", [Share("a", "m", 50), Share("b", "gone", 50)])
    told = world.call(endpoints.get, endpoint="e")
    assert told["state"] == {"ready": "NOT_READY", "config_update": "NOT_UPDATING"}
    states = [each["state"]["deployment"] for each in told["config"]["served_entities"]]
    assert states == ["DEPLOYMENT_READY", "DEPLOYMENT_FAILED"]
    assert world.call(endpoints.list_)["endpoints"][0]["name"] == "e"
    assert world.call(endpoints.permissions, id=told["id"])
    world.call(endpoints.update, {"served_entities": [A]}, endpoint="e")
    assert world.call(endpoints.get, endpoint="e")["config"]["config_version"] == 2


def route(name: Any, percent: Any) -> dict[str, Any]:
    return {"served_model_name": name, "traffic_percentage": percent}


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({}, '"served_entities" is a required property'),
        ({"served_entities": []}, "must not be empty"),
        ({"served_entities": "m"}, "'array' but got 'string'"),
        ({"served_entities": [A] * 11}, "at most 10 members"),
        ({"served_entities": [A, A]}, "already the name of another"),
        ({"served_entities": [{}]}, '"entity_name" is a required property'),
        ({"served_entities": [{"entity_name": "x"}]}, '"x" is not a model of this server, which has m, org.v2'),
        ({"served_entities": [{"entity_name": "m", "name": "a\nb"}]}, "printable"),
        ({"served_entities": [A | {"external_model": {"name": "x"}}]}, "not available"),
        ({"served_entities": [A | {"environment_vars": {"X": "1"}}]}, "not available"),
        ({"served_entities": [A | {"workload_size": 1}]}, "'string' but got 'integer'"),
        ({"served_entities": [A, B]}, '"traffic_config" is a required property'),
        ({"served_entities": [A, B], "traffic_config": {}}, '"routes" is a required property'),
        ({"served_entities": [A], "traffic_config": {"routes": [route("b", 100)]}}, '"b" is not one of the served'),
        ({"served_entities": [A], "traffic_config": {"routes": [route("a", 99)]}}, "add up to 100, but they sum to 99"),
        ({"served_entities": [A], "traffic_config": {"routes": [route("a", 50)] * 2}}, "already has a route"),
        ({"served_entities": [A], "traffic_config": {"routes": [route("a", 101)]}}, "at most 100"),
        ({"served_entities": [A], "traffic_config": {"routes": [route("a", "1e2")]}}, "'integer' but got 'string'"),
        ({"served_entities": [A], "traffic_config": {"routes": [route("a", None)]}}, '"traffic_percentage" is a'),
        ({"served_entities": [A], "traffic_config": {"routes": [route(None, 100)]}}, '"served_model_name" is a'),
        ({"served_entities": [A], "traffic_config": {"routes": []}}, "they sum to 0"),
        ({"served_entities": [A], "auto_capture_config": {"enabled": True}}, "not available"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_endpoint_refuses_wrong_config(world, config, part):
    status, code, message = world.refused(endpoints.create, {"name": "n", "config": config})
    assert (status, code) == (400, "INVALID_PARAMETER_VALUE")
    assert part in message
    assert world.refused(endpoints.update, config, endpoint="e")[:2] == (400, "INVALID_PARAMETER_VALUE")


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
        ({"name": "n", "config": CONFIG, "rate_limits": [{"calls": 1}]}, 400, "INVALID_PARAMETER_VALUE"),
        ({"name": "n", "config": CONFIG, "ai_gateway": {"guardrails": {}}}, 400, "INVALID_PARAMETER_VALUE"),
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
    assert world.refused(endpoints.create, body)[:2] == (status, code)


def test_databricks_unavailable_routes_say_so():
    for given in DIALECT.routes:
        if given.kind == "ask":
            with pytest.raises(ParleyError) as caught:
                given.read(b"{}", Head("0f", 1, "fp"), FACTS)
            answer = DIALECT.error(caught.value)
            assert answer.status == 400 and b"not available on this server" in answer.body
