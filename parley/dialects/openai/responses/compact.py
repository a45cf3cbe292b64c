"""``POST /v1/responses/compact``: the conversation as a summary by the model, and the messages of its user.

The summary comes sealed in an item that later requests send back in place of the conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai.labels import MAX_LABEL
from parley.dialects.openai.responses import members
from parley.dialects.openai.responses.reply import read_response_input
from parley.dialects.openai.responses.response_object import usage_object
from parley.dialects.openai.responses.response_rules import LENIENT, ResponsesRules
from parley.dialects.reply import UnstreamedReply
from parley.dialects.request_context import RequestContext
from parley.dialects.summary_request import SUMMARY_REQUEST
from parley.types import ChoiceDelta, Event, Request, StopConditions, SummarizeContext, Usage

MAX_SUMMARY_TOKENS = 4096


def read_compact_request(body: bytes, context: RequestContext, rules: ResponsesRules = LENIENT) -> CompactReply:
    """Read the body of a compaction. Raises BadRequest."""
    return CompactReply(decode_fields(body), context, rules)


class CompactReply(UnstreamedReply):
    """A request for a summary of a conversation."""

    field_names = {"prompt": "input"}  # noqa: RUF012  # never changed

    def __init__(self, body: Fields, context: RequestContext, rules: ResponsesRules):
        if not body.has_value("model"):
            raise body.missing_member("model")
        body.string("prompt_cache_key", None, cap=MAX_LABEL)
        storage = members.read_storage(body, context)
        response_input = read_response_input(body, context, rules, storage)
        room = max(1, context.context_length // 4) if context.context_length else MAX_SUMMARY_TOKENS
        self.request = Request(
            id=context.unique_id,
            model=body.string("model", "", cap=256),
            prompts=[msgspec.structs.replace(response_input.chat, edits=[SummarizeContext(0, SUMMARY_REQUEST)])],
            stop_conditions=StopConditions(max_tokens=min(MAX_SUMMARY_TOKENS, room), reserved_tokens=1),
        )
        self._context, self._texts = context, list[str]()
        self._items = response_input.all_items[response_input.covered_items :]  # those before are in an earlier summary

    def add_events(self, events: Sequence[Event]) -> None:
        """Collect the text of the summary."""
        self._texts += [
            event.text for event in events if isinstance(event, ChoiceDelta) and event.output_part == "content"
        ]

    def render_body(self, usage: Usage) -> bytes:
        """Return the compacted conversation."""
        summary = self._context.seal_reasoning("".join(self._texts).encode())
        compaction: dict[str, Any] = {"id": f"cmp_{self._context.unique_id}", "type": "compaction"}
        user_messages = [item for item in self._items if item["type"] == "message" and item.get("role") == "user"]
        return encode_json(
            {
                "id": f"resp_{self._context.unique_id}",
                "object": "response.compaction",
                "created_at": self._context.created,
                "output": [*user_messages, compaction | {"encrypted_content": summary}],
                "usage": usage_object(usage),
            }
        )
