"""inspect_ai evaluates two samples, one with a tool, over four APIs. Arguments: HOST:PORT MODEL."""

import os
import sys
import tempfile

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

address, model = sys.argv[1:]
os.environ.update(PARLEY_BASE_URL=f"http://{address}/v1", PARLEY_API_KEY="none", VLLM_API_KEY="none")
os.environ.update(VLLM_BASE_URL=f"http://{address}/v1", OLLAMA_BASE_URL=f"http://{address}/v1")


@tool
def get_weather():
    async def execute(city: str):
        """Get the weather in a city.

        Args:
            city: The city.
        """
        return f'{{"city": "{city}", "sky": "sunny", "temperature": 21}}'

    return execute


samples = [
    Sample(input="What is the capital of France?", target="Paris"),
    Sample(input="What is the weather in Paris?", target="sunny"),
]
task = Task(dataset=samples, solver=[use_tools(get_weather()), generate()], scorer=includes())
for name, arguments in (
    (f"openai-api/parley/{model}", {}),
    (f"openai-api/parley/{model}", {"responses_api": True}),
    (f"vllm/{model}", {}),
    (f"ollama/{model}", {}),
):
    with tempfile.TemporaryDirectory() as folder:
        (log,) = evaluate(
            task, name, model_args=arguments, log_dir=folder, display="none", max_tokens=200, temperature=0
        )
    assert log.status == "success" and log.results.scores[0].metrics["accuracy"].value == 1, (name, log.error)
print("good")
