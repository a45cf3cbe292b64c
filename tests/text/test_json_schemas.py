"""JSON schemas kept as data: answers follow accepted schemas to the letter, and refusals name their reason.

A model with random weights and the built-in one answer every accepted schema, all at once. ``jsonschema``, which shares
no code with the engine, checks the answers. ``make test`` takes a third of the schemas, ``make test-nightly`` all.
"""

import asyncio
import json
import os
import re
from collections.abc import Iterator
from datetime import date
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import llguidance
import pytest
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from support import tiny_models

from parley import LLM
from parley.errors import InvalidValue
from parley.text.grammar.compiler import GrammarCompiler
from parley.text.grammar.schemas.string_formats import KNOWN_FORMATS
from parley.types import Grammar

DATA = Path(__file__).parents[1] / "data" / "schemas"
ROWS: list[dict[str, Any]] = [
    row for file in sorted(DATA.glob("*.json")) for row in json.loads(file.read_text("utf-8"))
]
ACCEPTED = [row for row in ROWS if "refused" not in row]
REFUSED = [row for row in ROWS if "refused" in row]
TESTED = ACCEPTED if os.environ.get("PARLEY_NIGHTLY") else ACCEPTED[::3]
MAX_ANSWER_TOKENS = 240  # of an answer; endless values are cut there
MAX_BATCH = 192  # concurrent answers
CLOSING = re.compile(r'["}\]][]},"]*')
HOSTNAME = re.compile(
    r"(?!.{254})([a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)(\.[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)*"
)
TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)")
DURATION = re.compile(r"P(?=.)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?)")


def build_format_checker() -> FormatChecker:
    """Return a checker of the formats that the grammar promises; jsonschema alone checks only a few of them."""
    checker = FormatChecker(formats=KNOWN_FORMATS & FormatChecker.checkers.keys())

    def check(name: str, holds: Any) -> None:
        checker.checks(name, raises=ValueError)(lambda value: not isinstance(value, str) or bool(holds(value)))

    check("date", date.fromisoformat)
    check("time", TIME.fullmatch)
    check("date-time", lambda text: TIME.fullmatch(text[11:]) and text[10] in "Tt" and date.fromisoformat(text[:10]))
    check("duration", DURATION.fullmatch)
    check("hostname", HOSTNAME.fullmatch)
    check("email", re.compile(r"[^@\s]+@[^@\s]+").fullmatch)
    check("uri", re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:[^\s<>\"{}|\\^`]*").fullmatch)
    check("json-pointer", re.compile(r"(/([^/~]|~0|~1)*)*").fullmatch)
    check("relative-json-pointer", re.compile(r"(0|[1-9]\d*)(#|(/([^/~]|~0|~1)*)*)").fullmatch)
    return checker


CHECKER = build_format_checker()


def parse_json_exactly(text: str) -> Any:
    """Parse JSON with exact decimals: in binary, 9.88 is not a multiple of 0.01."""

    def number(digits: str) -> Any:
        try:
            return Decimal(digits)
        except InvalidOperation:  # an exponent out of range
            return float(digits)

    return json.loads(text, parse_float=number)


def schema_validator(schema: Any) -> Validator:
    """Return a validator for the draft that the schema declares."""
    schema = parse_json_exactly(json.dumps(schema))
    kind = validator_for(schema, default=Draft202012Validator)
    kind.check_schema(schema)
    return kind(schema, format_checker=CHECKER)


@pytest.fixture(scope="module", params=["random", "built-in"])
def llm(request) -> Iterator[LLM]:
    folder = str(tiny_models.model_folder("qwen3")) if request.param == "random" else None
    with LLM(folder, threads=1, kv_memory=192 << 20, max_batch=MAX_BATCH) as llm:
        yield llm


def test_schema_data_is_large_with_unique_names():
    names = [row["name"] for row in ROWS]
    assert len(ACCEPTED) >= 400 and len(REFUSED) >= 50
    assert len({(row["name"], "refused" in row) for row in ROWS}) == len(names)


def test_refused_schemas_fail_with_reason_before_queueing(llm):
    before = llm.model.engine.stats.prompt_tokens
    for row in REFUSED:
        with pytest.raises(InvalidValue) as caught:
            llm.generate("a", guided_json=row["schema"], max_tokens=1)
        assert row["refused"] in caught.value.message, row["name"]
        assert caught.value.field == "guided_json" and "guided_json" in caught.value.message
    assert llm.model.engine.stats.prompt_tokens == before


def closing_bias(llm: LLM) -> dict[str, float]:
    """Return a logit bias towards the ends of strings, lists, objects and answers, which these models rarely choose."""
    tokenizer = llm.model.text_pipeline.tokenizer
    texts = ((token_id, tokenizer.backend.decode([token_id])) for token_id in range(tokenizer.vocab_size))
    token_bias = {str(token_id): 9.0 if text[0] == '"' else 3.0 for token_id, text in texts if CLOSING.fullmatch(text)}
    return token_bias | {str(token_id): 6.0 for token_id in tokenizer.eos_ids}


def test_answers_validate_against_their_schemas(llm):
    closing = closing_bias(llm)

    async def write() -> list[Any]:
        options = {"max_tokens": MAX_ANSWER_TOKENS, "temperature": 0.8, "frequency_penalty": 0.5, "logit_bias": closing}
        return await asyncio.gather(
            *(
                llm.agenerate("JSON: ", guided_json=row["schema"], seed=seed, **options)
                for seed, row in enumerate(TESTED)
            )
        )

    answers = asyncio.run(write())
    truncated_count = 0
    for row, answer in zip(TESTED, answers, strict=True):
        text = answer.text
        if answer.completions[0].finish == "length":
            truncated_count += 1
            assert is_answer_beginning(llm, row["schema"], text), (row["name"], text)
        else:
            assert answer.completions[0].finish == "stop", row["name"]
            faults = [fault.message for fault in schema_validator(row["schema"]).iter_errors(parse_json_exactly(text))]
            assert not faults, (row["name"], text, faults)
    assert truncated_count <= len(TESTED) / 10


def is_answer_beginning(llm: LLM, schema: Any, text: str) -> bool:
    """Whether the text, read byte by byte, is the beginning of an answer under the schema."""
    grammar = GrammarCompiler(llm.model.text_pipeline.tokenizer).compile_grammar(Grammar("json", schema))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    letters = list(text.removesuffix("\ufffd").encode())
    return matcher.try_consume_tokens(letters) == len(letters)
