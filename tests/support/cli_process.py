"""Support for tests of the command line: a clean environment, and answers of a misbehaving server."""

from __future__ import annotations

import os
from http.server import BaseHTTPRequestHandler


def clean_environment() -> dict[str, str]:
    """Returns the environment without parley's own variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PARLEY_")}


def send_answer(handler: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    """Sends a whole answer."""
    handler.send_response(status)
    for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


def send_events(handler: BaseHTTPRequestHandler, *events: bytes) -> None:
    """Sends the headers of an event stream and some events; the caller decides how it continues and ends."""
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Connection", "close")
    handler.end_headers()
    for event in events:
        handler.wfile.write(b"data: " + event + b"\n\n")
    handler.wfile.flush()
    handler.close_connection = True
