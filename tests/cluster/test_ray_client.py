"""The Ray client: the words of its errors."""

from pathlib import Path

import pytest

pytest.importorskip("ray")
from parley.cluster import ray_client


def test_a_ray_that_does_not_start_is_a_connection_error_with_the_reason(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("x" * 110)))  # too long for the paths of Ray's sockets
    with pytest.raises(ConnectionError, match=r"^Ray did not start on this machine: .*AF_UNIX"):
        ray_client.start_ray()


def test_resources_are_written_with_their_units() -> None:
    amounts = {"CPU": 2.0, "memory": 1.5 * 2**30, "object_store_memory": 2.0**29, "node:10.0.0.1": 1.0, "rack": 0.5}
    assert ray_client.format_amounts(amounts) == "cpus 2, memory 1.5GiB, object_store_memory 0.5GiB, rack 0.5"
