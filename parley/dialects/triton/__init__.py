"""The API of Triton Inference Server over HTTP: KServe's v2 protocol with Triton's extensions. Its table of routes.

Requests are tensors (``infer``) or flat JSON objects (``generate``). ``model`` declares the tensors, ``sampling`` turns
values into a request, and ``outputs`` turns events into output tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from parley.dialects.dialect import Answer, Dialect, PromptMembers, Route
from parley.dialects.triton import bench, control, errors, generate, infer, metrics

MODEL = "/v2/models/{model}"
PLACES = (MODEL, MODEL + "/versions/{version}")
MEMBERS = PromptMembers(prompts=("inputs", "text_input"))
SHARED = ("/v2/systemsharedmemory", "/v2/cudasharedmemory")


def _regions(path: str) -> tuple[Route, ...]:
    region = path + "/region/{region}"
    return (
        Route("GET", f"{path}/status", "ask", read=control.regions),
        Route("POST", f"{path}/unregister", "ask", read=control.unregister),
        Route("GET", f"{region}/status", "ask", read=control.regions),
        Route("POST", f"{region}/register", "ask", read=control.register),
        Route("POST", f"{region}/unregister", "ask", read=control.unregister),
    )


def _repository(path: str, strict: bool) -> tuple[Route, ...]:
    return (
        Route("POST", f"{path}/index", "ask", read=control.index),
        Route("POST", path + "/models/{model}/load", "ask", read=control.unload if strict else control.load),
        Route("POST", path + "/models/{model}/unload", "ask", read=control.unload),
    )


def _model(path: str, strict: bool) -> tuple[Route, ...]:
    read = partial(generate.read, strict=strict)
    return (
        Route("GET", path, "ask", read=control.metadata),
        Route("GET", f"{path}/ready", "ask", read=control.ready),
        Route("GET", f"{path}/config", "ask", read=control.config),
        Route("GET", f"{path}/stats", "count", read=control.statistics),
        Route("POST", f"{path}/generate", "generate", read=partial(read, stream=False)),
        Route("POST", f"{path}/generate_stream", "generate", read=partial(read, stream=True)),
        Route("POST", f"{path}/infer", "generate", read=infer.read),
    )


def _settings(path: str, read: control.Ask) -> tuple[Route, ...]:
    return tuple(Route(method, path, "ask", read=read) for method in ("GET", "POST"))


def _health(member: str, strict: bool) -> Callable[[bool], Answer]:
    return control.health if strict else partial(control.healthy, member)


def _dialect(strict: bool) -> Dialect:
    return Dialect(
        name="triton",
        title="Triton",
        base="/v2",
        error=errors.error,
        members=MEMBERS,
        routes=(
            Route("GET", "/v2", "ask", read=control.server),
            Route("GET", "/v2/health/live", "live", write=_health("live", strict)),
            Route("GET", "/v2/health/ready", "ready", write=_health("ready", strict)),
            Route("GET", "/v2/models/stats", "count", read=control.statistics),  # before a model named "stats"
            *(route for place in PLACES for route in _model(place, strict)),
            *_repository("/v2/repository", strict),
            *_repository("/v2/repository/{repo}", strict),
            *_settings("/v2/trace/setting", control.trace),
            *_settings(MODEL + "/trace/setting", control.trace),
            *_settings("/v2/logging", control.log),
            *(route for path in SHARED for route in _regions(path)),
        ),
        series=metrics.told,
        bench=bench.APIS,
    )


DIALECT = _dialect(strict=False)
STRICT = _dialect(strict=True)  # with the original's refusals
