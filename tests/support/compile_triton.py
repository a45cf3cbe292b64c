"""Compiles every kernel in Triton for GPUs that are not there, and prints a line of JSON for each.

Run it as a program, without Triton's interpreter: the launch functions run with tensors on the CPU, and each launch is
compiled for its own arguments instead of being started. ``main`` takes compute capabilities ("80 90").
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from parley import native
from parley.core.sequence import PAGE_SIZE
from parley.native.batch_tables import BatchTables
from parley.native.experts import Experts, stack_experts
from parley.native.layer_shape import Norm
from parley.native.layout import LayerKV, RowSpan
from parley.native.pool import LayerPages
from parley.native.torch_forms import torch_attention
from parley.native.torch_forms.torch_grouped import GroupedWeight
from parley.native.triton_forms import (
    triton_attention,
    triton_experts,
    triton_grouped,
    triton_int8,
    triton_kernels,
    triton_linear,
)
from parley.native.triton_forms.triton_packed import TritonPacked

DTYPE = torch.bfloat16
HIDDEN, HEADS, KV_HEADS, DIM = 4096, 32, 8, 128  # of a model of 8B parameters
TYPE_NAMES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Launch:
    """A recorded launch: a kernel, its arguments in order, and its options."""

    def __init__(self, kernel: JITFunction, arguments: tuple, options: dict):
        self.kernel, self.arguments, self.options = kernel, arguments, options

    @property
    def variant(self) -> tuple:
        """Return what tells apart kernels whose code differs by more than sizes."""
        shape = self.arguments[self.kernel.arg_names.index("shape")] if "shape" in self.kernel.arg_names else None
        return self.kernel.__name__, *(getattr(shape, name, None) for name in ("format", "order", "has_latents"))

    def specialize(self) -> tuple[dict[str, str], dict, dict]:
        """Return the types of the arguments, the constants, and what is known of the others."""
        signature: dict[str, str] = {}
        constants, attributes = {}, {}
        for place, (name, value) in enumerate(zip(self.kernel.arg_names, self.arguments, strict=True)):
            if isinstance(value, torch.Tensor):
                signature[name], attributes[place,] = TYPE_NAMES[value.dtype], [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[name] = "fp32"
            elif (
                isinstance(value, int)
                and not isinstance(value, bool)
                and name != "shape"
                and not self.kernel.params[place].is_constexpr
            ):
                signature[name] = "i32"
                if value % 16 == 0:
                    attributes[place,] = [["tt.divisibility", 16]]
            else:
                signature[name], constants[place,] = "constexpr", value
        return signature, constants, attributes

    def compile(self, capability: int) -> dict:
        """Compile the kernel; return its registers, spilled bytes, bytes of shared memory and matrix instruction."""
        source = ASTSource(self.kernel, *self.specialize())
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(self.options))
        return {"shared": kernel.metadata.shared} | read_usage(kernel.asm["ptx"], capability)


def read_usage(ptx: str, capability: int) -> dict:
    """Return registers and spilled bytes of a thread, as ptxas reports them, and the matrix instruction of the PTX."""
    suffix = "a" if capability >= 90 else ""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [
            get_ptxas(capability).path,
            "-v",
            f"--gpu-name=sm_{capability}{suffix}",
            file.name,
            "-o",
            "/dev/null",
        ]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    instruction = re.search(r"wgmma|tcgen05\.mma|mma\.sync", ptx)
    return {
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
        "spills": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        "matrix": instruction[0] if instruction else "",
    }


def record_launches() -> Iterator[tuple[str, Launch]]:
    """Yield a name and a launch for each kernel and size of tile, with the sizes of a model of 8B parameters."""
    launches: list[Launch] = []

    def record(kernel: JITFunction, grid: tuple):
        def launch(*arguments, **options):
            launches.append(Launch(kernel, arguments, options))

        return launch

    with mock.patch.object(JITFunction, "__getitem__", record):
        for name, call in kernel_calls():
            call()
            while launches:
                launch = launches.pop(0)
                yield f"{name}: {launch.kernel.__name__}", launch


def kernel_calls():
    yield from linear_calls()
    yield from expert_calls()
    yield from attention_calls()
    yield from latent_calls()
    norm = Norm(torch.ones(HIDDEN), 1e-6, torch.ones(HIDDEN), True)
    rows = torch.zeros(2, HIDDEN, dtype=DTYPE)
    yield "norms", lambda: triton_kernels.add_norm(rows, rows, norm, after=norm)
    yield "quantized rows", lambda: triton_kernels.quantize_rows(rows)
    for activation in ("silu", "gelu", "gelu_tanh", "clamped_swiglu"):
        yield activation, lambda activation=activation: triton_kernels.activate(rows, activation)
    for is_int8 in (False, True):
        pool = make_pool(is_int8)
        qkv = torch.zeros(2, (HEADS + 2 * KV_HEADS) * DIM, dtype=DTYPE)
        angles = torch.zeros(2, 1, DIM)
        indices = torch_attention.write_indices(torch.tensor([0, 1]), pool.page_format.shape)
        head_norm = Norm(torch.ones(HEADS + KV_HEADS, DIM), 1e-6)
        yield (
            f"rope int8={is_int8}",
            lambda pool=pool, qkv=qkv, angles=angles, indices=indices, head_norm=head_norm: triton_kernels.rope_write(
                qkv, angles, angles, pool, indices, head_norm=head_norm
            ),
        )


def linear_calls():
    weight, bias = torch.zeros(HIDDEN, HIDDEN, dtype=DTYPE), torch.zeros(HIDDEN, dtype=DTYPE)
    integers = torch.zeros(HIDDEN, HIDDEN, dtype=torch.int8)
    packed_int8 = triton_int8.pack_int8(integers, torch.ones(HIDDEN), bias, DTYPE)
    grouped = {
        code: triton_kernels.pack_grouped(
            GroupedWeight(
                integers.view(torch.uint8),
                torch.ones(HIDDEN, HIDDEN // 128, dtype=DTYPE),
                torch.zeros(HIDDEN, HIDDEN // 128, dtype=torch.uint8) if code == "int4" else None,
                128,
                None,
                code,
                torch.ones(HIDDEN),
            ),
            bias,
            DTYPE,
        )
        for code in ("int4", "int8", "e4m3", "e2m1")
    }
    for rows in (1, 32, 64, 512):
        x = torch.zeros(rows, HIDDEN, dtype=DTYPE)
        yield (
            f"linear of {rows}",
            lambda x=x: triton_linear.multiply_rows(x, TritonPacked(weight, bias), DTYPE),
        )
        yield f"int8 linear of {rows}", lambda x=x: triton_int8.multiply_int8(x, packed_int8, DTYPE)
        for code, packed in grouped.items():
            yield (
                f"{code} linear of {rows}",
                lambda x=x, packed=packed: triton_grouped.multiply_grouped(x, packed, DTYPE),
            )


def expert_calls():
    """Mixtures of 8 experts, with few pairs and with as many as each size of tile takes."""
    width, experts, chosen = 1536, 8, 2
    packed = {
        name: Experts(experts, *(stack_experts(iter([weight] * experts), experts) for weight in weights))
        for name, weights in expert_weights(width).items()
    }
    for rows in (1, *(tile * experts // chosen for tile in triton_experts.TILE_ROWS)):
        x = torch.zeros(rows, HIDDEN, dtype=DTYPE)
        ids, weights = torch.zeros(rows, chosen, dtype=torch.int64), torch.zeros(rows, chosen + 1)
        for name, packed_experts in packed.items():
            yield (
                f"{name} experts of {rows}",
                lambda x=x, packed_experts=packed_experts, ids=ids, weights=weights: triton_experts.mix_experts(
                    x, packed_experts, ids, weights, x, "clamped_swiglu"
                ),
            )
        heads = torch.zeros(rows, HEADS, DIM, dtype=DTYPE)
        key_up = TritonPacked(torch.zeros(HEADS, 512, DIM, dtype=DTYPE), None)
        yield f"heads of {rows}", lambda heads=heads, key_up=key_up: triton_experts.linear_heads(heads, key_up)


def expert_weights(width: int) -> dict[str, list]:
    """Return the gate_up and down of an expert in each format."""
    sizes = (2 * width, HIDDEN), (HIDDEN, width)
    result: dict[str, list] = {"plain": [], "int8": [], "int4": [], "e4m3": [], "e2m1": []}
    for out_features, in_features in sizes:
        bias, integers = (
            torch.zeros(out_features, dtype=DTYPE),
            torch.zeros(out_features, in_features, dtype=torch.int8),
        )
        result["plain"].append(TritonPacked(torch.zeros(out_features, in_features, dtype=DTYPE), bias))
        result["int8"].append(triton_int8.pack_int8(integers, torch.ones(out_features), bias, DTYPE))
        for code, group in (("int4", 128), ("e4m3", 128), ("e2m1", 32)):
            scales = torch.ones(out_features, in_features // group, dtype=DTYPE)
            zeros = torch.zeros(out_features, in_features // group, dtype=torch.uint8) if code == "int4" else None
            weight = GroupedWeight(integers.view(torch.uint8), scales, zeros, group, code=code)
            result[code].append(triton_grouped.pack_grouped(weight, bias))
    return result


def make_pool(is_int8: bool, dim: int = DIM) -> LayerPages:
    page_format = torch_attention.page_format(LayerKV(KV_HEADS, dim, dim), torch.int8 if is_int8 else DTYPE)
    return LayerPages(torch.zeros(64, *page_format.shape, dtype=page_format.dtype), page_format)


def attention_calls():
    for count in (1, 64):
        span = RowSpan(0, count, 1000, list(range(-(-1000 // PAGE_SIZE))))
        tables = BatchTables.of_spans([span], None, torch.device("cpu"))
        for dim in (64, 128, 256):
            queries = torch.zeros(count, HEADS, dim, dtype=DTYPE)
            for is_int8 in (False, True):
                for window, softcap in ((0, None), (300, 30.0)):
                    plan, pool = native.TablePlan(tables, window), make_pool(is_int8, dim)
                    for is_split in (False, True):
                        yield (
                            f"attention of {count}, dim {dim}, int8={is_int8}, window {window}, split={is_split}",
                            lambda queries=queries, pool=pool, plan=plan, softcap=softcap, is_split=is_split: (
                                triton_attention.attend(
                                    queries, pool, plan, scale=1.0, softcap=softcap, is_split=is_split
                                )
                            ),
                        )


def latent_calls():
    """Latent attention with the sizes of DeepSeek-V3."""
    rank, rotary = 512, 64
    page_format = torch_attention.page_format(LayerKV(1, rank + rotary, rank, has_latents=True), DTYPE)
    pool = LayerPages(torch.zeros(64, *page_format.shape, dtype=DTYPE), page_format)
    norm, key_up = Norm(torch.ones(rank), 1e-6), TritonPacked(torch.zeros(HEADS, rank, DIM, dtype=DTYPE), None)
    for count in (1, 64):
        span = RowSpan(0, count, 1000, list(range(-(-1000 // PAGE_SIZE))))
        plan = native.TablePlan(BatchTables.of_spans([span], None, torch.device("cpu")), 0)
        queries = torch.zeros(count, HEADS, rank + rotary, dtype=DTYPE)
        for is_split in (False, True):
            yield (
                f"latent attention of {count}, split={is_split}",
                lambda queries=queries, plan=plan, is_split=is_split: triton_attention.attend(
                    queries, pool, plan, scale=1.0, is_split=is_split
                ),
            )
    rows, angles = torch.zeros(2, rank + rotary, dtype=DTYPE), torch.zeros(2, 1, rotary)
    indices = torch.zeros(2, 1, dtype=torch.int64)
    yield (
        "latents",
        lambda: triton_kernels.write_latents(rows, norm, angles, angles, pool, indices, is_interleaved=True),
    )
    queries = torch.zeros(2, HEADS, DIM + rotary, dtype=DTYPE)
    yield (
        "latents",
        lambda queries=queries: triton_kernels.absorb_queries(queries, key_up, angles, angles, is_interleaved=True),
    )


def main(capabilities: list[str]) -> None:
    """Print a line for each kernel and capability. With "few" as the first word: one size of each variant."""
    is_few = capabilities[0] == "few"
    seen = set()
    for name, launch in record_launches():
        key = launch.variant if is_few else (launch.kernel.__name__, repr((launch.specialize(), launch.options)))
        if key in seen:
            continue
        seen.add(key)
        for capability in map(int, capabilities[is_few:]):
            print(json.dumps({"kernel": name, "capability": capability} | launch.compile(capability)), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main(sys.argv[1:])
