"""smolagents: messages, streams, and an agent that calls a tool. Arguments: HOST:PORT MODEL."""

import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool

address, model = sys.argv[1:]
asked = []


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: The city.
    """
    asked.append(city)
    return f'{{"city": "{city}", "sky": "sunny", "temperature": 21}}'


capital = [{"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}]
client = OpenAIModel(model, api_base=f"http://{address}/v1", api_key="none", temperature=0, max_tokens=60)
message = client(capital)
assert "Paris" in message.content and message.token_usage.output_tokens > 0, message
deltas = list(client.generate_stream(capital))
assert "".join(delta.content or "" for delta in deltas) == message.content, deltas
assert deltas[-1].token_usage.output_tokens == message.token_usage.output_tokens, deltas

# The agent's prompt names tools in words that the built-in model does not know; the forced call is what counts here.
weather = [{"role": "user", "content": [{"type": "text", "text": "What is the weather in Paris?"}]}]
(call,) = client(weather, tools_to_call_from=[get_weather]).tool_calls
assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}'), call
for streams in (False, True):
    agent = ToolCallingAgent(tools=[get_weather], model=client, max_steps=1, stream_outputs=streams, verbosity_level=0)
    agent.run("What is the weather in Paris?")
    assert agent.memory.steps[1].tool_calls, agent.memory.steps
assert asked
print("good")
