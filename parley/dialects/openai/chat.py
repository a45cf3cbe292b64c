"""``POST /v1/chat/completions``: reads the body as a neutral request, and writes events as chunks or as one answer.

The first chunk of a choice carries the role and is sent with the choice's first event, not earlier: until something is
sent, an error can still be an HTTP status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from parley.dialects import parameters
from parley.dialects.dialect import Head, Reply
from parley.dialects.fields import Fields, decode
from parley.dialects.openai import extras, shared, tools
from parley.dialects.openai.messages import conversation, prediction
from parley.dialects.openai.shared import RULES, Rules
from parley.errors import ParleyError
from parley.types import Accepted, CallDelta, Chat, Delta, Done, Event, Request, Scored, Token, Usage, Want

CONTENT = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}'


def read(body: bytes, head: Head) -> ChatReply:
    """Read a chat request. Raises BadRequest."""
    return ChatReply(decode(body), head)


@dataclass
class Choice:
    """The output of one choice so far."""

    started: bool = False
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    given: int = 0  # tokens sent in the stream so far, counted only for continuous usage
    done: Done | None = None


class ChatReply(Reply):
    """A chat request, answered in OpenAI's form."""

    names: ClassVar[Mapping[str, str]] = {"prompt": "messages", "stop_ids": "stop_token_ids"}
    rules: ClassVar[Rules] = RULES

    def __init__(self, body: Fields, head: Head):
        chat, self._legacy = conversation(body, self.rules)
        max_tokens = _max_tokens(body)
        more = extras.read(body, head, max_tokens=max_tokens)
        _refuse_media(body)
        stream = body.boolean("stream", False)
        usage, self._continuous = shared.include_usage(body, stream)
        self._ids = body.boolean("return_token_ids", False)
        logprobs = _logprobs(body, self.rules)
        self.request = Request(
            id=head.id,
            model=body.string("model", "", cap=256),
            prompts=[chat],
            sampling=shared.sampling(body),
            stop=shared.stop(body, max_tokens, self.rules),
            want=Want(
                logprobs=logprobs,
                named=extras.named(body, logprobs, max_tokens),
                prompt_logprobs=shared.alternatives(body, "prompt_logprobs", self.rules),
                usage=usage,
                skip_special=body.boolean("skip_special_tokens", True),
                interval=shared.interval(body),
                ids=self._ids or self._continuous,
                text=body.boolean("return_prompt_text", False),
            ),
            **shared.choices(body, 1, self.rules)._asdict(),
            stream=stream,
            banned=parameters.bad_words(body),
            grammar=more.grammar,
            **more.members,
            thinking_budget=more.budget,
            prediction=prediction(body),
        )
        self._echo = _last_answer(chat) if body.boolean("echo", False) else ""
        self._reasons = body.boolean("include_reasoning", True)
        self._named = chat.only is not None
        self._name = more.name or head.id
        self._id_names = body.boolean("return_tokens_as_token_ids", False)
        self._head = head
        self._choices = [Choice() for _ in range(self.request.n)]
        self._prompt_ids: list[int] | None = None
        self._prompt_text: str | None = None
        self._prompt_scores: list[Token] | None = None
        self._before = b""
        self._after = b',"usage":null}\n\n' if self.request.want.usage else b"}\n\n"

    # -- a stream

    def chunk(self, events: Sequence[Event]) -> bytes:
        parts = []
        for event in events:
            match event:
                case Delta():
                    parts.append(self._delta(event))
                case Done():
                    parts.append(self._start(event.index) + self._done(event))
                case Accepted():
                    self._prompt_ids, self._prompt_text = event.token_ids, event.text
                case Scored() if self.request.want.prompt_logprobs is not None:
                    self._prompt_scores = event.tokens
                    parts.append(self._start(0))
        return b"".join(parts)

    def end(self, usage: Usage) -> bytes:
        if not self.request.want.usage:
            return shared.DONE
        return shared.frame(self._envelope("chat.completion.chunk", [], usage)) + shared.DONE

    def fail(self, error: ParleyError) -> bytes:
        return shared.failure(error)

    def _start(self, index: int) -> bytes:
        """Return the chunk that opens a choice, or nothing if the choice is open already."""
        choice = self._choices[index]
        if choice.started:
            return b""
        choice.started = True
        opening = self._opening(index)
        more = b',"prompt_token_ids":' + shared.encode(self._prompt_ids) if self._ids else b""
        if self._prompt_text is not None:
            more += b',"prompt_text":' + shared.encode(self._prompt_text)
        if self._prompt_scores is not None and index == 0:
            more += b',"prompt_logprobs":' + shared.encode(self._prompt_logprobs())
        return self._frame(index, shared.encode(opening), more)

    def _opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": self._echo, "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _delta(self, event: Delta) -> bytes:
        made = self._continued(event)
        start = self._start(event.index) if made else b""
        self._choices[event.index].given += len(event.tokens)
        return start + self._frame(event.index, made) if made else b""

    def _continued(self, event: Delta) -> bytes:
        """Return the choice object of a chunk, or nothing if there is nothing to send."""
        wants_tokens = self.request.want.logprobs is not None or self._ids
        if event.part == "content" and event.text and not wants_tokens:  # nearly every chunk takes this path
            return CONTENT % (event.index, shared.encode(event.text))
        delta = self._piece(event)
        if not delta and not (wants_tokens and event.tokens):
            return b""
        return shared.encode(
            {
                "index": event.index,
                "delta": delta or {"content": ""},
                "logprobs": self._logprobs(event.tokens),
                "finish_reason": None,
                **self._token_ids(event.tokens),
            }
        )

    def _piece(self, event: Delta) -> dict[str, Any]:
        """Return the ``delta`` of a chunk, or nothing if there is nothing to send."""
        if event.call is not None:
            return self._call_piece(event.call)
        if event.part == "tool" or not event.text:
            return {}
        if event.part == "content":
            return {"content": event.text}
        return {"reasoning_content": event.text, "reasoning": event.text} if self._reasons else {}

    def _call_piece(self, call: CallDelta) -> dict[str, Any]:
        function = {"arguments": call.arguments}
        if call.name is not None:
            function = {"name": call.name, **function}
        if self._legacy:
            return {"function_call": function}
        piece: dict[str, Any] = {"index": call.index}
        if call.id is not None:
            piece |= {"id": call.id, "type": "function"}
        return {"tool_calls": [piece | {"function": function}]}

    def _done(self, event: Done) -> bytes:
        return self._frame(
            event.index,
            shared.encode(
                {
                    "index": event.index,
                    "delta": {},
                    "logprobs": None,
                    "finish_reason": self._finish(event),
                    "stop_reason": event.stop,
                }
            ),
        )

    def _frame(self, index: int, choice: bytes, more: bytes = b"") -> bytes:
        """Return a chunk with one choice. ``more``: further members to write after the choices."""
        if not self._before:  # the model's name is final only after the server has resolved it
            envelope = shared.encode(self._envelope("chat.completion.chunk", []))
            self._before = b"data: " + envelope.removesuffix(b"]}")
        if self._continuous:
            usage = shared.progress(len(self._prompt_ids or ()), self._choices[index].given)
            return self._before + choice + b"]" + more + b',"usage":' + shared.encode(usage) + b"}\n\n"
        return self._before + choice + b"]" + more + self._after

    # -- one answer

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Delta(index, text, part):
                    choice = self._choices[index]
                    choice.tokens += event.tokens
                    if event.call is not None:
                        tools.extend(choice.calls, event.call)
                    elif part != "tool":
                        (choice.content if part == "content" else choice.reasoning).append(text)
                case Done():
                    self._choices[event.index].done = event
                case Accepted():
                    self._prompt_ids, self._prompt_text = event.token_ids, event.text
                case Scored():
                    self._prompt_scores = event.tokens

    def body(self, usage: Usage) -> bytes:
        choices = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        answer = self._envelope("chat.completion", choices, usage)
        if self._prompt_scores is not None and self.request.want.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs()
        if self._ids:
            answer["prompt_token_ids"] = self._prompt_ids
        if self._prompt_text is not None:
            answer["prompt_text"] = self._prompt_text
        return shared.encode(answer)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.done is not None
        content: str | None = self._echo + "".join(choice.content)
        reasoning = "".join(choice.reasoning) if self._reasons else ""
        if not content and (choice.calls or choice.reasoning):
            content = None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
        if choice.calls and self._legacy:
            message["function_call"] = choice.calls[0]["function"]
        elif choice.calls:
            message["tool_calls"] = choice.calls
        message["reasoning_content"] = message["reasoning"] = reasoning or None
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": self._finish(choice.done),
            "stop_reason": choice.done.stop,
            **self._token_ids(choice.tokens),
        }

    # -- both

    def _envelope(self, object: str, choices: list[Any], usage: Usage | None = None) -> dict[str, Any]:
        envelope: dict[str, Any] = {
            "id": f"chatcmpl-{self._name}",
            "object": object,
            "created": self._head.created,
            "model": self.request.model,
            "service_tier": "default",
            "system_fingerprint": self._head.fingerprint,
            "choices": choices,
        }
        if usage is not None:
            envelope["usage"] = shared.usage(usage)
        return envelope

    def _finish(self, done: Done) -> str:
        if done.reason == "tool" and self._named:  # the client chose the call, not the model
            return "stop"
        return "function_call" if self._legacy and done.reason == "tool" else shared.FINISH[done.reason]

    def _token_ids(self, tokens: list[Token]) -> dict[str, Any]:
        return {"token_ids": [token.id for token in tokens]} if self._ids else {}

    def _prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        wanted = self.request.want.prompt_logprobs
        if self._prompt_scores is None or wanted is None:
            return None
        return shared.prompt_scores(self._prompt_scores, wanted)

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if self.request.want.logprobs is None:
            return None
        return {"content": [self._scored(t) | {"top_logprobs": list(map(self._scored, t.top))} for t in tokens],
                "refusal": None}  # fmt: skip

    def _scored(self, token: Token) -> dict[str, Any]:
        return {
            "token": f"token_id:{token.id}" if self._id_names else token.text,
            "logprob": shared.number(token.logprob),
            "bytes": list(token.raw),
        }


def _max_tokens(body: Fields) -> int | None:
    """Read the token limit; ``max_completion_tokens`` wins over its older name."""
    old = body.integer("max_tokens", None, 1, shared.MAX_TOKENS)
    return body.integer("max_completion_tokens", old, 1, shared.MAX_TOKENS)


def _logprobs(body: Fields, rules: Rules) -> int | None:
    wanted = body.boolean("logprobs", False)
    top = shared.alternatives(body, "top_logprobs", rules)
    if top and not wanted:
        raise body.fail("top_logprobs", "needs 'logprobs' to be true.")
    return (top or 0) if wanted else None


def _refuse_media(body: Fields) -> None:
    if body.has("audio"):
        raise shared.unsupported(body, "audio", "Audio is")
    for modality in body.array("modalities", cap=16):
        if modality != "text":
            raise shared.unsupported(body, "modalities", "Output other than text is")


def _last_answer(chat: Chat) -> str:
    last = chat.messages[-1]
    return (last.content or "") if last.role == "assistant" else ""
