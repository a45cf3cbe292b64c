"""``POST /v1/chat/completions``: reads the body as a neutral request, and writes events as chunks or as one answer.

The first chunk of a choice carries the role and is sent with the choice's first event, not earlier: until something is
sent, an error can still be an HTTP status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from parley.dialects import sampling_members
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai import tools, vllm_members
from parley.dialects.openai.common_members import (
    MAX_TOKENS,
    read_alternatives,
    read_capped_choices,
    read_openai_sampling,
    read_stop_conditions,
    read_stream_interval,
    read_usage_options,
    unsupported_member_error,
)
from parley.dialects.openai.custom_tools import CustomCallReader
from parley.dialects.openai.error_answers import openai_failure_events
from parley.dialects.openai.labels import VERBOSITIES, read_labels
from parley.dialects.openai.messages import read_conversation, read_prediction
from parley.dialects.openai.mistral_members import takes_whole_calls, with_openai_members
from parley.dialects.openai.reading_rules import OPENAI_RULES, STRICT_OPENAI_RULES, ReadingRules, applied_options
from parley.dialects.openai.stored_chats import is_stored, read_keeper
from parley.dialects.openai.timings import metrics_member
from parley.dialects.openai.token_objects import FINISH_REASONS, finite_logprob, prompt_logprob_maps
from parley.dialects.openai.token_usage import openai_usage, running_usage
from parley.dialects.openai.whole_calls import WholeCallReader
from parley.dialects.reply import Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.sse import STREAM_DONE, choice_event_start, data_event
from parley.errors import InvalidValue, ParleyError, excerpt
from parley.types import (
    ChatPrompt,
    ChoiceDelta,
    ChoiceDone,
    Event,
    Message,
    OutputOptions,
    PromptAccepted,
    PromptScored,
    Request,
    TokenInfo,
    ToolCallDelta,
    Usage,
)

PLAIN_CHUNK = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}'


def read_chat_request(body: bytes, context: RequestContext) -> ChatReply:
    """Read a chat request. Raises BadRequest."""
    return ChatReply(with_openai_members(decode_fields(body)), context)


def read_strict_chat_request(body: bytes, context: RequestContext) -> StrictChatReply:
    """Read a chat request with the refusals of OpenAI's own service. Raises BadRequest."""
    return StrictChatReply(decode_fields(body), context)


@dataclass
class ChatChoice:
    """The output of one choice so far."""

    started: bool = False
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)
    sent_tokens: int = 0  # tokens sent in the stream so far, counted only for continuous usage
    done: ChoiceDone | None = None


