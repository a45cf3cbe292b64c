"""MindIE's ``POST /v1/chat/completions`` in both variants: with vLLM's members, or those of its own interface.

In a stream, a choice opens with an event with empty text (not for the old manual's servers), and ends with one that has
its last text, finish_reason and usage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parley.dialects.dialect import Head
from parley.dialects.fields import Fields, decode
from parley.dialects.mindie import choices, constraints, messages, openai, parameters
from parley.dialects.mindie.answers import common
from parley.dialects.mindie.openai import Choice, OpenAIReply, frame
from parley.dialects.mindie.rules import Rules
from parley.dialects.mindie.shared import UNREAD, encode
from parley.dialects.openai import tools
from parley.dialects.openai.shared import number
from parley.types import Delta, Done, Event, Request, Token, Usage, Want

# The fast path, for nearly all events.
PLAIN = b'"choices":[{"index":%d,"delta":{"role":"assistant","content":%b},"logprobs":null,"finish_reason":null}]}\n\n'
FINISH = {"length": "length", "tool": "tool_calls"}  # all other reasons are "stop"


def read(rules: Rules, body: bytes, head: Head) -> ChatReply:
    """Read a chat request. Raises BadRequest."""
    return ChatReply(rules, decode(body, UNREAD), head)


class ChatReply(OpenAIReply):
    """A reply to one conversation, as a stream of events or in one piece."""

    def __init__(self, rules: Rules, body: Fields, head: Head):
        self.model = openai.model(body, rules)
        chat, budget = messages.conversation(body, rules)
        interface = (parameters.CHAT if rules.vllm else parameters.NATIVE_CHAT).under(rules)
        values = parameters.read(body, interface)
        wish = choices.count(body, values, interface, rules)
        grammar = constraints.read(body) if rules.vllm or not rules.strict else None
        super().__init__(rules, head, messages.CHAT, wish.n)
        self.unknown = "Model not found" if rules.vllm else "Got model {}, but not found in server"
        top, stream = values["top_logprobs"], bool(values["stream"])
        scored = top is not None or bool(values["logprobs"])
        self._scored = scored
        self._tools = bool(chat.tools)
        self._opened: set[int] = set()
        self._plain = not (scored or rules.old or rules.full_text)  # events have no optional members
        self._before = b""
        self.request = Request(
            **common(rules, head),
            model=self.model,
            prompts=[chat],
            sampling=parameters.sampling(values, rules),
            stop=openai.stop(values),
            want=Want(
                logprobs=(top or 0) if scored else None,
                skip_special=values["skip_special_tokens"] is not False,
                costs=rules.figures,
            ),
            **wish._asdict(),
            grammar=grammar,
            stream=stream,
            thinking_budget=budget,
        )

    # -- streaming

    def chunk(self, events: Sequence[Event]) -> bytes:
        """Return an event for each piece of output."""
        parts: list[bytes] = []
        waiting: dict[int, Delta] = {}  # the last output of each choice, which may be sent with its end
        for event in events:
            if isinstance(event, Delta):
                if (before := waiting.pop(event.index, None)) is not None:
                    parts.append(self._said(before))
                waiting[event.index] = event
            elif isinstance(event, Done):
                parts.append(self._said(waiting.pop(event.index, Delta(event.index, "")), event))
        parts += [self._said(delta) for delta in waiting.values()]
        return b"".join(parts)

    def _said(self, event: Delta, done: Done | None = None) -> bytes:
        choice = self._choices[event.index]
        opening = self._open(event.index)
        choice.take(event.tokens)
        if self._plain and done is None and event.part == "content":
            choice.tokens = []
            return opening + self._before + PLAIN % (event.index, encode(event.text))
        told: dict[str, Any] = {"index": event.index, "delta": {"role": "assistant", **self._delta(choice, event)}}
        if self._scored or not self._rules.old:
            told["logprobs"] = self._logprobs(event.tokens)
        choice.tokens = []
        told["finish_reason"] = None if done is None else FINISH.get(done.reason, "stop")
        chunk = self._envelope("chat.completion.chunk")
        if done is not None:
            if self._rules.full_text:
                chunk["full_text"] = "".join(choice.content)
            chunk["usage"] = self._usage(done.usage, choice.costs)
        return opening + frame(chunk | {"choices": [told]})

    def _open(self, index: int) -> bytes:
        if self._rules.old or index in self._opened:
            return b""
        self._opened.add(index)
        # the model's name is final only after the server has looked it up
        self._before = b"data: " + encode(self._envelope("chat.completion.chunk")).removesuffix(b"}") + b","
        delta = {"role": "assistant", "content": ""}
        told = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return frame(self._envelope("chat.completion.chunk") | {"choices": [told]})

    def _delta(self, choice: Choice, event: Delta) -> dict[str, Any]:
        full = self._rules.full_text  # only then is earlier output kept
        if event.call is not None:
            function = {} if event.call.name is None else {"name": event.call.name}
            call: dict[str, Any] = {"index": event.call.index}
            if event.call.id is not None:
                call |= {"id": event.call.id, "type": "function"}
            return {"tool_calls": [call | {"function": function | {"arguments": event.call.arguments}}]}
        if event.part == "reasoning":
            return {"reasoning_content": _grown(choice.reasoning, event.text) if full else event.text}
        text = event.text if event.part == "content" else ""
        return {"content": _grown(choice.content, text) if full else text}

    # -- in one piece

    def add(self, events: Sequence[Event]) -> None:
        """Collect the output of these events by choice."""
        for event in events:
            match event:
                case Delta(index, text, part):
                    choice = self._choices[index]
                    choice.take(event.tokens)
                    if event.call is not None:
                        tools.extend(choice.calls, event.call)
                    elif part != "tool":
                        (choice.content if part == "content" else choice.reasoning).append(text)
                case Done():
                    self._choices[event.index].done = event

    def body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        costs = self._costs
        answer = self._envelope("chat.completion")
        answer["choices"] = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        answer["usage"] = self._usage(usage, costs)
        return encode(answer | (openai.times(costs) if self._rules.figures else {}))

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.done is not None
        message: dict[str, Any] = {"role": "assistant", "content": "".join(choice.content)}
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if self._tools or not self._rules.old:
            message["tool_calls"] = choice.calls
        told: dict[str, Any] = {"index": index, "message": message}
        if self._scored or not self._rules.old:
            told["logprobs"] = self._logprobs(choice.tokens)
        return told | {"finish_reason": FINISH.get(choice.done.reason, "stop")}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self._scored:
            return None
        return {"content": [_token(token) | {"top_logprobs": list(map(_token, token.top))} for token in tokens]}


def _token(token: Token) -> dict[str, Any]:
    return {"token": token.text, "logprob": number(token.logprob), "bytes": list(token.raw)}


def _grown(texts: list[str], text: str) -> str:
    """Append a text to the earlier ones, join them in place, and return the result."""
    texts[:] = ["".join((*texts, text))]
    return texts[0]
