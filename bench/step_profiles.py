"""Part of ``make bench``: profiles a step, in the engine with both models and in the API process.

Runs ``profile_engine.py`` and ``profile_api.py``, and writes their tables to ``.peers/profile.md`` for
``performance_page.py``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from install_peers import MODELS, ROOT

BENCH = Path(__file__).parent
BUILT_IN = BENCH.parent / "parley" / "demo" / "model"
# heading, script, arguments
TABLES: list[tuple[str, str, list[str]]] = [
    ("Engine, CPU time of one thread per step, the built-in model", "profile_engine.py", [str(BUILT_IN)]),
    ("The same, kernel by kernel", "profile_engine.py", [str(BUILT_IN), "--kernels"]),
    ("The first with the 0.5B model", "profile_engine.py", [str(MODELS / "0.5b"), "--steps", "8"]),
    ("API process, CPU time, the built-in model", "profile_api.py", [str(BUILT_IN)]),
]


def main() -> int:
    parts = []
    for heading, script, arguments in TABLES:
        done = subprocess.run([sys.executable, BENCH / script, *arguments], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"{script} {' '.join(arguments)} failed; the page is not changed", file=sys.stderr)
            return 1
        print(done.stdout, flush=True)
        parts.append(f"{heading} (`python bench/{script}`):\n\n{done.stdout.strip()}")
    (ROOT / "profile.md").write_text("\n\n".join(parts) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
