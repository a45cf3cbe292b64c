"""The repairs that ``make engines`` makes in an environment with vLLM's build for CPUs."""

from __future__ import annotations

import sys
from importlib.metadata import Distribution
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from install_engines import OPERATORS_CALL, VLLM, repair_metadata, repair_torchvision


def test_the_version_of_vllm_can_be_asked_for_by_that_name(tmp_path: Path) -> None:
    repair_metadata(tmp_path)
    repair_metadata(tmp_path)
    [distribution] = Distribution.discover(name="vllm", path=[str(tmp_path)])
    assert distribution.version == f"{VLLM}+cpu"


def test_torchvision_declares_its_missing_operators_before_it_names_them(tmp_path: Path) -> None:
    extension = tmp_path / "torchvision" / "extension.py"
    extension.parent.mkdir()
    extension.write_text("_load_library('_C')\n")
    repair_torchvision(tmp_path)
    repair_torchvision(tmp_path)
    assert extension.read_text() == f"_load_library('_C')\n{OPERATORS_CALL}"
    assert "def declare_missing_operators()" in (tmp_path / "torchvision_operators.py").read_text()
