"""Mixtures of experts on a GPU, and the products of heads with weights of their own. ``torch_experts`` and
``torch_latent`` define them.

A *pair* is a row of x with one of its chosen experts; pair p is of row p // chosen. Pairs are sorted by expert, on the
device and in order, and cut into tiles of one expert each. A tile multiplies as a linear layer does, in the files of
the weight's format, and stores the results of a pair at the pair's number. Finally each row adds up its experts'
results in the order in which they were chosen. So a row's bits do not depend on the tiles of its pairs.

The host never reads how many pairs an expert has, so all of this can be recorded in a CUDA graph. The grid has the
largest number of tiles that may be needed: expert e, whose sorted pairs begin at index s, has the tiles from s // rows
+ e on. Up to FEW_PAIRS pairs are not sorted: each is a tile of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from parley.native.experts import Experts
from parley.native.layer_shape import GateLimits
from parley.native.torch_forms.torch_int8 import TorchRows
from parley.native.torch_forms.torch_kernels import TorchPacked
from parley.native.torch_forms.torch_streams import limit_gates
from parley.native.triton_forms import triton_activations, triton_grouped, triton_int8, triton_linear
from parley.native.triton_forms.launch import INTERPRETED, NO_FUSION, unused
from parley.native.triton_forms.triton_activations import activate_numbers
from parley.native.triton_forms.triton_grouped import GroupedShape, multiply_grouped_tile
from parley.native.triton_forms.triton_int8 import multiply_int8_tile, quantize_rows
from parley.native.triton_forms.triton_linear import LinearShape, Tile, multiply_tile
from parley.native.triton_forms.triton_packed import TritonGroupedPacked, TritonInt8Packed, TritonPacked

StackedWeight = TritonPacked | TritonInt8Packed | TritonGroupedPacked | TorchPacked

FEW_PAIRS = 16
TILE_ROWS = (16, 32, 64)  # pairs of a tile; each format of weights has tiles of these sizes
SORT_BLOCK = 1024  # pairs that a program of the sorting kernel reads at once
SUM_BLOCK = 1024  # columns of a program that adds up the experts of a row
TILE_FIELDS = tl.constexpr(3)  # expert, index of the first pair, index after the last


@dataclass(frozen=True)
class ExpertShape:
    """The constants of a product with the weights of ``count`` experts or heads.

    * ``product``: the product with one of them.
    * ``format``: "plain", "int8" or "grouped".
    * ``fold``: number of adjacent pairs that read the same row.
    * ``width``: number of results of a pair.
    * ``activation``: applied to the products; "": none.
    * ``order``: how a tile finds its pairs, "sorted", "pairs" or "heads".
    * ``weight_size`` and ``group_size``: numbers of the weight and of the scales of groups for each expert.
    """

    product: LinearShape | GroupedShape
    count: int
    format: str
    fold: int
    width: int
    activation: str
    is_gated: bool
    order: str
    weight_size: int
    group_size: int


@triton.jit
def _sort_kernel(
    ids: tl.tensor,  # int32 [pairs]: the expert of each
    sorted_pairs: tl.tensor,  # int32 [pairs], the result: pairs by expert, and by number
    tiles: tl.tensor,  # int32 [tiles, 3], the result
    pair_count: tl.tensor,
    rows: tl.constexpr,  # of a tile
    block: tl.constexpr,
) -> None:
    """Sort the pairs of one expert, and make its tiles."""
    expert = tl.program_id(0)
    numbers = tl.arange(0, block)
    pairs_before, own_count = expert * 0, expert * 0
    for first in range(0, pair_count, block):
        pairs = first + numbers
        chosen_experts = tl.load(ids + pairs, pairs < pair_count, 0x7FFFFFFF)
        pairs_before += tl.sum((chosen_experts < expert).to(tl.int32))
        own_count += tl.sum((chosen_experts == expert).to(tl.int32))
    target = pairs_before
    for first in range(0, pair_count, block):
        pairs = first + numbers
        is_own = tl.load(ids + pairs, pairs < pair_count, 0x7FFFFFFF) == expert
        counts = is_own.to(tl.int32)
        tl.store(sorted_pairs + target + tl.cumsum(counts) - 1, pairs, is_own)
        target += tl.sum(counts)
    end = pairs_before + own_count
    first_tile = pairs_before // rows
    for tile in range(0, end // rows - first_tile + 1):
        fields = tiles + (first_tile + expert + tile) * TILE_FIELDS
        tl.store(fields, expert)
        tl.store(fields + 1, pairs_before + tile * rows)
        tl.store(fields + 2, end)


@triton.jit
def _find_pairs(
    sorted_pairs: tl.tensor, tiles: tl.tensor, ids: tl.tensor, row_count: tl.tensor, shape: tl.constexpr
) -> tl.tensor:
    """Return the expert or head of this program's tile, its pairs, and whether they exist."""
    tile = tl.program_id(1)
    numbers = tl.arange(0, shape.product.rows)
    if shape.order == "heads":
        expert = tile % shape.count
        rows = tile // shape.count * shape.product.rows + numbers
        pairs, is_pair = rows * shape.count + expert, rows < row_count
    elif shape.order == "pairs":
        expert, pairs, is_pair = tl.load(ids + tile), tile + numbers, numbers < 1
    else:
        fields = tiles + tile * TILE_FIELDS
        expert = tl.load(fields)
        places = tl.load(fields + 1) + numbers
        is_pair = places < tl.load(fields + 2)
        pairs = tl.load(sorted_pairs + places, is_pair, 0)
    return expert, pairs, is_pair


