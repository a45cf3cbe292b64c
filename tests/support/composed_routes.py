"""Routes of the other APIs for the composition test: how each asks for a feature, and the parts of its answers.

The parts of an answer must equal those of chat completions' answer to the same features. Data and small functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support.request_features import BASE, FEATURES, QUESTION, SCHEMA, Members

from parley.demo.errands import TOOLS

Names = tuple[str, ...]
Reader = Callable[[Any], Members]
FUNCTION: Members = TOOLS["get_weather"]["function"]
# Asked for by the same members as in chat completions.
DRAWING = ("penalties", "typical_p", "watermark", "logit_bias", "min_tokens", "lora")


@dataclass(frozen=True)
class ComposedRoute:
    """One route: ``base``: its plain request; ``members``: what asks for a feature, by the feature's name.

    ``read_answer``: the parts of an answer; ``join_stream``: the answer that the lines of a stream make up.
    """

    title: str
    path: str
    base: Members
    members: dict[str, Members]
    read_answer: Reader
    join_stream: Callable[[list[str]], Any]

    def make_body(self, names: Names) -> Members:
        """Return a request that asks for these features."""
        body: Members = {"model": "parley-demo", **self.base}
        for name in names:
            for key, value in self.members[name].items():
                merges = key == "options"
                body[key] = {**body.get(key, {}), **value} if merges else value
        return body


def answer_parts(
    text: str, reasoning: str, calls: list[tuple[str, Any]], usage: tuple[int, int], scores: list[float] | None
) -> Members:
    return {"text": text, "reasoning": reasoning, "calls": calls, "usage": usage, "scores": scores}


def chat_parts(answer: Members) -> Members:
    """Return the parts of chat completions' answer. The arguments of a call that are cut off or no object are None."""
    (choice,) = answer["choices"]
    message, usage = choice["message"], answer["usage"]
    functions = [call["function"] for call in message.get("tool_calls") or []]
    calls = [(function["name"], read_arguments(function["arguments"])) for function in functions]
    scores = [token["logprob"] for token in (choice.get("logprobs") or {}).get("content") or []]
    return answer_parts(
        message.get("content") or "",
        message.get("reasoning_content") or "",
        calls,
        (usage["prompt_tokens"], usage["completion_tokens"]),
        scores or None,
    )


