"""How ``parley bench`` requests a token stream from vLLM's API: with OpenAI's members and events."""

from __future__ import annotations

from parley.dialects.bench import Api
from parley.dialects.openai import bench

APIS = {"vllm": Api("/v1/completions", bench.completion, bench.see)}
