"""The whole server as a user starts it, with the built-in model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.free_ports import free_port
from support.server_process import ServerProcess, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One server with the built-in model for all tests of a file."""
    with running_server("--kv-memory", "64MiB") as server:
        yield server


@pytest.fixture
def serve() -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers; all are killed at the end."""
    running: list[ServerProcess] = []

    def start(*flags: str, wait: bool = True) -> ServerProcess:
        server = ServerProcess(*flags, port=free_port())
        running.append(server)
        if wait:
            assert server.wait_for(server.is_ready, 60), server.output()
        return server

    yield start
    for server in running:
        server.close()
