"""Writes ``parley/dialects/bodies.json``: JSON schemas of the bodies of all APIs, learned from their readers.

``make openapi`` takes some minutes. ``dialects/openapi_document.py`` makes the served documents of it.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from body_schemas import SchemaLearner
from random_bodies import ANY_VALUES, draw_value
from refine_schemas import CannotRefine, refine_schema
from survey import CLASSIFIER_CONTEXT, CONTEXT, SPARSE_CONTEXT, SurveyedRecords, call_reader, encode_body

from parley.dialects.admin_requests import DetokenizeRequest
from parley.dialects.dialect import Dialect
from parley.dialects.mindie import service_dialect
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mounts import API_MOUNTS
from parley.dialects.openapi_bodies import LEARNED_CONTEXT, LEARNED_MODEL, LEARNED_VOCABULARY, body_key, output_room
from parley.dialects.openapi_errors import SAMPLE_ERRORS
from parley.dialects.records import NoRecords
from parley.dialects.render_reply import AnswerRenderer, PromptRenderer
from parley.dialects.reply import Acknowledgement, Answer, Reply
from parley.dialects.request_context import ApiOptions, RequestContext
from parley.dialects.route import Route
from parley.errors import BadRequest, InvalidValue, MissingField, ParleyError, UnknownRecord
from parley.text.grammar.answer_compiler import AnswerGrammarCompiler, may_be_any_text
from parley.text.parsing.markup import Markup
from parley.types import Request, TokensPrompt


class PlainVocabulary:
    """A vocabulary without marks, for grammars."""

    marks: Mapping[str, int] = {}
    vocab_size = LEARNED_VOCABULARY
    decodes_by_token = True

    def find_token(self, token: int | str) -> int | None:
        """Return the id of a token that is given by its id."""
        return token if isinstance(token, int) and token < LEARNED_VOCABULARY else None


ANSWER_COMPILER = AnswerGrammarCompiler(PlainVocabulary(), Markup())
ANSWER_DRAWS = 60  # bodies whose answers are looked at
BODIES = Path(__file__).resolve().parents[1] / "parley" / "dialects" / "bodies.json"
# The models that a route may need, the usual one first: a text model with every ability.
MODELS: dict[str, RequestContext] = {
    "": replace(CONTEXT, media_limits={}, api_options=ApiOptions()),
    "a model that reads media": replace(CONTEXT, api_options=ApiOptions()),
    "a classifier": replace(CLASSIFIER_CONTEXT, media_limits={}, api_options=ApiOptions()),
    "a sparse embedding model": replace(SPARSE_CONTEXT, media_limits={}, api_options=ApiOptions()),
}


class NewRecords(NoRecords):
    """Records of a server that keeps them and has one file."""

    are_kept = True
    largest_record = SurveyedRecords.largest_record

    def save_record(self, name: str, data: bytes, parts: Sequence[str] = ()) -> bool:
        """Return True: the record is small enough."""
        return True

    def find_part(self, part: str) -> bytes | None:
        """Return the file if this is its part."""
        return SurveyedRecords().find_part(part)


def read_for(route: Route, model: str, body: Any, without: bytes = b"") -> Any:
    """Return what the reader makes of a body for a model of ``MODELS``. ``without``: a header that the request lacks.
    Raises ParleyError if it is refused, or asks for nothing to be generated: readers ignore other members then."""
    answer = read_request(route, model, body, without)
    if isinstance(answer, Acknowledgement):
        raise MissingField("The body asks for nothing to be generated.")
    if isinstance(answer, Answer) and answer.status >= 400:
        raise BadRequest(answer.body.decode())
    if isinstance(answer, Reply):
        check_like_server(answer.request)
    if isinstance(answer, AnswerRenderer):
        check_token_ids([token_id for output in answer.outputs for token_id in output.token_ids])
    if isinstance(answer, DetokenizeRequest) and not answer.ignore_unknown:
        check_token_ids([*answer.token_ids, *chain(*answer.further_ids)])
    return answer


def read_request(route: Route, model: str, body: Any, without: bytes = b"") -> Any:
    """Return the reader's result for a body, without the server's checks. Raises ParleyError if it is refused."""
    records = SurveyedRecords() if "{id}" in route.path else NewRecords()
    headers = CONTEXT.headers | ({b"content-type": b"multipart/form-data; boundary=b"} if route.reads_form else {})
    headers = {name: value for name, value in headers.items() if name != without}
    context = replace(MODELS[model], records=records, headers=headers, context_length=LEARNED_CONTEXT)
    return call_reader(route, body if isinstance(body, bytes) else encode_body(route, body), context)


def check_like_server(request: Request) -> None:
    """Check what the server checks before it queues a request, for a model with the learned sizes. Raises
    InvalidValue."""
    stop, sampling = request.stop_conditions, request.sampling
    prompt_ids = [
        prompt_id for prompt in request.prompts if isinstance(prompt, TokensPrompt) for prompt_id in prompt.ids
    ]
    option_ids = [*stop.ids, *sampling.logit_bias, *sampling.allowed, *request.output_options.logprob_ids]
    check_token_ids([*prompt_ids, *option_ids])
    wanted = stop.max_tokens or 0
    needed = wanted if stop.reserved_tokens is None else min(wanted, stop.reserved_tokens)
    if max(needed, stop.min_tokens) > output_room(LEARNED_CONTEXT):
        raise InvalidValue("There is no room for a prompt.")
    for prompt in request.prompts[:1]:
        if not may_be_any_text(prompt, request.grammar):
            ANSWER_COMPILER.compile_answer(prompt, request.grammar)


def check_token_ids(token_ids: list[int]) -> None:
    """Raise InvalidValue if an id is not in the vocabulary."""
    if max(token_ids, default=0) >= LEARNED_VOCABULARY:
        raise InvalidValue("A token id is not in the vocabulary.")


def learn_route(route: Route) -> dict[str, Any] | None:
    """Return what is known of a route's body: ``schema``, ``left_out``, the model that it ``needs``, and the members
    without which it is ``acknowledged``, where these are not empty. None: it reads no body, or its schema cannot be
    learned."""
    if route.reader is None or route.body_paths or route.method in ("GET", "HEAD") or route.kind in ("reset", "probe"):
        return None
    try:
        read_for(route, "", b"\xff")
    except UnknownRecord:  # it looks for the record that the path names before any body, so none can be learned from
        return None
    except ParleyError:
        pass
    else:
        return None
    for model in MODELS:
        learner = SchemaLearner(partial(read_for, route, model))
        schema = learner.learn_body()
        if schema is not None:
            try:
                learner.left_out += refine_schema(schema, learner.takes)
            except CannotRefine as error:
                print(f"not learned: {route.method} {route.path}: {error}", file=sys.stderr)
                return None
            left_out = [path for path in learner.left_out if path not in set(schema_paths(schema))]
            facts = {"schema": schema, "left_out": sorted(left_out), "needs": model}
            body = draw_value(schema, random.Random(1))
            facts["headers"] = list(required_headers(route, model, body))
            facts["acknowledged"] = list(acknowledged_members(route, model, schema, body))
            return {name: value for name, value in facts.items() if value or name == "schema"}
    return {}


def learn_answers(dialect: Dialect, route: Route, facts: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Return status and content type of the answers to bodies that are valid under a schema, to others, and to errors
    that a reply answers in a way of its own."""
    source, answers = random.Random(13), set()
    for number in range(ANSWER_DRAWS if "schema" in facts else len(ANY_VALUES)):
        body = draw_value(facts["schema"], source) if "schema" in facts else ANY_VALUES[number]
        if number % 2:
            body = spoil_member(body, source)
        elif number % 4 == 0 and isinstance(body, dict) and "stream" in facts.get("schema", {}).get("properties", ()):
            body["stream"] = number % 8 == 0  # at random, too few bodies ask for a stream, or for none
        try:
            reply = read_for(route, facts.get("needs", ""), body)
        except ParleyError as error:
            reply = dialect.render_error(error)
        if isinstance(reply, Reply):
            streams = reply.request.stream and not isinstance(reply, PromptRenderer)
            answers.add(Answer(200, b"", reply.media_type.encode() if streams else reply.content_type))
            answers |= {answer for error in SAMPLE_ERRORS if (answer := reply.render_refusal(error)) is not None}
        elif isinstance(reply, Answer):
            answers.add(reply)
    return sorted({(answer.status, answer.content_type.decode().partition(";")[0]) for answer in answers})


