"""DSPy: a language model called alone and side by side, by three APIs. Takes HOST:PORT MODEL."""

import asyncio
import os
import sys

os.environ["DSPY_CACHEDIR"] = os.path.join(sys.prefix, "dspy-cache")
import dspy

address, model = sys.argv[1:]
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
THOUGHTLESS = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
place = {"api_base": f"http://{address}/v1", "api_key": "none", "cache": False, "temperature": 0}
lm = dspy.LM(f"openai/{model}", **place, **THOUGHTLESS)
assert lm(QUESTION) == [ANSWER], lm.history[-1]
assert lm.history[-1]["usage"]["completion_tokens"] > 0


async def ask_several():
    return await asyncio.gather(*(lm.acall(QUESTION) for _ in range(4)))


assert asyncio.run(ask_several()) == [[ANSWER]] * 4
responses = dspy.LM(f"openai/{model}", model_type="responses", **place)
(answer,) = responses(QUESTION)
assert (answer["text"] if isinstance(answer, dict) else answer) == ANSWER, answer
text = dspy.LM(f"text-completion-openai/{model}", model_type="text", **place, max_tokens=5)
assert text("The capital of France is")[0]
print("good")
