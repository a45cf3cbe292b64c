"""Huawei MindIE's API: its tables of routes, made from rules.

One server speaks MindIE's own interface and its forms of TGI's, vLLM's and Triton's; ``parameters`` has what each of
them takes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from parley.dialects.dialect import Dialect, Route
from parley.dialects.mindie import control, native, shared, tensors, tgi, triton, vllm
from parley.dialects.mindie.rules import Rules

MODEL = "/v2/models/{model}"
PLACES = (MODEL, MODEL + "/versions/{version}")  # the version is for show: there is one


def service(rules: Rules) -> Dialect:
    """The plane that clients of a model speak to."""
    places = PLACES[:1] if rules.strict else PLACES
    return Dialect(
        name="mindie",
        title="MindIE of 2025" if rules.old else "MindIE",
        base="",
        error=shared.error,
        hints=not rules.strict,
        routes=(
            Route("POST", "/", "generate", read=partial(tgi.either, rules)),
            Route("POST", "/generate", "generate", read=partial(vllm.read, rules), claims=("prompt",), yields=True),
            Route("POST", "/generate", "generate", read=partial(tgi.whole, rules), claims=("inputs",)),
            Route("POST", "/generate_stream", "generate", read=partial(tgi.stream, rules)),
            *alone(rules),
            Route("GET", "/v2", "ask", read=partial(control.server, rules)),
            *(route for place in places for route in _model(rules, place)),
        ),
    )


def alone(rules: Rules) -> tuple[Route, ...]:
    """Routes of paths that no other API has."""
    return (
        Route("POST", "/infer", "generate", read=partial(native.read, rules)),
        Route("POST", "/infer_token", "generate", read=partial(native.read, rules)),
        Route("POST", "/v1/tokenizer", "tokenize", read=partial(control.tokenize, rules), write=control.tokenized),
        Route("POST", MODEL + "/stopInfer", "halt", read=triton.stop),
    )


def _model(rules: Rules, place: str) -> tuple[Route, ...]:
    read = partial(triton.read, rules)
    return (
        Route("GET", place, "ask", read=partial(control.metadata, rules)),
        Route("GET", place + "/config", "ask", read=partial(control.config, rules)),
        Route("POST", place + "/infer", "generate", read=partial(tensors.read, rules)),
        Route("POST", place + "/generate", "generate", read=partial(read, stream=False)),
        Route("POST", place + "/generate_stream", "generate", read=partial(read, stream=True)),
    )


def shared_root(rules: Rules) -> Dialect:
    """What a root has of it that other APIs share."""
    return replace(service(rules), routes=alone(rules))


DIALECT = shared_root(Rules("extended"))
STRICT = service(Rules("strict"))
OLD = service(Rules("strict-old"))
