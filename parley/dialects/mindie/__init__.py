"""Huawei MindIE's API: the routes of its three ports, built from rules.

One server speaks MindIE's own interface and its variants of TGI's, vLLM's, Triton's and OpenAI's. ``parameters`` says
which parameters each of them accepts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from parley.dialects.dialect import Dialect, PromptMembers, Route, named
from parley.dialects.mindie import (
    bench,
    chat,
    completions,
    control,
    coordinator,
    instance,
    metrics,
    native,
    openai,
    shared,
    tensors,
    tgi,
    triton,
    upkeep,
    vllm,
)
from parley.dialects.mindie.rules import Rules
from parley.dialects.openai import embeddings

ID_HEADER = b"requestuuid"
MODEL = "/v2/models/{model}"
PLACES = (MODEL, MODEL + "/versions/{version}")  # the version has no effect: there is only one
MEMBERS = PromptMembers(
    conversations=("messages",),
    prompts=("prompt", "inputs", "text_input", "input_id"),
    before=("tools",),
    salts=("adapter_id",),
)
EMBEDDINGS = (Route("POST", "/v1/embeddings", "embed", read=embeddings.read, model=named),)  # not in the original


def service(rules: Rules) -> Dialect:
    """Return the dialect of the service port, which a model's clients use."""
    places = PLACES[:1] if rules.strict else PLACES
    return Dialect(
        name="mindie",
        title="MindIE",
        base="",
        error=partial(shared.error, rules=rules),
        members=MEMBERS,
        id_header=ID_HEADER,
        documented_errors=True,
        apart=True,
        routes=(
            Route("POST", "/", "generate", read=partial(tgi.either, rules)),
            Route("POST", "/generate", "generate", read=partial(vllm.read, rules), claims=("prompt",), yields=True),
            Route("POST", "/generate", "generate", read=partial(tgi.whole, rules), claims=("inputs",)),
            Route("POST", "/generate_stream", "generate", read=partial(tgi.stream, rules)),
            *alone(rules),
            Route("POST", "/v1/chat/completions", "generate", read=partial(chat.read, rules), model=named),
            Route("POST", "/v1/completions", "generate", read=partial(completions.read, rules), model=named),
            *(() if rules.strict else EMBEDDINGS),
            Route("GET", "/v1/models", "models", write=partial(openai.models, rules)),
            Route("GET", "/v1/models/{model}", "model", write=openai.card),
            Route("GET", "/v2", "ask", read=partial(control.server, rules)),
            *(route for place in places for route in _model(rules, place)),
        ),
    )


def alone(rules: Rules) -> tuple[Route, ...]:
    """Return the routes whose paths no other API has."""
    return (
        Route("POST", "/infer", "generate", read=partial(native.read, rules)),
        Route("POST", "/infer_token", "generate", read=partial(native.read, rules)),
        Route("POST", "/v1/tokenizer", "tokenize", read=partial(control.tokenize, rules), write=control.tokenized),
        Route("POST", MODEL + "/stopInfer", "halt", read=triton.stop),
        Route("GET", MODEL + "/getSlotCount", "ask", read=partial(upkeep.slots, rules)),
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
    """Return the service dialect without the paths that other APIs at the same root have."""
    return replace(service(rules), routes=alone(rules))


def management_plane(rules: Rules) -> Dialect:
    """Return the dialect of the management port, which operators use."""
    return Dialect(
        name="mindie-management",
        title="MindIE management",
        base="",
        error=partial(shared.error, rules=rules),
        members=MEMBERS,
        id_header=ID_HEADER,
        documented_errors=True,
        routes=(
            Route("GET", "/health", "state", read=partial(upkeep.ready, rules)),
            Route("GET", "/health/timed", "trial", read=upkeep.wait, write=upkeep.tried),
            Route("GET", "/health/timed-{seconds}", "trial", read=upkeep.wait, write=upkeep.tried),
            Route("GET", "/v2/health/live", "state", read=partial(upkeep.live, rules)),
            Route("GET", "/v2/health/ready", "state", read=partial(upkeep.ready, rules)),
            Route("GET", MODEL + "/ready", "state", read=partial(upkeep.ready, rules)),
            Route("GET", MODEL + "/getSlotCount", "ask", read=partial(upkeep.slots, rules)),
            Route("GET", "/info", "ask", read=partial(upkeep.info, rules)),
            Route("GET", "/metrics-json", "ask", read=partial(upkeep.statistics, rules)),
            Route("GET", "/stopService", "stop", read=upkeep.force, write=upkeep.stopped),
            Route("GET", "/v1/config", "ask", read=partial(upkeep.config, rules)),
            Route("GET", "/v1/engine-server/running-status", "ask", read=partial(upkeep.status, rules)),
            Route("POST", "/v1/engine-server/fault-handling-command", "order", read=partial(upkeep.command, rules)),
            Route("POST", "/v1/load_lora_adapter", "adapter", read=partial(upkeep.adapter, rules, True)),
            Route("POST", "/v1/unload_lora_adapter", "adapter", read=partial(upkeep.adapter, rules, False)),
        ),
    )


def metrics_plane(rules: Rules) -> Dialect:
    """Return the dialect of the metrics port, which monitoring uses."""
    page = Route("GET", "/metrics", "metrics")
    if rules.strict and not rules.monitored:
        page = Route("GET", "/metrics", "ask", read=upkeep.unmonitored)
    return Dialect(
        name="mindie-metrics",
        title="MindIE metrics",
        base="",
        error=partial(shared.error, rules=rules),
        members=MEMBERS,
        id_header=ID_HEADER,
        documented_errors=True,
        routes=(page,),
        page=metrics.told,
    )


DIALECT = shared_root(Rules("extended"))
STRICT = replace(service(Rules("strict")), bench=bench.APIS)
OLD = service(Rules("strict-old"))
INSTANCE_PLANE, BODY_FAULT = instance.PLANE, coordinator.body_fault
MANAGEMENT, METRICS = management_plane(Rules("strict")), metrics_plane(Rules("strict"))
