"""Permissions of Databricks' endpoints: reading, storing and showing them, and what they let clients do."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from parley.dialects.admin_requests import EndpointChange
from parley.dialects.databricks import STRICT, endpoints, permissions
from parley.dialects.facts import Endpoint, EndpointGrant, EndpointShare, ModelCard, ServerFacts
from parley.dialects.request_context import RequestContext
from parley.errors import Forbidden, ParleyError
from parley.types import NO_TENANT, KeyOwner, Tenant

OWNERS = [KeyOwner("ann", ("red",)), KeyOwner("bob"), KeyOwner("job", ("red", "blue")), KeyOwner()]
FACTS = ServerFacts("1", [ModelCard("m", 1600000000, 100)], True, key_owners=OWNERS)
ANN, BOB, JOB, NAMELESS = (Tenant(str(number), owner=owner) for number, owner in enumerate(OWNERS, 1))
ADMIN = Tenant("9", is_admin=True)
SHARES = [EndpointShare("a", "m", 100)]


def grant(level: str, **principal: str) -> dict[str, str]:
    return {"permission_level": level, **principal}


class World:
    """Endpoint ``e`` and the model ``m``, whose changes are kept as the server keeps them."""

    def __init__(self, facts: ServerFacts = FACTS):
        self.facts, self.made = facts, {"e": Endpoint("e", SHARES)}

    def call(self, manage: Any, body: Any = None, client: Tenant = NO_TENANT, **path: str) -> Any:
        context = replace(RequestContext("f" * 32, 1700000000, "fp", path_parts=path), client=client)
        result = manage(b"" if body is None else json.dumps(body).encode(), context, self.facts, dict(self.made))
        if isinstance(result, EndpointChange):
            self.made.pop(result.remove_endpoint, None)
            if result.put_endpoint is not None:
                stored = msgspec.json.encode(result.put_endpoint)  # as in the file
                self.made[result.put_endpoint.name] = msgspec.json.decode(stored, type=Endpoint)
            result = result.answer
        return json.loads(result.body)

    def id_of(self, name: str) -> str:
        return self.call(endpoints.get_endpoint, endpoint=name)["id"]

    def put(self, *grants: dict[str, str], name: str = "e", patch: bool = False) -> Any:
        manage = permissions.update_permissions if patch else permissions.set_permissions
        return self.call(manage, {"access_control_list": list(grants)}, id=self.id_of(name))["access_control_list"]

    def refusal(self, body: Any) -> tuple[int, str, str]:
        before = dict(self.made)
        with pytest.raises(ParleyError) as caught:
            self.call(permissions.set_permissions, body, id=self.id_of("e"))
        assert self.made == before
        answer = STRICT.render_error(caught.value)
        error = json.loads(answer.body)
        return answer.status, error["error_code"], error["message"]

    def levels(self, name: str = "e") -> list[str | None]:
        return [self.made[name].client_level(client) for client in (ANN, BOB, JOB, NAMELESS, ADMIN, NO_TENANT)]


ADMINS_ENTRY = {
    "group_name": "admins",
    "all_permissions": [
        {"permission_level": "CAN_MANAGE", "inherited": True, "inherited_from_object": ["/serving-endpoints/"]}
    ],
}


def direct_grants(level: str) -> list[dict[str, Any]]:
    return [{"permission_level": level, "inherited": False}]


def test_permissions_are_shown_as_they_were_set():
    world = World()
    shown = world.put(
        grant("CAN_QUERY", user_name="ann"),
        grant("CAN_VIEW", group_name="blue"),
        grant("CAN_MANAGE", service_principal_name="bob"),
    )
    assert shown == [
        {"user_name": "ann", "display_name": "ann", "all_permissions": direct_grants("CAN_QUERY")},
        {"group_name": "blue", "all_permissions": direct_grants("CAN_VIEW")},
        {"service_principal_name": "bob", "display_name": "bob", "all_permissions": direct_grants("CAN_MANAGE")},
        ADMINS_ENTRY,
    ]
    listed = world.call(permissions.list_permissions, id=world.id_of("e"))
    assert listed["access_control_list"] == shown and listed["object_id"] == f"/serving-endpoints/{world.id_of('e')}"
    assert world.levels() == ["query", "manage", "view", None, "manage", "manage"]


def test_put_replaces_and_patch_adds_or_changes():
    world = World()
    world.put(grant("CAN_VIEW", user_name="ann"), grant("CAN_QUERY", user_name="bob"))
    world.put(grant("CAN_QUERY", user_name="ann"), grant("CAN_VIEW", group_name="blue"), patch=True)
    assert world.levels() == ["query", "query", "view", None, "manage", "manage"]
    world.put(grant("CAN_QUERY", group_name="users"))
    assert world.levels() == ["query"] * 4 + ["manage"] * 2
    assert world.put() == [] and world.levels() == ["manage"] * 6


def test_highest_level_of_a_principal_counts_and_admins_need_none():
    world = World()
    world.put(grant("CAN_QUERY", user_name="ann"), grant("CAN_VIEW", user_name="ann"))
    assert world.made["e"].grants == [EndpointGrant("ann", "user", "query")]
    assert world.put(grant("CAN_VIEW", group_name="admins")) == []


def test_other_changes_of_an_endpoint_keep_its_permissions():
    world = World()
    world.put(grant("CAN_QUERY", user_name="ann"))
    entity = {"entity_name": "m", "name": "b"}
    world.call(endpoints.update_endpoint, {"served_entities": [entity]}, endpoint="e")
    world.call(endpoints.change_tags, {"add_tags": [{"key": "k"}]}, endpoint="e")
    world.call(endpoints.change_rate_limits, {"rate_limits": [{"calls": 5}]}, endpoint="e")
    assert world.made["e"].grants == [EndpointGrant("ann", "user", "query")]
    assert [share.name for share in world.made["e"].shares] == ["b"]


def test_clients_see_only_endpoints_that_they_may_view():
    world = World()
    world.put(grant("CAN_VIEW", user_name="ann"))

    def names(client: Tenant) -> list[str]:
        return [endpoint["name"] for endpoint in world.call(endpoints.list_endpoints, client=client)["endpoints"]]

    assert names(ANN) == names(ADMIN) == ["e", "m"] and names(BOB) == ["m"]
    assert world.call(endpoints.get_endpoint, client=ANN, endpoint="e")["permission_level"] == "CAN_VIEW"
    for call, path in (
        (endpoints.get_endpoint, {"endpoint": "e"}),
        (endpoints.endpoint_openapi, {"endpoint": "e"}),
        (endpoints.empty_logs, {"endpoint": "e", "served": "a"}),
        (permissions.list_permissions, {"id": world.id_of("e")}),
        (permissions.list_permission_levels, {"id": world.id_of("e")}),
    ):
        with pytest.raises(Forbidden, match="does not have permission 'View' on Endpoint e"):
            world.call(call, client=BOB, **path)
    with pytest.raises(Forbidden, match="'Query'"):
        world.made["e"].check_client(ANN, "query")


def test_a_model_has_permissions_and_nothing_else_to_change():
    world = World()
    before = world.call(endpoints.get_endpoint, endpoint="m")
    world.put(grant("CAN_QUERY", user_name="ann"), name="m")
    assert world.levels("m") == ["query", None, None, None, "manage", "manage"]
    assert world.call(endpoints.get_endpoint, endpoint="m") == before
    assert len(world.call(endpoints.list_endpoints)["endpoints"]) == 2
    for call in (endpoints.delete_endpoint, endpoints.change_tags, endpoints.update_endpoint):
        with pytest.raises(Forbidden, match="model of the server"):
            world.call(call, {}, endpoint="m")
    world.put(name="m")
    assert "m" not in world.made


@pytest.mark.parametrize(
    ("item", "status", "code", "words"),
    [
        (grant("CAN_QUERY"), 400, "INVALID_PARAMETER_VALUE", "user_name"),
        (grant("CAN_QUERY", user_name="ann", group_name="red"), 400, "INVALID_PARAMETER_VALUE", "user_name"),
        (grant("CAN_QUERY", user_name=""), 400, "INVALID_PARAMETER_VALUE", "user_name"),
        ({"user_name": "ann"}, 400, "INVALID_PARAMETER_VALUE", "permission_level"),
        (grant("CAN_RUN", user_name="ann"), 400, "INVALID_PARAMETER_VALUE", "CAN_MANAGE"),
        (grant("CAN_QUERY", user_name="red"), 404, "RESOURCE_DOES_NOT_EXIST", "UserName('red')"),
        (grant("CAN_QUERY", group_name="ann"), 404, "RESOURCE_DOES_NOT_EXIST", "GroupName('ann')"),
        (5, 400, "INVALID_PARAMETER_VALUE", "access_control_list"),
    ],
    ids=str,
)
def test_permission_errors_name_the_member_or_principal(item: Any, status: int, code: str, words: str):
    actual_status, actual_code, message = World().refusal({"access_control_list": [item]})
    assert (actual_status, actual_code) == (status, code) and words in message


def test_permissions_need_api_keys():
    world = World(replace(FACTS, key_owners=None))
    status, _, message = world.refusal({"access_control_list": [grant("CAN_QUERY", group_name="users")]})
    assert status == 400 and "--api-key-file" in message