def spoil_member(value: Any, source: random.Random) -> Any:
    """Return a body with another value at one place."""
    if isinstance(value, dict) and value:
        name = source.choice(list(value))
        return value | {name: spoil_member(value[name], source)}
    if isinstance(value, list) and value:
        return [spoil_member(value[0], source), *value[1:]]
    return source.choice(ANY_VALUES)


def required_headers(route: Route, model: str, body: Any) -> Iterator[tuple[str, str]]:
    """Yield the headers without which a body is refused, besides its content type."""
    for name, value in CONTEXT.headers.items():
        try:
            read_for(route, model, body, without=name)
        except ParleyError:
            if name != b"content-type":
                yield name.decode(), value.decode()


def acknowledged_members(route: Route, model: str, schema: Mapping[str, Any], body: Any) -> Iterator[str]:
    """Yield the required members without which a body is answered at once, because it asks for nothing."""
    named = body | {"model": LEARNED_MODEL} if "model" in body else body
    for name in schema.get("required", ()):
        with suppress(ParleyError):
            answer = read_request(route, model, {other: value for other, value in named.items() if other != name})
            if isinstance(answer, Acknowledgement):
                yield name


def schema_paths(schema: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of all members in a schema."""
    for variant in schema.get("anyOf", ()):
        yield from schema_paths(variant, path)
    for items in (*schema.get("prefixItems", ()), *([schema["items"]] if "items" in schema else [])):
        yield f"{path}[]"
        yield from schema_paths(items, f"{path}[]")
    for name, member in schema.get("properties", {}).items():
        inner = f"{path}.{name}" if path else name
        yield inner
        yield from schema_paths(member, inner)


def all_routes() -> Iterator[tuple[Dialect, Route]]:
    """Yield every route of every API. MindIE's whole service comes first: the root has
    only some of its routes."""
    dialects = [service_dialect(MindieRules("extended")), *(mount.dialect for mount in API_MOUNTS)]
    for number, dialect in enumerate(dialects):
        if dialect.body_schemas not in [other.body_schemas for other in dialects[:number]]:
            yield from ((dialect, route) for route in dialect.routes)


def learn_all() -> dict[str, Any]:
    """Return the schemas, each once, and which routes of each API have which."""
    readers: dict[str, int] = {}  # the first route with each reader, by its number
    routes = list(all_routes())
    for number, (_, route) in enumerate(routes):
        readers.setdefault(reader_key(route), number)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        learned = dict(zip(readers, pool.map(learn_numbered_route, readers.values()), strict=True))
    schemas: list[Any] = []
    surfaces: dict[str, dict[str, Any]] = {}
    for dialect, route in routes:
        facts = learned[reader_key(route)]
        if facts is not None:
            answers = learn_answers(dialect, route, facts)
            if "schema" in facts:
                if facts["schema"] not in schemas:
                    schemas.append(facts["schema"])
                facts = facts | {"schema": schemas.index(facts["schema"])}
            facts = facts | ({"answers": answers} if answers else {})
            surfaces.setdefault(dialect.body_schemas, {})[body_key(route)] = facts
    return {"schemas": schemas, "surfaces": surfaces}


def reader_key(route: Route) -> str:
    """Return the same text for routes whose bodies are read in the same way."""
    return f"{route.reader!r} {route.reads_form} {route.kind} {'{id}' in route.path}"


def learn_numbered_route(number: int) -> dict[str, Any] | None:
    """Learn the body of one of ``all_routes``, and say so."""
    start = time.process_time()
    dialect, route = list(all_routes())[number]
    learned = learn_route(route)
    if learned is not None:
        print(
            f"{time.process_time() - start:6.1f} s  {dialect.body_schemas} {route.method} {route.path}", file=sys.stderr
        )
    return learned


if __name__ == "__main__":
    BODIES.write_text(json.dumps(learn_all(), ensure_ascii=False, separators=(",", ":")) + "\n", "utf-8")
