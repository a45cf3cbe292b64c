"""Which members each route of an API reads, found by running its readers over probing bodies and watching ``Fields``.

Nothing is written down twice: what a reader asks for is a member of its route, with the type and range it asks for. A
member's own members are found by giving it the ``SHAPES`` below; what is then taken, refused as not available, or wrong
shows in how the reader ends.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest import mock

from parley.dialects.dialect import Answer, Dialect, RequestContext, Route
from parley.dialects.facts import Endpoint, EndpointShare, ModelCard, ServerFacts
from parley.dialects.fields import Fields
from parley.errors import ParleyError, Unsupported

PATH = {"model": "m", "version": "1", "repo": "r", "region": "x", "endpoint": "e", "served": "m", "id": "i"}
HEAD = RequestContext(
    "0f", 1, "fp", context_length=4096, path_parts=PATH, headers={b"content-type": b"application/json"}
)
FACTS = ServerFacts("1", [ModelCard("m", 1, 4096)], True)
MADE = {"e": Endpoint("e", [EndpointShare("m", "m", 100)])}
WANTED: list[dict[str, Any]] = [  # what makes a body complete, one of them for each route
    {"messages": [{"role": "user", "content": "a"}]},
    {"prompt": "a"},
    {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    {"model": "m", "prompt": "a"},
    {"input": "a"},
    {"queries": "a", "documents": "b"},
    {"query": "a", "documents": "b"},
    {"texts": "a"},
    {"messages": [[{"role": "user", "content": "a"}]]},
    {"inputs": "a"},
    {"tokens": [5]},
    {"text_input": "a"},
    {"id": "a"},
    {"lora_name": "a", "lora_path": "b"},
    {"instances": [{"inputs": "a"}]},
    {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}]},
    {"name": "n", "config": {"served_entities": [{"entity_name": "m"}]}},
    {"served_entities": [{"entity_name": "m"}]},
    {},
]
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TURN = {"role": "user", "content": "a", "name": "b"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SHAPES: dict[str, list[Any]] = {  # values that lead to members inside members
    "messages": [
        [TURN, {"role": "assistant", "content": "a", "tool_calls": [CALL]}],
        [{"role": "tool", "content": "a", "tool_call_id": "c"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}],
        [[TURN]],
    ],
    "tools": [[{"type": "function", "function": FUNCTION}]],
    "functions": [[FUNCTION]],
    "tool_choice": [
        "auto",
        "none",
        {"type": "function", "function": {"name": "f"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "f"}}]}},
    ],
    "function_call": ["auto", {"name": "f"}],
    "response_format": [
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        {"type": "json_object", "value": {"properties": {}}},
        {"type": "json_object", "schema": {}},
        {"type": "text"},
    ],
    "structured_outputs": [{"json": {}}],
    "guided_decoding": [{"json": {}}],
    "grammar": [{"type": "json", "value": {"properties": {}}}],
    "embedding_request": ['{"input": "a", "pooling_params": {"dimensions": 5}}', '{"input": [5]}'],
    "value": [{"schema": {"properties": {}}}],
    "prediction": [{"type": "content", "content": "a"}, {"content": [{"type": "text", "text": "a"}]}],
    "stream_options": [{"include_usage": True}],
    "documents": [[{"title": "t"}], "b"],
    "parameters": [{}, {"max_new_tokens": 1}],
    "stop": ["a", ["a"]],
    "stop_token_ids": [[1]],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "prompt_embedding_table": [[0.5]],
    "lora_weights": [[0.5]],
    "modalities": [["text"], ["audio"]],
    "thinking": [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 5}],
    "config": [{"served_entities": [{"entity_name": "m"}]}],
    "served_entities": [[{"entity_name": "m"}], [{"model_name": "m"}]],
    "served_models": [[{"model_name": "m"}]],
    "traffic_config": [{"routes": [{"served_model_name": "m-1", "traffic_percentage": 100}]}],
    "routes": [
        [{"served_model_name": "m-1", "traffic_percentage": 100}],
        [{"served_entity_name": "m-1", "traffic_percentage": 100}],
    ],
    "embedding_types": [["float"]],
    "tags": [[{"key": "k", "value": "v"}]],
    "add_tags": [[{"key": "k", "value": "v"}]],
}  # fmt: skip
VALUES: dict[str, list[Any]] = {  # by the type that a reader asks for
    "boolean": [True, False],
    "integer": [1, 2, 5, 0],
    "number": [0.5, 1, 2],
    "string": ["a", "1"],
    "strings": [["a"], "a"],
    "integers": [[1]],
    "array": [["a"], [1]],
    "objects": [[{}]],
    "object": [{}],
    "free_object": [{"a": 1}],
    "token_weights": [{"1": 1.0}],
    "raw_value": [True, 1, "a", ["a"], {"a": 1}],
}
TYPES = {"strings": "string or array of strings", "integers": "array of integers", "objects": "array of objects",
         "free_object": "object", "token_weights": "object of numbers by token id", "raw_value": "any"}  # fmt: skip
ALONE = "not alone"  # whatever the value, this member by itself makes no good body
COUNTED = re.compile(r"\[\d+\]")


@dataclass
class Member:
    """A member of a body as its reader asks for it; ``how`` is the name of the method of ``Fields``."""

    path: str
    how: str = "raw_value"
    low: float | None = None
    high: float | None = None
    allowed: tuple[str, ...] = ()
    outcomes: set[str] = field(default_factory=set)  # taken, unavailable, wrong
    asked_text: bool = False  # it was a string in the body that is read now
    taken_text: bool = False  # it was a string in a body that was taken

    @property
    def type(self) -> str:
        named = TYPES.get(self.how, self.how)
        return f"string or {named}" if self.how in ("array", "objects") and self.taken_text else named

    @property
    def state(self) -> str:
        """In one word."""
        if "taken" not in self.outcomes:
            return "refused" if "unavailable" in self.outcomes else ALONE
        return "in part" if "unavailable" in self.outcomes else "yes"

    @property
    def range(self) -> str:
        low = "" if self.low is None or self.low < -(2**31) else f"{self.low:g}"
        high = "" if self.high is None or self.high >= 2**31 - 1 else f"{self.high:g}"
        return f"{low}..{high}" if low or high else ""


Members = dict[str, Member]


@contextmanager
def watched(found: Members) -> Iterator[None]:
    """While it is open, every member that a reader asks for is put down."""

    def watch(how: str) -> Any:
        method = getattr(Fields, how)

        @functools.wraps(method)
        def asking(self: Fields, name: str, *args: Any, **kwargs: Any) -> Any:
            path = COUNTED.sub("[]", self.member_path(name))
            member = found.setdefault(path, Member(path))
            member.asked_text |= isinstance(self._data.get(name), str)
            if member.how in ("raw_value", "array") and how not in ("has_value", "is_null", "raw_value"):
                member.how = how
                low, high = (*args[1:3], None, None)[:2] if how in ("integer", "number") else (None, None)
                member.low, member.high = kwargs.get("low", low), kwargs.get("high", high)
                member.allowed = tuple(kwargs.get("allowed", ()))
            return method(self, name, *args, **kwargs)

        return asking

    def among(self: Fields, names: Collection[str]) -> list[str]:
        return [name for name in names if self.has_value(name)]

    with mock.patch.multiple(
        Fields, present_names=among, **{how: watch(how) for how in (*VALUES, "has_value", "is_null")}
    ):
        yield


def ending(route: Route, body: dict[str, Any]) -> str:
    """How a reader ends: taken, unavailable, wrong."""
    known = {
        "generate": (HEAD,),
        "embed": (HEAD,),
        "abort": (HEAD,),
        "adapter": (HEAD,),
        "info": (HEAD, FACTS),
        "summed_info": (HEAD, FACTS),
        "endpoint": (HEAD, FACTS, MADE),
    }
    arguments = known.get(route.kind, ())
    assert route.reader is not None
    try:
        read = route.reader(json.dumps(body).encode(), *arguments)
    except Unsupported:
        return "unavailable"
    except ParleyError:
        return "wrong"
    if isinstance(read, Answer) and route.kind in ("generate", "embed"):
        return "unavailable" if b"not available" in read.body or b"not supported" in read.body else "wrong"
    return "taken"


def members(route: Route) -> Members:
    """The members that a route reads, in the order in which it asks for them."""
    found: Members = {}
    silent = route.reader is None or route.method not in ("POST", "PUT", "PATCH") or route.kind == "reset"
    if silent or route.path.endswith("}/infer"):
        return found  # the members of an inference are tensors: the inputs of the model, which generate has as members
    base = next((body for body in WANTED if ending(route, body) == "taken"), {})
    with watched(found):
        _ending(route, base, found)
        done: set[tuple[str, str]] = set()  # a member whose type is only asked for where it is there is probed again
        while fresh := [member for member in found.values() if (member.path, member.how) not in done]:
            done |= {(member.path, member.how) for member in fresh}
            for member in fresh:
                _probe(route, base, member, found)
    for path, member in found.items():  # what can only be refused inside is refused
        inside = {each.state for each in found.values() if each.path.startswith(path + ".")}
        if member.state == ALONE and "refused" in inside and not inside & {"yes", "in part"}:
            member.outcomes.add("unavailable")
    return found


def _ending(route: Route, body: dict[str, Any], found: Members) -> str:
    """How a reader ends; notes which members are strings in a body that it takes."""
    for member in found.values():
        member.asked_text = False
    end = ending(route, body)
    for member in found.values():
        member.taken_text |= member.asked_text and end == "taken"
    return end


def _probe(route: Route, base: dict[str, Any], member: Member, found: Members) -> None:
    """Give the member one value after another, and see how the reader ends."""
    *parents, name = member.path.split(".")
    values = [*SHAPES.get(name, []), *member.allowed, *VALUES[member.how]]
    if member.how == "integer" and member.low is not None:
        values.append(int(member.low))
    for value in values:
        body = json.loads(json.dumps(base))
        inner: Any = body
        for parent, child in pairwise((*parents, name)):
            if parent.endswith("[]"):
                member.outcomes.add("taken")  # in a list: SHAPES led here, and the reader went on
                return
            inner = inner.setdefault(parent, _holding(parent, child))
        if isinstance(inner, dict):
            inner[name] = value
            member.outcomes.add(_ending(route, body, found))


def _holding(parent: str, child: str) -> dict[str, Any]:
    """An object that may have this member."""
    shapes = (shape for shape in SHAPES.get(parent, []) if isinstance(shape, dict))
    return json.loads(json.dumps(next((shape for shape in shapes if child in shape), {})))


def survey(dialect: Dialect) -> dict[tuple[str, str], Members]:
    """Method and path of every route with its members."""
    found: dict[tuple[str, str], Members] = {}
    for route in dialect.routes:  # a path may have several, told apart by the body
        place = found.setdefault((route.method, route.path), {})
        place |= {path: member for path, member in members(route).items() if path not in place}
    return found
