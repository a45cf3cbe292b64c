"""TGI's ``POST /v1/chat/completions``: reads a conversation, writes a chunk for each token or one whole answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parley.dialects import vectors
from parley.dialects.fields import MAX_F32, MAX_U32, Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.sse import STREAM_DONE, choice_event_start
from parley.dialects.tgi import messages, openai, parameters
from parley.dialects.tgi.answer_parts import tgi_event
from parley.dialects.tgi.api_rules import TgiRules
from parley.dialects.tgi.parameters import RESERVED_TOKENS, TgiParameters
from parley.errors import InvalidValue, WrongType
from parley.types import (
    ChoiceDelta,
    ChoiceDone,
    Event,
    OutputOptions,
    Request,
    StopConditions,
    TokenInfo,
    ToolCallDelta,
    Usage,
)

MAX_BIAS_LIST = 1 << 20  # length of the list (one number per token) that the original accepts and ignores
FINISH_REASONS = {"eos_token": "stop"}  # other reasons keep their native names
PLAIN_CHUNK = b'{"index":0,"delta":{"role":"assistant","content":%b},"logprobs":null,"finish_reason":null}'


def read_tgi_chat(rules: TgiRules, body: bytes, context: RequestContext) -> TgiChatReply | Answer:
    """Read the body of a chat request. Raises BadRequest."""
    return tgi_chat_reply(rules, decode_fields(body, rules.wording), context)


def tgi_chat_reply(rules: TgiRules, body: Fields, context: RequestContext) -> TgiChatReply | Answer:
    """Return the reply to a decoded chat request, or an error as a stream. Raises BadRequest."""
    reply: TgiChatReply | Answer = openai.reply_or_error_stream(rules, body, lambda: TgiChatReply(rules, body, context))
    return reply


def _chat_parameters(body: Fields, rules: TgiRules) -> TgiParameters:
    """Return the native parameters; as in the original, the presence penalty sets the repetition penalty."""
    if body.has_value("max_tokens") and body.has_value("max_completion_tokens"):
        raise WrongType("duplicate field `max_tokens`", field="max_completion_tokens")
    limit = "max_completion_tokens" if body.has_value("max_completion_tokens") else "max_tokens"
    presence = body.number("presence_penalty", None, -MAX_F32, MAX_F32)
    return TgiParameters(
        **openai.read_shared_members(body, rules),
        repetition_penalty=None if presence is None or not rules.strict else presence + 2.0,
        max_new_tokens=body.integer(limit, None, 0, MAX_U32),
        top_n_tokens=body.integer("top_logprobs", None, 0, MAX_U32),
        grammar=parameters.read_tgi_grammar(body, "response_format"),
    )


class TgiChatReply(openai.TgiOpenAIReply):
    """A reply to one conversation, as a stream of chunks or in one piece."""

    def __init__(self, rules: TgiRules, body: Fields, context: RequestContext):
        stream = openai.read_stream_member(body, rules)
        params = _chat_parameters(body, rules)
        body.array("logit_bias", cap=MAX_BIAS_LIST)
        body.integer("n", None, 0, MAX_U32)  # checked only: there is always one choice
        self._with_logprobs = body.boolean("logprobs", False)
        if rules.strict and body.is_null("stream_options"):
            raise body.mistyped_member("stream_options", "an object")
        options = body.object("stream_options")
        include_usage = options.boolean("include_usage", False) if options is not None else False
        if params.grammar is not None and body.has_value("tools"):
            raise InvalidValue("Grammar and tools are mutually exclusive", field="tools", code="tool_error")
        chat = messages.read_tgi_conversation(body, context)
        parameters.check_tgi_parameters(params, rules, empty=False, stream=stream, context=context.context_length)
        super().__init__(body, rules, context, params, sum(len(message.content or "") for message in chat.messages))
        self.request = Request(
            id=context.unique_id,
            model=self._requested_model(),
            prompts=[chat],
            sampling=params.neutral_sampling,
            grammar=params.build_grammar("response_format"),
            stop_conditions=StopConditions(
                strings=params.stop,
                max_tokens=params.max_new_tokens,
                include_in_output=True,
                reserved_tokens=RESERVED_TOKENS,
            ),
            output_options=OutputOptions(
                logprobs=(params.top_n_tokens or 0) if self._with_logprobs else None,
                usage=include_usage,
                ids=stream,
                unparsed=not chat.tools,
            ),
            stream=stream,
        )
        self._call_id = messages.next_call_id(chat) or context.unique_id
        self._frame_start = b""
        self._text_parts: list[str] = []
        self._tokens: list[TokenInfo] = []
        self._call_name: str | None = None
        self._arguments: list[str] = []
        self._done_event: ChoiceDone | None = None

    # -- streaming

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return a chunk for each token of these events."""
        frames: list[bytes] = []
        pending: tuple[TokenInfo | None, str] | None = None  # held back until it is known whether it is the last token
        for event in events:
            match event:
                case ChoiceDelta(output_part="tool", tool_call=call):
                    if call is not None:
                        frames.append(self._call_frame(call))
                        self._call_name = self._call_name or call.name
                case ChoiceDelta():
                    for token, text in openai.split_delta(event):
                        if pending is not None:
                            frames.append(self._text_frame(*pending))
                        pending = token, text
                    if not event.tokens and event.text:
                        frames.append(self._text_frame(None, event.text))
                case ChoiceDone():
                    if self._call_name is None:  # a tool call ends without a chunk
                        frames.append(self._text_frame(*(pending or (None, "")), done=event))
                    pending = None
        if pending is not None:
            frames.append(self._text_frame(*pending))
        return b"".join(frames)

    def finish_stream(self, usage: Usage) -> bytes:
        """Return the usage chunk, if requested, and the ``[DONE]`` mark."""
        if not self.request.output_options.usage:
            return STREAM_DONE
        usage_chunk = self._chat_envelope("chat.completion.chunk", []) | {"usage": openai.tgi_usage_object(usage)}
        return tgi_event(usage_chunk) + STREAM_DONE

    def _text_frame(self, token: TokenInfo | None, text: str, done: ChoiceDone | None = None) -> bytes:
        if done is None and not self._with_logprobs:  # the fast path, for nearly all chunks
            return self._chunk_frame(PLAIN_CHUNK % encode_json(text))
        return self._chunk_frame(
            encode_json(
                {
                    "index": 0,
                    "delta": {"role": "assistant", "content": text},
                    "logprobs": self._logprobs_object([token] if token is not None else []),
                    "finish_reason": None if done is None else self._chat_finish_reason(done),
                }
            )
        )

    def _call_frame(self, call: ToolCallDelta) -> bytes:
        function = {"name": call.name, "arguments": call.arguments}
        piece = {"index": 0, "id": self._call_id, "type": "function", "function": function}
        delta = {"role": "assistant", "tool_calls": [piece]}
        return self._chunk_frame(encode_json({"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}))

    def _chunk_frame(self, choice: bytes) -> bytes:
        if not self._frame_start:  # the model's name is final only after the server has looked it up
            self._frame_start = choice_event_start(self._chat_envelope("chat.completion.chunk", []))
        return self._frame_start + choice + b'],"usage":null}\n\n'

    # -- in one piece

    def add_events(self, events: Sequence[Event]) -> None:
        """Collect the text, tokens and tool call of these events."""
        for event in events:
            match event:
                case ChoiceDelta():
                    self._tokens += event.tokens
                    if event.tool_call is None and event.output_part != "tool":
                        self._text_parts.append(event.text)
                    elif event.tool_call is not None:
                        self._call_name = self._call_name or event.tool_call.name
                        self._arguments.append(event.tool_call.arguments)
                case ChoiceDone():
                    self._done_event = event

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        assert self._done_event is not None
        self._usage = usage
        choice = {
            "index": 0,
            "message": self._answer_message(),
            "logprobs": self._logprobs_object(self._tokens),
            "finish_reason": self._chat_finish_reason(self._done_event),
        }
        return encode_json(self._chat_envelope("chat.completion", [choice]) | {"usage": openai.tgi_usage_object(usage)})

    def _answer_message(self) -> dict[str, Any]:
        if self._call_name is None:
            return {"role": "assistant", "content": "".join(self._text_parts)}
        function = {"description": None, "name": self._call_name, "arguments": "".join(self._arguments)}
        return {"role": "assistant", "tool_calls": [{"id": self._call_id, "type": "function", "function": function}]}

    # -- shared by both

    def _chat_envelope(self, object_type: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "object": object_type,
            "id": "",
            "created": self._context.created,
            "model": self._model_name(),
            "system_fingerprint": openai.SYSTEM_FINGERPRINT,
            "choices": choices,
        }

    def _chat_finish_reason(self, done: ChoiceDone) -> str:
        if done.reason == "tool":
            return "stop"
        native_reason = self._end_reason(done)
        return FINISH_REASONS.get(native_reason, native_reason)

    def _logprobs_object(self, tokens: list[TokenInfo]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return {
            "content": [
                _token_logprob(token) | {"top_logprobs": list(map(_token_logprob, token.top_tokens))}
                for token in tokens
            ]
        }


def _token_logprob(token: TokenInfo) -> dict[str, Any]:
    return {"token": token.text, "logprob": vectors.shortest_float32(token.logprob)}
