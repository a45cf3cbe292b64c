"""LiteLLM's ``responses``: text, streams, tools. Arguments: HOST:PORT MODEL."""

import sys

import litellm

address, model = sys.argv[1:]
ANSWER = "The capital of France is Paris."
options = {"model": f"openai/{model}", "api_base": f"http://{address}/v1", "api_key": "none", "temperature": 0}
litellm.num_retries = 0


def text_of(response) -> str:
    return "".join(part.text for item in response.output if item.type == "message" for part in item.content)


whole = litellm.responses(input="What is the capital of France?", **options)
assert text_of(whole) == ANSWER, whole
events = list(litellm.responses(input="What is the capital of France?", stream=True, **options))
assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
assert events[-1].type == "response.completed"
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool = {"type": "function", "name": "get_weather", "description": "Get the current weather in a city."}
called = litellm.responses(input="What is the weather in Paris?", tools=[tool | {"parameters": parameters}], **options)
assert any(item.type == "function_call" and item.name == "get_weather" for item in called.output), called
print("good")
