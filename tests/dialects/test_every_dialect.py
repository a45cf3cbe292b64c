"""What holds of every dialect in the table of surfaces, also of those that are yet to be added."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parley.dialects.dialect import Dialect, Head, Reply, Route
from parley.dialects.mounts import INNER, PLANES, SURFACES
from parley.dialects.triton.rpc import infer
from parley.errors import ParleyError

ROOT = Path(__file__).parents[2]
watched = runpy.run_path(str(ROOT / "docs" / "survey.py"))["watched"]  # notes the members that a reader asks for

DIALECTS = {
    f"{prefix or '/'} {dialect.name}": dialect
    for prefix, dialect in (
        *((surface.prefix, surface.dialect) for surface in (*SURFACES, *INNER)),
        *(("", dialect) for dialect in PLANES.values()),
    )
}
HEAD = Head("0f", 1, "fp", context=4096, path={"model": "m", "version": "1", "endpoint": "e", "served": "m"},
            headers={b"content-type": b"application/json"})  # fmt: skip
TEXT, IDS = "zebra", [11, 12, 13]
TURNS = [{"role": "user", "content": TEXT}]
TENSOR = {"datatype": "BYTES", "shape": [1], "data": [TEXT]}
WAYS: list[Any] = [  # in which a member may hold a prompt
    TEXT, [TEXT], IDS, TURNS, [TURNS], [{"inputs": TEXT}], [{"messages": TURNS}], [{"type": "text", "text": TEXT}],
    [{"name": "text_input"} | TENSOR], [{"name": "input0", "datatype": "UINT32", "shape": [1, 3], "data": IDS}],
]  # fmt: skip

BESIDE: list[dict[str, Any]] = [{}, {"model": "m"}, {"outputs": [{"name": "output0"}]}]  # what a body needs besides


def generating(dialect: Dialect) -> Iterator[Route]:
    return (route for route in dialect.routes if route.kind == "generate" and route.method == "POST")


def message() -> bytes:
    """A request over gRPC."""
    made = infer.REQUEST(model_name="tiny")
    made.inputs.add(name="text_input", datatype="BYTES", shape=[1], contents={"bytes_contents": [TEXT.encode()]})
    return made.SerializeToString()


def readings(route: Route, member: str) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Whether each body with this member is read as one whose prompt stands in it; and the members asked for."""
    for way in WAYS:
        for more in BESIDE:
            found: dict[str, Any] = {}
            with watched(found):
                said = prompts(route, {**more, member: way})
            yield TEXT in said or repr(IDS) in said, found


def prompts(route: Route, body: dict[str, Any]) -> str:
    """What a route reads as the prompts of a body, nothing if it refuses it."""
    assert route.read is not None
    try:
        reply = route.read(json.dumps(body).encode(), HEAD)
    except ParleyError:
        return ""
    return repr(reply.request.prompts) if isinstance(reply, Reply) else ""


def refusal(route: Route, body: dict[str, Any]) -> str:
    assert route.read is not None
    try:
        route.read(json.dumps(body).encode(), HEAD)
    except ParleyError as error:
        return error.message
    return ""


def carrying(route: Route) -> set[str]:
    """The members in which the prompt of a route may stand, found by trying all that its reader asks for."""
    asked: dict[str, Any] = {}
    with watched(asked):
        told = refusal(route, {}) + refusal(route, {"model": "m"})  # which may say what is missing
    names, tried = {*asked, *re.findall(r"\w+", told)}, set[str]()
    carriers = set[str]()
    while fresh := {name for name in names if name.isidentifier()} - tried:
        tried |= fresh
        for member in fresh:
            for carries, more in readings(route, member):
                names |= more.keys()
                if carries:
                    carriers.add(member)
                    break
    return carriers


@pytest.mark.parametrize("name", DIALECTS)
def test_a_coordinator_finds_every_prompt(name: str) -> None:
    """A prompt that no declared member holds would be routed by chance, and nobody would notice."""
    dialect = DIALECTS[name]
    declared = {*dialect.members.conversations, *dialect.members.prompts}
    if dialect.members.message is not None:
        assert dialect.members.message(message()) == ("tiny", TEXT.encode())
        return  # its bodies are no JSON
    for route in generating(dialect):
        carriers = carrying(route)
        assert carriers, f"{route.path}: no member was found that holds a prompt; add its form to WAYS"
        assert carriers <= declared, f"{route.path}: a prompt in one of these is not routed: {carriers - declared}"
