"""Which members each route of an API reads, found by running its readers over probing bodies and watching ``Fields``.

Nothing is written down twice: a member that a reader asks for is a member of its route, with the type and range that
the reader asks for. A member's own members are found by giving it the values in ``SHAPES`` below. Whether the reader
then takes the body, refuses it as not available, or calls it wrong is the outcome for the member. A body that is taken
also shows which features and bounds of an engine its request depends on.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any
from unittest import mock

from parley.dialects.dialect import Dialect
from parley.dialects.facts import Endpoint, EndpointShare, ModelCard, ServerFacts
from parley.dialects.fields import Fields
from parley.dialects.openai.stored_chat_routes import COMPLETIONS_PATH
from parley.dialects.openai.stored_chats import COMPLETIONS
from parley.dialects.openapi_bodies import LEARNED_FILE, LEARNED_MODEL, LEARNED_OWNER
from parley.dialects.records import NoRecords, RecordChange
from parley.dialects.reply import Answer, Reply
from parley.dialects.request_context import ApiOptions, RequestContext
from parley.dialects.route import Route
from parley.errors import ParleyError, Unsupported
from parley.serving.engine_features import BOUNDED_VALUES, FEATURE_FIELDS
from parley.types import EngineBound, KeyOwner, Request

PATH = {
    "digest": "sha256:00",
    "model": LEARNED_MODEL,
    "version": "1",
    "repo": "r",
    "region": "x",
    "endpoint": "e",
    "served": "m",
    "id": "conv_i",
    "item": "i",
}
COMPLETION_ID = f"{COMPLETIONS.id_prefix}i"
COMPLETION_RECORD = COMPLETIONS.record_name(COMPLETION_ID, 1)
COMPLETION = b'{"completion":{"id":"%b","created":1},"messages":[]}' % COMPLETION_ID.encode()
RECORDS = {PATH["id"]: b'{"conversation":{"id":"conv_i"},"items":[{"id":"i"}]}', COMPLETION_RECORD: COMPLETION}
FILE = f'{{"id":"{LEARNED_FILE}","created_at":1,"expires_at":null,"purpose":"batch"}}'
RECORD_PARTS = {f"{COMPLETIONS.name}/{COMPLETION_ID}": COMPLETION, f"file/{LEARNED_FILE}": FILE.encode()}


def path_parts(route: Route) -> dict[str, str]:
    """Return the parts of a path to the route. An id is that of a record that ``SurveyedRecords`` has, if there is one
    of its kind."""
    return PATH | ({"id": COMPLETION_ID} if route.path.startswith(f"{COMPLETIONS_PATH}/{{id}}") else {})


class SurveyedRecords(NoRecords):
    """Records with one conversation, one stored chat completion and one file."""

    are_kept = True
    largest_record = 1 << 20

    def save_record(self, name: str, data: bytes, parts: Sequence[str] = ()) -> bool:
        return True

    def find_record(self, name: str) -> bytes | None:
        return RECORDS.get(name)

    def find_part(self, part: str) -> bytes | None:
        return RECORD_PARTS.get(part)

    def update_record(self, name: str, change: RecordChange) -> bool:
        data = self.find_record(name)
        if data is not None:
            change(data)
        return data is not None


CONTEXT = RequestContext(  # a model that reads every kind of media, and an operator who allows everything
    "0f",
    1,
    "fp",
    context_length=4096,
    model_names=(LEARNED_MODEL,),
    path_parts=PATH,
    headers={b"content-type": b"application/json", b"anthropic-version": b"2023-06-01"},
    media_limits={"image": 9, "video": 9, "audio": 9},
    api_options=ApiOptions(enable_mm_embeds=True, trust_request_mm_kwargs=True),
    records=SurveyedRecords(),
)
CLASSIFIER_PATHS = ("/predict", "/rerank")  # routes that need a classifier
CLASSIFIER_CONTEXT = replace(CONTEXT, labels=["a"], pooling_tasks=frozenset({"classify"}))
SPARSE_CONTEXT = replace(CONTEXT, pooling_tasks=frozenset({"embed", "embed_sparse"}))
CONTEXTS_BY_PATH = {**dict.fromkeys(CLASSIFIER_PATHS, CLASSIFIER_CONTEXT), "/embed_sparse": SPARSE_CONTEXT}
BOUNDARY = "b"
FORM_CONTEXT = replace(
    CONTEXT,
    headers={b"content-type": b"multipart/form-data; boundary=" + BOUNDARY.encode()},
)
FACTS = ServerFacts(
    "1",
    [ModelCard(LEARNED_MODEL, 1, 4096)],
    True,
    key_owners=[KeyOwner(LEARNED_OWNER, (LEARNED_OWNER,))],
    keeps_tables=True,
)
ENDPOINTS = {"e": Endpoint("e", [EndpointShare("m", "m", 100)], {"id": PATH["id"]})}
COMPLETE_BODIES: list[dict[str, Any]] = [  # each route takes at least one of them
    {"messages": [{"role": "user", "content": "a"}]},
    {"model": "m", "max_tokens": 2048, "messages": [{"role": "user", "content": "a"}]},
    {"prompt": "a"},
    {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    {"model": "m", "prompt": "a"},
    {"input": "a"},
    {"model": "m", "input": "a"},
    {"model": "m", "name": "m"},
    {"requests": [{"custom_id": "a", "params": {"model": "m"}}]},
    {"queries": "a", "documents": "b"},
    {"query": "a", "documents": "b"},
    {"texts": "a"},
    {"messages": [[{"role": "user", "content": "a"}]]},
    {"inputs": "a"},
    {"file": "a"},
    {"file": "a", "purpose": "batch"},
    {"input_file_id": LEARNED_FILE, "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    {"tokens": [5]},
    {"token_ids": [5], "sampling_params": {}},
    {"request_ids": ["a"]},
    {"query": "a", "texts": ["b"]},
    {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
    {"ids": [5]},
    {"model": "m", "input": "a"},
    {"metadata": {}, "items": []},
    {"text_input": "a"},
    {"id": "a"},
    {"lora_name": "a", "lora_path": "b"},
    {"instances": [{"inputs": "a"}]},
    {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}]},
    {
        "inputs": [{"name": "input0", "datatype": "UINT32", "shape": [1, 1], "data": [5]}],
        "outputs": [{"name": "output0"}],
    },
    {"name": "n", "config": {"served_entities": [{"entity_name": "m"}]}},
    {"served_entities": [{"entity_name": "m"}]},
    {"access_control_list": [{"user_name": LEARNED_OWNER, "permission_level": "CAN_QUERY"}]},
    {},
    {"model": "m", "messages": [{"role": "user", "content": "a"}], "store": True},
    {"generate_response": {"choices": [{"token_ids": [5]}]}},
    {"generate_responses": [{"choices": [{"token_ids": [5]}]}]},
    {"stream": True, "generate_chunk": {"choices": [{"token_ids": [5]}]}},
]
TABLE = {"enabled": True, "catalog_name": "a", "schema_name": "b", "table_name_prefix": "c"}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TURN = {"role": "user", "content": "a", "name": "b"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CUSTOM_CALL = {"id": "c", "type": "custom", "custom": {"name": "f", "input": "a"}}
CUSTOM_FORMAT = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a"}}
DATA_URL = "data:image/png;base64,aGk="
MEDIA_PARTS = [
    {"type": "text", "text": "a"},
    *({"type": name, name: {"url": DATA_URL}} for name in ("image_url", "video_url", "audio_url")),
    {"type": "input_image", "image_url": DATA_URL},
    {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
    {"type": "file", "file": {"file_data": DATA_URL, "filename": "f.png"}},
    *({"type": f"{kind}_embeds", f"{kind}_embeds": "aGk="} for kind in ("image", "video", "audio")),
]
RESPONSE_ITEMS = [
    {"role": "user", "content": "a"},
    {"type": "reasoning", "id": "r", "encrypted_content": "a", "summary": [{"type": "summary_text", "text": "a"}],
     "content": [{"type": "reasoning_text", "text": "a"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "a"},
    {"type": "custom_tool_call", "call_id": "d", "name": "f", "input": "a"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "a"}]},
    {"type": "additional_tools", "tools": [{"type": "custom", "name": "g"}]},
    {"role": "user", "content": [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": DATA_URL, "detail": "low"},
        {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
        {"type": "input_file", "file_data": DATA_URL, "filename": "f.png"},
        {"type": "refusal", "refusal": "a"},
    ]},
]  # fmt: skip
RESPONSE_TOOLS = [
    {"type": "function"} | FUNCTION,
    {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "regex", "definition": "a"}},
    {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
    {"type": "web_search"},
]
CLIENT_ITEMS: list[dict[str, Any]] = [  # of tools that OpenAI defines and clients run
    {"type": "shell_call", "call_id": "s", "action": {"commands": ["a"], "timeout_ms": 5, "max_output_length": 5}},
    {"type": "shell_call_output", "call_id": "s", "output": [
        {"stdout": "a", "stderr": "a", "outcome": {"type": "exit", "exit_code": 0}}]},
    {"type": "local_shell_call", "id": "i", "call_id": "l", "action": {
        "type": "exec", "command": ["a"], "env": {}, "timeout_ms": 5, "user": "u", "working_directory": "d"}},
    {"type": "local_shell_call_output", "id": "i", "output": "a"},
    {"type": "apply_patch_call", "call_id": "p", "operation": {"type": "create_file", "path": "a", "diff": "+"}},
    {"type": "apply_patch_call_output", "call_id": "p", "status": "completed", "output": "a"},
    {"type": "computer_call", "call_id": "m", "action": {"type": "screenshot"}},
    {"type": "computer_call", "call_id": "n", "actions": [{"type": "screenshot"}]},
    {"type": "computer_call_output", "call_id": "m", "output": {"type": "computer_screenshot", "image_url": DATA_URL}},
    {"type": "tool_search_call", "call_id": "t", "arguments": {}},
    {"type": "tool_search_output", "call_id": "t", "tools": [{"type": "custom", "name": "g"}]},
]  # fmt: skip
CLIENT_TOOLS: list[dict[str, Any]] = [
    {"type": "shell", "environment": {"type": "local", "skills": [{"name": "n", "description": "d", "path": "p"}]}},
    {"type": "computer_use_preview", "display_width": 9, "display_height": 9, "environment": "browser"},
    {"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}},
]
BLOCKS: list[dict[str, Any]] = [  # of Anthropic's messages
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
    {"type": "image", "source": {"type": "url", "url": DATA_URL}},
    {"type": "document", "title": "t", "source": {"type": "text", "data": "a"}, "citations": {"enabled": False}},
    {"type": "document", "source": {"type": "content", "content": "a"}},
    {"type": "search_result", "title": "t", "source": "s", "content": [{"type": "text", "text": "a"}]},
]
COMPACTED = {"type": "compaction", "content": "a", "tool_changes": [], "encrypted_content": "a"}
CALLING_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [
        {"type": "text", "text": "a"}, {"type": "tool_reference", "tool_name": "f"}]}]},
]  # fmt: skip
THINKING_TURN = {"role": "assistant", "content": [
    {"type": "thinking", "thinking": "a"}, {"type": "redacted_thinking", "data": "a"}, {"type": "text", "text": "a"},
]}  # fmt: skip
COHERE_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "tool_plan": "a", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "document", "document": {"id": "d", "data": "a"}}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]},
]
TOOL_CHANGES: list[dict[str, Any]] = [
    {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": "f"}}},
    {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}},
]
# Those that every surface reads: strict ones refuse sealed reasoning and added tools.
STRICT_ITEMS = [item for item in RESPONSE_ITEMS if item.get("type") not in ("reasoning", "additional_tools")]
TOOL_EDIT = {
    "type": "clear_tool_uses_20250919",
    "trigger": {"type": "input_tokens", "value": 9},
    "keep": {"type": "tool_uses", "value": 9},
    "clear_at_least": {"type": "input_tokens", "value": 9},
    "exclude_tools": ["f"],
}
SHAPES: dict[str, list[Any]] = {  # values that lead to members inside members
    "input": [RESPONSE_ITEMS, STRICT_ITEMS, CLIENT_ITEMS, [{"type": "item_reference", "id": "m"}]],
    "text": [{"format": {"type": "json_schema", "name": "n", "schema": {}}}],
    "reasoning": [{"effort": "low", "summary": "auto"}],
    "format": [{"type": "json_schema", "name": "n", "schema": {}}],
    "metadata": [{"a": "b"}],
    "items": [
        [{"type": "message", "role": "user", "content": "a"}],
        [{"role": "user", "content": "a"}],
        *([{"type": item["type"]}] for item in RESPONSE_ITEMS if "type" in item),
    ],
    "conversation": ["conv_i", {"id": "conv_i"}],
    "background_options": [{"completion_window": "soonest"}],
    "messages": [
        [TURN, {"role": "assistant", "content": "a", "tool_calls": [CALL]}],
        [TURN, {"role": "assistant", "content": "a", "tool_calls": [CUSTOM_CALL]}],
        [{"role": "tool", "content": "a", "tool_call_id": "c"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}],
        [{"role": "user", "content": MEDIA_PARTS}],
        *([{"role": "user", "content": [part]}] for part in MEDIA_PARTS),
        [[TURN]],
        [{"role": "user", "content": BLOCKS}],
        [TURN, {"role": "assistant", "content": [COMPACTED]}, TURN],
        CALLING_TURNS,
        [TURN, THINKING_TURN, TURN],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}],
        [TURN, {"role": "system", "content": TOOL_CHANGES, "clear_at": "never"}],
        COHERE_TURNS,
    ],
    "system": [[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "5m"}}]],
    "output_config": [{"effort": "low", "format": {"type": "json_schema", "schema": {}}}],
    "output_format": [{"type": "json_schema", "schema": {}}],
    "cache_control": [{"type": "ephemeral", "ttl": "5m"}],
    "compaction": [{"type": "summarize", "instructions": "a"}],
    "context_management": [
        {"edits": [TOOL_EDIT | {"clear_tool_inputs": ["f"]}]},
        {"edits": [TOOL_EDIT | {"clear_tool_inputs": True}]},
        {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        {"edits": [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 9}, "instructions": "a",
                    "pause_after_compaction": True}]},
        [{"type": "compaction", "compact_threshold": 1000}],
    ],
    "tools": [
        [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        [{"type": "function", "function": FUNCTION}],
        [{"type": "custom", "custom": {"name": "c", "description": "d", "format": CUSTOM_FORMAT}}],
        RESPONSE_TOOLS,
        CLIENT_TOOLS,
        [{"type": "computer_toolset_20260801", "configs": {"zoom": {"enabled": True, "defer_loading": False}}}],
        [{"type": "browser_toolset_20260801", "configs": {"find": {"enabled": False}}}],
    ],
    "functions": [[FUNCTION]],
    "tool_choice": [
        "auto",
        "none",
        {"type": "auto", "disable_parallel_tool_use": True},
        {"type": "function", "function": {"name": "f"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "f"}}]}},
        {"type": "custom", "custom": {"name": "c"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "custom", "custom": {"name": "c"}}]}},
    ],
    "function_call": ["auto", {"name": "f"}],
    "response_format": [
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        {"type": "json_object", "value": {"properties": {}}},
        {"type": "json_object", "schema": {}},
        {"type": "text"},
    ],
    "structured_outputs": [{"json": {}}, {"regex": "a"}, {"choice": ["a"]}, {"grammar": 'root ::= "a"'},
                           {"json_object": True}],
    "guided_decoding": [{"json": {}}],
    "grammar": [{"type": "json", "value": {"properties": {}}}],
    "embedding_request": ['{"input": "a", "pooling_params": {"dimensions": 5}}', '{"input": [5]}'],
    "value": [{"schema": {"properties": {}}}],
    "prediction": [{"type": "content", "content": "a"}, {"content": [{"type": "text", "text": "a"}]}],
    "stream_options": [{"include_usage": True}],
    "documents": [[{"title": "t"}], "b", ["b"]],
    "parameters": [{}, {"max_new_tokens": 1}],
    "stop": ["a", ["a"]],
    "images": [["aGk="]],
    "inputs": [[{"content": MEDIA_PARTS}], *([{"content": [part]}] for part in MEDIA_PARTS)],
    "think": [True, False, "high"],
    "stop_token_ids": [[1]],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "prompt_embedding_table": [[0.5]],
    "lora_weights": [[0.5]],
    "modalities": [["text"], ["audio"]],
    "thinking": [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 5},
                 {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}],
    "config": [{"served_entities": [{"entity_name": "m"}]},
               {"served_entities": [{"entity_name": "m"}], "auto_capture_config": TABLE}],
    "served_entities": [[{"entity_name": "m"}], [{"model_name": "m"}]],
    "served_models": [[{"model_name": "m"}]],
    "traffic_config": [{"routes": [{"served_model_name": "m-1", "traffic_percentage": 100}]}],
    "routes": [
        [{"served_model_name": "m-1", "traffic_percentage": 100}],
        [{"served_entity_name": "m-1", "traffic_percentage": 100}],
    ],
    "embedding_types": [["float"]],
    "requests": [[{"custom_id": "a", "params": {"model": "m"}}]],
    "expires_after": [{"anchor": "created_at", "seconds": 3600}],
    "output_expires_after": [{"anchor": "created_at", "seconds": 3600}],
    "image": [["aGk="]],
    "image_url": [[DATA_URL]],
    "media_io_kwargs": [{"video": {"fps": 1}}],
    "include": [["logprobs"], ["message.output_text.logprobs"]],
    "language": ["en"],
    "languages": [["en"]],
    "to_language": ["en"],
    "timestamp_granularities": [["segment"]],
    "chunking_strategy": ["auto", {"type": "server_vad"}],
    "ids": [[5]],
    "vllm_xargs": ['{"a": 1}'],
    "tags": [[{"key": "k", "value": "v"}]],
    "add_tags": [[{"key": "k", "value": "v"}]],
    "access_control_list": [
        [{name: LEARNED_OWNER, "permission_level": "CAN_QUERY"}]
        for name in ("user_name", "group_name", "service_principal_name")
    ],
    "rate_limits": [[{"calls": 1, "key": "user", "renewal_period": "minute"}], [{"tokens": 1}]],
    "ai_gateway": [{"rate_limits": [{"calls": 1}]}, {"inference_table_config": TABLE}],
    "inference_table_config": [TABLE],
    "auto_capture_config": [TABLE],
    "usage_tracking_config": [{"enabled": False}],
}  # fmt: skip
VALUES: dict[str, list[Any]] = {  # by the type that a reader asks for
    "boolean": [True, False],
    "integer": [1, 2, 5, 0],
    "number": [0.5, 1, 2],
    "string": ["a", "1"],
    "strings": [["a"], "a"],
    "integers": [[1]],
    "array": [["a"], [1]],
    "objects": [[{}]],
    "object": [{}],
    "free_object": [{"a": 1}],
    "token_weights": [{"1": 1.0}],
    "raw_value": [True, 1, "a", ["a"], {"a": 1}],
}
TYPES = {"strings": "string or array of strings", "integers": "array of integers", "objects": "array of objects",
         "free_object": "object", "token_weights": "object of numbers by token id", "raw_value": "any"}  # fmt: skip
ALONE = "not alone"  # with any value, the body is wrong unless other members are added
INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True)
class EngineNeeds:
    """What a request needs of its engine: features, and values that may have bounds."""

    features: frozenset[str] = frozenset()
    values: Mapping[EngineBound, float] = field(default_factory=dict)

    def beyond(self, base: EngineNeeds) -> EngineNeeds:
        """Return the features that ``base`` does not need, and the values that are others there."""
        values = {bound: value for bound, value in self.values.items() if base.values.get(bound) != value}
        return EngineNeeds(self.features - base.features, values)


NO_NEEDS = EngineNeeds()


def engine_needs(request: Request) -> EngineNeeds:
    """Return what a request needs of its engine."""
    features = {feature for feature, read_field in FEATURE_FIELDS.items() if read_field(request) is not None}
    amounts = {bound: read_value(request) for bound, read_value in BOUNDED_VALUES.items()}
    values = {bound: amount.value for bound, amount in amounts.items() if amount is not None}
    return EngineNeeds(frozenset(features), values)


@dataclass
class Member:
    """A member of a body as its reader asks for it. ``method`` is the name of the method of ``Fields``, ``cap`` the
    most characters of a string or elements of an array.

    ``outcomes``: taken, unavailable, wrong. ``asked_as_text``: it was a string in the body that is being read;
    ``taken_as_text``: it was a string in a body that was taken. ``needs``: what each request with it, which was taken,
    needs of an engine for its sake.
    """

    path: str
    method: str = "raw_value"
    low: float | None = None
    high: float | None = None
    allowed: tuple[str, ...] = ()
    cap: int | None = None
    outcomes: set[str] = field(default_factory=set)
    asked_as_text: bool = False
    taken_as_text: bool = False
    needs: list[EngineNeeds] = field(default_factory=list)

    @property
    def type(self) -> str:
        """The JSON type that the page shows."""
        name = TYPES.get(self.method, self.method)
        return f"string or {name}" if self.method in ("array", "objects") and self.taken_as_text else name

    @property
    def state(self) -> str:
        """Whether it is taken: "yes", "in part", "refused" or "not alone"."""
        if "taken" not in self.outcomes:
            return "refused" if "unavailable" in self.outcomes else ALONE
        return "in part" if "unavailable" in self.outcomes else "yes"

    @property
    def range(self) -> str:
        """The range of a number, or "" without one."""
        low = "" if self.low is None or self.low < -(2**31) else f"{self.low:g}"
        high = "" if self.high is None or self.high >= 2**31 - 1 else f"{self.high:g}"
        return f"{low}..{high}" if low or high else ""


Members = dict[str, Member]


@contextmanager
def record_reads(recorded: Members) -> Iterator[None]:
    """Record every member that a reader asks for inside the context."""

    def record_calls(method: str) -> Any:
        original = getattr(Fields, method)

        @functools.wraps(original)
        def ask(self: Fields, name: str, *args: Any, **kwargs: Any) -> Any:
            path = self.member_path(name)
            if "[" in path:
                path = INDEX.sub("[]", path)
            member = recorded.get(path)
            if member is None:
                member = recorded[path] = Member(path)
            member.asked_as_text |= isinstance(self._data.get(name), str)
            if member.method in ("raw_value", "array") and method not in ("has_value", "is_null", "raw_value"):
                member.method = method
                low, high = (*args[1:3], None, None)[:2] if method in ("integer", "number") else (None, None)
                member.low, member.high = kwargs.get("low", low), kwargs.get("high", high)
                member.allowed = tuple(_in_order(kwargs.get("allowed", ())))
                member.cap = kwargs.get("cap")
            return original(self, name, *args, **kwargs)

        return ask

    def present_names(self: Fields, names: Collection[str]) -> list[str]:
        return [name for name in _in_order(names) if self.has_value(name)]

    methods = {method: record_calls(method) for method in (*VALUES, "has_value", "is_null")}
    with mock.patch.multiple(Fields, present_names=present_names, **methods):
        yield


def _in_order(names: Collection[str]) -> Collection[str]:
    """Return names in the same order in every run: a set has another order in each."""
    return sorted(names) if isinstance(names, Set) else names


def read_outcome(route: Route, body: dict[str, Any]) -> str:
    """Give a body to the route's reader and return the outcome: taken, unavailable, wrong."""
    return read_body(route, body)[0]


