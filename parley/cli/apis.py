"""The APIs that ``parley bench`` can call: those mounted in ``dialects/mounts.py`` that declare a bench."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from parley.dialects.bench import BenchApi
from parley.dialects.mounts import API_MOUNTS, ApiMount


def bench_apis(mounts: Iterable[ApiMount]) -> dict[str, BenchApi]:
    """Return the bench entries of all APIs by name, each from the first mount that has it."""
    apis: dict[str, BenchApi] = {}
    for mount in mounts:
        for name, api in mount.dialect.bench_apis.items():
            apis.setdefault(name, replace(api, path=mount.prefix + api.path))
    return apis


BENCHED_APIS = bench_apis(API_MOUNTS)
