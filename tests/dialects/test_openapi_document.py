"""The OpenAPI documents: valid, complete, and true: bodies drawn from their schemas are taken by the readers."""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.http_client import fill_path

from parley.dialects import openai
from parley.dialects.dialect import Dialect
from parley.dialects.facts import ModelCard, ServerFacts
from parley.dialects.mounts import (
    ADMIN_PLANES,
    DEDICATED_APIS,
    DOCUMENT_PATH,
    GRPC_CALLS,
    INSTANCE_PLANE,
    ApiMount,
    dedicated_mounts,
    mount_table,
    universal_mounts,
)
from parley.dialects.openapi_bodies import body_key, body_table, find_bodies, with_served_values
from parley.dialects.request_context import RequestContext
from parley.dialects.route import Route
from parley.errors import ParleyError

ROOT = Path(__file__).parents[2]
NIGHTLY = bool(os.environ.get("PARLEY_NIGHTLY"))
DRAWS = 300 if NIGHTLY else 3  # bodies of each route
CONTEXT = RequestContext("0f", 1, "fp")
FACTS = ServerFacts("1.2", [ModelCard("tiny", 1, 4096), ModelCard("other", 1, 4096)], True)
PORTS: dict[str, tuple[ApiMount, ...]] = {
    "all": universal_mounts(),
    "strict": universal_mounts(strict=True, tgi_compat="0.9.4"),
    **{name: dedicated_mounts(name, apis=DEDICATED_APIS | ADMIN_PLANES) for name in (*DEDICATED_APIS, *ADMIN_PLANES)},
    "several": dedicated_mounts("ollama", "openai"),
}


@cache
def load_generator() -> dict[str, Any]:
    try:
        return runpy.run_path(str(ROOT / "docs" / "openapi.py"))
    finally:
        sys.path.remove(str(ROOT / "docs"))


@cache
def documents(port: str) -> dict[str, dict[str, Any]]:
    """Return the documents of a port by their paths."""
    found = {}
    for (_, path), answering in mount_table(PORTS[port]).items():
        if path in {f"{mount.prefix}{DOCUMENT_PATH}" for mount in PORTS[port]}:
            assert answering[0][0].reader is not None
            found[path] = json.loads(answering[0][0].reader(b"", CONTEXT, FACTS).body)
    return found


def test_every_prefix_and_port_has_a_document():
    assert set(documents("all")) == {f"{mount.prefix}{DOCUMENT_PATH}" for mount in PORTS["all"]}
    for port in PORTS.keys() - {"all", "strict"}:
        assert set(documents(port)) == {DOCUMENT_PATH}


@pytest.mark.parametrize("port", PORTS if NIGHTLY else ["all", "tgi", "several"])
def test_documents_are_valid(port):
    validator = jsonschema.Draft202012Validator(json.loads((ROOT / "tests/data/openapi/schema-3.1.json").read_text()))
    for document in documents(port).values():
        components = document["components"] | {"schemas": {name: {} for name in document["components"]["schemas"]}}
        validator.validate(document | {"components": components})  # the schemas are tested below
        ids = [way["operationId"] for ways in document["paths"].values() for way in ways.values()]
        assert len(ids) == len(set(ids))
        for reference in set(re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(document))):
            target = document
            for part in reference.split("/"):
                target = target[part]
        for path, ways in document["paths"].items():
            for operation in ways.values():
                named = [
                    parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"
                ]
                assert named == re.findall(r"\{(\w+)\}", path), path


def test_route_that_refuses_every_request_has_no_answer_but_errors():
    responses = documents("all")["/ollama" + DOCUMENT_PATH]["paths"]["/api/create"]["post"]["responses"]
    assert "200" not in responses and "400" in responses
    responses = documents("all")["/tei" + DOCUMENT_PATH]["paths"]["/embed_sparse"]["post"]["responses"]
    assert set(responses["422"]["content"]) == {"application/json", "text/plain"} and "424" in responses