def read_body(route: Route, body: dict[str, Any]) -> tuple[str, EngineNeeds | None]:
    """Return the outcome of a body, and what its request needs of an engine, None if there is no such request."""
    try:
        result = call_reader(route, encode_body(route, body))
    except Unsupported:
        return "unavailable", None
    except ParleyError:
        return "wrong", None
    if isinstance(result, Answer) and route.kind in ("generate", "embed"):
        is_unavailable = b"not available" in result.body or b"not supported" in result.body
        return ("unavailable" if is_unavailable else "wrong"), None
    return "taken", engine_needs(result.request) if isinstance(result, Reply) else None


def call_reader(route: Route, body: bytes, context: RequestContext | None = None) -> Any:
    """Return what a route's reader makes of a body. ``context``: in place of the usual one. Raises ParleyError."""
    if context is None:
        context = FORM_CONTEXT if route.reads_form else CONTEXT
        context = CONTEXTS_BY_PATH.get(route.path, context) if route.kind == "embed" else context
    context = replace(context, path_parts=path_parts(route))
    arguments_by_kind = {
        "generate": (context,),
        "embed": (context,),
        "render": (context,),
        "tokenize": (context,),
        "abort": (context,),
        "abort_list": (context,),
        "stored": (context,),
        "adapter": (context,),
        "info": (context, FACTS),
        "summed_info": (context, FACTS),
        "pull": (context, FACTS),
        "endpoint": (context, FACTS, ENDPOINTS),
    }
    assert route.reader is not None
    return route.reader(body, *arguments_by_kind.get(route.kind, ()))


