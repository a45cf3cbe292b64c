"""Parts of Databricks' answers: their id, the tokens so far, and the header that names the model."""

from __future__ import annotations

import re

from parley.dialects.openai.token_usage import running_usage
from parley.dialects.reply import Reply
from parley.dialects.request_context import RequestContext
from parley.types import ChoiceDelta, Event, PromptAccepted

UNPRINTABLE = re.compile(rb"[^ -~]")  # bytes that a header must not contain


def answer_uuid(context: RequestContext) -> str:
    """Return the id of an answer, in the form of a UUID."""
    hexes = f"{context.unique_id:0<32}"[:32]
    return "-".join((hexes[:8], hexes[8:12], hexes[12:16], hexes[16:20], hexes[20:]))


class RunningTokenCount:
    """The prompt and output tokens so far, which every chunk of a stream reports."""

    def __init__(self) -> None:
        self.prompt = self.output = 0

    def count_event(self, event: Event) -> None:
        """Count the tokens of an event."""
        match event:
            case PromptAccepted():
                self.prompt += len(event.token_ids)
            case ChoiceDelta():
                self.output += len(event.tokens)

    def usage_so_far(self) -> dict[str, int]:
        """Return the ``usage`` object so far."""
        return running_usage(self.prompt, self.output)


def served_model_header(reply: Reply) -> list[tuple[bytes, bytes]]:
    """Return the header that names the endpoint's model that answered."""
    return [(b"served-model-name", UNPRINTABLE.sub(b"?", reply.served_model.encode()))] if reply.served_model else []
