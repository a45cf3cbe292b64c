"""Ids in Cohere's answers and errors, which are UUIDs."""

from __future__ import annotations

import re
from uuid import UUID

HEX_ID = re.compile(r"[0-9a-fA-F]{1,32}")


def id_as_uuid(unique_id: str) -> str:
    """Return a request's id as the original writes ids: a UUID."""
    return str(UUID(hex=unique_id.rjust(32, "0"))) if HEX_ID.fullmatch(unique_id) else unique_id
