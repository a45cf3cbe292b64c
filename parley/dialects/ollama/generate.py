"""``POST /api/generate``: a prompt in, lines with pieces of text out, or one text.

A prompt is a turn of the user, rendered by the chat template or the client's own ``template``, or with ``raw`` the
model's input as it is. ``context`` continues an earlier answer: its tokens come before the prompt's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parley.dialects import media
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.ollama.answers import AnswerEnd, AnswerPiece, OllamaReply, load_answer
from parley.dialects.ollama.api_rules import OllamaRules
from parley.dialects.ollama.messages import read_images
from parley.dialects.ollama.model_names import MAX_NAME_CHARACTERS, check_served
from parley.dialects.ollama.options import (
    ThinkMember,
    check_keep_alive,
    read_format,
    read_ollama_logprobs,
    read_options,
    read_think,
    refuse_unavailable,
)
from parley.dialects.ollama.refusal_wording import OllamaWording, incapable_model_error
from parley.dialects.ollama.template import TemplateInput, render_prompt
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.sampling_members import MAX_TOKEN_ID
from parley.errors import InvalidValue, UnknownModel, Unsupported
from parley.types import (
    ChatPrompt,
    ChoiceDone,
    Event,
    Message,
    OutputOptions,
    PlacedMedia,
    Prompt,
    PromptAccepted,
    Request,
    TextPrompt,
)

MAX_CONTEXT_IDS = 1 << 22
IMAGE_MODEL_MEMBERS = ("width", "height", "steps")


def read_ollama_generate(rules: OllamaRules, body: bytes, context: RequestContext) -> GenerateReply | Answer:
    """Read a prompt; an empty one asks to load the model, which needs nothing. Raises BadRequest, UnknownModel."""
    fields = decode_fields(body, OllamaWording("GenerateRequest"))
    name = fields.string("model", "", cap=MAX_NAME_CHARACTERS)
    if not name:
        raise UnknownModel("model '' not found", field="model")
    stays = check_keep_alive(fields, rules)
    if not any(fields.raw_value(member) for member in ("prompt", "suffix", "images")):
        check_served(name, context)
        if stays:
            _check_generates(name, context)
        return load_answer(name, context, {"response": ""}, stays=stays)
    return GenerateReply(name, rules, fields, context)


def _check_generates(name: str, context: RequestContext) -> None:
    """Check that the model writes text. Raises UnsuitableModel."""
    if not context.generates:
        raise incapable_model_error(name, "generate")


class GenerateReply(OllamaReply):
    """A reply to a prompt."""

    def __init__(self, name: str, rules: OllamaRules, body: Fields, context: RequestContext):
        _check_generates(name, context)
        think = read_think(body, name, context)
        super().__init__(name, context, shows_thinking=think.shown)
        _refuse_members(body, name, context)
        refuse_unavailable(body)
        options = read_options(body, rules, context)
        self._raw = body.boolean("raw", False)
        body.boolean("truncate", True)  # one turn cannot lose earlier ones
        images = read_images(body, context)
        media.check_media_counts((placed.media for placed in images), context.media_limits)
        self.request = Request(
            id=context.unique_id,
            model=name,
            prompts=[_read_prompt(rules, body, images, think, context)],
            sampling=options.sampling,
            stop_conditions=options.stop_conditions,
            output_options=OutputOptions(logprobs=read_ollama_logprobs(body), whole_ids=not self._raw),
            grammar=read_format(body),
            stream=body.boolean("stream", True),
            context_limit=options.context_limit,
        )
        self._context_ids: list[int] = []  # of the prompt and the answer

    def read_event(self, event: Event) -> AnswerPiece | None:
        """Return the output of an event that can be sent now, and keep the tokens for ``context``."""
        if isinstance(event, PromptAccepted) and not self._raw:
            self._context_ids = list(event.token_ids)
        elif isinstance(event, ChoiceDone):
            self._context_ids += event.token_ids
        return super().read_event(event)

    def answer_record(self, piece: AnswerPiece, end: AnswerEnd | None) -> dict[str, Any]:
        """Return a line's members in their order."""
        record = self.envelope() | {"response": piece.content}
        if piece.thinking:
            record["thinking"] = piece.thinking
        record["done"] = end is not None
        if end is not None:
            record["done_reason"] = end.reason
            if self._context_ids:
                record["context"] = self._context_ids
            record |= end.metrics
        if piece.calls:
            record["tool_calls"] = piece.calls
        return record | self.logprobs_member(piece)


