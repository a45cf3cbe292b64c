"""The Responses API at an endpoint: OpenAI's bodies, answers and streams, with Databricks' errors and headers."""

from __future__ import annotations

from parley.dialects.databricks.answer_parts import served_model_header
from parley.dialects.databricks.api_rules import DatabricksRules
from parley.dialects.databricks.chat import CHAT_WORDING
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.openai.responses.reply import ResponsesReply
from parley.dialects.openai.responses.response_rules import LENIENT, STRICT
from parley.dialects.reply import HeaderList, RequestTimings
from parley.dialects.request_context import RequestContext


def read_databricks_response(rules: DatabricksRules, body: bytes, context: RequestContext) -> DatabricksResponsesReply:
    """Read the body of a create. Raises BadRequest."""
    return DatabricksResponsesReply(decode_fields(body, CHAT_WORDING), context, STRICT if rules.strict else LENIENT)


def has_response_items(body: Fields) -> bool:
    """True if the input of a body has items of a conversation; texts to embed are strings."""
    value = body.raw_value("input")
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)


class DatabricksResponsesReply(ResponsesReply):
    """A request for a response of an endpoint."""

    def answer_headers(self, timings: RequestTimings | None) -> HeaderList:
        """Return the header that names the endpoint's model that answered."""
        return served_model_header(self)
