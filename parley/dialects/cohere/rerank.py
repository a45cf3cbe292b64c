"""``POST /v2/rerank`` in Cohere's form of answers. vLLM reads the same members, and so they are read there."""

from __future__ import annotations

from typing import Any, ClassVar

from parley.dialects.cohere.answer_ids import id_as_uuid
from parley.dialects.cohere.refusal_wording import COHERE_WORDING
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.request_context import RequestContext
from parley.dialects.vllm.pooling.scores import RerankReply
from parley.types import Usage

UNIT_DOCUMENTS = 100  # documents of one search unit


def read_cohere_rerank(body: bytes, context: RequestContext) -> CohereRerankReply:
    """Read a query and documents. Raises BadRequest."""
    return CohereRerankReply(decode_fields(body, COHERE_WORDING), context)


class CohereRerankReply(RerankReply):
    """A reply to a query and documents."""

    api_version: ClassVar[str] = "2"
    needs_model: ClassVar[bool] = True

    def __init__(self, body: Fields, context: RequestContext):
        if self.needs_model and not body.string("model", ""):
            raise body.missing_member("model")
        super().__init__(body, context)

    def render_body(self, usage: Usage) -> bytes:
        """Return the places of the documents with their scores, the highest first."""
        units = -(-self.document_count // UNIT_DOCUMENTS)
        return encode_json(
            {
                "id": id_as_uuid(self.request.id),
                "results": [
                    {"index": index, "relevance_score": score} | self.result_members(index)
                    for index, score in self.ranking()
                ],
                "meta": {"api_version": {"version": self.api_version}, "billed_units": {"search_units": units}},
            }
        )

    def result_members(self, index: int) -> dict[str, Any]:
        """Return the further members of the result for a document; none by default."""
        return {}
