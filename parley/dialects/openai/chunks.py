"""Joins the chunks of a streamed chat completion into the completion that its answer in one piece would be."""

from __future__ import annotations

from typing import Any

import msgspec

from parley.dialects.sse import DATA_START, STREAM_END, split_events

TEXTS = ("content", "refusal", "reasoning_content", "reasoning")


class StreamedCompletion:
    """The completion of one stream."""

    def __init__(self) -> None:
        self._tail = b""  # the beginning of an event that has not arrived completely
        self._members: dict[str, Any] = {}  # of the completion, except its choices
        self._choices: dict[int, dict[str, Any]] = {}
        self._has_failed = False

    def add_bytes(self, data: bytes) -> bool:
        """Read a part of the stream. Return whether the completion is whole now."""
        events, self._tail = split_events(self._tail + data)
        for event in events:
            if not event.startswith(DATA_START):
                continue  # a comment
            content = event.removeprefix(DATA_START)
            if content == STREAM_END:
                return bool(self._members) and not self._has_failed
            self._add_chunk(msgspec.json.decode(content, type=dict[str, Any]))
        return False

    def join_chunks(self) -> dict[str, Any]:
        """Return the completion."""
        choices = [choice for _, choice in sorted(self._choices.items())]
        return self._members | {"object": "chat.completion", "choices": choices}

    def _add_chunk(self, chunk: dict[str, Any]) -> None:
        if "choices" not in chunk:  # an error ends the stream
            self._has_failed = True
            return
        for part in chunk.pop("choices"):
            choice = self._choices.setdefault(part["index"], _new_choice(part["index"]))
            _extend_message(choice["message"], part.get("delta") or {})
            _extend_logprobs(choice, part.get("logprobs"))
            if token_ids := part.get("token_ids"):
                choice.setdefault("token_ids", []).extend(token_ids)
            for name in ("finish_reason", "stop_reason"):
                if part.get(name) is not None:
                    choice[name] = part[name]
        self._members |= {name: value for name, value in chunk.items() if value is not None}


def _new_choice(index: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": None, "stop_reason": None}


def _extend_message(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in TEXTS:
        if delta.get(name):
            message[name] = (message.get(name) or "") + delta[name]
    if (legacy_call := delta.get("function_call")) is not None:
        _extend_texts(message.setdefault("function_call", {}), legacy_call)
    for piece in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        if piece["index"] == len(calls):
            calls.append({name: piece[name] for name in ("id", "type") if name in piece})
        call = calls[piece["index"]]
        for kind in ("function", "custom"):
            if kind in piece:
                _extend_texts(call.setdefault(kind, {}), piece[kind])


def _extend_texts(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for name, text in part.items():
        whole[name] = whole.get(name, "") + text


def _extend_logprobs(choice: dict[str, Any], logprobs: dict[str, Any] | None) -> None:
    if logprobs is None:
        return
    if choice["logprobs"] is None:
        choice["logprobs"] = {"content": [], "refusal": None}
    choice["logprobs"]["content"] += logprobs.get("content") or []
