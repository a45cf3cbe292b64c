"""Writes deploy/requirements-hashes.lock: the versions of requirements.lock with the SHA-256 of each file.

``python tools/lock_hashes.py`` asks pip which file it would install here for each requirement, so run it on the
platform and with the package index of the image. The hashes of another index differ where its files do, as torch's for
CPUs and GPUs; so this file is not part of the repository. ``pip install --require-hashes`` then takes no other bytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "deploy" / "requirements-hashes.lock"


def resolve_files() -> list[dict]:
    """Return pip's report for every package of the lock, without installing anything."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    done = subprocess.run(
        [*command, "--report", "-", "-r", str(ROOT / "requirements.lock")],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)["install"]


def hashed_lines(packages: list[dict]) -> list[str]:
    """Return the lines of the file, by name. Raises KeyError for a package whose index tells no SHA-256."""
    lines = []
    for package in packages:
        name, version = package["metadata"]["name"], package["metadata"]["version"]
        digest = package["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name.lower().replace('_', '-')}=={version} --hash=sha256:{digest}")
    return sorted(lines)


if __name__ == "__main__":
    head = "# Made by tools/lock_hashes.py from requirements.lock, for one platform and package index.\n"
    TARGET.write_text(head + "\n".join(hashed_lines(resolve_files())) + "\n", "utf-8")
    print(f"{TARGET.relative_to(ROOT)} is written")
