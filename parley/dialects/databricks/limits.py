"""Rate limits of an endpoint: as its own list, as older clients write them, and inside the object of its gateway."""

from __future__ import annotations

from typing import Any

import msgspec

from parley.dialects.databricks import config
from parley.dialects.facts import Endpoint, EndpointLimit
from parley.dialects.fields import Fields

MAX_LIMITS = 20  # as many as the original has
MAX_COUNT = 2**31 - 1
KEYS = ("user", "endpoint")
REFUSED_GATEWAY_PARTS = ("guardrails", "inference_table_config", "fallback_config")


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
    """Read the object of a gateway, whose other parts are refused by name. Raises BadRequest."""
    config.refuse_members(body, *REFUSED_GATEWAY_PARTS)
    tracking = body.object("usage_tracking_config")
    if tracking is not None and tracking.boolean("enabled", False):
        config.refuse_members(body, "usage_tracking_config")
    return read_limits(body)


def write_limits(limits: list[EndpointLimit]) -> list[dict[str, Any]]:
    """Return limits as clients write them."""
    return [
        ({"calls": limit.calls} if limit.tokens is None else {"tokens": limit.tokens})
        | {"key": "user" if limit.per_client else "endpoint", "renewal_period": "minute"}
        for limit in limits
    ]


def with_limits(endpoint: Endpoint, limits: list[EndpointLimit]) -> Endpoint:
    """Return the endpoint with these limits in place of its own."""
    return msgspec.structs.replace(endpoint, limits=limits)
