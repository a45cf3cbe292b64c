"""``POST /v1/responses``: reads the body as a neutral request, and writes events as a stream or as one object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec

from parley.dialects import output_constraints, sampling_members
from parley.dialects.admin_requests import TokenizeRequest, TokenizeResult
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai import vllm_members
from parley.dialects.openai.common_members import (
    MAX_TOKENS,
    read_openai_sampling,
    read_stop_conditions,
    read_stream_interval,
)
from parley.dialects.openai.messages import read_template_options
from parley.dialects.openai.metadata import read_metadata
from parley.dialects.openai.responses import items, members, stored, tools
from parley.dialects.openai.responses.events import KEEPALIVE, EventStream
from parley.dialects.openai.responses.items import InputItemReader
from parley.dialects.openai.responses.members import StorageMembers
from parley.dialects.openai.responses.open_item import ItemStatus
from parley.dialects.openai.responses.output import OutputItems
from parley.dialects.openai.responses.response_object import ResponseObject, ResponseStatus
from parley.dialects.openai.responses.response_rules import LENIENT, ResponsesRules
from parley.dialects.reply import Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.summary_request import SUMMARY_REQUEST
from parley.errors import InvalidValue, NotReady, ParleyError
from parley.types import (
    ChatPrompt,
    ChoiceDelta,
    ChoiceDone,
    Event,
    OutputOptions,
    PromptAccepted,
    Request,
    SummarizeContext,
    Usage,
)

KEEPALIVE_SECONDS = 15.0
TRUNCATIONS = ("auto", "disabled")
NO_MEMBERS = Fields({})


def read_response_request(body: bytes, context: RequestContext, rules: ResponsesRules = LENIENT) -> ResponsesReply:
    """Read the body of a create. Raises BadRequest."""
    return ResponsesReply(decode_fields(body), context, rules)


class ResponseInput(msgspec.Struct, frozen=True):
    """The input of a body: the conversation, with all its items as they are stored, and the tools.

    ``new_items``: those of ``all_items`` that the body brought. ``summarizes``: they ask for a summary.
    ``covered_items``: how many of ``all_items`` a summary among them stands for, with its own item.
    """

    chat: ChatPrompt
    tool_members: tools.ResponsesToolMembers
    all_items: list[stored.Item]
    new_items: list[stored.Item]
    summarizes: bool
    covered_items: int


def read_response_input(
    body: Fields, context: RequestContext, rules: ResponsesRules, storage: StorageMembers
) -> ResponseInput:
    """Read the conversation of a body with its tools. Raises BadRequest, UnknownRecord."""
    earlier = stored.earlier_items(context, storage)
    reader = InputItemReader(rules, context)
    reader.read_instructions(body.string("instructions", None))
    reader.read_earlier(earlier)
    body, new_items = items.input_with_items(body, partial(stored.find_item, context), may_be_missing=bool(earlier))
    reader.read_items(body.objects("input", cap=items.MAX_ITEMS))
    messages = reader.finish()
    tool_members = tools.read_responses_tools(
        body, reader.added_tools, rules, reads_images="image" in context.media_limits
    )
    is_callable = tool_members.choice != "none"
    chat = ChatPrompt(
        messages=messages,
        tools=tool_members.tools if is_callable else [],
        tool_choice=tool_members.choice if is_callable else "auto",
        forced_tool=tool_members.only,
        allowed_tools=tool_members.allowed,
        parallel_calls=body.boolean("parallel_tool_calls", True),
        schema_fields=tool_members.schema_fields if is_callable else {},
        reasoning_effort=members.read_reasoning(body).effort,
        options=read_template_options(body),
    )
    listed_items = stored.with_ids(new_items, context.unique_id)
    all_items = [*earlier, *listed_items]
    return ResponseInput(chat, tool_members, all_items, listed_items, reader.summarizes, reader.covered_items)


def read_token_count(body: bytes, context: RequestContext, rules: ResponsesRules = LENIENT) -> TokenizeRequest:
    """Read the body of a count of input tokens, which has members of a create. Raises BadRequest."""
    fields = decode_fields(body)
    storage = members.read_storage(fields, context)
    response_input = read_response_input(fields, context, rules, storage)
    members.read_text_form(fields, rules)
    fields.string("truncation", "disabled", allowed=TRUNCATIONS)
    return TokenizeRequest(model=fields.string("model", "", cap=256), prompt=response_input.chat)


def write_token_count(result: TokenizeResult) -> bytes:
    """Return the number of input tokens."""
    return encode_json({"object": "response.input_tokens", "input_tokens": len(result.token_ids)})


class ResponsesReply(Reply):
    """A request for a response, answered in OpenAI's form.

    Servers that answer it in another form derive their own replies, with their own events and response objects.
    """

    event_stream: ClassVar[type[EventStream]] = EventStream
    reasoning_as_text: ClassVar[bool] = False  # always: neither as a summary nor sealed
    reasoning_status: ClassVar[bool] = False  # items of reasoning have a status, as all others have
    empty_message: ClassVar[bool] = True  # an answer without output has one
    shows_queue: ClassVar[bool] = True  # a stream of a response in the background begins with its wait
    field_names: ClassVar[Mapping[str, str]] = {
        "prompt": "input",
        "stop_ids": "stop_token_ids",
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
    }
    ping_interval: ClassVar[float | None] = KEEPALIVE_SECONDS

    def __init__(self, body: Fields, context: RequestContext, rules: ResponsesRules):
        members.check_members(body, rules)
        self._storage = storage = members.read_storage(body, context)
        self._input = response_input = read_response_input(body, context, rules, storage)
        tool_members = response_input.tool_members
        max_tokens = body.integer("max_output_tokens", None, rules.min_output_tokens, MAX_TOKENS)
        self._generates = body.boolean("generate", True)  # False: compute the prompt for requests that continue it
        edits = members.read_context_edits(body, context.context_length) if rules.compacts else []
        if response_input.summarizes:
            edits = [SummarizeContext(0, SUMMARY_REQUEST)]
        elif not self._generates:
            edits = []
        extra_members = vllm_members.read_vllm_members(
            NO_MEMBERS if rules.strict else body, context, max_tokens=max_tokens, rules=rules.reading
        )
        text_form, reasoning = members.read_text_form(body, rules), members.read_reasoning(body)
        included = members.read_include(body)
        top_logprobs, alternatives = self.read_logprobs(body, included, context)
        truncation = body.string("truncation", "disabled", allowed=TRUNCATIONS)
        self.request = Request(
            id=context.unique_id,
            model=body.string("model", "", cap=256),
            prompts=[msgspec.structs.replace(response_input.chat, edits=edits)],
            sampling=read_openai_sampling(body),
            stop_conditions=read_stop_conditions(body, max_tokens if self._generates else 0, rules.reading),
            output_options=OutputOptions(logprobs=alternatives, stream_interval=read_stream_interval(body)),
            stream=body.boolean("stream", False) or (storage.in_background and context.records.are_inlined),
            banned_words=sampling_members.read_bad_words(body),
            grammar=output_constraints.only_constraint(extra_members.grammar, text_form.grammar),
            **extra_members.request_members,
            thinking_budget=extra_members.thinking_budget,
            on_overflow="oldest_turns" if truncation == "auto" else "refuse",
            cancel_ids=(f"resp_{context.unique_id}",),
        )
        self._context = context
        self._settings = self.read_settings(body, tool_members) | {
            "max_output_tokens": max_tokens,
            "reasoning": reasoning.shown,
            "text": text_form.shown,
            "top_logprobs": top_logprobs,
            "truncation": truncation,
        }
        self._events = self.event_stream(self.request.stream)
        self._output = OutputItems(
            context.unique_id,
            self._events,
            tool_members.declared,
            wants_logprobs=alternatives is not None,
            as_summary=reasoning.as_summary and not self.reasoning_as_text,
            seal=partial(_seal_text, context)
            if members.SEALED_INCLUDED in included and not self.reasoning_as_text
            else None,
            reasoning_status=self.reasoning_status,
            seal_summary=partial(_seal_text, context, mark=items.COVERS_ALL),
            summarizes=response_input.summarizes,
        )
        self._client_streams = body.boolean("stream", False)
        self._response: ResponseObject | None = None  # once the model's name is final
        self._done: ChoiceDone | None = None
        self._has_output = False
        if storage.in_background and not context.records.are_inlined:
            self.background_name = self._settings["id"]

    def read_settings(self, body: Fields, tool_members: tools.ResponsesToolMembers) -> dict[str, Any]:
        """Return the members of the answer that the request decides. Raises BadRequest."""
        sampling = self.request.sampling
        return {
            "id": f"resp_{self._context.unique_id}",
            "object": "response",
            "created_at": self._context.created,
            "background": self._storage.in_background,
            **({"conversation": {"id": self._storage.conversation}} if self._storage.conversation else {}),
            "frequency_penalty": sampling.frequency_penalty,
            "instructions": body.string("instructions", None),
            "parallel_tool_calls": body.boolean("parallel_tool_calls", True),
            "presence_penalty": sampling.presence_penalty,
            "previous_response_id": self._storage.previous,
            "store": self._storage.is_stored,
            "temperature": sampling.temperature,
            "tool_choice": tool_members.shown_choice,
            "tools": tool_members.shown,
            "top_p": sampling.top_p,
            "metadata": read_metadata(body),
            **members.read_shown_labels(body),
        }

    def read_logprobs(self, body: Fields, included: set[str], context: RequestContext) -> tuple[int, int | None]:
        """Return ``top_logprobs``, and the number of alternatives whose log-probabilities are wanted, or None."""
        return members.read_responses_logprobs(body, included, context)

    def make_response_object(self, settings: dict[str, Any]) -> ResponseObject:
        """Return the response object. ``settings``: its members that do not change."""
        return ResponseObject(settings)

    @property
    def _object(self) -> ResponseObject:
        if self._response is None:
            self._response = self.make_response_object(self._settings | {"model": self.request.model})
        return self._response

    # -- a stream

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return the events of the stream that these events produce; the first two announce the response."""
        self.add_events(events)
        return self._events.take_bytes()

    def finish_stream(self, usage: Usage) -> bytes:
        """Return the events that end the stream, and the ``[DONE]`` mark."""
        final = self._final_object(usage)
        self._events.write(f"response.{final['status']}", response=final)
        return self._events.end_bytes()

    def fail_stream(self, error: ParleyError) -> bytes:
        """Return the error, the failed response and the ``[DONE]`` mark."""
        self._keep_response(self._events.write_failure(error, self._object.snapshot("failed", self._output.items)))
        return self._events.end_bytes()

    def render_ping(self) -> bytes:
        """Return an event once the response was announced, as some clients time events; before that a comment."""
        if not self._events.count:
            return self.ping_bytes
        self._events.write(KEEPALIVE)
        return self._events.take_bytes()

    # -- one answer

    def add_events(self, events: Sequence[Event]) -> None:
        """Add these events to the output."""
        for event in events:
            match event:
                case ChoiceDelta() if self._generates:
                    if not self._has_output:
                        self._begin_output()
                    self._output.add_delta(event)
                case ChoiceDone(summary=str()):
                    if not self._has_output:
                        self._begin_output()
                    self._output.add_summary(event.summary or "")
                case ChoiceDone():
                    self._done = event
                case PromptAccepted(prompt=0):
                    self._announce_response()

    def render_body(self, usage: Usage) -> bytes:
        """Return the response as JSON."""
        return encode_json(self._final_object(usage))

    def render_accepted(self) -> bytes:
        """Keep the response as queued, and return it."""
        queued = self._object.snapshot("queued")
        self._keep_response(queued)
        return encode_json(queued)

    def _announce_response(self) -> None:
        if not self._events.enabled:
            return
        in_progress = opening = self._encoded_snapshot("in_progress")
        # A coordinator answers a create that is no stream with the opening of the stream that it gets.
        waits = self._storage.in_background and (self.shows_queue or not self._client_streams)
        if waits:
            opening = self._encoded_snapshot("queued")
        self._events.write("response.created", response=opening)
        if waits:
            self._events.write("response.queued", response=opening)
        self._events.write("response.in_progress", response=in_progress)

    def _encoded_snapshot(self, status: ResponseStatus) -> msgspec.Raw:
        """Return the response as JSON for several events; its tools may be long."""
        return msgspec.Raw(encode_json(self._object.snapshot(status)))

    def _begin_output(self) -> None:
        self._has_output = True
        if self._storage.in_background:
            self._keep_response(self._object.snapshot("in_progress"))

    def _keep_response(self, response: dict[str, Any]) -> None:
        """Keep the response, and add one that has ended to its conversation. If the store fails, or the response is too
        large for it, output that is there is answered nevertheless, as not stored. Raises NotReady, InvalidValue before
        that."""
        records = self._context.records
        if not self._storage.is_stored or records.are_inlined:
            return
        record = stored.StoredResponse(response, self._input.all_items)
        try:
            is_kept = stored.keep_response(self._context, record, self._input.new_items, self._storage.conversation)
        except NotReady:
            if response["status"] == "queued":
                raise
            is_kept = False
        if is_kept:
            return
        if response["status"] == "queued":
            raise InvalidValue("The response would be larger than the server's store of responses.", field="background")
        response["store"] = False

    def _final_object(self, usage: Usage) -> dict[str, Any]:
        """End the output, and return the response as it stays."""
        status, reason = _final_status(self._done) if self._generates else ("completed", None)
        output: list[dict[str, Any]] = []
        if self._generates:
            item_status: ItemStatus = "completed" if status == "completed" else "incomplete"
            is_whole = self._done is not None and self._done.reason in ("stop", "tool")
            output = self._output.close_items(item_status, empty_message=self.empty_message, is_whole=is_whole)
        seconds = int(self.timings.total) if self.timings is not None else 0
        completed_at = self._context.created + seconds if status == "completed" else None
        final = self._object.snapshot(status, output, completed_at=completed_at, incomplete_reason=reason, usage=usage)
        self._keep_response(final)
        return final


def _final_status(done: ChoiceDone | None) -> tuple[ResponseStatus, str | None]:
    """Return the status of a response that ended, and why it is incomplete. One that a client cancelled is incomplete,
    too: a stream has no event for it."""
    reason = done.reason if done is not None else "error"
    if reason in ("stop", "tool", "repetition"):
        return "completed", None
    return "incomplete", "max_output_tokens" if reason == "length" else "cancelled"


def _seal_text(context: RequestContext, text: str, mark: str = "") -> str:
    """Seal a text that begins with a mark. No method of the reply, whose output would refer to it in a circle."""
    return context.seal_reasoning(f"{mark}{text}".encode())
