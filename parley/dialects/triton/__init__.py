"""The API of Triton Inference Server over HTTP: KServe's v2 protocol with Triton's extensions. Its table of routes.

Requests are tensors (``infer``) or flat JSON objects (``generate``). ``model`` declares the tensors, ``sampling`` turns
values into a request, and ``outputs`` turns events into output tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from parley.dialects.dialect import Dialect, PromptMembers
from parley.dialects.reply import Answer
from parley.dialects.route import ModelListMerge, Route
from parley.dialects.triton import bench, control, error_answers, generate, infer, metrics
from parley.dialects.triton.images import IMAGE_INPUTS
from parley.types import ALL_MODEL_TASKS

MODEL_PATH = "/v2/models/{model}"
MODEL_PATHS = (MODEL_PATH, MODEL_PATH + "/versions/{version}")
TRITON_PROMPT_MEMBERS = PromptMembers(prompts=("inputs", "text_input"), media=IMAGE_INPUTS)
SHARED_MEMORY_PATHS = ("/v2/systemsharedmemory", "/v2/cudasharedmemory")


def _shared_memory_routes(path: str) -> tuple[Route, ...]:
    region = path + "/region/{region}"
    return (
        Route("GET", f"{path}/status", "info", reader=control.shared_memory_status),
        Route("POST", f"{path}/unregister", "info", reader=control.unregister_shared_memory),
        Route("GET", f"{region}/status", "info", reader=control.shared_memory_status),
        Route("POST", f"{region}/register", "info", reader=control.refuse_shared_memory),
        Route("POST", f"{region}/unregister", "info", reader=control.unregister_shared_memory),
    )


def _repository_routes(path: str, strict: bool) -> tuple[Route, ...]:
    return (
        Route("POST", f"{path}/index", "info", reader=control.repository_index, model_list=ModelListMerge()),
        Route(
            "POST",
            path + "/models/{model}/load",
            "info",
            reader=control.unload_model_answer if strict else control.load_model_answer,
        ),
        Route("POST", path + "/models/{model}/unload", "info", reader=control.unload_model_answer),
    )


def _model_routes(path: str, strict: bool) -> tuple[Route, ...]:
    read_generate = partial(generate.read_triton_generate, strict=strict)
    render = generate.strict_generate_error if strict else None
    return (
        Route("GET", path, "info", reader=control.model_metadata_answer),
        Route("GET", f"{path}/ready", "info", reader=control.model_ready_answer, content_types=()),
        Route("GET", f"{path}/config", "info", reader=control.model_config_answer),
        Route("GET", f"{path}/stats", "summed_info", reader=control.model_statistics),
        *(
            Route("POST", path + verb, "generate", reader=partial(read_generate, stream=stream), render_error=render)
            for verb, stream in (("/generate", False), ("/generate_stream", True))
        ),
        Route(
            "POST",
            f"{path}/infer",
            "generate",
            reader=partial(infer.read_triton_infer, strict=strict),
            tasks=ALL_MODEL_TASKS,
        ),
    )


def _settings_routes(path: str, answer_settings: control.InfoHandler) -> tuple[Route, ...]:
    return tuple(Route(method, path, "info", reader=answer_settings) for method in ("GET", "POST"))


def _health_writer(member: str, strict: bool) -> Callable[[bool], Answer]:
    return control.strict_health if strict else partial(control.kserve_health, member)


def _metadata_paths(strict: bool) -> tuple[str, ...]:
    """Return the paths of the server's metadata: some clients of KServe write it with its trailing slash."""
    return ("/v2",) if strict else ("/v2", "/v2/")


def _list_routes(strict: bool) -> tuple[Route, ...]:
    """Return the route with the names of all models, which KServe's own servers have and Triton lacks."""
    return (
        ()
        if strict
        else (Route("GET", "/v2/models", "info", reader=control.model_names_answer, model_list=ModelListMerge()),)
    )


def _triton_dialect(strict: bool) -> Dialect:
    return Dialect(
        name="triton",
        body_schemas="triton-strict" if strict else "triton",
        title="Triton",
        base_path="/v2",
        render_error=error_answers.triton_error_answer if strict else error_answers.lenient_error_answer,
        prompt_members=TRITON_PROMPT_MEMBERS,
        routes=(
            *(Route("GET", path, "info", reader=control.server_metadata) for path in _metadata_paths(strict)),
            Route("GET", "/v2/health/live", "live", writer=_health_writer("live", strict)),
            Route("GET", "/v2/health/ready", "ready", writer=_health_writer("ready", strict)),
            Route(
                "GET", "/v2/models/stats", "summed_info", reader=control.model_statistics
            ),  # before a model named "stats"
            *_list_routes(strict),
            *(route for path in MODEL_PATHS for route in _model_routes(path, strict)),
            *_repository_routes("/v2/repository", strict),
            *_repository_routes("/v2/repository/{repo}", strict),
            *_settings_routes("/v2/trace/setting", control.trace_settings),
            *_settings_routes(MODEL_PATH + "/trace/setting", control.trace_settings),
            *_settings_routes("/v2/logging", control.log_settings),
            *(route for path in SHARED_MEMORY_PATHS for route in _shared_memory_routes(path)),
        ),
        shared_metrics=metrics.write_triton_metrics,
        add_buckets=metrics.add_triton_buckets,
        bench_apis=bench.APIS,
    )


DIALECT = _triton_dialect(strict=False)
STRICT = _triton_dialect(strict=True)  # with the original's refusals
