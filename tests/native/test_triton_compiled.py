"""The kernels in Triton compile for GPUs that are not there, without spills and within their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import triton_device  # noqa: F401 - before other tests import Triton without its interpreter

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}  # of a block, at most
PROGRAM = Path(__file__).parents[1] / "support" / "compile_triton.py"


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_compile_without_spills_and_within_shared_memory(capability):
    """One size of each kernel and format of weights; at night all sizes of tiles."""
    sizes = [] if os.environ.get("PARLEY_NIGHTLY") else ["few"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    process = subprocess.run(
        [sys.executable, PROGRAM, *sizes, str(capability)], env=environment, capture_output=True, text=True, check=True
    )
    kernels = [json.loads(line) for line in process.stdout.splitlines()]
    assert {kernel["kernel"].rpartition(" ")[2] for kernel in kernels} >= {
        *("_linear_kernel", "_attend_kernel", "_merge_kernel", "_expert_kernel", "_write_latents_kernel")
    }
    for kernel in kernels:
        max_spills = 64 if "dim 256, int8=True" in kernel["kernel"] else 0  # bytes; 40 were seen, for 8.0
        assert kernel["spills"] <= max_spills and kernel["shared"] <= SHARED_BYTES[capability], kernel
        is_linear = "linear" in kernel["kernel"] and "_quantize" not in kernel["kernel"]
        if (is_linear or "_expert_kernel" in kernel["kernel"]) and not kernel["kernel"].startswith("int8"):
            assert kernel["matrix"] == "mma.sync", kernel  # one instruction for all tiles, so that bits agree
