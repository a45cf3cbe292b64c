"""Huawei MindIE's API: the routes of its three ports, built from rules.

One server speaks MindIE's own interface and its variants of TGI's, vLLM's, Triton's and OpenAI's. ``parameters`` says
which parameters each of them accepts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from parley.dialects.dialect import Dialect, PromptMembers
from parley.dialects.mindie import bench, control, management_ports, metrics
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.error_answers import mindie_error_answer
from parley.dialects.mindie.interfaces import chat, completions, native, openai, tensors, tgi, triton, vllm
from parley.dialects.mindie.pd import coordinator, instance
from parley.dialects.mindie.pd.refusals import MINDIE_COORDINATOR_TEXTS
from parley.dialects.openai import embeddings
from parley.dialects.route import KIND_TASKS, Route, model_in_body

REQUEST_ID_HEADER = b"requestuuid"
STRICT_HEADERS = ((b"connection", b"close"),)  # of answers that are no streams
MODEL_PATH = "/v2/models/{model}"
MODEL_PATHS = (MODEL_PATH, MODEL_PATH + "/versions/{version}")  # the version has no effect: there is only one
MINDIE_PROMPT_MEMBERS = PromptMembers(
    conversations=("messages",),
    prompts=("prompt", "inputs", "text_input", "input_id"),
    preceding=("tools",),
    salts=("adapter_id",),
)
# Not in the original.
EMBEDDING_ROUTES = (
    Route("POST", "/v1/embeddings", "embed", reader=embeddings.read_embedding_request, model_reader=model_in_body),
)


def service_dialect(rules: MindieRules) -> Dialect:
    """Return the dialect of the service port, which a model's clients use."""
    model_paths = MODEL_PATHS[:1] if rules.strict else MODEL_PATHS
    return replace(
        _port_dialect(rules, "mindie", "MindIE"),
        body_schemas=f"mindie-{rules.profile}",
        chunk_per_event=True,
        routes=(
            Route("POST", "/", "generate", reader=partial(tgi.read_mindie_any, rules)),
            Route(
                "POST",
                "/generate",
                "generate",
                reader=partial(vllm.read_mindie_vllm, rules),
                claiming_members=("prompt",),
                yields_unclaimed=True,
            ),
            Route(
                "POST",
                "/generate",
                "generate",
                reader=partial(tgi.read_mindie_whole, rules),
                claiming_members=("inputs",),
            ),
            Route("POST", "/generate_stream", "generate", reader=partial(tgi.read_mindie_stream, rules)),
            *unique_routes(rules),
            Route(
                "POST",
                "/v1/chat/completions",
                "generate",
                reader=partial(chat.read_mindie_chat, rules),
                model_reader=model_in_body,
            ),
            Route(
                "POST",
                "/v1/completions",
                "generate",
                reader=partial(completions.read_mindie_completion, rules),
                model_reader=model_in_body,
            ),
            *(() if rules.strict else EMBEDDING_ROUTES),
            Route("GET", "/v1/models", "models", writer=partial(openai.write_mindie_models, rules)),
            Route("GET", "/v1/models/{model}", "model", writer=openai.write_mindie_model),
            Route("GET", "/v2", "info", reader=partial(control.mindie_server_metadata, rules)),
            *(route for path in model_paths for route in _model_routes(rules, path)),
        ),
    )


def _port_dialect(rules: MindieRules, name: str, title: str) -> Dialect:
    """Return a dialect without routes: the dialects of the ports only differ in these."""
    return Dialect(
        name=name,
        title=title,
        base_path="",
        render_error=partial(mindie_error_answer, rules=rules),
        prompt_members=MINDIE_PROMPT_MEMBERS,
        id_header=REQUEST_ID_HEADER,
        whole_answer_headers=STRICT_HEADERS if rules.strict else (),
        documented_errors=True,
        routes=(),
    )


def unique_routes(rules: MindieRules) -> tuple[Route, ...]:
    """Return the routes whose paths no other API has."""
    return (
        Route("POST", "/infer", "generate", reader=partial(native.read_mindie_native, rules)),
        Route("POST", "/infer_token", "generate", reader=partial(native.read_mindie_native, rules)),
        Route(
            "POST",
            "/v1/tokenizer",
            "tokenize",
            reader=partial(control.read_mindie_tokenize, rules),
            writer=control.write_mindie_tokens,
            tasks=KIND_TASKS["generate"],
        ),
        Route("POST", MODEL_PATH + "/stopInfer", "abort", reader=triton.read_stop_infer),
        Route("GET", MODEL_PATH + "/getSlotCount", "info", reader=partial(management_ports.count_slots, rules)),
    )


