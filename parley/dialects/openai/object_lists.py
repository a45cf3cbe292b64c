"""Lists of stored objects in OpenAI's form: reads the query, and writes the answer."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

import msgspec

from parley.dialects.fields import Fields
from parley.dialects.request_context import RequestContext
from parley.errors import InvalidValue, excerpt

MAX_QUERY_MEMBERS = 64
MAX_LISTED, DEFAULT_LISTED = 100, 20
MAX_ID = 256  # characters


class ListQuery(msgspec.Struct, frozen=True):
    """``limit``: objects at most. ``after``: the id of the object before the first one."""

    limit: int
    newest_first: bool
    after: str | None


def read_query(context: RequestContext) -> Fields:
    """Return the parameters of the query, the last of each name. Raises InvalidValue."""
    text = context.query_string.decode("latin-1")
    try:
        values = parse_qs(text, keep_blank_values=True, max_num_fields=MAX_QUERY_MEMBERS)
    except ValueError:
        raise InvalidValue(f"The query has more than {MAX_QUERY_MEMBERS} parameters.") from None
    return Fields({name: texts[-1] for name, texts in values.items()})


def read_list_query(
    query: Fields, *, default_order: str = "desc", default_limit: int = DEFAULT_LISTED, max_limit: int = MAX_LISTED
) -> ListQuery:
    """Read ``limit``, ``order`` and ``after``. Raises InvalidValue."""
    limit_text = query.string("limit", str(default_limit), cap=16)
    limit = int(limit_text) if limit_text.isdecimal() else 0
    if not 1 <= limit <= max_limit:
        raise query.member_error("limit", f"must be an integer from 1 to {max_limit}, but got {excerpt(limit_text)}.")
    order = query.string("order", default_order, allowed=("asc", "desc"))
    return ListQuery(limit, order == "desc", query.string("after", None, cap=MAX_ID))


def list_object(items: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return a list, with the ids of its ends, as a client gets it."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }


def slice_items(items: list[dict[str, Any]], list_query: ListQuery) -> dict[str, Any]:
    """Return the part of all items, oldest first, that a query asks for, as a list. Raises InvalidValue."""
    ordered = items[::-1] if list_query.newest_first else items
    if list_query.after is not None:
        position = next((number for number, item in enumerate(ordered) if item["id"] == list_query.after), None)
        if position is None:
            raise InvalidValue(f"Invalid 'after': there is no item {excerpt(list_query.after)}.", field="after")
        ordered = ordered[position + 1 :]
    return list_object(ordered[: list_query.limit], has_more=len(ordered) > list_query.limit)
