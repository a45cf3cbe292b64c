"""Permissions of an endpoint: who may see and query it. Without any, every client may.

Users and service principals are names of API keys, groups are groups of keys. Changes need an admin key, as everything
that changes the server, so ``CAN_MANAGE`` allows other keys no more than ``CAN_QUERY``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from parley.dialects.admin_requests import EndpointChange
from parley.dialects.databricks import config
from parley.dialects.databricks.endpoints import (
    ENDPOINT_WORDING,
    LEVEL_NAMES,
    EndpointsByName,
    endpoint_id,
    find_by_id,
)
from parley.dialects.facts import (
    ADMIN_GROUP,
    ALL_KEYS_GROUP,
    GRANT_LEVELS,
    Endpoint,
    EndpointGrant,
    PrincipalKind,
    ServerFacts,
)
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import json_answer
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.errors import NotFound, Unsupported, excerpt

MAX_GRANTS = 1000
MAX_PRINCIPAL = 256  # characters
LEVELS_BY_NAME = {name: level for level, name in LEVEL_NAMES.items()}
LEVEL_TEXTS = {
    "CAN_MANAGE": "Can do everything with the endpoint",
    "CAN_QUERY": "Can query the endpoint",
    "CAN_VIEW": "Can see the endpoint",
}
PRINCIPAL_MEMBERS: dict[str, PrincipalKind] = {
    "user_name": "user",
    "group_name": "group",
    "service_principal_name": "service_principal",
}
MEMBERS_BY_KIND = {kind: member for member, kind in PRINCIPAL_MEMBERS.items()}
PRINCIPAL_TITLES = {"user": "UserName", "group": "GroupName", "service_principal": "ServicePrincipalName"}
NO_KEYS = (
    "Permissions need API keys, and this server has none, so it cannot tell clients apart. Start it with "
    "--api-key-file FILE, where 'name=NAME' and 'groups=NAME,NAME' after a key say who has it."
)


def list_permissions(body: bytes, context: RequestContext, facts: ServerFacts, created: EndpointsByName) -> Answer:
    """Return the permissions of each user and group. Raises NotFound, Forbidden."""
    endpoint = find_by_id(context, facts, created)
    endpoint.check_client(context.client, "view")
    return json_answer(_access_list(endpoint))


def list_permission_levels(
    body: bytes, context: RequestContext, facts: ServerFacts, created: EndpointsByName
) -> Answer:
    """Return the levels of permission and their descriptions. Raises NotFound, Forbidden."""
    find_by_id(context, facts, created).check_client(context.client, "view")
    levels = [{"permission_level": level, "description": text} for level, text in LEVEL_TEXTS.items()]
    return json_answer({"permission_levels": levels})


def set_permissions(
    body: bytes, context: RequestContext, facts: ServerFacts, created: EndpointsByName
) -> EndpointChange:
    """Replace all permissions; none: every client may do everything. Raises NotFound, BadRequest."""
    grants = _read_grants(decode_fields(body, ENDPOINT_WORDING), facts)
    return _change_grants(find_by_id(context, facts, created), grants, facts)


def update_permissions(
    body: bytes, context: RequestContext, facts: ServerFacts, created: EndpointsByName
) -> EndpointChange:
    """Change the permissions of these principals, or add them. Raises NotFound, BadRequest."""
    grants = _read_grants(decode_fields(body, ENDPOINT_WORDING), facts)
    endpoint = find_by_id(context, facts, created)
    changed = {(grant.kind, grant.principal) for grant in grants}
    kept_grants = [grant for grant in endpoint.grants if (grant.kind, grant.principal) not in changed]
    return _change_grants(endpoint, [*kept_grants, *grants], facts)


def _change_grants(endpoint: Endpoint, grants: list[EndpointGrant], facts: ServerFacts) -> EndpointChange:
    changed = msgspec.structs.replace(endpoint, grants=grants)
    answer = json_answer(_access_list(changed))
    if any(card.name == endpoint.name for card in facts.cards):  # only the permissions of a model are stored
        if not grants:
            return EndpointChange(answer, remove_endpoint=endpoint.name)
        changed = msgspec.structs.replace(changed, about={})
    return EndpointChange(answer, put_endpoint=changed)


def _access_list(endpoint: Endpoint) -> dict[str, Any]:
    entries = [
        {
            MEMBERS_BY_KIND[grant.kind]: grant.principal,
            **({} if grant.kind == "group" else {"display_name": grant.principal}),
            "all_permissions": [{"permission_level": LEVEL_NAMES[grant.level], "inherited": False}],
        }
        for grant in endpoint.grants
    ]
    if entries:
        inherited = {
            "permission_level": "CAN_MANAGE",
            "inherited": True,
            "inherited_from_object": ["/serving-endpoints/"],
        }
        entries.append({"group_name": ADMIN_GROUP, "all_permissions": [inherited]})
    return {
        "object_id": f"/serving-endpoints/{endpoint_id(endpoint)}",
        "object_type": "serving-endpoint",
        "access_control_list": entries,
    }


def _read_grants(body: Fields, facts: ServerFacts) -> list[EndpointGrant]:
    """Read ``access_control_list``. Of several levels for a principal the highest counts.

    Raises BadRequest, Unsupported without API keys, NotFound for a principal that no key has.
    """
    grants: dict[tuple[PrincipalKind, str], EndpointGrant] = {}
    for item in body.objects("access_control_list", cap=MAX_GRANTS):
        grant = _read_grant(item)
        if facts.key_owners is None:
            raise Unsupported(NO_KEYS, field="access_control_list", code=config.INVALID_VALUE)
        _check_principal(grant, facts)
        if grant.kind == "group" and grant.principal == ADMIN_GROUP:  # has all permissions in any case
            continue
        earlier = grants.get((grant.kind, grant.principal), grant)
        grants[grant.kind, grant.principal] = max(earlier, grant, key=_rank_grant)
    return list(grants.values())


def _rank_grant(grant: EndpointGrant) -> int:
    return GRANT_LEVELS.index(grant.level)


def _read_grant(item: Fields) -> EndpointGrant:
    present = item.present_names(PRINCIPAL_MEMBERS)
    if len(present) != 1:
        raise item.member_error("user_name", f"must be given alone: one of {', '.join(PRINCIPAL_MEMBERS)}")
    (member,) = present
    principal = item.string(member, None, cap=MAX_PRINCIPAL)
    if not principal:
        raise item.empty_member(member, "string")
    level = item.string("permission_level", None, allowed=tuple(LEVELS_BY_NAME))
    if level is None:
        raise item.missing_member("permission_level")
    return EndpointGrant(principal, PRINCIPAL_MEMBERS[member], LEVELS_BY_NAME[level])


def _check_principal(grant: EndpointGrant, facts: ServerFacts) -> None:
    """Raise NotFound if there is no such principal: a misspelt one would be locked out silently."""
    owners = facts.key_owners or ()
    principals: Iterable[str] = (owner.name for owner in owners)
    if grant.kind == "group":
        principals = (ALL_KEYS_GROUP, ADMIN_GROUP, *(group for owner in owners for group in owner.groups))
    if grant.principal not in principals:
        word = "groups" if grant.kind == "group" else "name"
        raise NotFound(
            f"Principal: {PRINCIPAL_TITLES[grant.kind]}({excerpt(grant.principal)}) does not exist: no API key of this "
            f"server has it as '{word}='.",
            code="RESOURCE_DOES_NOT_EXIST",
        )