@pytest.mark.parametrize("schema", body_table()["schemas"][:: 1 if NIGHTLY else 20])
def test_schemas_are_valid(schema):
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("port", PORTS)
def test_documents_have_exactly_the_routes(port):
    for prefix in {mount.prefix for mount in PORTS[port]}:
        served = {
            (route.method, re.sub(r":\w+\}", "}", route.path))
            for mount in PORTS[port]
            if mount.prefix == prefix and mount.dialect is not GRPC_CALLS
            for route in mount.dialect.routes
            if route not in INSTANCE_PLANE.routes and not route.path.endswith(DOCUMENT_PATH)
        }
        document = documents(port)[prefix + DOCUMENT_PATH]
        described = {(way.upper(), path) for path, ways in document["paths"].items() for way in ways}
        assert {place for place in described if not place[1].endswith(DOCUMENT_PATH)} == served
        assert document["servers"] == [{"url": prefix or "/"}]


def bodies_of_all_apis() -> list[tuple[Dialect, Route]]:
    dialects = {mount.dialect.body_schemas: mount.dialect for mounts in PORTS.values() for mount in mounts}
    return [
        (dialect, route)
        for dialect in dialects.values()
        for route in dialect.routes
        if find_bodies(route, dialect) and len(route.body_paths) != 1  # one that reads what another route reads
    ]


def test_every_schema_of_a_body_belongs_to_a_route():
    table = body_table()
    generated = {(dialect.body_schemas, body_key(route)) for dialect, route in load_generator()["all_routes"]()}
    assert {(name, key) for name, keys in table["surfaces"].items() for key in keys} <= generated
    used = {known["schema"] for keys in table["surfaces"].values() for known in keys.values() if "schema" in known}
    assert used == set(range(len(table["schemas"])))


@pytest.mark.skipif(not NIGHTLY, reason="learning all schemas again takes minutes")
def test_learning_again_finds_the_same_schemas():
    learned = load_generator()["learn_all"]()
    assert json.loads(json.dumps(learned)) == body_table()


@pytest.mark.parametrize(("path", "member"), [("/api/chat", "messages"), ("/api/embed", "input")])
def test_schemas_are_learned_from_bodies_that_ask_for_something(path, member):
    """Ollama's routes answer a body without texts at once, and read none of its other members."""
    generator = load_generator()
    dialect, route = next((dialect, route) for dialect, route in bodies_of_all_apis() if route.path == path)
    learned, (known,) = generator["learn_route"](route), find_bodies(route, dialect)
    assert learned["acknowledged"] == [member] and {member, "model"} <= set(learned["schema"]["required"])
    assert learned["schema"] == known["schema"]


def test_bodies_that_a_server_stores_are_learned():
    generator = load_generator()
    uploading, deleting = (
        next(route for route in openai.DIALECT.routes if (route.method, route.path) == wanted)
        for wanted in (("POST", "/v1/files"), ("DELETE", "/v1/files/{id}"))
    )
    file_schema = generator["learn_route"](uploading)["schema"]
    assert set(file_schema["required"]) == {"file", "purpose"}
    purposes = ["batch", "user_data", "vision", "assistants"]
    assert file_schema["properties"]["purpose"] == {"type": "string", "enum": purposes}
    assert generator["learn_route"](deleting) is None  # an id that is not there is no reason to refuse a body


def test_random_valid_bodies_are_accepted():
    """The readers accept every valid body. Members whose conflicts no schema can express are not drawn together."""
    generator, source = load_generator(), random.Random(random.randrange(1 << 32) if NIGHTLY else 2)
    refused, drawn = [], 0
    for dialect, route in bodies_of_all_apis():
        bodies = find_bodies(route, dialect)
        assert bodies
        for known in bodies:
            for _ in range(DRAWS if "schema" in known else 0):
                body = generator["draw_value"](known["schema"], source)
                drawn += 1
                try:
                    generator["read_for"](route, known.get("needs", ""), body)
                except ParleyError as error:
                    refused.append((dialect.body_schemas, body_key(route), body, error.message))
    assert drawn >= DRAWS * 150
    assert len(refused) <= drawn // 4000, refused


@pytest.mark.parametrize("value", [{"a": [{"b": 1}], "c": []}, ["x", True], {}, []], ids=json.dumps)
def test_constants_with_a_structure_are_written_as_schemas(value):
    schema = with_served_values({"const": value}, {})
    assert '"const": {' not in json.dumps(schema) and '"const": [' not in json.dumps(schema)
    for other in (value, {"a": [{"b": 2}], "c": []}, {"a": [{"b": 1}]}, ["x", True, 1], ["x", False], [1], {"d": 1}):
        assert jsonschema.Draft202012Validator(schema).is_valid(other) == (other == value)