def read_arguments(text: str) -> Any:
    """Return a call's arguments, None if they are not an object."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def different_parts(expected: Members, actual: Members, title: str) -> list[str]:
    """Return the names of the parts of another API's answer that differ from chat completions'."""
    whole_calls = [call for call in expected["calls"] if call[1] is not None]
    different = [name for name in ("reasoning", "usage") if actual[name] != expected[name]]
    # Messages writes a call as text if its arguments are no object.
    has_odd_call = len(whole_calls) < len(expected["calls"])
    if actual["text"] != expected["text"] and not (has_odd_call and actual["text"].startswith(expected["text"])):
        different.append("text")
    if actual["calls"][: len(whole_calls)] != whole_calls or len(actual["calls"]) > len(expected["calls"]):
        different.append("calls")
    scores = actual["scores"]
    # Responses have no log-probabilities of a call's tokens.
    if scores is not None and not expected["calls"] and scores != expected["scores"]:
        different.append("scores")
    return [f"{title}: {name}: {actual[name]} is not {expected[name]}" for name in different]


# -- Responses


def responses_parts(answer: Members) -> Members:
    texts, reasoning, calls, scores = [], [], [], []
    for item in answer["output"]:
        if item["type"] == "message":
            texts += [part["text"] for part in item["content"]]
            scores += [token["logprob"] for part in item["content"] for token in part.get("logprobs") or []]
        elif item["type"] == "reasoning":
            reasoning += [part["text"] for part in item["content"]]
        else:
            calls.append((item["name"], read_arguments(item["arguments"])))
    usage = answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]
    return answer_parts("".join(texts), "".join(reasoning), calls, usage, scores or None)


def last_response(lines: list[str]) -> Members:
    """Return the response in the last event, and check that its texts are those of the deltas."""
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    response: Members = events[-1]["response"]
    assert deltas == responses_parts(response)["text"], (deltas, response)
    return response


# -- Messages


def messages_parts(answer: Members) -> Members:
    blocks = answer["content"]
    usage = answer["usage"]
    prompt_tokens = sum(usage.get(name) or 0 for name in INPUT_COUNTS)
    return answer_parts(
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
        (prompt_tokens, usage["output_tokens"]),
        None,
    )


INPUT_COUNTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
DELTA_MEMBERS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def join_message_events(lines: list[str]) -> Members:
    blocks: list[Members] = []
    usage: Members = {}
    for line in lines:
        event = json.loads(line[6:]) if line.startswith("data: ") else {"type": ""}
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"partial_json": ""})
        elif event["type"] == "content_block_delta" and event["delta"]["type"] in DELTA_MEMBERS:
            member = DELTA_MEMBERS[event["delta"]["type"]]
            blocks[-1][member] += event["delta"][member]
        elif event["type"] == "message_delta":
            usage = event["usage"]
        assert event["type"] != "error", event
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = read_arguments(block["partial_json"] or "{}")
    return {"content": blocks, "usage": usage}


# -- Ollama


def ollama_parts(answer: Members) -> Members:
    message = answer["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    scores = [token["logprob"] for token in answer.get("logprobs") or []]
    usage = answer["prompt_eval_count"], answer["eval_count"]
    return answer_parts(message["content"], message.get("thinking", ""), calls, usage, scores or None)


def join_ollama_lines(lines: list[str]) -> Members:
    pieces = [json.loads(line) for line in lines if line]
    assert all("error" not in piece for piece in pieces), pieces
    message: Members = {"content": "", "thinking": "", "tool_calls": []}
    scores: list[Any] = []
    for piece in pieces:
        for name, value in piece["message"].items():
            if name != "role":
                message[name] += value
        scores += piece.get("logprobs") or []
    return pieces[-1] | {"message": message, "logprobs": scores}


# -- Cohere


def cohere_parts(answer: Members) -> Members:
    message, tokens = answer["message"], answer["usage"]["tokens"]
    blocks = message.get("content") or []
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return answer_parts(
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        [(function["name"], read_arguments(function["arguments"] or "{}")) for function in functions],
        (tokens["input_tokens"], tokens["output_tokens"]),
        [score for item in answer.get("logprobs") or [] for score in item["logprobs"]] or None,
    )


def join_cohere_events(lines: list[str]) -> Members:
    content: list[Members] = []
    calls: list[Members] = []
    scores: list[Members] = []
    end: Members = {}
    for line in lines:
        event = json.loads(line[6:]) if line.startswith("data: {") else {"type": "", "delta": {}}
        message = event.get("delta", {}).get("message") or {}
        match event["type"]:
            case "content-start":
                assert event["index"] == len(content)
                content.append(message["content"])
            case "content-delta":
                for name, text in message["content"].items():
                    content[event["index"]][name] += text
                scores += [event["logprobs"]] if "logprobs" in event else []
            case "tool-call-start":
                assert event["index"] == len(calls)
                calls.append(message["tool_calls"])
            case "tool-call-delta":
                calls[event["index"]]["function"]["arguments"] += message["tool_calls"]["function"]["arguments"]
            case "message-end":
                end = event["delta"]
    assert "error" not in end, end
    return {"message": {"content": content, "tool_calls": calls}, "usage": end["usage"], "logprobs": scores}


SAMPLING: Members = {"temperature": 0.9, "seed": BASE["seed"]}
STREAMED: Members = {"stream": True}
AS_CHAT = {name: FEATURES[name].members for name in DRAWING}

COMPOSED_ROUTES = (
    ComposedRoute(
        "Responses",
        "/v1/responses",
        {"input": QUESTION, "max_output_tokens": BASE["max_tokens"], "store": False, **SAMPLING},
        AS_CHAT
        | {name: FEATURES[name].members for name in ("bad_words", "stop", "regex", "reasoning", "priority")}
        | {
            "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 3},
            "schema": {"text": {"format": {"type": "json_schema", "name": "weather", "schema": SCHEMA}}},
            "tools": {"tools": [{"type": "function", "strict": False} | FUNCTION]},
            "streaming": STREAMED,
        },
        responses_parts,
        last_response,
    ),
    ComposedRoute(
        "Messages",
        "/v1/messages",
        {"messages": BASE["messages"], "max_tokens": BASE["max_tokens"], **SAMPLING},
        AS_CHAT
        | {
            "stop": {"stop_sequences": FEATURES["stop"].members["stop"]},
            "schema": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "tools": {
                "tools": [
                    {"name": FUNCTION["name"], "description": FUNCTION["description"],
                     "input_schema": FUNCTION["parameters"]}
                ]
            },
            "reasoning": {"thinking": {"type": "adaptive"}},
            "streaming": STREAMED,
        },
        messages_parts,
        join_message_events,
    ),
    ComposedRoute(
        "Ollama",
        "/api/chat",
        {
            "messages": BASE["messages"],
            "think": False,
            "stream": False,
            "options": SAMPLING | {"num_predict": BASE["max_tokens"], "top_k": 0, "top_p": 1.0},
        },
        {
            # not penalties: theirs have a window, which chat completions do not have
            "typical_p": {"options": FEATURES["typical_p"].members},
            "stop": {"options": FEATURES["stop"].members},
            "lora": FEATURES["lora"].members,
            "logprobs": FEATURES["logprobs"].members,
            "schema": {"format": SCHEMA},
            "tools": {"tools": [TOOLS["get_weather"]]},
            "reasoning": {"think": True},
            "streaming": STREAMED,
        },
        ollama_parts,
        join_ollama_lines,
    ),
    ComposedRoute(
        "Cohere",
        "/v2/chat",
        {"messages": BASE["messages"], "max_tokens": BASE["max_tokens"], "p": 1, **SAMPLING},
        AS_CHAT
        | {name: FEATURES[name].members for name in ("tools", "priority")}
        | {
            "stop": {"stop_sequences": FEATURES["stop"].members["stop"]},
            "logprobs": {"logprobs": True},
            "schema": {"response_format": {"type": "json_object", "json_schema": SCHEMA}},
            "reasoning": {"thinking": {"type": "enabled"}},
            "streaming": STREAMED,
        },
        cohere_parts,
        join_cohere_events,
    ),
)  # fmt: skip
