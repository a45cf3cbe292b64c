"""Hugging Face's InferenceClient on a classifier. Arguments: HOST:PORT MODEL."""

import sys

from huggingface_hub import InferenceClient

address = sys.argv[1]
TEXT = "Paris is a city."
classes = InferenceClient(model=f"http://{address}").text_classification(TEXT)
assert {class_.label for class_ in classes} == {"bad", "fair", "good"}
assert abs(sum(class_.score for class_ in classes) - 1) < 1e-5
for path in ("/predict", "/tei", "/tei/predict"):  # the client takes the first class of TEI's own form
    assert InferenceClient(model=f"http://{address}{path}").text_classification(TEXT) == classes[0]
print("good")
