"""Huawei MindIE's API: the routes of its three planes. Its form of TGI's interface so far; others are still to come."""

from __future__ import annotations

from functools import partial

from parley.dialects.dialect import Dialect, Route
from parley.dialects.mindie import shared, tgi, upkeep
from parley.dialects.mindie.rules import Rules


def service(rules: Rules) -> Dialect:
    """The plane that clients of a model speak to."""
    return Dialect(
        name="mindie",
        title="MindIE",
        base="",
        error=shared.error,
        routes=(
            Route("POST", "/", "generate", read=tgi.either),
            Route("POST", "/generate", "generate", read=tgi.whole),
            Route("POST", "/generate_stream", "generate", read=tgi.stream),
        ),
    )


def management(rules: Rules) -> Dialect:
    """The plane of those who run the server."""
    model = "/v2/models/{model}"
    return Dialect(
        name="mindie-management",
        title="MindIE management",
        base="",
        error=shared.error,
        routes=(
            Route("GET", "/health", "state", read=partial(upkeep.ready, rules)),
            Route("GET", "/health/timed", "trial", read=upkeep.wait, write=upkeep.tried),
            Route("GET", "/health/timed-{seconds}", "trial", read=upkeep.wait, write=upkeep.tried),
            Route("GET", "/v2/health/live", "state", read=partial(upkeep.live, rules)),
            Route("GET", "/v2/health/ready", "state", read=partial(upkeep.ready, rules)),
            Route("GET", f"{model}/ready", "state", read=partial(upkeep.ready, rules)),
            Route("GET", f"{model}/getSlotCount", "ask", read=partial(upkeep.slots, rules)),
            Route("GET", "/info", "ask", read=partial(upkeep.info, rules)),
            Route("GET", "/metrics-json", "ask", read=partial(upkeep.statistics, rules)),
            Route("GET", "/stopService", "stop", read=upkeep.force, write=upkeep.stopped),
            Route("GET", "/v1/config", "ask", read=partial(upkeep.config, rules)),
            Route("GET", "/v1/engine-server/running-status", "ask", read=partial(upkeep.status, rules)),
            Route("POST", "/v1/engine-server/fault-handling-command", "order", read=partial(upkeep.command, rules)),
            Route("POST", "/v1/load_lora_adapter", "ask", read=partial(upkeep.adapter, rules)),
            Route("POST", "/v1/unload_lora_adapter", "ask", read=partial(upkeep.adapter, rules)),
        ),
    )


def metrics(rules: Rules) -> Dialect:
    """The plane of those who watch it."""
    page = Route("GET", "/metrics", "metrics")
    if rules.strict and not rules.monitored:
        page = Route("GET", "/metrics", "ask", read=upkeep.unmonitored)
    return Dialect(name="mindie-metrics", title="MindIE metrics", base="", error=shared.error, routes=(page,))


STRICT = service(Rules("strict"))
MANAGEMENT, METRICS = management(Rules("strict")), metrics(Rules("strict"))
