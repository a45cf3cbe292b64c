"""TGI's ``POST /v1/chat/completions``: reads a conversation, writes a chunk for each token or one whole answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parley.dialects.dialect import Answer, Head
from parley.dialects.fields import Fields, decode
from parley.dialects.tgi import messages, openai, parameters, shared
from parley.dialects.tgi.parameters import RESERVED, Parameters
from parley.dialects.tgi.shared import F32, U32, WORDS, Rules
from parley.errors import Invalid, WrongType
from parley.types import CallDelta, Delta, Done, Event, Request, Stop, Token, Usage, Want

MAX_BIAS = 1 << 20  # length of the list (one number per token) that the original accepts and ignores
FINISH = {"eos_token": "stop"}  # other reasons keep their native names
CHUNK = b'{"index":0,"delta":{"role":"assistant","content":%b},"logprobs":null,"finish_reason":null}'


def read(rules: Rules, body: bytes, head: Head) -> ChatReply | Answer:
    """Read the body of a chat request. Raises BadRequest."""
    return of(rules, decode(body, WORDS), head)


def of(rules: Rules, body: Fields, head: Head) -> ChatReply | Answer:
    """Return the reply to a decoded chat request, or an error as a stream. Raises BadRequest."""
    reply: ChatReply | Answer = openai.read_stream(rules, body, lambda: ChatReply(rules, body, head))
    return reply


def _parameters(body: Fields, rules: Rules) -> Parameters:
    """Return the native parameters; as in the original, the presence penalty sets the repetition penalty."""
    if body.has("max_tokens") and body.has("max_completion_tokens"):
        raise WrongType("duplicate field `max_tokens`", field="max_completion_tokens")
    limit = "max_completion_tokens" if body.has("max_completion_tokens") else "max_tokens"
    presence = body.number("presence_penalty", None, -F32, F32)
    return Parameters(
        **openai.common(body, rules),
        repetition_penalty=None if presence is None or not rules.strict else presence + 2.0,
        max_new_tokens=body.integer(limit, None, 0, U32),
        top_n_tokens=body.integer("top_logprobs", None, 0, U32),
        grammar=parameters.grammar(body, "response_format"),
    )


class ChatReply(openai.Spoken):
    """A reply to one conversation, as a stream of chunks or in one piece."""

    def __init__(self, rules: Rules, body: Fields, head: Head):
        stream = openai.streams(body, rules)
        wish = _parameters(body, rules)
        body.array("logit_bias", cap=MAX_BIAS)
        body.integer("n", None, 0, U32)  # checked only: there is always one choice
        self._scores = body.boolean("logprobs", False)
        if rules.strict and body.null("stream_options"):
            raise body.mistyped("stream_options", "an object")
        options = body.object("stream_options")
        tells = options.boolean("include_usage", False) if options is not None else False
        if wish.grammar is not None and body.has("tools"):
            raise Invalid("Grammar and tools are mutually exclusive", field="tools", code="tool_error")
        chat = messages.talk(body)
        parameters.check(wish, rules, empty=False, stream=stream, context=head.context)
        super().__init__(body, rules, head, wish, sum(len(message.content or "") for message in chat.messages))
        self.request = Request(
            id=head.id,
            model=self._model or "",
            prompts=[chat],
            sampling=wish.sampling,
            grammar=wish.form("response_format"),
            stop=Stop(strings=wish.stop, max_tokens=wish.max_new_tokens, include=True, reserve=RESERVED),
            want=Want(
                logprobs=(wish.top_n_tokens or 0) if self._scores else None,
                usage=tells,
                ids=stream,
                plain=not chat.tools,
            ),
            stream=stream,
        )
        self._call_id = messages.next_id(chat) or head.id
        self._before = b""
        self._text: list[str] = []
        self._tokens: list[Token] = []
        self._name_of_call: str | None = None
        self._arguments: list[str] = []
        self._done: Done | None = None

    # -- streaming

    def chunk(self, events: Sequence[Event]) -> bytes:
        """Return a chunk for each token of these events."""
        frames: list[bytes] = []
        held: tuple[Token | None, str] | None = None  # held back until it is known whether it is the last token
        for event in events:
            match event:
                case Delta(part="tool", call=call):
                    if call is not None:
                        frames.append(self._call(call))
                        self._name_of_call = self._name_of_call or call.name
                case Delta():
                    for token, text in openai.pieces(event):
                        if held is not None:
                            frames.append(self._piece(*held))
                        held = token, text
                    if not event.tokens and event.text:
                        frames.append(self._piece(None, event.text))
                case Done():
                    if self._name_of_call is None:  # a tool call ends without a chunk
                        frames.append(self._piece(*(held or (None, "")), done=event))
                    held = None
        if held is not None:
            frames.append(self._piece(*held))
        return b"".join(frames)

    def end(self, usage: Usage) -> bytes:
        """Return the usage chunk, if requested, and the ``[DONE]`` mark."""
        if not self.request.want.usage:
            return openai.DONE
        told = self._envelope("chat.completion.chunk", []) | {"usage": openai.usage(usage)}
        return shared.frame(told) + openai.DONE

    def _piece(self, token: Token | None, text: str, done: Done | None = None) -> bytes:
        if done is None and not self._scores:  # the fast path, for nearly all chunks
            return self._frame(CHUNK % shared.encode(text))
        return self._frame(
            shared.encode(
                {
                    "index": 0,
                    "delta": {"role": "assistant", "content": text},
                    "logprobs": self._logprobs([token] if token is not None else []),
                    "finish_reason": None if done is None else self._finish(done),
                }
            )
        )

    def _call(self, call: CallDelta) -> bytes:
        function = {"name": call.name, "arguments": call.arguments}
        piece = {"index": 0, "id": self._call_id, "type": "function", "function": function}
        delta = {"role": "assistant", "tool_calls": [piece]}
        return self._frame(shared.encode({"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}))

    def _frame(self, choice: bytes) -> bytes:
        if not self._before:  # the model's name is final only after the server has looked it up
            envelope = shared.encode(self._envelope("chat.completion.chunk", []))
            self._before = b"data: " + envelope.removesuffix(b"]}")
        return self._before + choice + b'],"usage":null}\n\n'

    # -- in one piece

    def add(self, events: Sequence[Event]) -> None:
        """Collect the text, tokens and tool call of these events."""
        for event in events:
            match event:
                case Delta():
                    self._tokens += event.tokens
                    if event.call is None and event.part != "tool":
                        self._text.append(event.text)
                    elif event.call is not None:
                        self._name_of_call = self._name_of_call or event.call.name
                        self._arguments.append(event.call.arguments)
                case Done():
                    self._done = event

    def body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        assert self._done is not None
        self._usage = usage
        choice = {
            "index": 0,
            "message": self._message(),
            "logprobs": self._logprobs(self._tokens),
            "finish_reason": self._finish(self._done),
        }
        return shared.encode(self._envelope("chat.completion", [choice]) | {"usage": openai.usage(usage)})

    def _message(self) -> dict[str, Any]:
        if self._name_of_call is None:
            return {"role": "assistant", "content": "".join(self._text)}
        function = {"description": None, "name": self._name_of_call, "arguments": "".join(self._arguments)}
        return {"role": "assistant", "tool_calls": [{"id": self._call_id, "type": "function", "function": function}]}

    # -- shared by both

    def _envelope(self, object: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "object": object,
            "id": "",
            "created": self._head.created,
            "model": self._name(),
            "system_fingerprint": openai.FINGERPRINT,
            "choices": choices,
        }

    def _finish(self, done: Done) -> str:
        if done.reason == "tool":
            return "stop"
        told = self._ended(done)
        return FINISH.get(told, told)

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if not self._scores:
            return None
        return {"content": [_scored(token) | {"top_logprobs": list(map(_scored, token.top))} for token in tokens]}


def _scored(token: Token) -> dict[str, Any]:
    return {"token": token.text, "logprob": shared.single(token.logprob)}
