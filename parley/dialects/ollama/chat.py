"""``POST /api/chat``: a conversation in, lines with pieces of a message out, or one message."""

from __future__ import annotations

from typing import Any

from parley.dialects.fields import Fields, decode_fields
from parley.dialects.ollama.answers import AnswerEnd, AnswerPiece, OllamaReply, load_answer
from parley.dialects.ollama.api_rules import OllamaRules
from parley.dialects.ollama.messages import read_ollama_messages, read_ollama_tools
from parley.dialects.ollama.model_names import check_served, read_ollama_model_name
from parley.dialects.ollama.options import (
    check_keep_alive,
    read_format,
    read_ollama_logprobs,
    read_options,
    read_think,
    refuse_unavailable,
)
from parley.dialects.ollama.refusal_wording import OllamaWording, incapable_model_error
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.types import ChatPrompt, OutputOptions, Request

EMPTY_MESSAGE = {"role": "assistant", "content": ""}


def read_ollama_chat(rules: OllamaRules, body: bytes, context: RequestContext) -> OllamaChatReply | Answer:
    """Read a conversation; one without messages asks to load the model, which needs nothing. Raises BadRequest."""
    fields = decode_fields(body, OllamaWording("ChatRequest"))
    name = read_ollama_model_name(fields)
    stays = check_keep_alive(fields, rules)
    if not fields.array("messages", cap=1 << 20):
        check_served(name, context)
        if stays:
            _check_chats(name, context)
        return load_answer(name, context, {"message": EMPTY_MESSAGE}, stays=stays)
    return OllamaChatReply(name, rules, fields, context)


def _check_chats(name: str, context: RequestContext) -> None:
    """Check that the model has conversations. Raises UnsuitableModel."""
    if not context.generates or "chat" not in context.abilities:
        raise incapable_model_error(name, "chat")


class OllamaChatReply(OllamaReply):
    """A reply to a conversation."""

    def __init__(self, name: str, rules: OllamaRules, body: Fields, context: RequestContext):
        _check_chats(name, context)
        think = read_think(body, name, context)
        super().__init__(name, context, shows_thinking=think.shown)
        options = read_options(body, rules, context)
        refuse_unavailable(body)
        chat = ChatPrompt(
            read_ollama_messages(body, rules, context),
            read_ollama_tools(body, name, context),
            thinking=think.thinking,
            reasoning_effort=think.effort,
        )
        self.request = Request(
            id=context.unique_id,
            model=name,
            prompts=[chat],
            sampling=options.sampling,
            stop_conditions=options.stop_conditions,
            output_options=OutputOptions(logprobs=read_ollama_logprobs(body)),
            grammar=read_format(body),
            stream=body.boolean("stream", True),
            context_limit=options.context_limit,
            on_overflow="oldest_turns" if body.boolean("truncate", True) else "refuse",
        )

    def answer_record(self, piece: AnswerPiece, end: AnswerEnd | None) -> dict[str, Any]:
        """Return a line's members in their order."""
        message: dict[str, Any] = {"role": "assistant", "content": piece.content}
        if piece.thinking:
            message["thinking"] = piece.thinking
        if piece.calls:
            message["tool_calls"] = piece.calls
        record = self.envelope() | {"message": message, "done": end is not None}
        if end is None:
            return record | self.logprobs_member(piece)
        return record | {"done_reason": end.reason} | self.logprobs_member(piece) | end.metrics
