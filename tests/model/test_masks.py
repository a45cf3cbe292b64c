"""Grammars in the engine: every answer has its form, whatever else is in the batch and however its work was cut."""

from __future__ import annotations

import json

import jsonschema
import models
import pytest

from parley import LLM

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0},
                   "tags": {"type": "array", "items": {"enum": ["a", "bc", "zwölf"]}, "maxItems": 3}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip
SCHEMAS = [
    PERSON,
    {"type": "boolean"},
    {"enum": [1, "zwei", None]},
    {"type": "array", "items": {"type": "null"}, "maxItems": 4},
]


@pytest.fixture(scope="module")
def llm():
    with LLM(str(models.model("qwen3")), threads=1, kv_memory=8 << 20) as llm:
        yield llm


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("heat", [0.0, 1.0, 2.0])
def test_answers_of_a_random_model_follow_their_schema(llm, schema, heat):
    answer = llm.generate("the quick", schema=schema, temperature=heat, n=4 if heat else 1, seed=3, max_tokens=300)
    for completion in answer.completions:
        if completion.finish == "stop":
            jsonschema.validate(json.loads(completion.text), schema)
    assert any(completion.finish == "stop" for completion in answer.completions)
