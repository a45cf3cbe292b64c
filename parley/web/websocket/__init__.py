"""WebSockets (RFC 6455) over HTTP/1.1: the handshake, the frames, and messages as requests of the application."""

from importlib.util import find_spec

HAS_WEBSOCKETS = find_spec("wsproto") is not None  # an extra; without it, no connection becomes a WebSocket
