"""guidance over OpenAI's API and with vLLM's grammars: chat, streams, choices, patterns. Arguments: HOST:PORT MODEL."""

import json
import sys

from guidance import assistant, gen, select, user
from guidance import json as gen_json
from guidance.models import OpenAI
from guidance.models.experimental import VLLMModel

address, model = sys.argv[1:]
PLACE = {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"]}

plain = OpenAI(model, base_url=f"http://{address}/v1", api_key="none")
with user():
    plain += "What is the capital of France?"
with assistant():
    plain += gen(name="answer", max_tokens=20)
assert plain["answer"] == "The capital of France is Paris."

for prefix in ("", "/vllm"):  # it sends each grammar in the members of old and new versions of vLLM
    lm = VLLMModel(model, base_url=f"http://{address}{prefix}/v1", api_key="none")
    with user():
        lm += "What is the capital of France?"
    with assistant():
        lm += select(["Paris", "Oslo"], name="city")
    assert lm["city"] in ("Paris", "Oslo")
    with user():
        lm += "How much is 2 + 2?"
    with assistant():
        lm += gen(name="number", regex=r"[0-9]{1,3}")
    assert lm["number"].isdigit() and len(lm["number"]) <= 3
    with user():
        lm += "Where is it?"
    with assistant():
        lm += gen_json(name="place", schema=PLACE)
    assert json.loads(lm["place"])["city"] in ("Paris", "Oslo")
print("good")
