"""The OpenAPI document of TGI's routes, and an HTML page that lists its contents.

``docs/compatibility.py`` generates the document from the members that the readers ask for, and stores it next to this
file. The original's page loads its scripts from other hosts; this one is plain HTML and needs none.
"""

from __future__ import annotations

from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from parley.dialects.dialect import Answer, Head
from parley.dialects.facts import Facts

FILE = Path(__file__).with_name("openapi.json")
TOP = "<!doctype html><meta charset=utf-8><title>Text Generation Inference</title><h1>Text Generation Inference</h1>"
LINK = '<p>As data: <a href="{}api-doc/openapi.json">openapi.json</a></p>'


@cache
def _document() -> bytes:
    return msgspec.json.encode(msgspec.json.decode(FILE.read_bytes()))  # drops the whitespace


def openapi(body: bytes, head: Head, facts: Facts) -> Answer:
    """Answer ``GET /api-doc/openapi.json``."""
    return Answer(200, _document())


def page(up: str, body: bytes, head: Head, facts: Facts) -> Answer:
    """Answer ``GET /docs``. ``up`` is the relative path from the page to the API's root."""
    document: Any = msgspec.json.decode(_document())
    lines = [TOP, LINK.format(up)]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            lines.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            content = operation.get("requestBody", {}).get("content", {})
            for described in content.values():
                lines.append(_members(described["schema"]))
    return Answer(200, "\n".join(lines).encode(), b"text/html; charset=utf-8")


def _members(schema: dict[str, Any]) -> str:
    """Return an object's members as nested HTML lists."""
    schema = schema.get("items", schema)
    listed = [
        f"<li><code>{escape(name)}</code> {member.get('type', 'any')}{_members(member)}</li>"
        for name, member in schema.get("properties", {}).items()
    ]
    return f"<ul>{''.join(listed)}</ul>" if listed else ""
