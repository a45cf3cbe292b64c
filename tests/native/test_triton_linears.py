"""Linear layers in Triton: plain, int8 and in groups, against their definitions, and a row's bits in any batch."""

from __future__ import annotations

import pytest
import torch
from support.triton_device import DEVICE, DTYPE, IS_NIGHT, random_rows

from parley import native
from parley.native.torch_forms import torch_int8, torch_kernels
from parley.native.torch_forms.torch_grouped import GroupedWeight, dequantize_grouped
from parley.native.triton_forms import triton_grouped, triton_int8, triton_kernels, triton_linear
from parley.native.triton_forms.triton_packed import TritonGroupedPacked, TritonPacked

OUT_FEATURES, IN_FEATURES = 40, 200  # neither fills whole tiles


def assert_near(result: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    assert (result.double() - exact).abs().max() < tolerance * exact.abs().max()


def test_product_is_exact_but_for_float32():
    x, weight, bias = (
        random_rows(5, IN_FEATURES),
        random_rows(OUT_FEATURES, IN_FEATURES, seed=1),
        random_rows(OUT_FEATURES, seed=2),
    )
    exact = x.double() @ weight.double().t()
    assert_near(triton_kernels.lm_head_logits(x, TritonPacked(weight, bias)), exact + bias.double(), 1e-6)
    assert_near(triton_kernels.lm_head_logits(x, TritonPacked(weight, None)), exact, 1e-6)
    assert triton_kernels.linear(x, TritonPacked(weight, None)).dtype == DTYPE


@pytest.mark.parametrize("tile", [tile for _, tile in triton_linear.TILES])
def test_every_tile_multiplies_rows_right(tile):
    x, weight = random_rows(tile.rows + 3, IN_FEATURES), random_rows(OUT_FEATURES, IN_FEATURES, seed=1)
    result = triton_linear.multiply_rows(x, TritonPacked(weight, None), torch.float32, tile)
    assert_near(result, x.double() @ weight.double().t(), 1e-6)


def test_rows_have_their_bits_in_any_batch():
    """In batches of all sizes, and so in every tile."""
    x, weight = random_rows(300 if IS_NIGHT else 70, IN_FEATURES), random_rows(OUT_FEATURES, IN_FEATURES, seed=1)
    packed = TritonPacked(weight, None)
    alone = torch.cat([triton_kernels.linear(row[None], packed) for row in x])
    for rows in (2, 7, 16, 17, 33, 64, 65, 128, 300):
        for first in {0, len(x) - rows}:
            if first >= 0 and rows <= len(x):
                part = slice(first, first + rows)
                assert torch.equal(triton_kernels.linear(x[part], packed), alone[part]), rows


def test_rows_may_lie_apart():
    x, weight = random_rows(5, 2 * IN_FEATURES), random_rows(OUT_FEATURES, IN_FEATURES, seed=1)
    packed = TritonPacked(weight, None)
    assert torch.equal(
        triton_kernels.linear(x[:, :IN_FEATURES], packed), triton_kernels.linear(x[:, :IN_FEATURES].clone(), packed)
    )


def test_int8_products_have_the_bits_of_the_torch_form():
    x, weight, bias = (
        random_rows(20, IN_FEATURES),
        torch_int8.quantize_rows(random_rows(OUT_FEATURES, IN_FEATURES, seed=1)),
        random_rows(OUT_FEATURES),
    )
    packed = triton_int8.pack_int8(weight.values, weight.scales, bias, torch.float32)
    expected = torch_kernels.linear(x, torch_kernels.pack_int8(weight.values, weight.scales, bias, torch.float32))
    assert torch.equal(triton_kernels.linear(x, packed), expected)
    assert torch.equal(triton_kernels.linear(triton_kernels.quantize_rows(x), packed), expected)


CODES = [("int4", True), ("int4", False), ("int8", True), ("e4m3", False), ("e2m1", False)]


@pytest.mark.parametrize("group", [16, 32, 96, 128, IN_FEATURES])
@pytest.mark.parametrize(("code", "has_zeros"), CODES)
def test_products_with_grouped_weights(code, has_zeros, group):
    weight = grouped_weight(code, has_zeros, group, permuted=group == 32)
    bias, x = random_rows(OUT_FEATURES, seed=2), random_rows(5, IN_FEATURES)
    packed = triton_kernels.pack_grouped(weight, bias, DTYPE)
    assert isinstance(packed, TritonGroupedPacked)
    unscaled = dequantize_grouped(weight._replace(out_scales=None)).to(DTYPE).double()
    exact = (x.double() @ unscaled.t()) * weight.out_scales.double() + bias.double()
    assert_near(triton_kernels.lm_head_logits(x, packed), exact, 1e-6)


@pytest.mark.parametrize(("code", "group"), [("int4", 8), *((code, 32) for code in ("nf4", "q4_0", "iq4_nl", "q8_0"))])
def test_groups_and_codes_that_no_product_fits_are_dequantized(code, group):
    weight = grouped_weight(code, code == "int4", group)
    packed = triton_kernels.pack_grouped(weight, None, DTYPE)
    assert isinstance(packed, TritonPacked)
    assert torch.equal(packed.weight, dequantize_grouped(weight).to(DTYPE))


def test_every_tile_of_grouped_weights_multiplies_rows_right():
    weight = grouped_weight("int4", True, 64)
    packed = triton_kernels.pack_grouped(weight._replace(out_scales=None), None, DTYPE)
    exact = dequantize_grouped(weight._replace(out_scales=None)).to(DTYPE).double().t()
    for rows in (20, 70):
        x = random_rows(rows, IN_FEATURES)
        assert_near(triton_grouped.multiply_grouped(x, packed, torch.float32), x.double() @ exact, 1e-6)


def grouped_weight(code: str, has_zeros: bool, group: int, *, permuted: bool = False) -> GroupedWeight:
    generator = torch.Generator().manual_seed(3)
    most = 256 if code in ("int8", "e4m3", "q8_0") else 16

    def integers(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, dtype=torch.uint8, generator=generator).to(DEVICE)

    values, groups = integers(most, OUT_FEATURES, IN_FEATURES), -(-IN_FEATURES // group)
    if code == "e4m3":
        values[values & 127 == 127] = 1  # not a number
    return GroupedWeight(
        values,
        random_rows(OUT_FEATURES, groups, seed=4).abs() / most,
        integers(most, OUT_FEATURES, groups) if has_zeros else None,
        group,
        torch.randperm(IN_FEATURES, generator=generator).to(DEVICE) if permuted else None,
        code,
        1 + random_rows(OUT_FEATURES, seed=5).float().abs(),
    )


def test_kernels_are_chosen_by_device_and_dtype(monkeypatch):
    from support.triton_device import use_triton

    use_triton(monkeypatch)
    assert isinstance(
        native.pack_weight(random_rows(OUT_FEATURES, IN_FEATURES)), TritonPacked | torch_kernels.TorchPacked
    )
    weight = torch_int8.quantize_rows(random_rows(OUT_FEATURES, IN_FEATURES))
    assert type(native.pack_int8(weight.values, weight.scales, None, DTYPE)).__name__ == "TritonInt8Packed"
    assert type(native.pack_int8(weight.values, weight.scales, None, torch.float32)).__name__ == "TorchInt8Packed"
    assert isinstance(
        native.pack_weight(random_rows(OUT_FEATURES, IN_FEATURES, dtype=torch.float32)), torch_kernels.TorchPacked
    )
