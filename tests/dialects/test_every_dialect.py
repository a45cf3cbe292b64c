"""Properties of every mounted dialect, including dialects that are added later."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from parley.dialects.dialect import Dialect
from parley.dialects.mounts import ADMIN_PLANES, API_MOUNTS, INNER_MOUNTS
from parley.dialects.reply import Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.route import Route
from parley.dialects.triton.calls import GRPC_CALLS
from parley.dialects.triton.rpc import infer
from parley.errors import ParleyError
from parley.types import Prompt, TextPrompt

ROOT = Path(__file__).parents[2]
record_reads = runpy.run_path(str(ROOT / "docs" / "survey.py"))[
    "record_reads"
]  # records the members that a reader reads

DIALECTS = {
    f"{prefix or '/'} {dialect.name}": dialect
    for prefix, dialect in (
        *((surface.prefix, surface.dialect) for surface in (*API_MOUNTS, *INNER_MOUNTS)),
        *(("", dialect) for dialect in ADMIN_PLANES.values()),
    )
}
CONTEXT = RequestContext(
    "0f",
    1,
    "fp",
    context_length=4096,
    path_parts={"model": "m", "version": "1", "endpoint": "e", "served": "m"},
    headers={b"content-type": b"application/json", b"anthropic-version": b"2023-06-01"},
)
TEXT, IDS = "zebra", [11, 12, 13]
TURNS = [{"role": "user", "content": TEXT}]
TENSOR = {"datatype": "BYTES", "shape": [1], "data": [TEXT]}
WAYS: list[Any] = [  # forms that a prompt can have inside a member
    TEXT, [TEXT], IDS, TURNS, [TURNS], [{"inputs": TEXT}], [{"messages": TURNS}], [{"type": "text", "text": TEXT}],
    [{"name": "text_input"} | TENSOR], [{"name": "input0", "datatype": "UINT32", "shape": [1, 3], "data": IDS}],
]  # fmt: skip

BESIDE: list[dict[str, Any]] = [  # what a body needs besides
    {}, {"model": "m", "max_tokens": 1}, {"outputs": [{"name": "output0"}]}, {"sampling_params": {}},
    {"items": ["lion"], "label_token_ids": [1]},
]  # fmt: skip


def generate_routes(dialect: Dialect) -> Iterator[Route]:
    """Yield the routes whose bodies have a prompt in JSON or in a message."""
    for route in dialect.routes:
        if route.kind == "generate" and route.method == "POST" and not route.reads_form:
            yield route


def message() -> bytes:
    """A request over gRPC."""
    request = infer.INFER_REQUEST(model_name="tiny")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1], contents={"bytes_contents": [TEXT.encode()]})
    return request.SerializeToString()


def can_hold_prompt(route: Route, member: str) -> bool:
    """Whether the route reads the prompt from a body with only this member, in one of the forms."""
    texts = (read_prompts(route, {**common, member: form}) for form in WAYS for common in BESIDE)
    return any(TEXT in seen or repr(IDS) in seen for seen in texts)


def read_prompts(route: Route, body: dict[str, Any]) -> str:
    """Return the prompts that a route reads from a body, or an empty string if it refuses the body."""
    assert route.reader is not None
    try:
        reply = route.reader(json.dumps(body).encode(), CONTEXT)
    except ParleyError:
        return ""
    return repr([*map(without_suffix, reply.request.prompts)]) if isinstance(reply, Reply) else ""


def without_suffix(prompt: Prompt) -> Prompt:
    """Return a prompt without the text that follows the answer: prefixes are cached up to the answer."""
    return msgspec.structs.replace(prompt, suffix="") if isinstance(prompt, TextPrompt) else prompt


def refusal(route: Route, body: dict[str, Any]) -> str:
    assert route.reader is not None
    try:
        route.reader(json.dumps(body).encode(), CONTEXT)
    except ParleyError as error:
        return error.message
    return ""


def find_prompt_members(route: Route) -> set[str]:
    """Find the members that can hold the prompt of a route, by trying each member that its reader reads."""
    read_members: dict[str, Any] = {}
    with record_reads(read_members):
        refusals = refusal(route, {}) + refusal(route, {"model": "m"})  # a refusal may name the missing member
        named, tried, carriers = set(re.findall(r"\w+", refusals)), set[str](), set[str]()
        while untried := {name for name in named | read_members.keys() if name.isidentifier()} - tried:
            tried |= untried
            carriers |= {member for member in untried if can_hold_prompt(route, member)}
    return carriers


@pytest.mark.parametrize("name", DIALECTS)
def test_every_prompt_member_is_declared_for_routing(name: str) -> None:
    """Guards against a coordinator that silently routes at random because it does not see the prompt."""
    dialect = DIALECTS[name]
    declared = {*dialect.prompt_members.conversations, *dialect.prompt_members.prompts}
    if dialect is GRPC_CALLS:
        assert dialect.prompt_members.read_non_json is not None
        assert dialect.prompt_members.read_non_json(message()) == ("tiny", TEXT.encode())
        return  # bodies are not JSON; tests/disagg/test_prompt_hash.py covers them
    routes = {repr(route.reader): route for route in generate_routes(dialect)}  # several share a reader
    for route in routes.values():
        carriers = find_prompt_members(route)
        assert carriers, f"{route.path}: no member was found that holds a prompt; add its form to WAYS"
        assert carriers <= declared, f"{route.path}: a prompt in one of these is not routed: {carriers - declared}"
