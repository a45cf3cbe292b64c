"""How MindIE's API is asked for a stream of tokens, for ``parley bench``: members and events are those of its form of
TGI's."""

from __future__ import annotations

from parley.dialects.bench import Api
from parley.dialects.tgi import bench

APIS = {"mindie": Api("/generate_stream", bench.body, bench.see, ids=False)}
