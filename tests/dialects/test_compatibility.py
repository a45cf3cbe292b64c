"""The generated pages match the readers, and the survey they are made from finds every member that a reader reads."""

import json
import runpy
import sys
from functools import cache
from pathlib import Path
from typing import Any

from parley.dialects.facts import ModelCard, ServerFacts
from parley.dialects.fields import decode_fields
from parley.dialects.mounts import API_MOUNTS
from parley.dialects.openapi_bodies import find_bodies
from parley.dialects.request_context import RequestContext
from parley.dialects.route import Route
from parley.dialects.tgi import STRICT
from parley.errors import Unsupported

DOCS = Path(__file__).resolve().parents[2] / "docs"
CONTEXT = RequestContext("0f", 1700000000, "fp_1", context_length=100)
FACTS = ServerFacts("1", [ModelCard("m", 1, 100)], True)


@cache
def load_page_script() -> dict[str, Any]:
    try:
        return runpy.run_path(str(DOCS / "compatibility.py"))
    finally:
        sys.path.remove(str(DOCS))


@cache
def generate_pages() -> dict[Path, str]:
    pages: dict[Path, str] = load_page_script()["all_pages"]()
    return pages


def test_generated_pages_match_readers():
    pages = generate_pages()
    for file, page in pages.items():
        assert file.read_text("utf-8") == page, f"{file.relative_to(DOCS.parent)} is old: make docs"
    assert {DOCS / "compatibility.md", *DOCS.glob("compatibility/*")} == set(pages)
    untested = [line for page in pages.values() for line in page.splitlines() if line.endswith("|  |")]
    assert not untested, "members that no test names"


def test_every_api_has_a_page_that_lists_its_routes():
    generator, pages = load_page_script(), generate_pages()
    index = pages[DOCS / "compatibility.md"]
    for surface in API_MOUNTS:
        api = next(
            api
            for api, columns in generator["dialects_by_api"]().items()
            if surface.dialect in [dialect for _, dialect in columns]
        )
        assert f"(compatibility/{api}.md)" in index
        page = pages[DOCS / "compatibility" / f"{api}.md"]
        for route in surface.dialect.routes:
            assert f"`{route.method} {route.path}`" in page


def test_survey_finds_members_of_a_reader():
    def read(body: bytes, context: RequestContext) -> Any:
        fields = decode_fields(body)
        fields.integer("n", 1, 1, 9)
        inner = fields.object("inner")
        if inner is not None:
            inner.string("kind", None, allowed=("x", "y"))
        if fields.boolean("magic", False):
            raise Unsupported("not available")
        if fields.raw_value("later") is not None:
            raise Unsupported("not available")
        fields.integer("pair", None, 1, 0)

    members = load_page_script()["survey_dialect"].__globals__["survey_route"](
        Route("POST", "/x", "generate", reader=read)
    )
    assert {path: (member.type, member.range, member.state) for path, member in members.items()} == {
        "n": ("integer", "1..9", "yes"),
        "inner": ("object", "", "yes"),
        "inner.kind": ("string", "", "yes"),
        "magic": ("boolean", "", "in part"),
        "later": ("any", "", "refused"),
        "pair": ("integer", "1..0", "not alone"),
    }
    assert members["inner.kind"].allowed == ("x", "y")


MEDIA_OPTIONS = {"media_io_kwargs", "mm_processor_kwargs"}  # a model of text ignores them where it only tokenizes


def test_schemas_of_bodies_name_every_member():
    """A member that a reader gained after the last ``make openapi`` is in no schema."""
    generator, missing = load_page_script(), []
    for api, columns in generator["dialects_by_api"]().items():
        for prefix, dialect in columns:
            for (method, path), members in generator["survey_api"](api)[prefix].items():
                routes = [route for route in dialect.routes if (route.method, route.path) == (method, path)]
                found = [known for route in routes for known in find_bodies(route, dialect)]
                described = [known for known in found if "schema" in known]
                names = {name for known in described for name in top_members(known)}
                for name, member in members.items():
                    is_top = "." not in name and "[" not in name and name not in MEDIA_OPTIONS
                    if described and is_top and member.state != "not alone" and name not in names:
                        missing.append((dialect.body_schemas, method, path, name))
    assert not missing, f"make openapi: {missing}"


def top_members(known: dict[str, Any]) -> set[str]:
    """Return the members of a body that its schema or its description names."""
    schema = known.get("schema", {})
    variants = schema.get("anyOf", [schema])
    return {*known.get("left_out", ()), *(name for variant in variants for name in variant.get("properties", ()))}


def test_tgi_documents_its_routes():
    dialect = STRICT
    routes = {(route.method, route.path): route for route in dialect.routes}
    openapi = json.loads(routes["GET", "/api-doc/openapi.json"].reader(b"", CONTEXT, FACTS).body)
    assert {(m.upper(), path) for path, ways in openapi["paths"].items() for m in ways} == {
        place for place in routes if place[1] not in ("/api-doc/openapi.json", "/docs", "/docs/")
    }
    reference = openapi["paths"]["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = openapi["components"]["schemas"][reference.rpartition("/")[2]]
    parameters = schema["properties"]["parameters"]["properties"]
    assert parameters["max_new_tokens"] == {"type": ["integer", "null"], "minimum": 1, "maximum": 2**32 - 1}
    assert parameters["stop"]["items"]["type"] == "string" and parameters["stop"]["maxItems"] == 4
    status, page, type_ = routes["GET", "/docs"].reader(b"", CONTEXT, FACTS)
    assert (status, type_) == (200, b"text/html; charset=utf-8")
    assert b"<code>POST /generate_stream</code>" in page and b"<code>typical_p</code> number" in page