class ChatReply(Reply):
    """A chat request, answered in OpenAI's form."""

    field_names: ClassVar[Mapping[str, str]] = {"prompt": "messages", "stop_ids": "stop_token_ids"}
    reading_rules: ClassVar[ReadingRules] = OPENAI_RULES

    def __init__(self, body: Fields, context: RequestContext):
        self._options = options = applied_options(context, self.reading_rules)
        chat_prompt, tool_members = read_conversation(body, self.reading_rules, context)
        self._legacy, self._custom_calls = tool_members.legacy, CustomCallReader(tool_members.custom)
        joins_calls = self.reading_rules is OPENAI_RULES and takes_whole_calls(context.headers)
        self._whole_calls = WholeCallReader() if joins_calls else None
        max_tokens = _read_max_tokens(body)
        extra_members = vllm_members.read_vllm_members(
            body, context, max_tokens=max_tokens, options=options, rules=self.reading_rules
        )
        _refuse_media(body)
        if self.reading_rules in (OPENAI_RULES, STRICT_OPENAI_RULES) and body.has_value("moderation"):
            raise unsupported_member_error(body, "moderation", "Moderation is")
        stream = body.boolean("stream", False)
        usage, self._usage_per_chunk = read_usage_options(body, stream, options)
        self._wants_ids = body.boolean("return_token_ids", False)
        logprobs = _read_logprobs(body, self.reading_rules, context)
        echoes = body.boolean("echo", False)
        self.request = Request(
            id=context.unique_id,
            model=body.string("model", "", cap=256),
            prompts=[vllm_members.with_reused_tokens(body, chat_prompt, echoes=echoes)],
            sampling=read_openai_sampling(body),
            stop_conditions=read_stop_conditions(body, max_tokens, self.reading_rules),
            output_options=self._read_output_options(body, context, max_tokens, logprobs, usage=usage),
            **read_capped_choices(body, 1, self.reading_rules)._asdict(),
            stream=stream,
            banned_words=sampling_members.read_bad_words(body),
            grammar=extra_members.grammar,
            **extra_members.request_members,
            thinking_budget=extra_members.thinking_budget,
            prediction=read_prediction(body),
        )
        stores = self.reading_rules.stores_chats
        self._keeper = read_keeper(body, context) if stores else None
        # A client's own id may be one that another stored completion has, or may not fit into a path.
        own_id = None if stores and is_stored(body, context) else extra_members.client_id
        self._echo_text = _last_answer(chat_prompt) if echoes else ""
        self._wants_reasoning = body.boolean("include_reasoning", True)
        self._tool_chosen = chat_prompt.forced_tool is not None
        self._answer_id = own_id or context.unique_id
        self._tokens_as_ids = body.boolean("return_tokens_as_token_ids", options.return_tokens_as_token_ids)
        self._context = context
        self._choices = [ChatChoice() for _ in range(self.request.n)]
        self._wants_tokens = logprobs is not None or self._wants_ids
        self._prompt_ids: list[int] | None = None
        self._prompt_text: str | None = None
        self._prompt_scores: list[TokenInfo] | None = None
        self._chunk_start = b""
        self._chunk_end = b',"usage":null}\n\n' if self.request.output_options.usage else b"}\n\n"

    def _read_output_options(
        self, body: Fields, context: RequestContext, max_tokens: int | None, logprobs: int | None, *, usage: bool
    ) -> OutputOptions:
        """Read the options of reports about tokens. Raises BadRequest."""
        return OutputOptions(
            logprobs=logprobs,
            logprob_ids=vllm_members.read_logprob_ids(body, logprobs, max_tokens),
            prompt_logprobs=read_alternatives(body, "prompt_logprobs", self.reading_rules, context),
            usage=usage,
            skip_special=body.boolean("skip_special_tokens", True),
            stream_interval=read_stream_interval(body),
            ids=self._wants_ids or self._usage_per_chunk,
            prompt_text=body.boolean("return_prompt_text", False),
        )

    # -- a stream

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return a chunk for each piece of output and each end of a choice; a chunk with the role opens each choice."""
        parts = []
        if self._whole_calls is not None:
            events = self._whole_calls.read_events(events)
        for event in self._custom_calls.read_events(events):
            match event:
                case ChoiceDelta():
                    parts.append(self._delta_chunks(event))
                case ChoiceDone():
                    parts.append(self._open_choice(event.index) + self._done_chunk(event))
                case PromptAccepted():
                    self._prompt_ids, self._prompt_text = event.token_ids, event.text
                case PromptScored() if self.request.output_options.prompt_logprobs is not None:
                    self._prompt_scores = event.tokens
                    parts.append(self._open_choice(0))
        data = b"".join(parts)
        if self._keeper is not None:
            self._keeper.watch_stream(data)
        return data

    def finish_stream(self, usage: Usage) -> bytes:
        """Return the usage chunk, if requested, and the ``[DONE]`` mark."""
        end = STREAM_DONE
        if self.request.output_options.usage:
            envelope = self._chat_envelope("chat.completion.chunk", [], usage)
            end = data_event(envelope | metrics_member(self, self._options, usage)) + end
        if self._keeper is not None:
            self._keeper.watch_stream(end, openai_usage(usage))
        return end

    def fail_stream(self, error: ParleyError) -> bytes:
        """Return the error event and the ``[DONE]`` mark."""
        return openai_failure_events(error)

    def _open_choice(self, index: int) -> bytes:
        """Return the chunk that opens a choice, or nothing if the choice is open already."""
        choice = self._choices[index]
        if choice.started:
            return b""
        choice.started = True
        opening = self._opening_choice(index)
        more = b',"prompt_token_ids":' + encode_json(self._prompt_ids) if self._wants_ids else b""
        if self._prompt_text is not None:
            more += b',"prompt_text":' + encode_json(self._prompt_text)
        if self._prompt_scores is not None and index == 0:
            more += b',"prompt_logprobs":' + encode_json(self._prompt_logprobs_member())
        return self._chat_chunk(index, encode_json(opening), more)

    def _opening_choice(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": self._echo_text, "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _delta_chunks(self, event: ChoiceDelta) -> bytes:
        choice, state = self._delta_choice(event), self._choices[event.index]
        start = self._open_choice(event.index) if choice and not state.started else b""
        if event.tokens:
            state.sent_tokens += len(event.tokens)
        return start + self._chat_chunk(event.index, choice) if choice else b""

    def _delta_choice(self, event: ChoiceDelta) -> bytes:
        """Return the choice object of a chunk, or nothing if there is nothing to send."""
        wants_tokens = self._wants_tokens
        if event.output_part == "content" and event.text and not wants_tokens:  # nearly every chunk takes this path
            return PLAIN_CHUNK % (event.index, encode_json(event.text))
        delta = self._delta_member(event)
        if not delta and not (wants_tokens and event.tokens):
            return b""
        return encode_json(
            {
                "index": event.index,
                "delta": delta or {"content": ""},
                "logprobs": self._logprobs_member(event.tokens),
                "finish_reason": None,
                **self._token_ids_member(event.tokens),
            }
        )

    def _delta_member(self, event: ChoiceDelta) -> dict[str, Any]:
        """Return the ``delta`` of a chunk, or nothing if there is nothing to send."""
        if event.tool_call is not None:
            return self._call_member(event.tool_call)
        if event.output_part == "tool" or not event.text:
            return {}
        if event.output_part == "content":
            return {"content": event.text}
        return {"reasoning_content": event.text, "reasoning": event.text} if self._wants_reasoning else {}

    def _call_member(self, call: ToolCallDelta) -> dict[str, Any]:
        kind, text_member = tools.call_members(call)
        content = {text_member: call.arguments}
        if call.name is not None:
            content = {"name": call.name, **content}
        if self._legacy:
            return {"function_call": content}
        piece: dict[str, Any] = {"index": call.index}
        if call.id is not None:
            piece |= {"id": call.id, "type": kind}
        return {"tool_calls": [piece | {kind: content}]}

    def _done_chunk(self, event: ChoiceDone) -> bytes:
        return self._chat_chunk(
            event.index,
            encode_json(
                {
                    "index": event.index,
                    "delta": {},
                    "logprobs": None,
                    "finish_reason": self._finish_reason(event),
                    "stop_reason": event.stop,
                }
            ),
        )

    def _chat_chunk(self, index: int, choice: bytes, more: bytes = b"") -> bytes:
        """Return a chunk with one choice. ``more``: further members to write after the choices."""
        if not self._chunk_start:  # the model's name is final only after the server has resolved it
            self._chunk_start = choice_event_start(self._chat_envelope("chat.completion.chunk", []))
        if self._usage_per_chunk:
            usage = running_usage(len(self._prompt_ids or ()), self._choices[index].sent_tokens)
            return self._chunk_start + choice + b"]" + more + b',"usage":' + encode_json(usage) + b"}\n\n"
        return self._chunk_start + choice + b"]" + more + self._chunk_end

    # -- one answer

    def add_events(self, events: Sequence[Event]) -> None:
        """Collect the text, reasoning, tool calls and tokens of these events by choice."""
        for event in self._custom_calls.read_events(events):
            match event:
                case ChoiceDelta(index, text, part):
                    choice = self._choices[index]
                    choice.tokens += event.tokens
                    if event.tool_call is not None:
                        tools.extend_calls(choice.calls, event.tool_call)
                    elif part != "tool":
                        (choice.content if part == "content" else choice.reasoning).append(text)
                case ChoiceDone():
                    self._choices[event.index].done = event
                case PromptAccepted():
                    self._prompt_ids, self._prompt_text = event.token_ids, event.text
                case PromptScored():
                    self._prompt_scores = event.tokens

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON, with the prompt's ids, text and log-probabilities if requested."""
        choices = [self._choice_object(index, choice) for index, choice in enumerate(self._choices)]
        answer = self._chat_envelope("chat.completion", choices, usage)
        if self._prompt_scores is not None and self.request.output_options.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs_member()
        if self._wants_ids:
            answer["prompt_token_ids"] = self._prompt_ids
        if self._prompt_text is not None:
            answer["prompt_text"] = self._prompt_text
        if self._keeper is not None:
            self._keeper.keep(answer)
        return encode_json(answer | metrics_member(self, self._options, usage))

    def _choice_object(self, index: int, choice: ChatChoice) -> dict[str, Any]:
        assert choice.done is not None
        content: str | None = self._echo_text + "".join(choice.content)
        reasoning = "".join(choice.reasoning) if self._wants_reasoning else ""
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
            "logprobs": self._logprobs_member(choice.tokens),
            "finish_reason": self._finish_reason(choice.done),
            "stop_reason": choice.done.stop,
            **self._token_ids_member(choice.tokens),
        }

    # -- both

    def _chat_envelope(self, object_name: str, choices: list[Any], usage: Usage | None = None) -> dict[str, Any]:
        envelope: dict[str, Any] = {
            "id": f"chatcmpl-{self._answer_id}",
            "object": object_name,
            "created": self._context.created,
            "model": self.request.model,
            "service_tier": "default",
            "system_fingerprint": self._context.fingerprint,
            "choices": choices,
        }
        if usage is not None:
            envelope["usage"] = openai_usage(usage)
        return envelope

    def _finish_reason(self, done: ChoiceDone) -> str:
        if done.reason == "tool" and self._tool_chosen:  # the client chose the call, not the model
            return "stop"
        return "function_call" if self._legacy and done.reason == "tool" else FINISH_REASONS[done.reason]

    def _token_ids_member(self, tokens: list[TokenInfo]) -> dict[str, Any]:
        return {"token_ids": [token.id for token in tokens]} if self._wants_ids else {}

    def _prompt_logprobs_member(self) -> list[dict[str, Any] | None] | None:
        alternatives = self.request.output_options.prompt_logprobs
        if self._prompt_scores is None or alternatives is None:
            return None
        return prompt_logprob_maps(self._prompt_scores, alternatives)

    def _logprobs_member(self, tokens: list[TokenInfo]) -> dict[str, Any] | None:
        if self.request.output_options.logprobs is None:
            return None
        return {
            "content": [
                self._scored_token(token) | {"top_logprobs": list(map(self._scored_token, token.top_tokens))}
                for token in tokens
            ],
            "refusal": None,
        }

    def _scored_token(self, token: TokenInfo) -> dict[str, Any]:
        return {
            "token": f"token_id:{token.id}" if self._tokens_as_ids else token.text,
            "logprob": finite_logprob(token.logprob),
            "bytes": list(token.raw_bytes),
        }


