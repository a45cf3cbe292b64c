"""An HTML page that lists the contents of TGI's OpenAPI document.

The original's page loads its scripts from other hosts; this one is plain HTML and needs none.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import msgspec

from parley.dialects.facts import ServerFacts
from parley.dialects.openapi_bodies import SCHEMAS
from parley.dialects.openapi_document import OpenApiDocument
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext

PAGE_TOP = (
    "<!doctype html><meta charset=utf-8><title>Text Generation Inference</title><h1>Text Generation Inference</h1>"
)
DOCUMENT_LINK = '<p>As data: <a href="{}api-doc/openapi.json">openapi.json</a></p>'


def answer_docs_page(
    document: OpenApiDocument, root_path: str, body: bytes, context: RequestContext, facts: ServerFacts
) -> Answer:
    """Answer ``GET /docs``. ``root_path`` is the relative path from the page to the API's root."""
    described: Any = msgspec.json.decode(document(body, context, facts).body)
    components = described["components"]["schemas"]
    lines = [PAGE_TOP, DOCUMENT_LINK.format(root_path)]
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            lines.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            content = operation.get("requestBody", {}).get("content", {})
            for media_type in content.values():
                lines.append(_member_list(media_type["schema"], components))
    return Answer(200, "\n".join(lines).encode(), b"text/html; charset=utf-8")


def _member_list(schema: Mapping[str, Any], components: Mapping[str, Any]) -> str:
    """Return an object's members as nested HTML lists."""
    if "$ref" in schema:
        schema = components[schema["$ref"].removeprefix(SCHEMAS)]
    items = [
        f"<li><code>{escape(name)}</code> {_type_name(member)}{_member_list(member, components)}</li>"
        for name, member in schema.get("properties", {}).items()
    ]
    own_list = f"<ul>{''.join(items)}</ul>" if items else ""
    inner = [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])]
    return own_list + "".join(_member_list(branch, components) for branch in inner)


def _type_name(schema: Mapping[str, Any]) -> str:
    """Return the types of a schema in words."""
    kinds = schema.get("type", "any")
    names = [kinds] if isinstance(kinds, str) else kinds
    names = [_type_name(branch) for branch in schema["anyOf"]] if "anyOf" in schema else names
    return " or ".join(dict.fromkeys(name for name in names if name != "null"))
