"""``POST /v1/chat/completions/batch``: several conversations in one request of vLLM's, with one choice for each.

Each conversation is read and answered like a request of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from parley.dialects.fields import Fields
from parley.dialects.openai.common_members import unsupported_member_error
from parley.dialects.openai.completions import MAX_PROMPTS
from parley.dialects.reply import Answer, HeaderList, RequestTimings, UnstreamedReply
from parley.dialects.request_context import RequestContext
from parley.dialects.vllm import requests
from parley.dialects.vllm.chat import VllmChatReply
from parley.dialects.vllm.refusal_wording import parameter_error
from parley.dialects.vllm.token_usage import vllm_usage
from parley.types import ChoiceDelta, ChoiceDone, Event, Usage

SINGLE_ONLY_MEMBERS = {  # features that are available only for a single conversation
    "stream": "Streams of several conversations are",
    "use_beam_search": "Beam search in several conversations is",
    "tools": "Tools in several conversations are",
    "functions": "Functions in several conversations are",
    "prompt_logprobs": "Log-probabilities of several conversations are",
    "return_prompt_text": "The text of several conversations is",
}
ONE_PROMPT_SENTENCE = (
    "Batch chat completions do not support `kv_transfer_params['prompt_token_ids']`: one pre-tokenized prompt cannot "
    "serve several conversations."
)


def read_batch_request(body: bytes, context: RequestContext) -> BatchReply | Answer:
    """Read a request with several conversations. Raises BadRequest."""
    return requests.read_vllm_request(BatchReply, body, context)


class BatchReply(UnstreamedReply):
    """A request with several conversations."""

    field_names: ClassVar[Mapping[str, str]] = VllmChatReply.field_names

    def __init__(self, body: Fields, context: RequestContext):
        for name, subject in SINGLE_ONLY_MEMBERS.items():
            if body.has_value(name) and body.raw_value(name) is not False:
                raise unsupported_member_error(body, name, subject)
        if body.integer("n", 1) != 1:
            raise unsupported_member_error(body, "n", "More than one answer to each of several conversations is")
        if body.free_object("kv_transfer_params").get("prompt_token_ids") is not None:
            raise parameter_error(ONE_PROMPT_SENTENCE, "kv_transfer_params.prompt_token_ids")
        conversations = _split_conversations(body)
        self._replies = [VllmChatReply(conversation, context) for conversation in conversations.values()]
        self.request = self._replies[0].request
        self.request.prompts = [reply.request.prompts[0] for reply in self._replies]
        self.request.prompt_places = list(conversations)
        self.request.output_options = msgspec.structs.replace(self.request.output_options, prompt_logprobs=None)

    def add_events(self, events: Sequence[Event]) -> None:
        """Give the output of each conversation to its own reply."""
        for event in events:
            if isinstance(event, ChoiceDelta | ChoiceDone):
                self._replies[event.index].add_events([msgspec.structs.replace(event, index=0)])

    def render_body(self, usage: Usage) -> bytes:
        """Return one answer with the choices of all conversations, in their order."""
        return self._replies[0].answer_with(
            [reply.first_choice(index) for index, reply in enumerate(self._replies)], vllm_usage(usage), usage
        )

    def answer_headers(self, timings: RequestTimings | None) -> HeaderList:
        """Return the same headers as for a single conversation."""
        return self._replies[0].answer_headers(timings)


def _split_conversations(body: Fields) -> dict[str, Fields]:
    """Return a body for each conversation, by its position. Raises BadRequest."""
    conversations = body.array("messages", cap=MAX_PROMPTS)
    if not conversations:
        raise body.empty_member("messages", "array") if body.has_value("messages") else body.missing_member("messages")
    moved = {
        f"messages[{index}]": body.with_moved_member("messages", messages, f"messages[{index}]")
        for index, messages in enumerate(conversations)
    }
    for conversation in moved.values():
        if not isinstance(conversation.raw_value("messages"), list):
            raise conversation.mistyped_member("messages", "an array")
    return moved
