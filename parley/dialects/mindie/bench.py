"""How ``parley bench`` requests a stream of tokens from MindIE's API: like TGI, whose members and events it shares."""

from __future__ import annotations

from parley.dialects.bench import Api
from parley.dialects.tgi import bench

APIS = {"mindie": Api("/generate_stream", bench.body, bench.see, ids=False)}
