"""The generated pages match the readers, and the survey they are made from finds every member that a reader reads."""

import json
import runpy
import sys
from functools import cache
from pathlib import Path
from typing import Any

from parley.dialects.dialect import Head, Route
from parley.dialects.facts import Card, Facts
from parley.dialects.fields import decode
from parley.dialects.tgi import STRICT, document
from parley.errors import Unsupported

DOCS = Path(__file__).resolve().parents[2] / "docs"
HEAD = Head("0f", 1700000000, "fp_1", context=100)
FACTS = Facts("1", [Card("m", 1, 100)], True)


@cache
def script() -> dict[str, Any]:
    try:
        return runpy.run_path(str(DOCS / "compatibility.py"))
    finally:
        sys.path.remove(str(DOCS))


def test_generated_pages_match_readers():
    made = script()
    page = made["page"]()
    assert made["PAGE"].read_text("utf-8") == page, "docs/compatibility.md is old: make docs"
    assert made["OPENAPI"].read_text("utf-8") == made["openapi"](), "openapi.json is old: make docs"
    untested = [line for line in page.splitlines() if line.endswith("|  |")]
    assert not untested, "members that no test names"


def test_survey_finds_members_of_a_reader():
    def read(body: bytes, head: Head) -> Any:
        fields = decode(body)
        fields.integer("n", 1, 1, 9)
        inner = fields.object("inner")
        if inner is not None:
            inner.string("kind", None, allowed=("x", "y"))
        if fields.boolean("magic", False):
            raise Unsupported("not available")
        if fields.raw("later") is not None:
            raise Unsupported("not available")
        fields.integer("pair", None, 1, 0)

    found = script()["survey"].__globals__["members"](Route("POST", "/x", "generate", read=read))
    assert {path: (member.type, member.range, member.state) for path, member in found.items()} == {
        "n": ("integer", "1..9", "yes"),
        "inner": ("object", "", "yes"),
        "inner.kind": ("string", "", "yes"),
        "magic": ("boolean", "", "in part"),
        "later": ("any", "", "refused"),
        "pair": ("integer", "1..0", "not alone"),
    }
    assert found["inner.kind"].allowed == ("x", "y")


def test_openapi_document_names_every_route_and_member():
    told = json.loads(document.openapi(b"", HEAD, FACTS).body)
    assert {(m.upper(), path) for path, ways in told["paths"].items() for m in ways} == {
        (route.method, route.path) for route in STRICT.routes
    }
    schema = told["paths"]["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    wishes = schema["properties"]["parameters"]["properties"]
    assert wishes["max_new_tokens"] == {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
    assert wishes["stop"] == {"type": "array", "items": {"type": "string"}}
    assert wishes["grammar"]["properties"]["type"]["enum"] == ["json", "json_object", "regex", "json_schema"]
    status, page, type_ = document.page("", b"", HEAD, FACTS)
    assert (status, type_) == (200, b"text/html; charset=utf-8")
    assert b"<code>POST /generate_stream</code>" in page and b"<code>typical_p</code> number" in page
