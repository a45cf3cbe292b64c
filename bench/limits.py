"""What this machine can do at best, measured the moment before a load is: the denominators of every ratio.

Rates with all of torch's threads: bytes read from memory per second, and bf16 operations per second of a large matrix
product. Both change within minutes on a shared machine, so they are measured beside what they are compared with.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

BYTES = 1 << 30  # far beyond any cache
SIDE = 2048  # of the matrices


@dataclass
class Limits:
    """``bandwidth`` in bytes/s, ``compute`` in operations/s (a multiplication with its addition counts as two)."""

    bandwidth: float
    compute: float

    def decode(self, weights: int, kv: int, operations: float) -> float:
        """Seconds of a decode step that reads so many bytes and needs so many operations."""
        return max((weights + kv) / self.bandwidth, operations / self.compute)

    def prefill(self, operations: float) -> float:
        """Seconds of a prefill of so many operations."""
        return operations / self.compute


def measure() -> Limits:
    """Takes about two seconds and 1.1 GB."""
    memory = torch.ones(BYTES // 4, dtype=torch.int32)
    bandwidth = BYTES / _median(memory.max, 5)
    del memory
    a, b = (torch.ones(SIDE, SIDE, dtype=torch.bfloat16) for _ in range(2))
    compute = 2 * SIDE**3 / _median(lambda: a @ b, 15)
    return Limits(bandwidth, compute)


def _median(action: Callable[[], object], runs: int) -> float:
    action()
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


if __name__ == "__main__":
    found = measure()
    print(f"memory {found.bandwidth / 1e9:.0f} GB/s, bf16 products {found.compute / 1e9:.0f} GFLOP/s")
