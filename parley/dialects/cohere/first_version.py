"""``POST /v1/embed`` and ``/v1/rerank``, the first version of Cohere's API, which LangChain's embeddings still call.

The members are those of version 2. Without ``embedding_types`` the answer has plain lists of numbers, and an answer of
rerank has the documents if they are asked for.
"""

from __future__ import annotations

from typing import Any, ClassVar

from parley.dialects.cohere.embed import CohereEmbedReply
from parley.dialects.cohere.refusal_wording import COHERE_WORDING
from parley.dialects.cohere.rerank import CohereRerankReply
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.openai.embeddings import MAX_EMBEDDING_INPUTS
from parley.dialects.request_context import RequestContext


def read_first_embed(body: bytes, context: RequestContext) -> FirstEmbedReply:
    """Read texts to embed. Raises BadRequest."""
    return FirstEmbedReply(decode_fields(body, COHERE_WORDING), context)


def read_first_rerank(body: bytes, context: RequestContext) -> FirstRerankReply:
    """Read a query and documents. Raises BadRequest."""
    return FirstRerankReply(decode_fields(body, COHERE_WORDING), context)


class FirstEmbedReply(CohereEmbedReply):
    """A reply to texts to embed."""

    api_version: ClassVar[str] = "1"
    needs_model: ClassVar[bool] = False

    def __init__(self, body: Fields, context: RequestContext):
        super().__init__(body, context)
        self._has_types = bool(body.raw_value("embedding_types"))

    def embedding_members(self) -> dict[str, Any]:
        """Return the vectors: by type, or those of numbers alone."""
        members = super().embedding_members()
        if self._has_types:
            return members
        return {"embeddings": members["embeddings"]["float"], "response_type": "embeddings_floats"}


class FirstRerankReply(CohereRerankReply):
    """A reply to a query and documents."""

    api_version: ClassVar[str] = "1"
    needs_model: ClassVar[bool] = False

    def __init__(self, body: Fields, context: RequestContext):
        names = body.strings("rank_fields", cap=MAX_EMBEDDING_INPUTS, total=MAX_EMBEDDING_INPUTS)
        if names not in ([], ["text"]):
            raise body.member_error("rank_fields", "documents are ranked by their 'text'.")
        super().__init__(body.with_members({"documents": _document_texts(body)}), context)
        self._returns_documents = body.boolean("return_documents", False)

    def result_members(self, index: int) -> dict[str, Any]:
        """Return the further members of a result: its document, if the client wants it."""
        return {"document": {"text": self.document_text(index)}} if self._returns_documents else {}


def _document_texts(body: Fields) -> Any:
    """Return the texts of documents, which may be objects; anything else as it is, to be refused."""
    documents = body.raw_value("documents")
    if not isinstance(documents, list):
        return documents
    for index, document in enumerate(documents):
        if isinstance(document, dict) and not isinstance(document.get("text"), str):
            raise body.member_error(f"documents[{index}].text", "must be a string.")
    return [document["text"] if isinstance(document, dict) else document for document in documents]
