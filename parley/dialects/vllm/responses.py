"""``POST /v1/responses`` as vLLM answers it: OpenAI's members and vLLM's own, and vLLM's form of objects and events.

Its objects omit nothing: absent values are null. A stream has no ``[DONE]`` mark. Stored responses are the server's
own: the original keeps them if ``VLLM_ENABLE_RESPONSES_API_STORE`` is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from parley.dialects.fields import Fields
from parley.dialects.openai import vllm_members
from parley.dialects.openai.common_members import MAX_TOKENS, read_alternatives
from parley.dialects.openai.labels import MAX_LABEL
from parley.dialects.openai.responses import stored, stored_routes
from parley.dialects.openai.responses.events import EventStream
from parley.dialects.openai.responses.items import MAX_ITEMS
from parley.dialects.openai.responses.members import LOGPROBS_INCLUDED
from parley.dialects.openai.responses.reply import ResponsesReply
from parley.dialects.openai.responses.response_object import ResponseObject, ResponseStatus, usage_object
from parley.dialects.openai.responses.response_rules import ResponsesRules
from parley.dialects.openai.responses.tools import ResponsesToolMembers, namespaced_name
from parley.dialects.openai.tools import MAX_TOOLS
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.vllm import requests
from parley.dialects.vllm.answer_parts import vllm_call_id
from parley.dialects.vllm.error_answers import STORE_ERROR_TYPE, vllm_error_object
from parley.dialects.vllm.raw_messages import RawMessages
from parley.dialects.vllm.refusal_wording import EMPTY_SENTENCES, UNKNOWN_RESPONSE_TOOL, VLLM_WORDING, parameter_error
from parley.dialects.vllm.token_usage import created_cache_tokens
from parley.errors import BadRequest, InvalidValue, ParleyError
from parley.types import ChatPrompt, ChoiceDelta, Event, PromptAccepted, Usage

RESPONSES_RULES = ResponsesRules(pairs_calls=False, client_tools=False, compacts=False, reading=requests.VLLM_RULES)
MEMBER_ORDER = (
    "id", "created_at", "incomplete_details", "instructions", "metadata", "model", "object", "output",
    "parallel_tool_calls", "temperature", "tool_choice", "tools", "top_p", "background", "max_output_tokens",
    "max_tool_calls", "previous_response_id", "prompt", "prompt_cache_options", "prompt_cache_key",
    "prompt_cache_retention", "reasoning", "safety_identifier", "service_tier", "status", "text", "top_logprobs",
    "truncation", "usage", "user", "presence_penalty", "frequency_penalty", "kv_transfer_params", "ec_transfer_params",
    "input_messages", "output_messages",
)  # fmt: skip
REASONING_MEMBERS = ("context", "effort", "generate_summary", "mode", "summary")
FORMAT_MEMBERS = ("name", "schema", "type", "description", "strict")  # of a JSON schema
TOOL_MEMBERS = ("name", "parameters", "strict", "type", "allowed_callers", "async", "defer_loading", "description",
                "output_schema")  # fmt: skip
MEMBERS_ELSEWHERE = {"n", "use_beam_search", "logprob_token_ids"}  # which mean nothing here
TWO_HISTORIES = "Only one of `previous_input_messages` and `previous_response_id` can be set."
UNREAD_ITEMS = ("item_reference", "compaction", "compaction_trigger")
NO_BACKGROUND = (
    "This server does not support `store=True` and therefore does not support the background mode. To enable these "
    "features, let it keep responses."
)


def decode_response_body(body: bytes, context: RequestContext, *, renders: bool = False) -> Fields:
    """Return the members of a body, after the checks that its stored responses need. Raises BadRequest, UnknownRecord.

    A text without characters is a message of the user. ``renders``: only the prompt's tokens are wanted, so no response
    is stored.
    """
    fields = requests.decode_generation_body(body, context)
    if fields.has_value("prompt"):
        raise parameter_error("prompt template is not supported", "prompt")
    if fields.boolean("background", False):
        if not fields.boolean("store", True):
            raise parameter_error("background can only be used when `store` is true", "background")
        if not (renders or context.records.are_kept):
            raise store_error(NO_BACKGROUND, "background")
    previous = fields.string("previous_response_id", None, cap=256)
    if previous and fields.raw_value("previous_input_messages"):
        raise store_error(TWO_HISTORIES, "previous_response_id")
    if not context.records.are_inlined:  # else a coordinator has checked these, and put stored items among those sent
        if previous is not None:
            stored.load_response(context, previous)
        _check_items(fields)
    if fields.raw_value("input") == []:
        raise InvalidValue(EMPTY_SENTENCES["messages"])
    if fields.raw_value("input") == "":
        return fields.with_members({"input": [{"role": "user", "content": ""}]})
    return fields


def read_vllm_response(body: bytes, context: RequestContext) -> VllmResponsesReply:
    """Read the body of a create. Raises BadRequest, UnknownRecord."""
    return VllmResponsesReply(decode_response_body(body, context), context)


def cancel_vllm_response(body: bytes, context: RequestContext) -> Answer:
    """Stop a response that runs in the background. Raises UnknownRecord, BadRequest."""
    try:
        return stored_routes.cancel_response(body, context)
    except BadRequest as error:
        raise store_error(error.message, "response_id") from None


def store_error(message: str, field: str) -> InvalidValue:
    """Return the error for a wrong use of stored responses."""
    return InvalidValue(message, field=field, code=STORE_ERROR_TYPE)


def _check_response(body: Fields, context: RequestContext) -> None:
    """Check vLLM's rules for all members. Raises BadRequest."""
    limit = body.integer("max_output_tokens", None, None, None)
    # Out of range, the original names the member of chat completions.
    Fields({"max_tokens": limit}, "", VLLM_WORDING).integer("max_tokens", None, 1, MAX_TOKENS)
    # Checks of other members and of streams concern other routes.
    checked = body.without_members(MEMBERS_ELSEWHERE).with_members({"stream": False})
    requests.check_generation(checked, context, limit_member="max_output_tokens", least=1)
    text = body.object("text")
    if body.has_value("structured_outputs") and text is not None and text.has_value("format"):
        sentence = "Cannot specify both structured_outputs and text.format"
        raise parameter_error(sentence, "structured_outputs")
    body.array("previous_input_messages", cap=MAX_ITEMS)  # which only the original's gpt-oss reads


