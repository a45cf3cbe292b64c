"""Huawei MindIE's API: its table of routes. So far its form of TGI's interface; the others are still to come."""

from __future__ import annotations

from parley.dialects.dialect import Dialect, Route
from parley.dialects.mindie import shared, tgi

DIALECT = Dialect(
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
