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

from parley.dialects.dialect import Answer, RequestContext
from parley.dialects.facts import ServerFacts

OPENAPI_FILE = Path(__file__).with_name("openapi.json")
PAGE_TOP = (
    "<!doctype html><meta charset=utf-8><title>Text Generation Inference</title><h1>Text Generation Inference</h1>"
)
DOCUMENT_LINK = '<p>As data: <a href="{}api-doc/openapi.json">openapi.json</a></p>'


@cache
def _openapi_bytes() -> bytes:
    return msgspec.json.encode(msgspec.json.decode(OPENAPI_FILE.read_bytes()))  # drops the whitespace


def answer_openapi(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Answer ``GET /api-doc/openapi.json``."""
    return Answer(200, _openapi_bytes())


def answer_docs_page(root_path: str, body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Answer ``GET /docs``. ``root_path`` is the relative path from the page to the API's root."""
    document: Any = msgspec.json.decode(_openapi_bytes())
    lines = [PAGE_TOP, DOCUMENT_LINK.format(root_path)]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            lines.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            content = operation.get("requestBody", {}).get("content", {})
            for media_type in content.values():
                lines.append(_member_list(media_type["schema"]))
    return Answer(200, "\n".join(lines).encode(), b"text/html; charset=utf-8")


def _member_list(schema: dict[str, Any]) -> str:
    """Return an object's members as nested HTML lists."""
    schema = schema.get("items", schema)
    items = [
        f"<li><code>{escape(name)}</code> {member.get('type', 'any')}{_member_list(member)}</li>"
        for name, member in schema.get("properties", {}).items()
    ]
    return f"<ul>{''.join(items)}</ul>" if items else ""
