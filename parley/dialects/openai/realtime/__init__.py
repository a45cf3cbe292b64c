"""OpenAI's Realtime API over a WebSocket: audio in, its text out; and conversations whose answers are text."""

from __future__ import annotations

from parley.dialects.openai.realtime.session import RealtimeSession
from parley.dialects.route import Route

ROUTES = (Route("GET", "/v1/realtime", "socket", reader=RealtimeSession),)
