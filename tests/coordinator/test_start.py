"""What a coordinator prints when it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PORTS = "predict_port = 0\nmanagement_port = 0\nmetrics_port = 0\nstatus_port = 0\n"


@pytest.mark.parametrize("instances", ["", '[[instances]]\nurl = "http://127.0.0.1:9"\n'], ids=["none", "one"])
def test_a_coordinator_without_instances_says_how_to_name_some(tmp_path: Path, instances: str) -> None:
    config = tmp_path / "cluster.toml"
    config.write_text(PORTS + instances)
    command = [sys.executable, "-m", "parley", "coordinator", "--config", config]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("  status"):
                process.terminate()
        text = "".join(lines)
    assert process.returncode == 0
    assert ("[[instances]]" in text and "--config FILE" in text) is (not instances)
