"""The Ray client where Ray does not start."""

from pathlib import Path

import pytest

pytest.importorskip("ray")
from parley.cluster import ray_client


def test_a_ray_that_does_not_start_is_a_connection_error_with_the_reason(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("x" * 110)))  # too long for the paths of Ray's sockets
    with pytest.raises(ConnectionError, match=r"^Ray did not start on this machine: .*AF_UNIX"):
        ray_client.start_ray()
