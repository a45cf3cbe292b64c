"""Cohere's list of models: pages, endpoints and their defaults."""

import dataclasses
import json
from typing import Any

import msgspec
import pytest

from parley.dialects.cohere import models
from parley.dialects.facts import ModelCard, ServerFacts
from parley.dialects.request_context import RequestContext
from parley.engine.scripted_engine import SCRIPTED_MODEL
from parley.errors import ParleyError, UnknownModel

CONTEXT = RequestContext("0f", 1795331521, "fp")


def test_cohere_models_come_in_pages():
    cards = [ModelCard("a", 1, 100, abilities=frozenset({"tools", "chat"})), ModelCard("b", 1, None, purpose="vectors")]
    facts = ServerFacts("1", cards, True)

    def ask(query: bytes) -> Any:
        context = dataclasses.replace(CONTEXT, query_string=query, path_parts={"model": "b"})
        return json.loads(models.answer_cohere_models(b"", context, facts).body)

    first = ask(b"page_size=1")
    assert first["models"] == [
        {
            "name": "a",
            "is_deprecated": False,
            "endpoints": ["chat"],
            "finetuned": False,
            "context_length": 100,
            "tokenizer_url": None,
            "default_endpoints": ["chat"],
            "features": ["tools"],
            "sampling_defaults": {
                "temperature": 0.3,
                "k": 0,
                "p": 0.75,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
            },
        }
    ]
    assert first["next_page_token"] == "1" and [model["name"] for model in ask(b"page_token=1")["models"]] == ["b"]
    assert [model["name"] for model in ask(b"endpoint=embed")["models"]] == ["b"]
    for query in (b"page_size=0", b"page_token=x", b"endpoint=chats", b"default_only=true", b"default_only=x"):
        with pytest.raises(ParleyError, match="invalid request"):
            ask(query)
    with pytest.raises(UnknownModel):
        models.answer_cohere_model(b"", dataclasses.replace(CONTEXT, path_parts={"model": "c"}), facts)


def test_the_first_cohere_model_of_an_endpoint_is_its_default():
    cards = [ModelCard(name, 1, None, purpose="vectors" if name == "v" else "chat") for name in ("a", "b", "v")]
    context = dataclasses.replace(CONTEXT, query_string=b"default_only=true&endpoint=chat", path_parts={"model": "v"})
    facts = ServerFacts("1", cards, True)
    listed = json.loads(models.answer_cohere_models(b"", context, facts).body)["models"]
    assert [(model["name"], model["default_endpoints"], model["context_length"]) for model in listed] == [
        ("a", ["chat"], None)
    ]
    shown = json.loads(models.answer_cohere_model(b"", context, facts).body)
    assert (shown["default_endpoints"], shown["sampling_defaults"]) == (["embed", "rerank"], None)


def test_cohere_endpoints_of_a_loaded_model_are_those_that_it_can_answer():
    none = msgspec.structs.replace(SCRIPTED_MODEL, generates=False, dimensions=0)
    infos = {
        "vectors": msgspec.structs.replace(none, dimensions=4),
        "classifier": msgspec.structs.replace(none, labels=["a", "b"]),
        "reranker": msgspec.structs.replace(none, labels=["a"]),
    }
    cards = [ModelCard(name, 1, 10, purpose="vectors", info=info) for name, info in infos.items()]
    listed = json.loads(models.answer_cohere_models(b"", CONTEXT, ServerFacts("1", cards, True)).body)["models"]
    assert [model["endpoints"] for model in listed] == [["embed", "rerank"], [], ["rerank"]]
    assert [model["default_endpoints"] for model in listed] == [["embed"], [], ["rerank"]]
