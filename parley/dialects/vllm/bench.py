"""How ``parley bench`` requests a token stream from vLLM's API: with OpenAI's members and events."""

from __future__ import annotations

from parley.dialects.bench import BenchApi
from parley.dialects.openai import bench

BENCH_APIS = {"vllm": BenchApi("/v1/completions", bench.completion_bench_body, bench.read_openai_event)}