class StrictChatReply(ChatReply):
    """A chat request with the limits of OpenAI's own service."""

    reading_rules = STRICT_OPENAI_RULES

    def __init__(self, body: Fields, context: RequestContext):
        super().__init__(body, context)
        read_labels(body)
        body.string("verbosity", None, allowed=VERBOSITIES)
        if body.has_value("metadata") and not body.boolean("store", False):
            raise InvalidValue("The 'metadata' parameter is only allowed when 'store' is true.", field="metadata")
        chat_prompt = self.request.prompts[0]
        assert isinstance(chat_prompt, ChatPrompt)
        _check_call_order(chat_prompt.messages)
        form = body.object("response_format")
        is_free_object = form is not None and form.raw_value("type") == "json_object"
        texts = (message.content or "" for message in chat_prompt.messages)
        if is_free_object and not any("json" in text.lower() for text in texts):
            sentence = "A 'response_format' of type 'json_object' needs messages that contain the word 'json'."
            raise InvalidValue(sentence, field="messages")


def _check_call_order(messages: Sequence[Message]) -> None:
    """Raise InvalidValue unless each call is answered right after its message, and each result answers a call."""
    open_ids: set[str] = set()
    for index, message in enumerate(messages):
        field = f"messages[{index}].role"
        if message.role == "tool" and message.tool_call_id is not None:
            if message.tool_call_id not in open_ids:
                sentence = f"no call of the assistant's last message has the id {excerpt(message.tool_call_id)}."
                raise InvalidValue(f"Invalid '{field}': {sentence}", field=field)
            open_ids.discard(message.tool_call_id)
            continue
        if open_ids:
            raise _unanswered_call(open_ids, field)
        open_ids = {call.id for call in message.tool_calls if call.id}
    if open_ids:
        raise _unanswered_call(open_ids, "messages")


