"""How the Ray supervisor asks the coordinator: without a proxy, and with any answer."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

pytest.importorskip("ray")
from parley.cluster.ray_actor import request_succeeds


class CoordinatorHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/odd":
            self.wfile.write(b"no HTTP\r\n\r\n")
        else:
            self.send_response(200 if self.path == "/well" else 503)
            self.end_headers()

    def log_message(self, *args: object) -> None:
        """Log nothing."""


@pytest.mark.parametrize(("path", "ready"), [("/well", True), ("/not", False), ("/odd", False)])
def test_ray_readiness_check_ignores_http_proxies(monkeypatch: pytest.MonkeyPatch, path: str, ready: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed_socket:
        closed = closed_socket.getsockname()[1]
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{closed}")
    monkeypatch.delenv("no_proxy", raising=False)
    with HTTPServer(("127.0.0.1", 0), CoordinatorHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert request_succeeds(f"http://127.0.0.1:{server.server_port}{path}") == ready


def test_ray_readiness_check_fails_without_a_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed_socket:
        closed = closed_socket.getsockname()[1]
    assert not request_succeeds(f"http://127.0.0.1:{closed}/well")
