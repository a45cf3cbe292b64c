"""``POST /v2/chat/render``: the prompt of a conversation as tokens, without an answer.

vLLM has this route below ``/cohere``. The answer is the body of its ``/inference/v1/generate`` that continues these
tokens as the request asks.
"""

from __future__ import annotations

from collections.abc import Sequence

from parley.dialects.cohere.api_rules import CohereRules
from parley.dialects.cohere.chat import CohereChatReply
from parley.dialects.cohere.refusal_wording import COHERE_WORDING
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.render_reply import PromptRenderer, RenderedPrompt
from parley.dialects.request_context import RequestContext
from parley.dialects.vllm.token_routes.render import check_renderable, write_generate_request

STREAM_OPTIONS = {"include_usage": True, "continuous_usage_stats": False}  # a stream ends with its number of tokens


def read_cohere_rendering(rules: CohereRules, body: bytes, context: RequestContext) -> CohereChatRendering:
    """Read a conversation to render. Raises BadRequest."""
    return CohereChatRendering(rules, decode_fields(body, COHERE_WORDING), context)


class CohereChatRendering(CohereChatReply, PromptRenderer):
    """A conversation that is answered with its tokens."""

    def __init__(self, rules: CohereRules, body: Fields, context: RequestContext):
        super().__init__(rules, body, context)
        check_renderable(self.request, body)
        self._rendered_id = f"chatcmpl-{context.unique_id}"

    def render_prompts(self, prompts: Sequence[RenderedPrompt]) -> bytes:
        """Return the request that continues the conversation."""
        options = STREAM_OPTIONS if self.request.stream else None
        return encode_json(
            write_generate_request(self._rendered_id, prompts[0], self.request, {"stream_options": options})
        )