def _refuse_members(body: Fields, name: str, context: RequestContext) -> None:
    """Refuse members that this server does not support. Raises Unsupported, UnsuitableModel."""
    if body.string("suffix", "") and "insert" not in context.abilities:
        raise incapable_model_error(name, "insert")
    for member in IMAGE_MODEL_MEMBERS:
        if body.integer(member, 0):
            raise Unsupported(f"'{member}' is not available on this server: it makes no images.", field=member)


def _read_prompt(
    rules: OllamaRules, body: Fields, images: Sequence[PlacedMedia], think: ThinkMember, context: RequestContext
) -> Prompt:
    if body.boolean("raw", False):
        return _read_raw_prompt(body, images)
    gap = _read_gap(body) if body.string("suffix", "") else None
    if body.string("template", ""):
        return _read_templated(rules, body, images, think)
    return gap or _read_turn(body, images, think, context)


def _read_gap(body: Fields) -> TextPrompt:
    """Return the prompt and its suffix; the model writes the text between them."""
    for member in ("system", "context", "images"):
        if body.raw_value(member):
            raise body.member_error(member, "cannot be used together with 'suffix'.")
    return TextPrompt(body.string("prompt", ""), suffix=body.string("suffix", ""))


def _read_raw_prompt(body: Fields, images: Sequence[PlacedMedia]) -> TextPrompt:
    if body.string("template", "") or body.string("system", "") or body.array("context", cap=MAX_CONTEXT_IDS):
        raise InvalidValue("raw mode does not support template, system, or context", field="raw")
    if body.string("suffix", ""):
        raise body.member_error("suffix", "cannot be used together with 'raw'.")
    return TextPrompt(body.string("prompt", ""), media=list(images))


def _read_templated(rules: OllamaRules, body: Fields, images: Sequence[PlacedMedia], think: ThinkMember) -> ChatPrompt:
    """Return the prompt that the client's template writes. In the original, an error in it is one of the server."""
    level = body.raw_value("think")
    members = TemplateInput(
        prompt=body.string("prompt", ""),
        system=body.string("system", ""),
        suffix=body.string("suffix", ""),
        think=None if level is None else level is not False,
        think_level=think.effort or ("" if level is None else str(level is True).lower()),
        images=images,
    )
    try:
        text, placed = render_prompt(body.string("template", ""), members)
    except InvalidValue as error:
        error.status = 500 if rules.strict else error.status
        raise
    earlier_ids = _read_context(body)
    message = Message("user", text, media=placed)
    return ChatPrompt(
        [message], rendered=True, thinking=think.thinking, add_special_tokens=not earlier_ids, preceding_ids=earlier_ids
    )


def _read_context(body: Fields) -> list[int]:
    """Return the tokens of an earlier prompt and its answer."""
    return body.integers("context", cap=MAX_CONTEXT_IDS, low=0, high=MAX_TOKEN_ID)


def _read_turn(body: Fields, images: Sequence[PlacedMedia], think: ThinkMember, context: RequestContext) -> Prompt:
    """Return the prompt as a turn of a conversation, after the system's, if the model has conversations."""
    prompt, system = body.string("prompt", ""), body.string("system", "")
    earlier_ids = _read_context(body)
    if "chat" not in context.abilities:
        if system or earlier_ids:
            raise Unsupported(
                f"'{'system' if system else 'context'}' is not available with this model: it has no chat template.",
                field="system" if system else "context",
            )
        return TextPrompt(prompt, media=list(images))
    messages = [Message("system", system)] if system else []
    messages.append(Message("user", prompt, media=list(images)))
    return ChatPrompt(messages, thinking=think.thinking, reasoning_effort=think.effort, preceding_ids=earlier_ids)
