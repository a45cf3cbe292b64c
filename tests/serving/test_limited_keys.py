"""Keys that are limited to some models: every route keeps the others from them.

The routes come from the tables of the APIs, so a new one is tested as well. One that answers none of the bodies here
needs one.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from support import server_fixtures
from support.api_keys import make_keys
from support.http_client import MODEL_INFO, Answer, RunningServer, fill_path
from support.random_requests import build_grpc_request

from parley.dialects.mounts import mount_table, route_scope, universal_mounts
from parley.dialects.route import Route, RouteKind
from parley.dialects.triton.calls import INFER_PATH, SERVICE_PATH, STREAM_PATH
from parley.engine.scripted_engine import ScriptedEngine
from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.text.text_pipeline import TextPipeline
from parley.types import ModelInfo, ParleySettings

Members = dict[str, Any]

TURN = {"role": "user", "content": "a"}
TENSOR = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}
MINDIE_TENSOR = {"name": "input0", "shape": [1, 2], "datatype": "UINT32", "data": [70, 71]}
GENERATED = {"request_id": "r", "choices": [{"index": 0, "token_ids": [70, 71], "finish_reason": "stop"}]}
CHAT: Members = {"messages": [TURN], "max_tokens": 2}
COMPLETION: Members = {"prompt": "a", "max_tokens": 2}
BODIES: dict[RouteKind, list[Members]] = {
    "generate": [
        CHAT,
        COMPLETION,
        {"inputs": "a", "parameters": {"max_new_tokens": 2}},
        {"input": "a"},
        {"prompt": "a", "stream": False},
        {"messages": [[TURN]], "max_tokens": 2},
        {"token_ids": [70], "sampling_params": {"max_tokens": 2}},
        {"inputs": [TENSOR]},
        {"inputs": [MINDIE_TENSOR], "outputs": [{"name": "output0"}]},
        {"text_input": "a"},
        {"input_id": [70]},
        {"instances": [{"inputs": "a"}]},
        {"query": "a", "items": ["a"], "label_token_ids": [70]},
        {"message": "a", "max_tokens": 2},
    ],
    "embed": [
        {"input": "a"},
        {"inputs": "a"},
        {"inputs": {"source_sentence": "a", "sentences": ["a"]}},
        {"query": "a", "texts": ["a"]},
        {"query": "a", "documents": ["a"]},
        {"text_1": "a", "text_2": "a"},
        {"texts": ["a"], "input_type": "search_query", "embedding_types": ["float"]},
        {"prompt": "a"},
    ],
    "render": [
        CHAT,
        COMPLETION,
        {"input": "a"},
        {"generate_response": GENERATED},
        {"generate_responses": [GENERATED]},
    ],
    "tokenize": [{"prompt": "a"}, {"inputs": "a"}, {"messages": [TURN]}, {"input": "a"}],
    "detokenize": [{"tokens": [70]}, {"ids": [70]}],
}
KINDS: dict[str, Members] = {
    "writer": {"generates": True, "dimensions": 8, "token_vectors": True},
    "classifier": {"generates": False, "dimensions": 0, "labels": ["good", "bad"]},
    "reranker": {"generates": False, "dimensions": 0, "labels": ["score"]},
    "sparse": {"generates": False, "dimensions": 640, "pooling": "splade"},
}
HIDDEN_FACTS = (b"hidden-alias", b"HiddenArchitecture")  # besides the name that the client uses
MODEL_KINDS = ("generate", "embed", "render", "tokenize", "detokenize", "tokenizer", "server_info", "model")
PLACES = ("{model}", "{model:path}", "{endpoint}")


class WatchedModel(ServedModel):
    """A model that counts the uses of its text pipeline, which all work with it needs."""

    uses = 0

    @property
    def text_pipeline(self) -> TextPipeline:
        self.uses += 1
        return super().text_pipeline


def model_info(kind: str, name: str) -> ModelInfo:
    architecture = "HiddenArchitecture" if name == "hidden" else "scripted"
    return msgspec.structs.replace(MODEL_INFO, **KINDS[kind], architecture=architecture, max_model_len=1024)


def client_routes() -> list[tuple[str, str, Route]]:
    """List method, path and first route of each path that clients may call."""
    return [
        (method, path, answering[0][0])
        for (method, path), answering in mount_table(universal_mounts(pages=True)).items()
        if route_scope(answering[0][0]) in ("client", "open") and answering[0][0].kind not in ("page", "socket")
    ]


def bodies_of(path: str, route: Route, model: str) -> list[bytes]:
    """Return bodies for a route with the name of a model, or without if it is empty."""
    if path.endswith((INFER_PATH, STREAM_PATH)):
        return [build_grpc_request("a", False, {"max_tokens": 2}).replace(b"\n\x04tiny", text_field(model))]
    if SERVICE_PATH in path:
        return [text_field(model)]
    member = {"model": model} if model else {}
    members_of_kind = BODIES.get(route.kind, [{}])
    return [json.dumps(named | members).encode() for named in (member, {}) for members in members_of_kind]


def text_field(text: str) -> bytes:
    """Return the first field of a gRPC message."""
    return b"\n" + bytes([len(text)]) + text.encode() if text else b""


def named_path(path: str, model: str) -> str:
    return fill_path(path.replace("{method}", "ModelConfig")).replace("tiny", model)


@pytest.fixture
async def two_models(serve, folder, monkeypatch):
    """Return a function that starts a server with the models "hidden", which is the main one and watched, and
    "seen"."""

    async def start(kind: str, **options: Any) -> tuple[RunningServer, WatchedModel]:
        engine = ScriptedEngine(info=model_info(kind, "seen"), max_batch=8)
        seen = ServedModel(("seen",), ParleySettings(model=str(folder), max_batch=8), engine, ServerOptions())
        monkeypatch.setattr(server_fixtures, "ServedModel", WatchedModel)
        names = ("hidden", "hidden-alias")
        server = await serve(names=names, info=model_info(kind, "hidden"), beside=[seen], **options)
        assert isinstance(server.model, WatchedModel)
        return server, server.model

    return start


Remaining = dict[tuple[str, str], Route]  # routes that no body has been right for, by method and path


async def check_routes(
    server: RunningServer, hidden: WatchedModel, headers: dict[str, dict[str, str]], remaining: Remaining
) -> None:
    """Check that the key "limited" neither uses nor sees the hidden model, wherever the key "free" gets an answer about
    it. Removes the routes with such an answer from ``remaining``."""

    async def call(method: str, path: str, body: bytes, key: str) -> Answer:
        sent = {"content-type": "application/json", "anthropic-version": "2023-06-01"} | headers[key]
        used = hidden.uses
        answer = await server.call(method, path, body, sent)
        if key == "limited":
            case = (method, path, body, answer.status, answer.body[:300])
            assert hidden.uses == used, case
            assert not any(fact in answer.body for fact in HIDDEN_FACTS), case
        return answer

    for (method, path), route in list(remaining.items()):
        for named, unnamed in zip(bodies_of(path, route, "hidden"), bodies_of(path, route, ""), strict=True):
            free = await call(method, named_path(path, "hidden"), named, "free")
            if free.status >= 300:
                continue
            limited = await call(method, named_path(path, "hidden"), named, "limited")
            if any(place in path for place in PLACES):
                assert limited.status >= 400, (method, path)
            await call(method, named_path(path, "seen"), unnamed, "limited")
            del remaining[method, path]
            break


async def test_no_route_lets_a_limited_key_use_or_see_another_model(two_models):
    headers, keys = make_keys(limited={"models": ["seen"]}, free={})
    remaining = {(method, path): route for method, path, route in client_routes()}
    for kind in KINDS:
        server, hidden = await two_models(kind, hashed_keys=keys, tokenizer_info=True)
        await check_routes(server, hidden, headers, remaining)
        remaining = {place: route for place, route in remaining.items() if route.kind in MODEL_KINDS}
    unanswered = [f"{method} {path}" for method, path in remaining]
    assert [place for place in unanswered if "/audio/" not in place] == []  # forms, for models that hear
