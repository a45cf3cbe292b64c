"""Hugging Face's InferenceClient on an encoder: features and similarity. Arguments: HOST:PORT MODEL RERANKER."""

import json
import sys
import urllib.request

import numpy as np
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

address, model, reranker = sys.argv[1:]
TEXTS = ["Paris is a city.", "Paris is a town.", "12345 + 67890"]

url = f"http://{address}"
root, embed = InferenceClient(model=url), InferenceClient(model=f"{url}/embed")
vector = root.feature_extraction(TEXTS[0])
assert vector.shape == (48,) and abs(np.linalg.norm(vector) - 1) < 1e-5
for base in ("", "/tei"):  # TEI's form has a list also for a single text
    client = InferenceClient(model=f"{url}{base}/embed")
    assert np.allclose(client.feature_extraction(TEXTS[0]), vector[None], atol=1e-6)
    raw = client.feature_extraction(TEXTS[0], normalize=False)
    assert np.allclose(raw[0] / np.linalg.norm(raw), vector, atol=1e-6)
    long = client.feature_extraction("many words " * 2000, truncate=True, truncation_direction="left")
    assert long.shape == (1, 48)
    likeness = InferenceClient(model=f"{url}{base}/similarity").sentence_similarity(TEXTS[0], other_sentences=TEXTS)
    assert abs(likeness[0] - 1) < 1e-5 and max(likeness[1:]) < 1
assert root.sentence_similarity(TEXTS[0], other_sentences=TEXTS) == likeness
try:
    embed.feature_extraction("many words " * 2000)
except HfHubHTTPError as error:
    assert "must have less than 512 tokens" in str(error.response.text)
else:
    raise AssertionError("it was not refused")


def post(path: str, body: dict) -> list:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        assert int(answer.headers["x-compute-tokens"]) > 0
        return json.load(answer)


ranks = post("/rerank", {"model": reranker, "query": TEXTS[0], "texts": TEXTS, "return_text": True})  # as documented
assert sorted(rank["text"] for rank in ranks) == sorted(TEXTS)
assert [rank["score"] for rank in ranks] == sorted((rank["score"] for rank in ranks), reverse=True)
tokens = post("/embed_all", {"inputs": TEXTS[0]})
assert len(tokens) == 1 and {len(row) for row in tokens[0]} == {48}
print("good")
