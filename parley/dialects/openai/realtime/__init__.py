"""OpenAI's Realtime API over a WebSocket: audio in, its text out; and conversations whose answers are text."""

from __future__ import annotations

from parley.dialects.openai.realtime.other_transports import UNSERVED_PATHS, refuse_realtime_call, refuse_secret
from parley.dialects.openai.realtime.session import RealtimeSession
from parley.dialects.route import Route

ROUTES = (
    Route("GET", "/v1/realtime", "socket", reader=RealtimeSession),
    *(
        Route("POST", path, "info", reader=refuse_realtime_call if "/calls" in path else refuse_secret)
        for path in UNSERVED_PATHS
    ),
)