@triton.jit
def _multiply_outputs(
    columns: tl.tensor,
    is_pair: tl.tensor,
    row_scales: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    out_scales: tl.tensor,
    bias: tl.tensor,
    outs: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """Return the results of a linear layer with the expert's weight for these rows and outputs: float32 [outs,
    rows]."""
    if shape.format == "plain":
        total = multiply_tile(columns, is_pair, weight, outs, shape.product)
    elif shape.format == "int8":
        total = multiply_int8_tile(columns, is_pair, row_scales, weight, out_scales, outs, shape.product)
    else:
        total = multiply_grouped_tile(columns, is_pair, weight, scales, zeros, out_scales, outs, shape.product)
    if shape.product.has_bias:
        total += tl.load(bias + outs, outs < shape.product.out_features, 0).to(tl.float32)[:, None]
    return total


@triton.jit
def _expert_kernel(
    x: tl.tensor,  # [pairs / fold, into], with this stride between rows
    x_stride: tl.tensor,
    row_scales: tl.tensor,  # float32 [pairs / fold], of int8 rows
    weight: tl.tensor,  # [experts, ...], as are the next four
    scales: tl.tensor,
    zeros: tl.tensor,
    out_scales: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,  # [pairs, width]
    sorted_pairs: tl.tensor,
    tiles: tl.tensor,
    ids: tl.tensor,
    row_count: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Multiply the pairs of one tile by a block of outputs of their expert. The grid is (blocks of outputs, tiles).

    With an activation, the results are activation(gate) * up, or activation(up) if it is not gated.
    """
    expert, pairs, is_pair = _find_pairs(sorted_pairs, tiles, ids, row_count, shape)
    if tl.max(is_pair.to(tl.int32)) == 0:
        return
    expert = expert.to(tl.int64)
    rows = pairs // shape.fold
    columns = x + rows.to(tl.int64) * x_stride
    scales_of_rows = is_pair
    if shape.format == "int8":
        scales_of_rows = tl.load(row_scales + rows, is_pair, 0)
    weight += expert * shape.weight_size
    scales += expert * shape.group_size
    zeros += expert * shape.group_size
    out_scales += expert * shape.product.out_features
    bias += expert * shape.product.out_features
    outs = tl.program_id(0) * shape.product.outs + tl.arange(0, shape.product.outs)
    total = _multiply_outputs(columns, is_pair, scales_of_rows, weight, scales, zeros, out_scales, bias, outs, shape)
    if shape.activation != "":
        stored = y.dtype.element_ty
        gate, up = total.to(stored).to(tl.float32), total
        if shape.is_gated:
            up = _multiply_outputs(
                columns, is_pair, scales_of_rows, weight, scales, zeros, out_scales, bias, outs + shape.width, shape
            ).to(stored).to(tl.float32)  # fmt: skip
        total = activate_numbers(gate, up, stored, shape.activation, shape.is_gated)
    offsets = pairs[:, None].to(tl.int64) * shape.width + outs[None, :]
    is_stored = is_pair[:, None] & (outs[None, :] < shape.width)
    tl.store(y + offsets, tl.trans(total).to(y.dtype.element_ty), is_stored)


@triton.jit
def _sum_kernel(
    outputs: tl.tensor,  # float32 [T, chosen, hidden]
    weights: tl.tensor,  # float32 [T, chosen or one more]
    weight_stride: tl.tensor,
    shared: tl.tensor,  # [T, hidden]
    y: tl.tensor,  # [T, hidden]
    hidden: tl.constexpr,
    experts_per_token: tl.constexpr,
    has_shared: tl.constexpr,
    weighs_inputs: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Add up the weighted results of a row's experts for one block of columns. The grid is (T, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_column = columns < hidden
    total = tl.zeros([block], tl.float32)
    for slot in range(0, experts_per_token):
        result = tl.load(outputs + (row * experts_per_token + slot) * hidden + columns, is_column, 0)
        if not weighs_inputs:
            result *= tl.load(weights + row * weight_stride + slot)
        total += result
    if has_shared:
        shared_output = tl.load(shared + row * hidden + columns, is_column, 0).to(tl.float32)
        total += shared_output * tl.load(weights + row * weight_stride + experts_per_token)
    tl.store(y + row * hidden + columns, total.to(y.dtype.element_ty), is_column)


@dataclass(frozen=True)
class ExpertPlan:
    """The tiles of a batch: ``ids`` int32 [pairs], and what ``_sort_kernel`` gives, where pairs are ``is_sorted``.

    ``fold``: as in ``ExpertShape``. ``tile_count``: tiles there may be, of ``rows`` pairs.
    """

    ids: torch.Tensor
    sorted_pairs: torch.Tensor
    tiles: torch.Tensor
    tile_count: int
    rows: int
    is_sorted: bool


def plan_tiles(ids: torch.Tensor, count: int, *, is_sorted: bool | None = None) -> ExpertPlan:
    """Sort the pairs of ``ids`` [T, chosen], which are below ``count``, by expert. ``is_sorted``: None decides it by
    the number of pairs. It changes no bit."""
    pairs = ids.numel()
    ids = ids.to(torch.int32).flatten()
    if is_sorted is None:
        is_sorted = pairs > FEW_PAIRS
    if not is_sorted:
        return ExpertPlan(ids, ids, ids, pairs, TILE_ROWS[0], False)
    mean = triton.cdiv(pairs, count)
    rows = next((rows for rows in TILE_ROWS if mean <= rows), TILE_ROWS[-1])
    tile_count = pairs // rows + count
    tiles = ids.new_empty(tile_count, TILE_FIELDS.value)
    plan = ExpertPlan(ids, torch.empty_like(ids), tiles, tile_count, rows, True)
    _sort_kernel[(count,)](ids, plan.sorted_pairs, plan.tiles, pairs, rows, SORT_BLOCK, **NO_FUSION)
    return plan


def _product_shape(packed: StackedWeight, rows: int) -> tuple[Tile, LinearShape | GroupedShape, str]:
    """Return the tile of ``rows`` rows, the product of one expert, and the format of the weight."""

    def choose_tile(tiles: tuple[tuple[int, Tile], ...]) -> Tile:
        return next(tile for _, tile in tiles if tile.rows == rows)

    if isinstance(packed, TritonGroupedPacked):
        tile = choose_tile(triton_grouped.TILES)
        return tile, triton_grouped.grouped_shape(packed, tile), "grouped"
    out_features, in_features = packed.weight.shape[-2:]
    has_bias = packed.bias is not None
    if isinstance(packed, TritonInt8Packed):
        tile = choose_tile(triton_int8.TILES)
        shape = LinearShape(
            out_features, in_features, tile.outs, tile.rows, tile.inner, tile.stages, has_bias, INTERPRETED
        )
        return tile, shape, "int8"
    tile = choose_tile(triton_linear.TILES)
    return tile, triton_linear.linear_shape(out_features, in_features, tile, has_bias=has_bias), "plain"


def _multiply(
    x: torch.Tensor | TorchRows,
    packed: StackedWeight,
    y: torch.Tensor,
    plan: ExpertPlan,
    *,
    fold: int,
    order: str,
    activation: str = "",
    is_gated: bool = False,
    row_count: int = 0,
) -> None:
    """Multiply the rows of pairs by the weights of their experts; store the results, activated, in y [pairs, width]."""
    tile, product, weight_format = _product_shape(packed, plan.rows)
    values, row_scales = (x.values, x.scales) if isinstance(x, TorchRows) else (x, unused(x))
    scales = zeros = out_scales = unused(packed.weight)
    if isinstance(packed, TritonGroupedPacked):
        scales = packed.scales
        zeros = zeros if packed.zeros is None else packed.zeros
        out_scales = out_scales if packed.out_scales is None else packed.out_scales
    elif isinstance(packed, TritonInt8Packed):
        out_scales = packed.scales
    shape = ExpertShape(
        product=product,
        count=len(packed.weight),
        format=weight_format,
        fold=fold,
        width=y.shape[-1],
        activation=activation,
        is_gated=is_gated,
        order=order,
        weight_size=packed.weight[0].numel(),
        group_size=scales[0].numel(),
    )
    _expert_kernel[(triton.cdiv(shape.width, tile.outs), plan.tile_count)](
        values, values.stride(0), row_scales, packed.weight, scales, zeros, out_scales,
        unused(packed.weight) if packed.bias is None else packed.bias, y, plan.sorted_pairs, plan.tiles, plan.ids,
        row_count, shape, num_warps=tile.warps, **NO_FUSION,
    )  # fmt: skip


def mix_experts(
    x: torch.Tensor,
    experts: Experts,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    activation: str = "silu",
    *,
    weighs_inputs: bool = False,
    limits: GateLimits | None = None,
    is_sorted: bool | None = None,
) -> torch.Tensor:
    """Return the weighted sum of the chosen experts' MLPs for rows x [T, hidden]: [T, hidden].

    ``limits``: of the gates and ups of the chosen experts. ``is_sorted``: as in ``plan_tiles``.
    """
    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, StackedWeight) and isinstance(down, StackedWeight)
    (count, experts_per_token), hidden = ids.shape, x.shape[1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not count:
        return y
    plan = plan_tiles(ids, experts.count, is_sorted=is_sorted)
    order = "sorted" if plan.is_sorted else "pairs"
    rows: torch.Tensor | TorchRows = quantize_rows(x) if isinstance(gate_up, TritonInt8Packed) else x
    if weighs_inputs:
        rows = _weigh_pairs(rows, weights[:, :experts_per_token])
    width = gate_up.weight.shape[1] // (2 if experts.is_gated else 1)
    fold = 1 if weighs_inputs else experts_per_token
    if limits is None:
        active = x.new_empty(count * experts_per_token, width)
        _multiply(rows, gate_up, active, plan, fold=fold, order=order, activation=activation, is_gated=experts.is_gated)
    else:
        gates = x.new_empty(count * experts_per_token, 2 * width)
        _multiply(rows, gate_up, gates, plan, fold=fold, order=order)
        active = triton_activations.activate(limit_gates(gates, limits), activation)
    outputs = x.new_empty(count * experts_per_token, hidden, dtype=torch.float32)
    inputs = quantize_rows(active) if isinstance(down, TritonInt8Packed) else active
    _multiply(inputs, down, outputs, plan, fold=1, order=order)
    block = min(SUM_BLOCK, triton.next_power_of_2(hidden))
    _sum_kernel[(count, triton.cdiv(hidden, block))](
        outputs, weights, weights.stride(0), unused(x) if shared is None else shared.contiguous(), y, hidden,
        experts_per_token, shared is not None, weighs_inputs, block, **NO_FUSION,
    )  # fmt: skip
    return y


def _weigh_pairs(rows: torch.Tensor | TorchRows, weights: torch.Tensor) -> torch.Tensor | TorchRows:
    """Return the row of each pair, times the weight of its expert. ``weights`` [T, chosen]."""
    if isinstance(rows, TorchRows):
        experts_per_token = weights.shape[1]
        values = rows.values[:, None].expand(-1, experts_per_token, -1).flatten(0, 1)
        return TorchRows(values, (rows.scales[:, None] * weights).flatten())
    return (rows[:, None] * weights[:, :, None]).to(rows.dtype).flatten(0, 1)


def linear_heads(x: torch.Tensor, packed: TritonPacked | TorchPacked) -> torch.Tensor:
    """Return each head's rows times its own weight: x [T, heads, in] -> [T, heads, out]."""
    count, (heads, out) = len(x), packed.weight.shape[:2]
    y = x.new_empty(count, heads, out)
    if count:
        rows = next((rows for rows in TILE_ROWS if count <= rows), TILE_ROWS[-1])
        nothing = unused(x)
        plan = ExpertPlan(nothing, nothing, nothing, heads * triton.cdiv(count, rows), rows, False)
        _multiply(x.flatten(0, 1), packed, y, plan, fold=1, order="heads", row_count=count)
    return y
