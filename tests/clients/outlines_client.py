"""Outlines: constrained output through the APIs of vLLM, OpenAI, TGI, SGLang and Ollama. Arguments: HOST:PORT MODEL."""

import re
import sys
from collections.abc import Iterator
from typing import Any, Literal

import ollama
import openai
import outlines
from huggingface_hub import InferenceClient
from pydantic import BaseModel, Field

address, name = sys.argv[1:]
url = f"http://{address}"
QUESTION = "What is the capital of France?"
CODE = outlines.regex("[a-z]{3}-[0-9]{2}")


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    size: int = Field(ge=0, le=9)


def check_city(model: Any, **options: Any) -> None:
    """Asks for an object, whole and in a stream, and reads both."""
    City.model_validate_json(model(QUESTION, City, **options))
    pieces = model.stream(QUESTION, City, **options)
    assert isinstance(pieces, Iterator)
    City.model_validate_json("".join(pieces))


client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
strict_client = openai.OpenAI(base_url=f"{url}/vllm/v1", api_key="none")
for model in (outlines.from_vllm(client, name), outlines.from_vllm(strict_client, name)):
    assert model(QUESTION, max_tokens=20, temperature=0) == "The capital of France is Paris."
    check_city(model, max_tokens=200)
    assert model(QUESTION, Literal["Paris", "Rome"], max_tokens=20) in ("Paris", "Rome")
    assert re.fullmatch(r"[a-z]{3}-\d\d", model(QUESTION, CODE, max_tokens=20))
    assert model(QUESTION, outlines.cfg('start: "Oslo" | "Par" "is"'), max_tokens=20) in ("Oslo", "Paris")
check_city(outlines.from_openai(client, name), max_tokens=200)
sglang = outlines.from_sglang(client, name)
check_city(sglang, max_tokens=200)
assert re.fullmatch(r"[a-z]{3}-\d\d", sglang(QUESTION, CODE, max_tokens=20))
for base in ("", "/tgi"):
    tgi = outlines.from_tgi(InferenceClient(f"{url}{base}"))
    check_city(tgi, max_new_tokens=200, return_full_text=False)
    assert re.fullmatch(r"[a-z]{3}-\d\d", tgi(QUESTION, CODE, max_new_tokens=20, return_full_text=False))
check_city(outlines.from_ollama(ollama.Client(url), name))
print("good")
