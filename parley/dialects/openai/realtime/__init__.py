"""OpenAI's Realtime API over a WebSocket: audio in, its text out; and conversations whose answers are text."""

from __future__ import annotations

from parley.dialects.dialect import Route
from parley.dialects.openai.realtime.session import open_realtime_session

ROUTES = (Route("GET", "/v1/realtime", "socket", reader=open_realtime_session),)
