"""Routes of the Realtime API for browsers and telephones, which connect by WebRTC and SIP. Neither is served."""

from __future__ import annotations

from typing import NoReturn

from parley.dialects.facts import ServerFacts
from parley.dialects.request_context import RequestContext
from parley.errors import Unsupported

UNSERVED_PATHS = (
    "/v1/realtime/client_secrets",
    "/v1/realtime/sessions",
    "/v1/realtime/transcription_sessions",
    "/v1/realtime/calls",
    "/v1/realtime/calls/{id}/accept",
    "/v1/realtime/calls/{id}/hangup",
    "/v1/realtime/calls/{id}/refer",
    "/v1/realtime/calls/{id}/reject",
)
SECRET_REFUSAL = (
    "Client secrets are not available on this server: open a WebSocket at /v1/realtime with an API key; a page may "
    "send it as the subprotocol openai-insecure-api-key.KEY."
)
CALL_REFUSAL = (
    "Calls over WebRTC and SIP are not available on this server: open a WebSocket at /v1/realtime, and send audio as "
    "input_audio_buffer.append."
)


def refuse_secret(body: bytes, context: RequestContext, facts: ServerFacts) -> NoReturn:
    """Raise Unsupported for a route that creates a short-lived key of a session."""
    raise Unsupported(SECRET_REFUSAL)


def refuse_realtime_call(body: bytes, context: RequestContext, facts: ServerFacts) -> NoReturn:
    """Raise Unsupported for a route of calls over WebRTC or SIP."""
    raise Unsupported(CALL_REFUSAL)
