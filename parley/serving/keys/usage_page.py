"""The page ``/v1/usage``: the usage of each key, for administrators."""

from __future__ import annotations

import re
import sqlite3
import time
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import msgspec

from parley.dialects.route import Route
from parley.errors import InvalidValue, NotFound, NotReady, excerpt
from parley.serving.keys.usage_store import UsageStore, day_text
from parley.serving.workers.daemon_thread import run_in_daemon_thread
from parley.web.exchange import Exchange

if TYPE_CHECKING:
    from parley.serving.model_registry import ModelRegistry

DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
DEFAULT_DAYS = 30
MAX_ROWS = 10_000
MEMBERS = ("start", "end", "key", "model")
NO_USAGE = "This server does not keep the usage of keys. Start it with --usage-db FILE."


async def handle_usage(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Answer with the usage. Raises InvalidValue, NotFound if none is kept, NotReady if the database cannot be read."""
    query = exchange.scope.get("query_string", b"").decode("latin-1")
    await exchange.send_response(await render_usage(registry.usage_store, query))


async def render_usage(store: UsageStore | None, query: str) -> bytes:
    """Return the usage as JSON. ``query``: of the URL. Raises InvalidValue, NotFound, NotReady."""
    if store is None:
        raise NotFound(NO_USAGE)
    members = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
    if unknown := next((name for name in members if name not in MEMBERS), None):
        raise InvalidValue(
            f"There is no parameter {excerpt(unknown)}. Known: {', '.join(MEMBERS)}.", field=unknown[:60]
        )
    now = time.time()
    start = _read_day(members, "start", day_text(now - (DEFAULT_DAYS - 1) * 86_400))
    end = _read_day(members, "end", day_text(now))
    key, model = members.get("key", ""), members.get("model", "")
    try:
        list_rows = partial(store.list_usage, start, end, key, model, MAX_ROWS + 1)
        rows = await run_in_daemon_thread(list_rows, "parley-usage-page")
    except sqlite3.Error as error:
        raise NotReady(f"The usage cannot be brought up to date now: {store.fault_reason(error)}.") from None
    page = {
        "object": "list",
        "start": start,
        "end": end,
        "has_more": len(rows) > MAX_ROWS,
        "data": [
            {
                "day": row.day,
                "key": row.key_name,
                "key_id": row.key_id[:12],
                "model": row.model,
                "requests": row.requests,
                "prompt_tokens": row.prompt_tokens,
                "cached_tokens": row.cached_tokens,
                "completion_tokens": row.completion_tokens,
            }
            for row in rows[:MAX_ROWS]
        ],
    }
    return msgspec.json.encode(page)


def _read_day(members: dict[str, str], name: str, default: str) -> str:
    value = members.get(name, default)
    if not DAY.fullmatch(value):
        raise InvalidValue(f"'{name}' must be a day such as 2030-01-31, but is {excerpt(value)}.", field=name)
    return value