def _check_items(body: Fields) -> None:
    """Refuse items that the original does not read: references, compactions, sealed reasoning. Raises InvalidValue."""
    items = body.raw_value("input")
    for item in items if isinstance(items, list) else ():
        if not isinstance(item, dict):
            continue
        kind = item.get("type")
        if kind == "reasoning" and item.get("encrypted_content"):
            raise parameter_error("Encrypted content is not supported.", "input")
        if kind in UNREAD_ITEMS:
            raise parameter_error(f"Unsupported input item type: {kind}", "input")


def _with_chosen_tool(body: Fields) -> Fields:
    """Return the body with the joined name of a chosen tool that is in a namespace. Raises InvalidValue."""
    choice, tools = body.raw_value("tool_choice"), body.raw_value("tools")
    if choice == "required" and not tools:
        sentence = "Tool choice 'required' must be specified with 'tools' parameter."
        raise parameter_error(sentence, "tool_choice")
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom"):
        return body
    name = choice.get("name")
    if not (tools and name):
        raise parameter_error(UNKNOWN_RESPONSE_TOOL, "tool_choice")
    candidates = [joined for joined, local in _declared_names(tools) if name in (joined, local)]
    if name in candidates or not candidates:
        return body
    if len(candidates) > 1:
        sentence = (
            f"Tool choice '{name}' is ambiguous: it is defined in more than one namespace ({', '.join(candidates)}). "
            "Select it by its full '<namespace>__<name>' name."
        )
        raise parameter_error(sentence, "tool_choice")
    return body.with_members({"tool_choice": {"type": choice["type"], "name": candidates[0]}})


def _declared_names(tools: Any) -> list[tuple[str, str]]:
    """Return the joined name of each tool, and its name in its namespace."""
    names: list[tuple[str, str]] = []
    for tool in tools if isinstance(tools, list) else ():
        if not isinstance(tool, dict):
            continue
        inner = tool.get("tools") if tool.get("type") == "namespace" else None
        for member in inner if isinstance(inner, list) else [tool] if inner is None else ():
            if isinstance(member, dict) and isinstance(member.get("name"), str):
                namespace = "" if member is tool else str(tool.get("name"))
                names.append((namespaced_name(namespace, member["name"]), member["name"]))
    return names


class VllmEventStream(EventStream):
    """Writes events in vLLM's form: members by name, and no mark at the end."""

    end_mark = b""

    def event_object(self, event_type: str, members: dict[str, Any]) -> dict[str, Any]:
        """Return an event with its members in order."""
        is_opening = event_type.endswith(".added")
        members = {"type": event_type} | members
        if "item" in members:
            members["item"] = vllm_item(members["item"], is_streamed=True)
        if "part" in members:
            members["part"] = _vllm_part(members["part"], None if not is_opening else [])
        if event_type == "response.output_text.done":
            members["logprobs"] = []
        if event_type == "response.output_text.delta":
            members["logprobs"] = list(map(_without_bytes, members["logprobs"]))
        name = {"name": members.pop("name")} if "name" in members else {}  # of a call, which comes last
        return dict(sorted(members.items())) | name

    def error_members(self, error: ParleyError) -> dict[str, Any]:
        """Return the type, code, message and member of an error, in vLLM's words."""
        fault: dict[str, Any] = vllm_error_object(error)["error"]
        return fault | {"code": error.code}


