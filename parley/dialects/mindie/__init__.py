"""Huawei MindIE's API: its table of routes. So far its form of TGI's interface; the others are still to come."""

from __future__ import annotations

from parley.dialects.dialect import Dialect, Route
from parley.dialects.mindie import shared, tgi
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


STRICT = service(Rules("strict"))
