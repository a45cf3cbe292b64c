"""LangChain's embeddings over Hugging Face's endpoint. Arguments: HOST:PORT MODEL RERANKER."""

import sys

from huggingface_hub import InferenceClient
from langchain_huggingface import HuggingFaceEndpointEmbeddings

address = sys.argv[1]
TEXTS = ["Paris is a city.", "12345 + 67890"]

for path in ("/", "/embed", "/tei/embed"):
    # It takes names on the hub only, so the client of a server of one's own is put in its place.
    embeddings = HuggingFaceEndpointEmbeddings(
        model="local/encoder", huggingfacehub_api_token="none", model_kwargs={"truncate": True}
    )
    embeddings.client = InferenceClient(model=f"http://{address}{path}")
    vectors = embeddings.embed_documents([*TEXTS, "many words " * 2000])
    assert [len(vector) for vector in vectors] == [48, 48, 48]
    query = embeddings.embed_query(TEXTS[0])
    assert max(abs(one - other) for one, other in zip(query, vectors[0], strict=True)) < 1e-6
print("good")