def _unanswered_call(open_ids: set[str], field: str) -> InvalidValue:
    sentence = "each call of a message needs a message of a tool right after it, but these have none: "
    return InvalidValue(f"Invalid '{field}': {sentence}{', '.join(sorted(open_ids))[:256]}", field=field)


def _read_max_tokens(body: Fields) -> int | None:
    """Read the token limit; ``max_completion_tokens`` wins over its older name."""
    old = body.integer("max_tokens", None, 1, MAX_TOKENS)
    return body.integer("max_completion_tokens", old, 1, MAX_TOKENS)


def _read_logprobs(body: Fields, rules: ReadingRules, context: RequestContext) -> int | None:
    requested = body.boolean("logprobs", False)
    top = read_alternatives(body, "top_logprobs", rules, context)
    if top and not requested:
        raise body.member_error("top_logprobs", "needs 'logprobs' to be true.")
    return (top or 0) if requested else None


def _refuse_media(body: Fields) -> None:
    if body.has_value("audio"):
        raise unsupported_member_error(body, "audio", "Audio is")
    for modality in body.array("modalities", cap=16):
        if modality != "text":
            raise unsupported_member_error(body, "modalities", "Output other than text is")


def _last_answer(chat: ChatPrompt) -> str:
    last = chat.messages[-1]
    return (last.content or "") if last.role == "assistant" else ""
