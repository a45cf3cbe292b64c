"""Cohere's embed and rerank: answers, and refusals in its form."""

import dataclasses
import json

import pytest

from parley.dialects.cohere import STRICT, rerank
from parley.dialects.request_context import RequestContext
from parley.errors import ParleyError, UnknownPromptName
from parley.types import PromptVector, Usage

CONTEXT = RequestContext("0f", 1795331521, "fp", context_length=100, model_names=("m",))
JSON_HEAD = dataclasses.replace(CONTEXT, headers={b"content-type": b"application/json"})
ROUTES = {route.path: route for route in STRICT.routes}
EMBED_ROUTE, RERANK_ROUTE = ROUTES["/v2/embed"], ROUTES["/v2/rerank"]
ID = b"00000000-0000-0000-0000-00000000000f"
USAGE = Usage(prompt_tokens=70)
IMAGE_DATA_URL = "data:image/png;base64,AAAA"
IMAGE = {"type": "image_url", "image_url": {"url": IMAGE_DATA_URL}}
VECTOR, OTHER = b"\x00\x00\x00\x3f\x00\x00\x00\x00", b"\x00\x00\x00\x00\x00\x00\x00\x3f"


def test_cohere_rerank_has_places_and_scores():
    body = {"model": "m", "query": "a", "documents": ["b", "c", "d"], "top_n": 2}
    context = dataclasses.replace(CONTEXT, labels=["x"], headers={b"content-type": b"application/json"})
    reply = rerank.read_cohere_rerank(json.dumps(body).encode(), context)
    scores = [b"\x00\x00\x00\x3e", b"\x00\x00\x00\x3f", b"\x00\x00\x80\x3e"]
    reply.add_events([PromptVector(number, score) for number, score in enumerate(scores)])
    assert reply.render_body(USAGE) == (
        b'{"id":"%b","results":[{"index":1,"relevance_score":0.5},{"index":2,"relevance_score":0.25}],'
        b'"meta":{"api_version":{"version":"2"},"billed_units":{"search_units":1}}}' % ID
    )


def test_first_version_of_cohere_rerank_returns_documents():
    body = {"query": "a", "documents": [{"text": "b"}, "c"], "return_documents": True, "rank_fields": ["text"]}
    reply = ROUTES["/v1/rerank"].reader(json.dumps(body).encode(), JSON_HEAD)
    reply.add_events([PromptVector(number, score) for number, score in enumerate([VECTOR, VECTOR, OTHER])])
    results = json.loads(reply.render_body(USAGE))["results"]
    assert [(result["index"], result["document"]) for result in results] == [(0, {"text": "b"}), (1, {"text": "c"})]
    for name, wrong in (("rank_fields", ["title"]), ("documents", [{"title": "b"}])):
        with pytest.raises(ParleyError, match=name):
            ROUTES["/v1/rerank"].reader(json.dumps(body | {name: wrong}).encode(), JSON_HEAD)


def test_first_version_of_cohere_embed_has_numbers_unless_types_are_named():
    members = {"texts": ["a"], "truncate": "NONE", "input_type": "search_query"}
    for types, kind, wanted in (([], "floats", [[0.5, 0.5]]), (["float"], "by_type", {"float": [[0.5, 0.5]]})):
        body = json.dumps(members | {"embedding_types": types}).encode()
        reply = ROUTES["/v1/embed"].reader(body, JSON_HEAD)
        reply.add_events([PromptVector(0, b"\x00\x00\x00\x3f" * 2)])
        answer = json.loads(reply.render_body(USAGE))
        assert (answer["embeddings"], answer["response_type"]) == (wanted, f"embeddings_{kind}")
        assert answer["meta"]["api_version"] == {"version": "1"}


def test_cohere_embed_has_vectors_by_type():
    members = {"input_type": None, "embedding_types": ["float"], "truncate": "NONE", "output_dimension": 2}
    body = json.dumps({"model": "m", "texts": ["a"]} | members).encode()
    reply = EMBED_ROUTE.reader(body, JSON_HEAD)
    reply.add_events([PromptVector(0, b"\x00\x00\x00\x3f" * 2)])
    answer = json.loads(reply.render_body(USAGE))
    assert (answer["embeddings"], answer["texts"]) == ({"float": [[0.5, 0.5]]}, ["a"])
    assert (answer["id"], answer["response_type"]) == (ID.decode(), "embeddings_by_type")


@pytest.mark.parametrize(
    ("route", "members", "part"),
    [
        (EMBED_ROUTE, {"model": None}, "a model parameter is required for this endpoint."),
        (RERANK_ROUTE, {"model": ""}, "a model parameter is required for this endpoint."),
        (EMBED_ROUTE, {"texts": []}, "invalid request: exactly one of 'texts', 'images' and 'inputs' must be given"),
        (EMBED_ROUTE, {"images": ["a"]}, "invalid request: exactly one of 'texts', 'images' and 'inputs' must be"),
        (RERANK_ROUTE, {"documents": []}, "invalid request: documents must not be empty."),
        (RERANK_ROUTE, {"query": None}, "invalid request: required 'query' param is missing or empty."),
        (EMBED_ROUTE, {"images": [IMAGE_DATA_URL], "texts": None}, "images"),
        (
            EMBED_ROUTE,
            {"inputs": [{"content": [IMAGE]}], "texts": None},
            "'inputs[0].content[0].type' is 'image_url'",
        ),
        (EMBED_ROUTE, {"inputs": [{"content": [{"type": "text"}]}], "texts": None}, "inputs[0].content[0].text"),
        (EMBED_ROUTE, {"embedding_types": ["float", "int8", "uint8", "binary", "ubinary", "base64"]}, "got 'int8'"),
        (RERANK_ROUTE, {"instruction": "Rank."}, "instruction"),
        (RERANK_ROUTE, {"max_tokens_per_query": 100}, "max_tokens_per_query (100)"),
        (RERANK_ROUTE, {"max_tokens_per_doc": 100}, "max_tokens_per_doc (100)"),
    ],
)
def test_cohere_embed_and_rerank_refuse_in_its_form(route, members, part):
    body = {"texts": ["a"], "query": "a", "documents": ["b"], "model": "m"} | members
    with pytest.raises(ParleyError) as caught:
        route.reader(json.dumps(body).encode(), CONTEXT)
    answer = STRICT.render_error(caught.value)
    assert answer.status == 400 and part in json.loads(answer.body)["message"]


def test_cohere_embed_and_rerank_refuse_wrong_types_with_422():
    for route, members, path in ((EMBED_ROUTE, {"texts": 5}, "texts"), (RERANK_ROUTE, {"query": 5}, "query")):
        body = {"texts": ["a"], "query": "a", "documents": ["b"], "model": "m"} | members
        with pytest.raises(ParleyError, match=f"^invalid type: parameter '{path}' is of type number") as caught:
            route.reader(json.dumps(body).encode(), CONTEXT)
        assert STRICT.render_error(caught.value).status == 422


def test_cohere_embed_refuses_an_unknown_input_type_in_its_form():
    body = json.dumps({"model": "m", "texts": ["a"], "input_type": "clustering"}).encode()
    error = UnknownPromptName("No such prompt.", name="clustering", known=["search_query"])
    assert EMBED_ROUTE.reader(body, CONTEXT).render_refusal(error) is None  # so the dialect renders it
    assert list(json.loads(STRICT.render_error(error).body)) == ["message"]
