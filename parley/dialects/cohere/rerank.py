"""``POST /v2/rerank`` in Cohere's form of answers. vLLM reads the same members, and so they are read there."""

from __future__ import annotations

from parley.dialects.cohere.shared import uuid_text
from parley.dialects.dialect import Answer, RequestContext
from parley.dialects.json_answer import encode_json
from parley.dialects.vllm import requests
from parley.dialects.vllm.pooling.scores import RerankReply
from parley.types import Usage

UNIT_DOCUMENTS = 100  # documents of one search unit


def read_rerank(body: bytes, context: RequestContext) -> CohereRerankReply | Answer:
    """Read a query and documents. Raises BadRequest."""
    return requests.read_vllm_request(CohereRerankReply, body, context)


class CohereRerankReply(RerankReply):
    """A reply to a query and documents."""

    def render_body(self, usage: Usage) -> bytes:
        """Return the places of the documents with their scores, the highest first."""
        units = -(-self.document_count // UNIT_DOCUMENTS)
        return encode_json(
            {
                "id": uuid_text(self.request.id),
                "results": [{"index": index, "relevance_score": score} for index, score in self.ranking()],
                "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": units}},
            }
        )