class VllmResponseObject(ResponseObject):
    """A response in vLLM's form. ``is_streamed``: the answer is a stream; ``context``: of its request;
    ``raw_messages``: if the client wants them."""

    def __init__(
        self,
        settings: dict[str, Any],
        context: RequestContext,
        raw_messages: RawMessages | None,
        *,
        is_streamed: bool,
    ):
        self._settings, self._context = settings, context
        self._raw_messages, self._is_streamed = raw_messages, is_streamed

    def snapshot(
        self,
        status: ResponseStatus,
        output: list[dict[str, Any]] | None = None,
        *,
        completed_at: int | None = None,
        incomplete_reason: str | None = None,
        usage: Usage | None = None,
    ) -> dict[str, Any]:
        """Return the object in this state. The original has no time of its end."""
        members = self._settings | {
            "incomplete_details": None if incomplete_reason is None else {"reason": incomplete_reason},
            "output": [vllm_item(item, is_streamed=self._is_streamed) for item in output or ()],
            "status": status,
            "usage": None if usage is None else _vllm_response_usage(usage, self._context),
        }
        if self._raw_messages is not None and status not in ("queued", "in_progress"):
            members |= self._raw_messages.members()
        return {name: members.get(name) for name in MEMBER_ORDER}


class VllmResponsesReply(ResponsesReply):
    """A request for a response, answered in vLLM's form."""

    event_stream = VllmEventStream
    reasoning_as_text = reasoning_status = True
    empty_message = shows_queue = False
    ping_interval: ClassVar[float | None] = None

    def __init__(self, body: Fields, context: RequestContext):
        _check_response(body, context)
        body = _with_chosen_tool(body)
        super().__init__(body, context, RESPONSES_RULES)
        self.request.prompts = [
            vllm_members.with_reused_tokens(body, prompt)
            for prompt in self.request.prompts
            if isinstance(prompt, ChatPrompt)
        ]
        self.request.stop_conditions = requests.cap_max_tokens(self.request.stop_conditions, context)
        self._shows_reasoning = body.boolean("include_reasoning", True)
        self._raw_messages: RawMessages | None = None
        if body.boolean("enable_response_messages", False):
            self._raw_messages = RawMessages(keeps_stop_string=self.request.stop_conditions.include_in_output)
            self.request.output_options = msgspec.structs.replace(
                self.request.output_options, ids=True, prompt_text=True
            )
        self._settings |= {
            "max_output_tokens": self._output_limit(0),
            "reasoning": _shown_members(body.raw_value("reasoning"), REASONING_MEMBERS),
            "text": _shown_text(body),
            "top_logprobs": self.request.output_options.logprobs,
        }

    def read_settings(self, body: Fields, tool_members: ResponsesToolMembers) -> dict[str, Any]:
        """Return the members of the answer that the request decides. Raises BadRequest."""
        settings = super().read_settings(body, tool_members)
        tools = body.array("tools", cap=MAX_TOOLS)
        settings |= {
            "metadata": settings["metadata"] if body.has_value("metadata") else None,
            "tool_choice": settings["tool_choice"] if tools else "none",
            "tools": list(map(_shown_tool, tools)),
            "prompt_cache_options": _shown_cache_options(body),
        }
        if settings["prompt_cache_retention"] == "in-memory":
            settings["prompt_cache_retention"] = "in_memory"
        if not self._storage.is_stored and (name := body.string("request_id", None)) is not None:
            settings["id"] = name
        return settings

    def read_logprobs(self, body: Fields, included: set[str], context: RequestContext) -> tuple[int, int | None]:
        """Return ``top_logprobs``, and the number of alternatives whose log-probabilities are wanted, or None."""
        top = read_alternatives(body, "top_logprobs", requests.VLLM_RULES, context) or 0
        return (top, top) if LOGPROBS_INCLUDED in included else (0, None)

    def make_response_object(self, settings: dict[str, Any]) -> ResponseObject:
        """Return the response object in vLLM's form."""
        return VllmResponseObject(settings, self._context, self._raw_messages, is_streamed=self.request.stream)

    def render_ping(self) -> bytes:
        """Return a comment: the original has no event for that."""
        return self.ping_bytes

    def add_events(self, events: Sequence[Event]) -> None:
        """Add these events to the output."""
        if self._raw_messages is not None:
            self._raw_messages.add_events(events)
        for event in events:
            if isinstance(event, PromptAccepted):
                self._settings["max_output_tokens"] = self._output_limit(len(event.token_ids))
                self._response = None  # made again with the limit
        super().add_events([event for event in events if self._shows_reasoning or not _is_reasoning(event)])

    def _output_limit(self, prompt_tokens: int) -> int:
        """Return the largest number of tokens that the output may have."""
        room = max(0, self._context.context_length - prompt_tokens)
        max_tokens = self.request.stop_conditions.max_tokens
        return room if max_tokens is None else min(max_tokens, room)


