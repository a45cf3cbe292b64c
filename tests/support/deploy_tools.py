"""The programs that ``make deploy-tools`` installs: helm, and the schemas of Kubernetes."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / ".deploy-tools"


def find_helm() -> str | None:
    """Return the path of helm, or None where it is not installed."""
    return shutil.which("helm") or shutil.which("helm", path=FOLDER / "helm")


def validate_manifest(document: dict[str, Any]) -> None:
    """Check a manifest against the schemas of Kubernetes. Skips the test where they are not installed."""
    if (path := str(FOLDER / "schemas")) not in sys.path:
        sys.path.append(path)
        importlib.invalidate_caches()
    validator = pytest.importorskip("kubernetes_validate", reason="make deploy-tools installs it")
    validator.validate(document, "1.37", strict=True)
