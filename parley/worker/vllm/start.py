"""Runs a module of parley with vLLM's Python (``python -P start.py MODULE ARGUMENTS``).

parley's modules become importable without its environment, whose libraries have other versions than vLLM's. A process
that vLLM spawns runs this file's top level again, and so finds parley's modules as well.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parents[2]


def show_parley_modules() -> None:
    """Make parley's modules importable. The package's own ``__init__`` is not run: it imports more than msgspec."""
    if "parley" not in sys.modules:
        package = ModuleType("parley")
        package.__path__ = [str(PACKAGE)]
        sys.modules["parley"] = package


show_parley_modules()

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__")
