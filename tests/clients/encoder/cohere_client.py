"""Cohere's SDK: vectors in every encoding, and ranked documents. Arguments: HOST:PORT MODEL RERANKER."""

import base64
import sys

import cohere
import numpy as np

address, model, reranker = sys.argv[1:]
TEXTS = ["Paris is a city.", "12345 + 67890"]

for base in ("", "/vllm"):
    client = cohere.ClientV2(api_key="none", base_url=f"http://{address}{base}")
    query = {"model": model, "texts": TEXTS, "input_type": "search_query"}
    answer = client.embed(**query, embedding_types=["float", "base64", "binary", "ubinary"])
    vectors = np.array(answer.embeddings.float_, dtype=np.float32)
    assert vectors.shape == (2, 48) and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    packed = [np.frombuffer(base64.b64decode(text), np.float32) for text in answer.embeddings.base64]
    assert np.allclose(packed, vectors, atol=1e-6)
    assert np.array_equal(answer.embeddings.ubinary, np.packbits(vectors > 0, axis=1))
    assert np.array_equal(np.array(answer.embeddings.binary) + 128, answer.embeddings.ubinary)
    assert answer.meta.billed_units.input_tokens > 0
    document = client.embed(model=model, texts=TEXTS, input_type="search_document", embedding_types=["float"])
    assert not np.allclose(document.embeddings.float_, vectors, atol=1e-3)  # each kind of input has a prompt of its own
    try:
        client.embed(model=model, texts=TEXTS, input_type="clustering")
    except cohere.BadRequestError as error:
        assert "clustering" in str(error.body), error
    else:
        raise AssertionError("it was not refused")

    ranked = client.rerank(model=reranker, query=TEXTS[0], documents=TEXTS, top_n=1)
    (best,) = ranked.results
    scores = client.rerank(model=reranker, query=TEXTS[0], documents=TEXTS).results
    assert [score.relevance_score for score in scores] == sorted((s.relevance_score for s in scores), reverse=True)
    assert (best.index, best.document["text"]) == (scores[0].index, TEXTS[best.index]), ranked
print("good")
