"""Reads the license in a model's folder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

LICENSE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md")
MAX_LICENSE = 1 << 18  # bytes


def read_license(folder: Path) -> str:
    """Return the text of the license in a model's folder, "" if there is none."""
    for name in LICENSE_FILES:
        with suppress(OSError), (folder / name).open("rb") as file:
            return file.read(MAX_LICENSE).decode(errors="replace")
    return ""
