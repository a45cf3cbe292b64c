"""The features that the composition test combines: how a request asks for each, and how an answer shows it.

Data and small functions over answers, and the pairs that are refused. ``docs/composition.py`` renders them as a page.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from parley.demo.errands import TOOLS

Members = dict[str, Any]
Check = Callable[[Members, Members], bool]  # of the body and the answer

QUESTION = "What is the weather in Paris and London?"
BASE: Members = {"messages": [{"role": "user", "content": QUESTION}], "seed": 5, "max_tokens": 32}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "London"]}, "degrees": {"type": "integer", "maximum": 40}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


MAY_END_EARLY = {"stop", "response_format", "structured_outputs"}  # these may end an answer before min_tokens


@dataclass(frozen=True)
class Feature:
    """One feature: ``members`` of the body ask for it; ``check`` finds it in an answer, None if it does not show there.

    ``place``: a property of how a server runs rather than of a request.
    """

    description: str
    members: Members = field(default_factory=dict)
    check: Check | None = None
    server_side: bool = False


def choices(answer: Members) -> list[Members]:
    return answer["choices"]


def has_logprobs(body: Members, answer: Members) -> bool:
    return all(len(token["top_logprobs"]) >= 3 for choice in choices(answer) for token in choice["logprobs"]["content"])


def follows_schema(body: Members, answer: Members) -> bool:
    return "stop" in body or all(
        choice["finish_reason"] != "stop" or set(json.loads(choice["message"]["content"])) == {"city", "degrees"}
        for choice in choices(answer)
        if not choice["message"].get("tool_calls")
    )


FEATURES: dict[str, Feature] = {
    "n": Feature("several answers", {"n": 2}, lambda body, answer: len(choices(answer)) == body["n"]),
    "best_of": Feature("the best of more answers than are returned", {"best_of": 6}),
    "beam": Feature("beam search with `best_of` beams", {"use_beam_search": True, "best_of": 3}),
    "penalties": Feature(
        "repetition, presence and frequency penalties",
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    ),
    "typical_p": Feature("typical sampling", {"typical_p": 0.6}),
    "watermark": Feature("a watermark in the text", {"watermark": True}),
    "logit_bias": Feature(
        "biases for some tokens", {"logit_bias": {str(token_id): 6.0 - token_id % 9 for token_id in range(300, 360)}}
    ),
    "bad_words": Feature(
        "words that the answer must not contain", {"bad_words": ["get_weather", "<tool_call>", "The", "the", "is"]}
    ),
    "logprobs": Feature("log-probabilities of the answer", {"logprobs": True, "top_logprobs": 3}, has_logprobs),
    "prompt_logprobs": Feature(
        "log-probabilities of the prompt",
        {"prompt_logprobs": 2},
        lambda body, answer: len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"],
    ),
    # Pairs of letters that most texts have: processors round differently, so the answer is not the same on all.
    "stop": Feature(
        "stop strings",
        {"stop": ["ning", "name", "}", "al", "an", "ar", "au", "en", "er", "et", "in", "on", "or", "ou", "re", "st"]},
    ),
    "min_tokens": Feature(
        "a minimum number of tokens",
        {"min_tokens": 12},
        lambda body, answer: bool(MAY_END_EARLY & body.keys()) or answer["usage"]["completion_tokens"] >= 12,
    ),
    "schema": Feature(
        "JSON that follows a schema",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}},
        follows_schema,
    ),
    "regex": Feature(
        "text that matches a regular expression", {"structured_outputs": {"regex": "(It is|A) [a-z ]{4,30}\\."}}
    ),
    "tools": Feature("tool calls", {"tools": [TOOLS["get_weather"]]}),
    "reasoning": Feature("reasoning before the answer", {"chat_template_kwargs": {"enable_thinking": True}}),
    "lora": Feature("a LoRA adapter", {"model": "adapted"}),
    "priority": Feature("a priority in the queue", {"priority": 3}),
    "streaming": Feature("the answer as a stream", {"stream": True, "stream_options": {"include_usage": True}}),
    "speculation": Feature("draft tokens that the model verifies", server_side=True),
    "prefix": Feature("a prompt that the cache already has", server_side=True),
    "preemption": Feature("other requests that take the pages of this one", server_side=True),
    "batching": Feature("other requests in the same step", server_side=True),
}

# Pairs without a meaning are refused with a sentence that names these two members.
REFUSED: dict[frozenset[str], tuple[str, str]] = {
    frozenset(("beam", "typical_p")): ("use_beam_search", "typical_p"),
    frozenset(("schema", "regex")): ("response_format", "structured_outputs"),
}

REQUEST_FEATURES = [name for name, feature in FEATURES.items() if not feature.server_side]


def refused_pairs(names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Returns pairs of members; an error must name one pair. An empty list if the request is valid."""
    return [REFUSED[pair] for names_pair in combinations(names, 2) if (pair := frozenset(names_pair)) in REFUSED]


def make_body(names: tuple[str, ...]) -> Members:
    """Returns a request that asks for these features."""
    request_body: Members = {"model": "parley-demo", "temperature": 0.9, **BASE}
    for name in names:
        request_body |= FEATURES[name].members
    return request_body
