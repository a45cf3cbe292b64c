"""The OpenAPI documents of APIs, from their tables of routes and the schemas of the bodies that these read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from parley.dialects.dialect import Dialect
from parley.dialects.facts import ServerFacts
from parley.dialects.openapi_bodies import (
    LEARNED_CONTEXT,
    LEARNED_VOCABULARY,
    MODEL_REFERENCE,
    PROMPT_ROOM,
    SCHEMAS,
    Json,
    body_notes,
    find_bodies,
    output_room,
    with_dependencies,
    with_model_name,
    with_served_values,
)
from parley.dialects.openapi_errors import (
    ENGINE_KINDS,
    SAMPLE_ERRORS,
    error_statuses,
    expected_errors,
    merge_schemas,
    schema_of_example,
)
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.route import Route, RouteKind

PlacedRoutes = Mapping[tuple[str, str], Sequence[tuple[Route, Dialect]]]  # by method and path, the default first

NO_BODY: Json = {"not": {}}
EMPTY_KINDS: frozenset[RouteKind] = frozenset({"health", "live", "ready", "reset"})
SUMMARIES: dict[RouteKind, str] = {
    "generate": "Generate",
    "embed": "Compute vectors, scores or classes",
    "render": "Turn a prompt into tokens, or tokens into an answer",
    "tokenize": "Turn text into tokens",
    "detokenize": "Turn tokens into text",
    "models": "List the models",
    "model": "Describe a model",
    "tokenizer": "Describe the tokenizer",
    "version": "Report the version",
    "server_info": "Describe the server",
    "abort": "Abort a request",
    "abort_list": "Abort requests",
    "adapter": "Load or unload an adapter",
    "load": "Report the load",
    "reset": "Clear the prefix cache",
    "reset_media": "Drop the processed media that are kept",
    "health": "Report whether the server is ready",
    "live": "Report whether the server lives",
    "ready": "Report whether the server is ready",
    "stored": "Read or change stored records",
    "socket": "Open a WebSocket for requests of this path",
    "info": "Describe the server or its models",
    "summed_info": "Describe the server or its models",
    "endpoint": "Read or change endpoints",
    "probe": "Report the state of the server",
    "self_test": "Generate a token, to see whether the engine works",
    "pause": "Pause or resume admission",
    "pull": "Get a model",
    "stop": "Stop the server",
    "metrics": "Report metrics",
    "page": "Show the web page",
    "activity": "Report what the status page shows",
    "usage": "Report what each API key has used",
    "results": "Stream the results of requests that were handed over",
    "results_flow": "Pause or resume results",
    "role": "Take a role",
    "instance_status": "Report role and resources",
}
DESCRIPTION = (
    "Made from the readers of this server's requests: a body that is valid here is taken by a model of text that has"
    " the abilities that its members ask for. Other members are allowed; those that are read under conditions that a"
    " schema cannot say are listed with their operations. Limits that depend on the model hold besides: the length of"
    " its context, its vocabulary, its adapters, and what it reads besides text. The bounds of numbers of tokens leave"
    f" room for a prompt of {PROMPT_ROOM} tokens, or of half the context."
)
FORMATS = (
    "Strings with the format `regex` are regular expressions, and those with the format `json` JSON texts."
    " Tools of one request have different names, and requests of one batch different ids. A conversation that has to"
    " begin with a user's message has to end with one, too, if the model thinks before it answers."
)


class DocumentedModels(NamedTuple):
    """Facts about the models of a server, for documents. ``context_length`` and ``vocabulary`` are the least of all,
    None until a model is loaded."""

    names: tuple[str, ...]
    context_length: int | None = None
    vocabulary: int | None = None

    @property
    def bounds(self) -> Mapping[int, int]:
        """The bounds that stand for the learned ones."""
        learned, context = LEARNED_CONTEXT, self.context_length or LEARNED_CONTEXT
        return {
            output_room(learned): output_room(context),
            learned - 1: context - 1,
            learned: context,
            LEARNED_VOCABULARY - 1: (self.vocabulary or LEARNED_VOCABULARY) - 1,
        }


def describe_models(facts: ServerFacts) -> DocumentedModels:
    """Return the facts about the models, for documents."""
    lengths = [card.max_model_len for card in facts.cards if card.max_model_len is not None]
    vocabularies = [card.info.vocab_size for card in facts.cards if card.info is not None]
    vocabularies += [card.tokenizer_size for card in facts.cards if card.tokenizer_size is not None]
    names = tuple(dict.fromkeys(card.name for card in facts.cards))
    return DocumentedModels(names, min(lengths, default=None), min(vocabularies, default=None))


class OpenApiDocument:
    """The reader that answers with the OpenAPI document of some routes, built when it is asked for.

    ``base_url``: paths of routes are relative to it. ``version``: of the API, if it is not the server's.
    """

    def __init__(self, title: str, base_url: str, places: PlacedRoutes, version: str = ""):
        self.title, self.base_url, self.places, self.version = title, base_url, places, version
        self._built: tuple[object, Answer] | None = None  # the last document, and the values that it depends on

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpenApiDocument) and self._described == other._described

    def __hash__(self) -> int:
        return hash((self.title, self.base_url, self.version))

    @property
    def _described(self) -> tuple[object, ...]:
        return self.title, self.base_url, self.version, self.places

    def __call__(self, body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
        """Answer a request for the document."""
        served = describe_models(facts)
        version = self.version or facts.version
        if self._built is None or self._built[0] != (version, served):
            base_url = (facts.root_path + self.base_url).rstrip("/") or "/"
            document = build_document(self.title, base_url, self.places, version, served)
            self._built = (version, served), Answer(200, document)
        return self._built[1]


def build_document(title: str, base_url: str, places: PlacedRoutes, version: str, served: DocumentedModels) -> bytes:
    """Return the OpenAPI 3.1 document of routes, as JSON."""
    writer = _DocumentWriter(served)
    paths: dict[str, Json] = {}
    for (method, path), answering in places.items():
        template = re.sub(r"\{(\w+):\w+\}", r"{\1}", path)
        paths.setdefault(template, {})[method.lower()] = writer.write_operation(method, template, answering)
    dialects = {dialect.title: dialect for answering in places.values() for _, dialect in answering}
    document = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version, "description": f"{DESCRIPTION} {FORMATS}"},
        "servers": [{"url": base_url}],
        "security": [{}, {"bearer": []}, {"api-key": []}, {"x-api-key": []}],
        "tags": [{"name": name} for name in dialects],
        "paths": paths,
        "components": {
            "schemas": writer.schemas,
            "responses": writer.responses,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "Where the server has API keys."},
                **{name: {"type": "apiKey", "in": "header", "name": name} for name in ("api-key", "x-api-key")},
            },
        },
    }
    return msgspec.json.encode(document)


class _DocumentWriter:
    """Writes the operations of one document, and collects the components that they refer to."""

    def __init__(self, served: DocumentedModels):
        self._bounds = served.bounds
        names = list(served.names)
        self.schemas: dict[str, Json] = {
            "ModelName": {"type": "string"}
            | ({"enum": names, "description": "A model that is served."} if names else {})
        }
        self.responses: dict[str, Json] = {}
        self._dialects: dict[str, Dialect] = {}  # those whose errors are described, by their names
        self._body_names: dict[int, str] = {}  # by the identity of the learned schema, which the table keeps alive

    def write_operation(self, method: str, path: str, answering: Sequence[tuple[Route, Dialect]]) -> Json:
        """Return the operation of a method and path: the body decides which of these routes answers."""
        answering = [mounted for mounted in answering if not mounted[0].for_encoders] or answering
        route = answering[0][0]
        titles = list(dict.fromkeys(dialect.title for _, dialect in answering))
        operation: Json = {
            "operationId": _operation_id(method, path),
            "summary": SUMMARIES[route.kind],
            "tags": titles,
        }
        if parameters := self._parameter_objects(path, answering):
            operation["parameters"] = parameters
        notes = ["The members of the body decide which API answers."] if len(answering) > 1 else []
        bodies = [(known_body, route) for route, dialect in answering for known_body in find_bodies(route, dialect)]
        if bodies:
            operation["requestBody"] = self._request_body(path, method, bodies)
            for known_body, _ in bodies:
                notes += body_notes(known_body)
        if not bodies and route.kind in ENGINE_KINDS:  # no schema was learned
            operation["requestBody"] = {"content": {"application/json": {}}, "required": True}
        if notes:
            operation["description"] = " ".join(notes)
        operation["responses"] = self._answer_objects(path, answering, [known_body for known_body, _ in bodies])
        return operation

    def _parameter_objects(self, path: str, answering: Sequence[tuple[Route, Dialect]]) -> list[Json]:
        parameters: list[Json] = [
            {
                "name": name,
                "in": "path",
                "required": True,
                "schema": MODEL_REFERENCE if name == "model" else {"type": "string", "minLength": 1},
            }
            for name in re.findall(r"\{(\w+)\}", path)
        ]
        for route, _ in answering:
            parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()]
            if route.claiming_header:
                parameters.append(
                    {"name": route.claiming_header.decode(), "in": "header", "schema": {"type": "string"}}
                )
        headers = {
            header
            for route, dialect in answering
            for known_body in find_bodies(route, dialect)
            for header in map(tuple, known_body.get("headers", ()))
        }
        parameters += [
            {"name": name, "in": "header", "required": True, "schema": {"type": "string", "enum": [value]}}
            for name, value in sorted(headers)
        ]
        return parameters

    def _request_body(self, path: str, method: str, bodies: Sequence[tuple[Json, Route]]) -> Json:
        content: dict[str, Json] = {}
        for known_body, route in bodies:
            media_type = "multipart/form-data" if route.reads_form else "application/json"
            schema = self._body_reference(path, method, known_body["schema"]) if "schema" in known_body else NO_BODY
            if media_type in content and content[media_type]["schema"] != schema:
                others = content[media_type]["schema"]
                schema = {"anyOf": [*others.get("anyOf", [others]), schema]}
            content[media_type] = {"schema": schema}
        required = all("schema" in known_body for known_body, _ in bodies)
        return {"content": content} | ({"required": True} if required else {})

    def _body_reference(self, path: str, method: str, schema: Json) -> Json:
        """Return a reference to the component of a body's schema. Variants of a body have components of their own,
        because generators of clients name the types inside a component after it."""
        name = self._body_names.get(id(schema))
        if name is None:
            words = re.findall(r"[a-zA-Z0-9.]+", path)
            stem = "".join(word[:1].upper() + word[1:] for word in words) or "Root"
            name = self._body_names[id(schema)] = self._add_component(
                stem if method == "POST" else method.capitalize() + stem
            )
            variants = [
                with_dependencies(with_model_name(with_served_values(variant, self._bounds)))
                for variant in schema.get("anyOf", [schema])
            ]
            self.schemas[name] |= (
                {"anyOf": self._variant_references(name, variants)} if len(variants) > 1 else variants[0]
            )
        return {"$ref": SCHEMAS + name}

    def _variant_references(self, name: str, variants: list[Json]) -> list[Json]:
        references = []
        for variant in variants:
            members_elsewhere = {
                name for other in variants if other is not variant for name in other.get("required", ())
            }
            own_member = next(
                (name for name in variant.get("required", ()) if name not in members_elsewhere), "variant"
            )
            variant_name = self._add_component(name + "".join(map(str.capitalize, own_member.split("_"))))
            self.schemas[variant_name] |= variant
            references.append({"$ref": SCHEMAS + variant_name})
        return references

    def _add_component(self, stem: str) -> str:
        """Add an empty schema, and return its name."""
        names = (f"{stem}{number if number > 1 else ''}" for number in range(1, 99))
        name = next(candidate for candidate in names if candidate not in self.schemas)
        self.schemas[name] = {}
        return name

    def _answer_objects(
        self, path: str, answering: Sequence[tuple[Route, Dialect]], bodies: Sequence[Json]
    ) -> dict[str, Json]:
        """Return the answers of an operation by their statuses."""
        route = answering[0][0]
        contents: dict[str, Json] = {"200": {}}
        if bodies and not any("schema" in known_body for known_body in bodies):  # every request is refused
            contents = {}
        elif route.kind == "metrics":
            contents["200"] = {"text/plain": {"schema": {"type": "string"}}}
        elif route.kind not in EMPTY_KINDS and route.method != "HEAD":
            contents["200"] = {content_type.partition(";")[0]: {} for content_type in route.content_types}
        for status, content_type in (answer for known_body in bodies for answer in known_body.get("answers", ())):
            contents.setdefault(str(status), {}).update({content_type: {}} if content_type else {})
        references: dict[str, list[str]] = {}
        for _, dialect in answering:
            for status in error_statuses(dialect, expected_errors(route, path, bool(bodies))):
                references.setdefault(status, []).append(dialect.name)
                self._dialects[dialect.name] = dialect
        answers: dict[str, Json] = {}
        for status in (*contents, *references.keys() - contents.keys()):
            if status in contents:
                content = {**self._error_content(references.get(status, ()), status), **contents[status]}
                answers[status] = {"description": "The answer."} | ({"content": content} if content else {})
            else:
                answers[status] = self._error_reference(references[status], status)
        return dict(sorted(answers.items()))

    def _error_reference(self, api_names: Sequence[str], status: str) -> Json:
        """Return a reference to the component of the errors that these APIs answer with a status."""
        name = "-".join([*dict.fromkeys(api_names), status])
        if name not in self.responses:
            content = self._error_content(api_names, status)
            described: Json = {"description": f"{_status_phrase(int(status))}."}
            self.responses[name] = described | ({"content": content} if content else {})
        return {"$ref": f"#/components/responses/{name}"}

    def _error_content(self, api_names: Sequence[str], status: str) -> dict[str, Json]:
        """Return the content of errors with a status in the forms of these APIs, by content type."""
        schemas: dict[str, Json] = {}
        for name in dict.fromkeys(api_names):
            for error in SAMPLE_ERRORS:
                answer = self._dialects[name].render_error(error)
                content_type = answer.content_type.decode().partition(";")[0]
                if str(answer.status) == status and content_type and answer.body:
                    schema = schema_of_example(content_type, answer.body)
                    schemas[content_type] = merge_schemas(schemas.get(content_type, schema), schema)
        return {content_type: {"schema": schema} for content_type, schema in schemas.items()}


def _status_phrase(status: int) -> str:
    """Return the name of a status, also of one that only an API has."""
    return next((http_status.phrase for http_status in HTTPStatus if http_status == status), "The server is overloaded")


def _operation_id(method: str, path: str) -> str:
    words = re.findall(r"[a-zA-Z0-9]+", path)
    return "_".join([method.lower(), *words, *(["slash"] if len(path) > 1 and path.endswith("/") else [])])
