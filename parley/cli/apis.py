"""The APIs that ``parley bench`` can call: those mounted in ``dialects/mounts.py`` that declare a bench."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from parley.dialects.bench import Api
from parley.dialects.mounts import SURFACES, Surface


def benched(surfaces: Iterable[Surface]) -> dict[str, Api]:
    """Each API by name, at the first surface that has it."""
    found: dict[str, Api] = {}
    for surface in surfaces:
        for name, api in surface.dialect.bench.items():
            found.setdefault(name, replace(api, path=surface.prefix + api.path))
    return found


APIS = benched(SURFACES)