def _model_routes(rules: MindieRules, model_path: str) -> tuple[Route, ...]:
    read_generate = partial(triton.read_mindie_triton, rules)
    return (
        Route("GET", model_path, "info", reader=partial(control.mindie_model_metadata, rules)),
        Route("GET", model_path + "/config", "info", reader=partial(control.mindie_model_config, rules)),
        Route("POST", model_path + "/infer", "generate", reader=partial(tensors.read_mindie_tensors, rules)),
        Route("POST", model_path + "/generate", "generate", reader=partial(read_generate, stream=False)),
        Route("POST", model_path + "/generate_stream", "generate", reader=partial(read_generate, stream=True)),
    )


def shared_root_dialect(rules: MindieRules) -> Dialect:
    """Return the service dialect without the paths that other APIs at the same root have."""
    return replace(service_dialect(rules), routes=unique_routes(rules))


def management_dialect(rules: MindieRules) -> Dialect:
    """Return the dialect of the management port, which operators use."""
    return replace(
        _port_dialect(rules, "mindie-management", "MindIE management"),
        routes=(
            Route("GET", "/health", "probe", reader=partial(management_ports.check_ready, rules)),
            Route(
                "GET",
                "/health/timed",
                "self_test",
                reader=management_ports.read_wait_seconds,
                writer=management_ports.write_health_check,
            ),
            Route(
                "GET",
                "/health/timed-{seconds}",
                "self_test",
                reader=management_ports.read_wait_seconds,
                writer=management_ports.write_health_check,
            ),
            Route("GET", "/v2/health/live", "probe", reader=partial(management_ports.check_live, rules)),
            Route("GET", "/v2/health/ready", "probe", reader=partial(management_ports.check_ready, rules)),
            Route("GET", MODEL_PATH + "/ready", "probe", reader=partial(management_ports.check_ready, rules)),
            Route("GET", MODEL_PATH + "/getSlotCount", "info", reader=partial(management_ports.count_slots, rules)),
            Route("GET", "/info", "info", reader=partial(management_ports.mindie_info, rules)),
            Route("GET", "/metrics-json", "info", reader=partial(management_ports.mindie_statistics, rules)),
            Route(
                "GET",
                "/stopService",
                "stop",
                reader=management_ports.is_forced_stop,
                writer=management_ports.write_stop_answer,
                query={"mode": {"type": "string", "enum": ["Force"]}},
            ),
            Route("GET", "/v1/config", "info", reader=partial(management_ports.mindie_config, rules)),
            Route(
                "GET",
                "/v1/engine-server/running-status",
                "info",
                reader=partial(management_ports.running_status, rules),
            ),
            Route(
                "POST",
                "/v1/engine-server/fault-handling-command",
                "pause",
                reader=partial(management_ports.read_fault_command, rules),
            ),
            Route(
                "POST",
                "/v1/load_lora_adapter",
                "adapter",
                reader=partial(management_ports.read_adapter_change, rules, True),
            ),
            Route(
                "POST",
                "/v1/unload_lora_adapter",
                "adapter",
                reader=partial(management_ports.read_adapter_change, rules, False),
            ),
        ),
    )


def metrics_dialect(rules: MindieRules) -> Dialect:
    """Return the dialect of the metrics port, which monitoring uses."""
    page = Route("GET", "/metrics", "metrics")
    if rules.strict and not rules.has_metrics_port:
        page = Route("GET", "/metrics", "info", reader=management_ports.refuse_metrics)
    return replace(
        _port_dialect(rules, "mindie-metrics", "MindIE metrics"),
        routes=(page,),
        own_metrics=metrics.write_mindie_metrics,
        add_buckets=metrics.add_mindie_buckets,
    )


DIALECT = shared_root_dialect(MindieRules("extended"))
STRICT = replace(service_dialect(MindieRules("strict")), bench_apis=bench.APIS)
OLD = service_dialect(MindieRules("strict-old"))
INSTANCE_PLANE, BODY_FAULT = instance.INSTANCE_ROUTES, coordinator.find_body_fault
COORDINATOR_TEXTS = MINDIE_COORDINATOR_TEXTS
MANAGEMENT, METRICS = management_dialect(MindieRules("strict")), metrics_dialect(MindieRules("strict"))