def test_models_and_errors_are_those_of_the_server():
    document = documents("all")[DOCUMENT_PATH]
    assert document["components"]["schemas"]["ModelName"]["enum"] == ["tiny", "other"]
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/V1ChatCompletions"
    }
    schema = document["components"]["schemas"]["V1ChatCompletions"]
    assert schema["required"] == ["messages"]
    assert schema["properties"]["temperature"] == {"type": ["number", "null"], "minimum": 0, "maximum": 2}
    needs_stream = {"properties": {"stream": {"type": "boolean", "enum": [True]}}, "required": ["stream"]}
    assert schema["dependentSchemas"]["stream_options"] == needs_stream
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        answers = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert {"application/json", "text/event-stream"} <= answers.keys(), path
    assert "application/x-ndjson" in document["paths"]["/api/generate"]["post"]["responses"]["200"]["content"]
    error = document["components"]["responses"]["openai-400"]["content"]["application/json"]["schema"]
    assert error["properties"]["error"]["required"] == ["message", "type", "param", "code"]
    strict = documents("all")["/tgi" + DOCUMENT_PATH]
    assert strict["paths"]["/generate"]["post"]["responses"].keys() >= {"200", "422", "429"}


async def test_documents_need_a_key_like_other_information(serve):
    server = await serve(api_keys=("sk-right-key-0123456789",))
    for path in documents("all"):
        assert (await server.get(path)).status == (await server.get("/v1/models")).status == 401
        answer = await server.get(path, authorization="Bearer sk-right-key-0123456789")
        assert answer.status == 200 and answer.json["openapi"] == "3.1.0"


async def test_every_documented_route_exists(serve):
    server = await serve()
    for path, document in documents("all").items():
        prefix = path.removesuffix(DOCUMENT_PATH)
        for template, ways in document["paths"].items():
            for way in ways:
                answer = await server.call(way.upper(), fill_path(prefix + template), None)
                assert answer.status != 405 and b"Unknown request URL" not in answer.body, (way, template)


def with_components(document: dict[str, Any], schema: Any) -> Any:
    """Return a schema with components in place of references to them."""
    if isinstance(schema, list):
        return [with_components(document, item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return with_components(document, document["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    return {name: with_components(document, member) for name, member in schema.items()}


async def test_server_accepts_bodies_of_its_documents(serve):
    server, source = await serve(), random.Random(3)
    refused = []
    for document in [(await server.get(path)).json for path in (documents("all") if NIGHTLY else [DOCUMENT_PATH])]:
        prefix = document["servers"][0]["url"].rstrip("/")
        operations = [
            (path, way, operation)
            for path, ways in document["paths"].items()
            for way, operation in ways.items()
            if operation["summary"] in ("Generate", "Turn text into tokens", "Turn tokens into text")
            and "The body is as for" not in operation.get("description", "")
            and "Every request is refused" not in operation.get("description", "")
        ]
        for path, way, operation in operations[:: 1 if NIGHTLY else 3]:
            schema = with_components(document, operation["requestBody"]["content"]["application/json"]["schema"])
            required = [parameter for parameter in operation.get("parameters", ()) if parameter["in"] == "header"]
            headers = {
                parameter["name"]: parameter["schema"]["enum"][0] for parameter in required if parameter.get("required")
            }
            for _ in range(10 if NIGHTLY else 1):
                body = load_generator()["draw_value"](schema, source)
                if isinstance(body.get("parameters"), dict):
                    body["parameters"].pop("timeout", None)  # a loaded machine may need longer
                body.pop("lora_name", None)  # the server has no adapter
                body.pop("safety_mode", None)  # the documents are for models whose template has these modes
                if body.get("text_input") == "":
                    body["text_input"] = "a"  # this tokenizer makes no token of an empty text, others make one
                answer = await server.call(way.upper(), fill_path(prefix + path), body, headers)
                if answer.status != 200:
                    refused.append((path, body, answer.status, answer.body))
    assert not refused
