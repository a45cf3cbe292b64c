"""How vLLM's API is asked for a stream of tokens, for ``parley bench``: its members and events are OpenAI's."""

from __future__ import annotations

from parley.dialects.bench import Api
from parley.dialects.openai import bench

APIS = {"vllm": Api("/v1/completions", bench.completion, bench.see)}