def encode_body(route: Route, body: Any) -> bytes:
    """Return a body as JSON, or as a form where the route reads one."""
    return _encode_form(body) if route.reads_form and isinstance(body, dict) else json.dumps(body).encode()


def _encode_form(body: dict[str, Any]) -> bytes:
    """Return members as a form, with names in the brackets that clients write."""
    parts = []
    for name, value in body.items():
        match value:
            case list():
                parts += [(f"{name}[]", item) for item in value]
            case dict():
                parts += [(f"{name}[{key}]", member) for key, member in value.items()]
            case _:
                parts.append((name, value))
    texts = [
        (
            f'{name}"; filename="a.wav' if name == "file" else name,
            value if isinstance(value, str) else json.dumps(value),
        )
        for name, value in parts
    ]
    lines = [f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n' for name, text in texts]
    return "".join([*lines, f"--{BOUNDARY}--\r\n"]).encode()


_surveyed_readers: dict[tuple[Any, ...], Members] = {}


def survey_route(route: Route) -> Members:
    """Return the members that a route reads, in the order in which it asks for them."""
    has_no_body = route.reader is None or route.method not in ("POST", "PUT", "PATCH") or route.kind == "reset"
    if has_no_body or route.path.endswith("}/infer"):
        return {}  # an inference has tensors, one for each of the members that generate has
    is_classifier = route.path in CLASSIFIER_PATHS
    reading = repr(route.reader), route.kind, route.reads_form, is_classifier  # many routes share it
    if reading not in _surveyed_readers:
        _surveyed_readers[reading] = _survey_reader(route)
    return _surveyed_readers[reading]


def _survey_reader(route: Route) -> Members:
    recorded: Members = {}
    base = next((body for body in COMPLETE_BODIES if read_outcome(route, body) == "taken"), {})
    with record_reads(recorded):
        _, base_needs = _read_and_note(route, base, recorded)
        probed: set[tuple[str, str]] = set()  # a member is probed again when a reader asks for it by another type
        while unprobed := [member for member in recorded.values() if (member.path, member.method) not in probed]:
            probed |= {(member.path, member.method) for member in unprobed}
            for member in unprobed:
                _probe(route, base, base_needs or NO_NEEDS, member, recorded)
    for path, member in recorded.items():  # a member whose own members are all refused is refused
        inner_states = {inner.state for inner in recorded.values() if inner.path.startswith(path + ".")}
        if member.state == ALONE and "refused" in inner_states and not inner_states & {"yes", "in part"}:
            member.outcomes.add("unavailable")
    return recorded


def _read_and_note(route: Route, body: dict[str, Any], recorded: Members) -> tuple[str, EngineNeeds | None]:
    """Return what ``read_body`` returns, and note which members are strings in the body if it is taken."""
    for member in recorded.values():
        member.asked_as_text = False
    outcome, needs = read_body(route, body)
    for member in recorded.values():
        member.taken_as_text |= member.asked_as_text and outcome == "taken"
    return outcome, needs


def _probe(route: Route, base: dict[str, Any], base_needs: EngineNeeds, member: Member, recorded: Members) -> None:
    """Give the member one value after another and record the outcomes."""
    *parents, name = member.path.split(".")
    values = [*SHAPES.get(name, []), *member.allowed, *VALUES[member.method]]
    if member.method == "integer" and member.low is not None:
        values.append(int(member.low))
    for value in values:
        body = json.loads(json.dumps(base))
        inner: Any = body
        for parent, child in pairwise((*parents, name)):
            if parent.endswith("[]"):
                member.outcomes.add("taken")  # a member in a list: SHAPES led here, and the reader did not stop
                return
            inner = inner.setdefault(parent, _object_with(parent, child))
        if isinstance(inner, dict):
            inner[name] = value
            outcome, needs = _read_and_note(route, body, recorded)
            member.outcomes.add(outcome)
            if needs is not None:
                member.needs.append(needs.beyond(base_needs))


def _object_with(parent: str, child: str) -> dict[str, Any]:
    """Return a value for ``parent`` that may have the member ``child``."""
    shapes = (shape for shape in SHAPES.get(parent, []) if isinstance(shape, dict))
    return json.loads(json.dumps(next((shape for shape in shapes if child in shape), {})))


def survey_dialect(dialect: Dialect) -> dict[tuple[str, str], Members]:
    """Return the members of every route, by method and path."""
    surveyed: dict[tuple[str, str], Members] = {}
    for route in dialect.routes:  # several routes may share a path; the members of a body decide between them
        if len(route.body_paths) == 1:
            surveyed.setdefault((route.method, route.path), {})  # its members are those of other routes
            continue
        path_members = surveyed.setdefault((route.method, route.path), {})
        path_members |= {path: member for path, member in survey_route(route).items() if path not in path_members}
    return surveyed
