"""The gateway of an endpoint: its inference table, and rate limits, which older clients write as their own list."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from parley.dialects.databricks import config
from parley.dialects.facts import Endpoint, EndpointLimit, EndpointTable, ServerFacts
from parley.dialects.fields import Fields
from parley.errors import Unsupported

MAX_LIMITS = 20  # as many as the original has
MAX_COUNT = 2**31 - 1
KEYS = ("user", "endpoint")
REFUSED_SWITCHES = ("fallback_config", "usage_tracking_config")
PII_BEHAVIORS = ("NONE", "BLOCK", "MASK")
TABLE_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}")
NO_TABLES = (
    'parameter "{}" is not available on this server: it writes inference tables only if it is started with '
    "--inference-tables FOLDER"
)


def read_limits(body: Fields) -> list[EndpointLimit]:
    """Read ``rate_limits``: of calls or of tokens, for each user or for the endpoint. Raises BadRequest."""
    limits = []
    for item in body.objects("rate_limits", cap=MAX_LIMITS):
        key = item.string("key", "endpoint", allowed=KEYS)
        item.string("renewal_period", "minute", allowed=("minute",))
        config.refuse_members(item, "principal")
        calls = item.integer("calls", None, 0, MAX_COUNT)
        tokens = item.integer("tokens", None, 0, MAX_COUNT)
        if calls is None and tokens is None:
            raise item.missing_member("calls")
        limits += [EndpointLimit(calls=calls, per_client=key == "user")] if calls is not None else []
        limits += [EndpointLimit(tokens=tokens, per_client=key == "user")] if tokens is not None else []
    return limits


def read_gateway(body: Fields) -> list[EndpointLimit]:
    """Read the object of a gateway, whose other parts are refused by name unless they are off. Raises BadRequest.

    Clients that read the object and send it back also send the parts that are off.
    """
    guardrails = body.object("guardrails")
    sides = [_has_filters(guardrails.object(side)) for side in ("input", "output")] if guardrails is not None else []
    if any(sides):
        config.refuse_members(body, "guardrails")
    for name in REFUSED_SWITCHES:
        part = body.object(name)
        if part is not None and part.boolean("enabled", False):
            config.refuse_members(body, name)
    return read_limits(body)


def _has_filters(filters: Fields | None) -> bool:
    """True if the guardrails of one side filter anything. Raises BadRequest."""
    if filters is None:
        return False
    personal_data = filters.object("pii")
    words = [filters.strings(name, cap=1024, total=1 << 16) for name in ("invalid_keywords", "valid_topics")]
    hides = personal_data is not None and personal_data.string("behavior", "NONE", allowed=PII_BEHAVIORS) != "NONE"
    return filters.boolean("safety", False) or hides or any(words)


def read_table(
    body: Fields, member: str, endpoint: str, facts: ServerFacts, *, by_default: bool
) -> EndpointTable | None:
    """Read the inference table in a member; None if it is turned off.

    ``by_default``: it is on unless it says otherwise. Raises BadRequest, Unsupported if the server keeps no tables.
    """
    table = body.object(member)
    if table is None or not table.boolean("enabled", by_default):
        return None
    if not facts.keeps_tables:
        raise Unsupported(NO_TABLES.format(body.member_path(member)), field=member, code=config.INVALID_VALUE)
    return EndpointTable(
        _read_table_part(table, "catalog_name", None),
        _read_table_part(table, "schema_name", None),
        _read_table_part(table, "table_name_prefix", endpoint),
    )


def _read_table_part(table: Fields, name: str, default: str | None) -> str:
    part = table.string(name, default, cap=config.MAX_NAME)
    if part is None:
        raise table.missing_member(name)
    if not TABLE_PART.fullmatch(part):
        raise table.member_error(name, "must be up to 100 letters, digits, dashes and underscores")
    return part


def write_gateway(endpoint: Endpoint) -> dict[str, Any]:
    """Return the gateway as clients read it; empty if there is nothing in it."""
    gateway: dict[str, Any] = {}
    if endpoint.table is not None:
        gateway["inference_table_config"] = write_table(endpoint.table)
    if endpoint.limits:
        gateway["rate_limits"] = write_limits(endpoint.limits)
    return gateway


def write_table(table: EndpointTable) -> dict[str, Any]:
    """Return an inference table as clients read it."""
    names = {"catalog_name": table.catalog, "schema_name": table.schema, "table_name_prefix": table.prefix}
    return names | {"enabled": True}


def write_limits(limits: list[EndpointLimit]) -> list[dict[str, Any]]:
    """Return limits as clients write them."""
    return [
        ({"calls": limit.calls} if limit.tokens is None else {"tokens": limit.tokens})
        | {"key": "user" if limit.per_client else "endpoint", "renewal_period": "minute"}
        for limit in limits
    ]


def with_endpoint_limits(endpoint: Endpoint, limits: list[EndpointLimit]) -> Endpoint:
    """Return the endpoint with these limits in place of its own."""
    return msgspec.structs.replace(endpoint, limits=limits)
