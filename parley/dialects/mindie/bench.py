"""How ``parley bench`` requests a stream of tokens from MindIE's API: like TGI, whose members and events it shares."""

from __future__ import annotations

from parley.dialects.bench import BenchApi
from parley.dialects.tgi import bench

APIS = {"mindie": BenchApi("/generate_stream", bench.tgi_stream_body, bench.read_tgi_event, takes_token_ids=False)}
