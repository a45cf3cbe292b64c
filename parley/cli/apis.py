"""The APIs that ``parley bench`` can call: those mounted in ``dialects/mounts.py`` that declare a bench."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from parley.dialects.bench import BenchApi
from parley.dialects.mounts import SURFACES, Surface


def benched(surfaces: Iterable[Surface]) -> dict[str, BenchApi]:
    """Each API by name, at the first surface that has it."""
    found: dict[str, BenchApi] = {}
    for surface in surfaces:
        for name, api in surface.dialect.bench_apis.items():
            found.setdefault(name, replace(api, path=surface.prefix + api.path))
    return found


APIS = benched(SURFACES)
