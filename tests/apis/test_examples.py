"""The examples of the documents that an API is known by, sent letter by letter: answers have the documented members.

``tests/data/examples.json`` holds what the documents show: bodies, and answers of which only the members count.
"""

import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = json.loads((Path(__file__).parent.parent / "data" / "examples.json").read_text("utf-8"))


def members(value: Any, at: str = "") -> set[str]:
    """The paths of all members; entries of a list are all alike."""
    if isinstance(value, list):
        return set().union(*(members(entry, at) for entry in value))
    if not isinstance(value, dict):
        return set()
    paths = {f"{at}.{name}".strip(".") for name in value}
    return paths.union(*(members(inner, f"{at}.{name}".strip(".")) for name, inner in value.items()))


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{each['source']}: {each['name']}" for each in EXAMPLES])
async def test_an_example_sent_as_it_stands(serve, example):
    served = await serve(names=("mymodel",))
    for path in example["paths"]:
        answer = await served.call("POST", path, example["body"].encode(), {"content-type": "application/json"})
        assert answer.status == example["status"], (path, answer.body)
        streamed = path.endswith("_stream") and answer.status == 200
        kind = "text/event-stream; charset=utf-8" if streamed else "application/json"
        assert answer.headers["content-type"] == kind, path
        told = json.loads(answer.body.removeprefix(b"data: ") if streamed else answer.body)  # it is one event
        assert isinstance(told, type(example["answer"])), path
        assert members(told) == members(example["answer"]), path
        if "id" in example["answer"]:
            assert (told["id"], told["model_name"], told["model_version"]) == ("42", "mymodel", "1")