def _is_reasoning(event: Event) -> bool:
    return isinstance(event, ChoiceDelta) and event.output_part == "reasoning"


def vllm_item(item: dict[str, Any], *, is_streamed: bool) -> dict[str, Any]:
    """Return an item of the output in vLLM's form. Reasoning has a status only where the answer is a stream."""
    status = item["status"]
    match item["type"]:
        case "message":
            parts = [_vllm_part(part, None) for part in item["content"]]
            return {"id": item["id"], "content": parts, "role": item["role"], "status": status, "type": "message",
                    "phase": None}  # fmt: skip
        case "reasoning":
            parts = [_vllm_part(part, None) for part in item["content"] or ()]
            return {"id": item["id"], "summary": [], "type": "reasoning", "content": parts or None,
                    "encrypted_content": None, "status": status if is_streamed else None}  # fmt: skip
        case "function_call":
            return {
                "arguments": item["arguments"],
                "call_id": vllm_call_id(item["call_id"]),
                "name": item["name"],
                "type": "function_call",
                "id": item["id"],
                "async": None,
                "caller": None,
                "namespace": item.get("namespace"),
                "status": status,
            }
    return {
        "call_id": vllm_call_id(item["call_id"]),
        "input": item["input"],
        "name": item["name"],
        "type": item["type"],
        "id": item["id"],
        "async": None,
        "caller": None,
        "namespace": item.get("namespace"),
    }


def _vllm_part(part: dict[str, Any], no_logprobs: list[Any] | None) -> dict[str, Any]:
    """Return a part of an item in vLLM's form. ``no_logprobs``: stands for log-probabilities that are absent."""
    if part["type"] != "output_text":
        return {"text": part["text"], "type": part["type"]}
    logprobs = part["logprobs"] or no_logprobs
    return {"annotations": [], "text": part["text"], "type": "output_text", "logprobs": logprobs}


def _without_bytes(token: dict[str, Any]) -> dict[str, Any]:
    """Return a token's log-probability as events have it."""
    alternatives = [{"token": top["token"], "logprob": top["logprob"]} for top in token["top_logprobs"]]
    return {"token": token["token"], "logprob": token["logprob"], "top_logprobs": alternatives}


def _shown_members(value: Any, names: Sequence[str]) -> dict[str, Any] | None:
    return None if value is None else {name: value.get(name) for name in names}


def _shown_cache_options(body: Fields) -> dict[str, Any] | None:
    """Return the options of the prompt's cache, which have no effect. Raises BadRequest."""
    options = body.object("prompt_cache_options")
    if options is None:
        return None
    options.boolean("prewarm", None)
    return {
        "mode": options.string("mode", "implicit", allowed=("implicit", "explicit")),
        "ttl": options.string("ttl", "30m", allowed=("30m",)),
        "comparison_response_id": options.string("comparison_response_id", None, cap=MAX_LABEL),
    }


def _shown_text(body: Fields) -> dict[str, Any] | None:
    text = body.raw_value("text")
    if text is None:
        return None
    form = text.get("format")
    if form is not None:
        form = _shown_members(form, FORMAT_MEMBERS if form["type"] == "json_schema" else ("type",))
    return {"format": form, "verbosity": text.get("verbosity")}


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return tool if tool.get("type") != "function" else {name: tool.get(name) for name in TOOL_MEMBERS}


def _vllm_response_usage(usage: Usage, context: RequestContext) -> dict[str, Any]:
    """Return the token counts of a finished response; there are no tools of the server, and so no turns."""
    counts = usage_object(usage)
    created_tokens = created_cache_tokens(usage, context)
    counts["input_tokens_details"] |= {
        "cache_write_tokens": created_tokens,
        "input_tokens_per_turn": [],
        "cached_tokens_per_turn": [],
    }
    counts["output_tokens_details"] |= {
        "tool_output_tokens": 0,
        "output_tokens_per_turn": [],
        "tool_output_tokens_per_turn": [],
    }
    return counts
