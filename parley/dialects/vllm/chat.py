"""``POST /v1/chat/completions`` as vLLM answers it: OpenAI's members, its own form of chunks and answers.

A stream opens every choice before its first token, and the last text of a choice carries its finish reason. An answer
omits nothing: absent values are null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from parley.dialects.dialect import Answer, Head
from parley.dialects.fields import Fields
from parley.dialects.openai import chat
from parley.dialects.openai.shared import Rules
from parley.dialects.vllm import requests, shared
from parley.types import Accepted, CallDelta, Delta, Done, Event, Token, Usage

CONTENT = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null,"token_ids":null}'


def read(body: bytes, head: Head) -> ChatReply | Answer:
    """Read a chat request. Raises BadRequest."""
    return requests.read(ChatReply, body, head)


class ChatReply(shared.Streamed, chat.ChatReply):
    """A chat request, answered in vLLM's form."""

    rules: ClassVar[Rules] = requests.RULES

    def __init__(self, body: Fields, head: Head):
        counted = "max_completion_tokens" if body.has("max_completion_tokens") else "max_tokens"
        requests.check(body, head, counted=counted, least=1)
        requests.check_chat(body)
        super().__init__(requests.formed(body), head)
        self.request.stop = requests.cap(self.request.stop, head)
        self.request.sampling = requests.sampling(self.request)
        self._name = requests.name(head, self._name)
        self._legacy = False  # calls are always written in the newer form
        self._echoes = body.boolean("echo", False)
        self._wants_tokens = self._ids or self.request.want.logprobs is not None
        if self._echoes and self.request.want.prompt_logprobs is None and not self.request.stream:
            self.request.want = shared.scored(self.request.want)

    # -- a stream

    def chunk(self, events: Sequence[Event]) -> bytes:
        parts: list[bytes] = []
        pieces: list[tuple[Delta | None, Done | None]] = []
        for event in events:
            match event:
                case Accepted():
                    self._prompt_ids, self._prompt_text = event.token_ids, event.text
                    parts += [self._open(index) for index in range(self.request.n)]
                case Delta():
                    pieces.append((event, None))
                case Done():
                    shared.finish(pieces, event)
        return b"".join(parts + [self._say(delta, done) for delta, done in pieces])

    def _open(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        opening: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        told = self._wrap([opening]) | self._progress(index)
        told |= {"prompt_token_ids": self._prompt_ids if self._ids else None, "prompt_text": self._prompt_text}
        if not self._echo:
            return shared.frame(told)
        opening = opening | {"delta": {"content": self._echo}}
        return shared.frame(told) + shared.frame(self._wrap([opening]) | self._progress(index))

    def _say(self, delta: Delta | None, done: Done | None) -> bytes:
        """Return the chunks for new output, for the end of a choice, or for both."""
        plain = not (self._wants_tokens or self._continuous)
        if delta is not None and done is None and plain and delta.part == "content" and delta.text:
            return self._before_chunk() + CONTENT % (delta.index, shared.encode(delta.text)) + b"]}\n\n"
        told = [] if delta is None else self._deltas(delta)
        tokens = [] if delta is None else delta.tokens
        if not told and done is not None:
            told = [{}]
        elif not told and tokens and self._wants_tokens:
            told = [{"content": ""}]
        if not told and delta is not None:
            self._choices[delta.index].given += len(tokens)
        frames = []
        for number, piece in enumerate(told):
            last = number == len(told) - 1
            frames.append(self._chunk(piece, delta, done if last else None, tokens if last else []))
        return b"".join(frames)

    def _chunk(self, piece: dict[str, Any], delta: Delta | None, done: Done | None, tokens: list[Token]) -> bytes:
        index = done.index if delta is None and done is not None else delta.index if delta is not None else 0
        self._choices[index].given += len(tokens)
        choice: dict[str, Any] = {
            "index": index,
            "delta": piece,
            "logprobs": self._logprobs(tokens) if tokens else None,
            "finish_reason": None if done is None else self._finish(done),
        }
        if done is not None:
            choice["stop_reason"] = done.stop
        choice["token_ids"] = [token.id for token in tokens] if self._ids else None
        told = self._wrap([choice]) | self._progress(index)
        if done is not None and not self.request.want.usage:
            told["system_fingerprint"] = self._head.fingerprint
        return shared.frame(told)

    def _deltas(self, event: Delta) -> list[dict[str, Any]]:
        if event.call is not None:
            return self._calls(event.call)
        if event.part == "tool" or not event.text:
            return []
        if event.part == "content":
            return [{"content": event.text}]
        return [{"reasoning": event.text, "reasoning_content": event.text}] if self._reasons else []

    def _calls(self, call: CallDelta) -> list[dict[str, Any]]:
        """Return the deltas of a call: its announcement without arguments, then the arguments as separate deltas."""
        pieces: list[dict[str, Any]] = []
        if call.name is not None:
            function = {"name": call.name}
            pieces.append({"id": _call_id(call.id), "type": "function", "index": call.index, "function": function})
        if call.arguments:
            pieces.append({"index": call.index, "function": {"arguments": call.arguments}})
        return [{"content": None, "tool_calls": [piece]} for piece in pieces]

    def _wrap(self, choices: list[Any]) -> dict[str, Any]:
        return shared.envelope(f"chatcmpl-{self._name}", "chat.completion.chunk", self._head, self.request, choices)

    def _progress(self, index: int) -> dict[str, Any]:
        if not self._continuous:
            return {}
        return {"usage": shared.progress(len(self._prompt_ids or ()), self._choices[index].given)}

    # -- one answer

    def body(self, usage: Usage) -> bytes:
        return self.answer([self._choice(index, choice) for index, choice in enumerate(self._choices)], usage)

    def choice(self, index: int) -> dict[str, Any]:
        """Return the first choice, with another index."""
        return self._choice(index, self._choices[0])

    def answer(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        """Return the answer with its choices."""
        answer = shared.envelope(f"chatcmpl-{self._name}", "chat.completion", self._head, self.request, choices)
        return shared.encode(
            answer
            | {
                "service_tier": None,
                "system_fingerprint": self._head.fingerprint,
                "usage": shared.usage(usage),
                "prompt_logprobs": self._prompt_logprobs(),
                "prompt_token_ids": self._prompt_ids if self._ids else None,
                "prompt_text": self._prompt_text,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    def _choice(self, index: int, choice: chat.Choice) -> dict[str, Any]:
        assert choice.done is not None
        reasoning = ("".join(choice.reasoning) if self._reasons else "") or None
        content: str | None = self._echo + "".join(choice.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if not content and (choice.calls or choice.reasoning) and not self._named else content,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        if choice.calls:
            message["tool_calls"] = [call | {"id": _call_id(call["id"])} for call in choice.calls]
        message["reasoning"] = reasoning
        if reasoning is not None:
            message["reasoning_content"] = reasoning  # its name in older versions
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": self._finish(choice.done),
            "stop_reason": choice.done.stop,
            "token_ids": [token.id for token in choice.tokens] if self._ids else None,
            "routed_experts": None,
        }

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        scored = super()._logprobs(tokens)
        return None if scored is None else {"content": scored["content"]}


def _call_id(id: str | None) -> str:
    """Return the id of a call in vLLM's form, from the part that distinguishes calls here."""
    return f"chatcmpl-tool-{(id or '')[-16:]}"
