"""Examples of the vendors' own documents, sent byte for byte: the answers have the documented members.

``tests/data/examples.json`` holds the documented bodies and answers. Only the members of the answers are compared.
"""

import json
from pathlib import Path

import pytest
from support.member_paths import member_paths

EXAMPLES = json.loads((Path(__file__).parent.parent / "data" / "examples.json").read_text("utf-8"))


@pytest.mark.parametrize(
    "example", EXAMPLES, ids=[f"{listed_example['source']}: {listed_example['name']}" for listed_example in EXAMPLES]
)
async def test_documented_example_gets_the_documented_members(serve, example):
    server = await serve(names=("mymodel",))
    for path in example["paths"]:
        answer = await server.call("POST", path, example["body"].encode(), {"content-type": "application/json"})
        assert answer.status == example["status"], (path, answer.body)
        streamed = path.endswith("_stream") and answer.status == 200
        kind = "text/event-stream; charset=utf-8" if streamed else "application/json"
        assert answer.headers["content-type"] == kind, path
        actual = json.loads(answer.body.removeprefix(b"data: ") if streamed else answer.body)  # a stream has one event
        assert isinstance(actual, type(example["answer"])), path
        assert member_paths(actual) == member_paths(example["answer"]), path
        if "id" in example["answer"]:
            assert (actual["id"], actual["model_name"], actual["model_version"]) == ("42", "mymodel", "1")
