"""Measures the machine's limits right before a load, and computes the bounds that they set for a model.

The rates, with all of torch's threads, are bytes read from memory per second, and operations per second of a large
matrix product in bf16 and in int8. They change within minutes on a shared machine, so they are measured next to each
load that they are compared with. The bounds are arithmetic: time = max(bytes / bandwidth, operations / rate).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

BYTES = 1 << 30  # far larger than any cache
SIDE = 2048  # of the square matrices


@dataclass
class Limits:
    """``bandwidth`` in bytes/s; ``bf16`` and ``int8`` in operations/s (a multiply-add counts as two)."""

    bandwidth: float
    bf16: float
    int8: float


def measure_limits(clock: Callable[[], float] = time.perf_counter) -> Limits:
    """Measure the limits, in seconds of ``clock``. Takes about two seconds and 1.1 GB."""
    memory = torch.ones(BYTES // 4, dtype=torch.int32)
    bandwidth = BYTES / _median_seconds(memory.max, 5, clock)
    del memory
    a, b = (torch.ones(SIDE, SIDE, dtype=torch.bfloat16) for _ in range(2))
    bf16 = 2 * SIDE**3 / _median_seconds(lambda: a @ b, 9, clock)
    c, d = (torch.ones(SIDE, SIDE, dtype=torch.int8) for _ in range(2))
    int8 = 2 * SIDE**3 / _median_seconds(lambda: torch._int_mm(c, d.t()), 9, clock)
    return Limits(bandwidth, bf16, int8)


def _median_seconds(action: Callable[[], object], runs: int, clock: Callable[[], float]) -> float:
    action()
    times = []
    for _ in range(runs):
        began = clock()
        action()
        times.append(clock() - began)
    return statistics.median(times)


@dataclass(frozen=True)
class WeightKind:
    """A weight format: bytes per weight with its share of a scale, and the number type of products, by part."""

    body: float
    head: float
    body_rate: str
    head_rate: str


KINDS = {
    "bf16": WeightKind(2, 2, "bf16", "bf16"),
    "w8a8": WeightKind(1, 2, "int8", "bf16"),
    "int8": WeightKind(1, 1, "int8", "int8"),
    "int4": WeightKind(0.5 + 4 / 128, 1, "bf16", "int8"),
    "int8 weights": WeightKind(1, 1, "bf16", "bf16"),
    "Q8_0": WeightKind(1 + 2 / 32, 1 + 2 / 32, "int8", "int8"),
    "Q4_0": WeightKind(0.5 + 2 / 32, 1 + 2 / 32, "int8", "int8"),
}


@dataclass(frozen=True)
class ModelSize:
    """A Llama-shaped model with a tied head. ``body``, ``head``: number of weights in linear layers, in the head.
    ``query_width``: numbers of all query heads together."""

    body: int
    head: int
    query_width: int
    layers: int
    kv: int  # bytes per token, bf16

    @classmethod
    def from_config(cls, folder: Path) -> ModelSize:
        """Read the size from a folder's config.json."""
        config = json.loads((folder / "config.json").read_text("utf-8"))
        hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
        width = config.get("head_dim") or hidden // config["num_attention_heads"]
        queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
        layer = hidden * (2 * queries + 2 * keys + 3 * inner)
        return cls(layers * layer, hidden * config["vocab_size"], queries, layers, 4 * layers * keys)

    def weight_bytes(self, kind: str) -> float:
        """Return the bytes of weights that a step reads."""
        return self.body * KINDS[kind].body + self.head * KINDS[kind].head

    def decode_seconds(self, limits: Limits, kind: str, batch: int, context: float) -> float:
        """Return the seconds of a decode step for ``batch`` sequences with ``context`` tokens each."""
        read = (self.weight_bytes(kind) + batch * context * self.kv) / limits.bandwidth
        return max(read, batch * (self._body_seconds(limits, kind, context) + self._head_seconds(limits, kind)))

    def prefill_seconds(self, limits: Limits, kind: str, tokens: int, before: int = 0) -> float:
        """Return the seconds of a prefill after ``before`` cached tokens; only its last token needs the head."""
        operations = tokens * self._body_seconds(limits, kind, before + tokens / 2) + self._head_seconds(limits, kind)
        return max(self.weight_bytes(kind) / limits.bandwidth, operations)

    def _body_seconds(self, limits: Limits, kind: str, context: float) -> float:
        """Return a token's seconds in linear layers and, in bf16, in attention over ``context`` tokens."""
        attention = 4 * self.query_width * self.layers * context / limits.bf16
        return 2 * self.body / getattr(limits, KINDS[kind].body_rate) + attention

    def _head_seconds(self, limits: Limits, kind: str) -> float:
        return 2 * self.head / getattr(limits, KINDS[kind].head_rate)


if __name__ == "__main__":
    limits = measure_limits()
    print(f"memory {limits.bandwidth / 1e9:.0f} GB/s, ", end="")
    print(f"products of bf16 {limits.bf16 / 1e9:.0f} and of int8 {limits.int8 / 1e9:.0f} GOP/s")
