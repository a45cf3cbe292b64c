"""Linear layers with weights in groups, for every instruction set of this CPU: accurate and batch-invariant."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.random_tensors import random_tensor

from parley import native
from parley.native import build, library
from parley.native.compiled_forms.compiled_kernels import CompiledKernels
from parley.native.torch_forms import torch_kernels
from parley.native.torch_forms.torch_grouped import (
    FLOAT_ZERO_DTYPES,
    GroupedPieces,
    GroupedWeight,
    PackedBlockWeight,
    dequantize_grouped,
    round_int4,
)

COUNTS = [*range(1, 65), 100, 128, 256, 512]
GROUPED_CODES = (
    "int4", "int8", "e4m3", "e2m1", "q4_0", "q8_0", "iq4_nl", "nf4", "fp4", *FLOAT_ZERO_DTYPES, "int2", "int3",
)  # fmt: skip
WIDE_CODES = ("int8", "e4m3", "q8_0", "zero8_f16", "zero8_bf16", "least8_f16", "least8_bf16")  # those of 8 bits
FEW_BITS = {"zero1": 1, "zero2": 2, "zero3": 3, "int2": 2, "int3": 3}
HALF_CODES = ("q4_0", "q8_0", "iq4_nl")  # those whose scales are float16
BLOCK_CODES = {  # bits of the integers, numbers in a group, whether groups have minimums
    "q2_k": (2, 16, True),
    "q3_k": (3, 16, False),
    "q4_k": (4, 32, True),
    "q5_k": (5, 32, True),
    "q6_k": (6, 16, False),
    "q4_1": (4, 32, True),
    "q5_0": (5, 32, False),
    "q5_1": (5, 32, True),
    "iq4_xs": (4, 32, False),
    "iq2": (4, 16, False),
    "iq3_xxs": (4, 32, False),
    "iq3_s": (4, 32, False),
}
FLOAT_CODES = ("e4m3", "e2m1", "iq4_nl", "nf4", "fp4")  # numbers from a table, which are never multiplied as integers
RUN = 128  # adjacent numbers of a row that are rounded together
SMALL_BLOCKS = ("q4_1", "q5_0", "q5_1")  # blocks of 32 numbers, which have no integers for groups


@pytest.fixture(scope="module", params=build.usable_levels())
def kernels(request) -> CompiledKernels:
    try:
        build.find_compiler()
    except build.BuildError:
        pytest.skip("no C++ compiler")
    return CompiledKernels(library.open_level(request.param))


def random_weight(
    outer: int, inner: int, group: int, seed: int = 0, ordered: bool = False, code: str = "int4"
) -> GroupedWeight:
    """A weight with random values, scales and zero points, so that nothing is symmetric or trivial."""
    source = torch.Generator().manual_seed(seed)
    groups, top = -(-inner // group), 256 if code in WIDE_CODES else 16
    top = 1 << FEW_BITS[code[:5]] if code[:5] in FEW_BITS else top
    values = torch.randint(0, top, (outer, inner), generator=source, dtype=torch.uint8)
    if code == "e4m3":
        values[(values & 0x7F) == 0x7F] = 0  # NaN
    dtype = FLOAT_ZERO_DTYPES.get(code, torch.float16 if code in HALF_CODES else torch.bfloat16)
    zeros = None
    if code[:3] == "int":
        zeros = torch.randint(0, top, (outer, groups), generator=source, dtype=torch.uint8)
    elif code in FLOAT_ZERO_DTYPES:
        zeros = ((torch.rand(outer, groups, generator=source) - 0.2) * top).to(dtype)
    return GroupedWeight(
        values,
        (torch.rand(outer, groups, generator=source) + 0.01).to(dtype),
        zeros,
        group,
        torch.randperm(inner, generator=source) if ordered else None,
        code,
        torch.rand(outer, generator=source) + 0.5 if code == "e2m1" else None,
    )


def e4m3_number(bits: int) -> float:
    """The value of a sign, four bits of exponent and three of mantissa, by the definition of float8_e4m3fn."""
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if bits >> 7 else size


E2M1_NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
E4M3_NUMBERS = torch.tensor([e4m3_number(bits) for bits in range(256)], dtype=torch.float64)
IQ4_NUMBERS = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]).double()
IQ2_SIZES, IQ3_SIZES = (1, 3.125, 5.375, 0.125, 0.875, 1.125, 0, 0), (1, 3, 5, 7, 9, 11, 13)
BLOCK_TABLES = {
    "iq4_xs": IQ4_NUMBERS,
    **{
        code: torch.tensor([*sizes, *(-size for size in sizes)]).double()
        for code, sizes in (("iq2", IQ2_SIZES), ("iq3_xxs", (*IQ3_SIZES, 15.5)), ("iq3_s", (*IQ3_SIZES, 15)))
    },
}
# Of nf4, rounded to bfloat16 as the kernel reads them.
NF4_NUMBERS = torch.tensor([
    -1, -0.6953125, -0.5234375, -0.39453125, -0.28515625, -0.1845703125, -0.0908203125, 0, 0.07958984375, 0.1611328125,
    0.24609375, 0.337890625, 0.44140625, 0.5625, 0.72265625, 1,
]).double()  # fmt: skip
NUMBERS = {
    "e2m1": E2M1_NUMBERS,
    "e4m3": E4M3_NUMBERS,
    "iq4_nl": IQ4_NUMBERS,
    "nf4": NF4_NUMBERS,
    "fp4": torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3]).double(),
    "q4_0": torch.arange(-8, 8).double(),
    "q8_0": torch.arange(-128, 128).double(),
}


def dequantized_weight(weight: GroupedWeight) -> torch.Tensor:
    """The weight as float64 [out, in], computed number by number from the definition."""
    dequantized = torch.empty(weight.values.shape, dtype=torch.float64)
    for k in range(dequantized.shape[1]):
        place = k if weight.order is None else int(weight.order[k])
        group = k // weight.group
        if weight.code[:5] in ("shift", "least"):
            assert weight.zeros is not None
            shifts = weight.zeros[:, group].double() / weight.scales[:, group].double()
            numbers = weight.values[:, k].double() - (8 if weight.code[:5] == "shift" else 0) + shifts
        elif weight.zeros is None:
            numbers = NUMBERS[weight.code][weight.values[:, k].long()]
        else:
            numbers = weight.values[:, k].double() - weight.zeros[:, group].double()
        dequantized[:, place] = numbers * weight.scales[:, group].double()
    return dequantized if weight.out_scales is None else dequantized * weight.out_scales.double()[:, None]


def multiplies_integers(kernels: CompiledKernels, code: str) -> bool:
    """Whether rows and weights of this code are multiplied as 16-bit integers."""
    return kernels.library_name.endswith(("avx2.so", "avx512.so")) and code not in FLOAT_CODES


def rounded_rows(x: torch.Tensor, weight: GroupedWeight) -> torch.Tensor:
    """The rows as float64 that are multiplied without AVX-512 bf16: see ``round_rows`` in grouped_weights.cpp."""
    order = torch.arange(x.shape[1]) if weight.order is None else weight.order.long()
    rows = x.double()[:, order]
    for group in rows.split(weight.group, 1):
        for run in group.split(RUN, 1):
            largest = run.abs().amax(1, keepdim=True) if run.numel() else run
            unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 15)
            run.copy_((run / unit).round() * unit)
    return torch.empty_like(rows).index_copy_(1, order, rows)


def check_accuracy(
    actual: torch.Tensor, x: torch.Tensor, dequantized: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Allow the rounding error of float32 sums of these products, and one step of the result's type."""
    exact = x.double() @ dequantized.T + (0 if bias is None else bias.double())
    # The kernel multiplies numbers up to 8 before it subtracts a zero point up to 8, so rounding applies to those.
    largest_sum = x.double().abs().sum(-1, keepdim=True) * F.pad(dequantized.abs(), (0, 1)).amax(1)
    step = 2**-8 if actual.dtype == torch.bfloat16 else 2**-23
    assert actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= exact.abs() * step + largest_sum * 2**-18 + 1e-30).all()


SHAPES = [(896, 160, 128), (4864, 40, 128), (333, 77, 32), (1101, 65, 1101), (1, 1, 128)]


@pytest.mark.parametrize(("inner", "outer", "group"), SHAPES)
def test_int4_linear_row_is_batch_invariant(kernels, threads, inner, outer, group):
    """Guards against a kernel that sums in another order for another batch size or thread count."""
    x, bias = random_tensor(512, inner), random_tensor(outer, seed=2)
    weight = random_weight(outer, inner, group, seed=1)
    packed = kernels.pack_grouped(weight, bias)
    threads(1)
    rows_alone = torch.cat([kernels.linear(x[i : i + 1], packed) for i in range(len(x))])
    float32_rows_alone = torch.cat([kernels.lm_head_logits(x[i : i + 1], packed) for i in range(len(x))])
    for count in COUNTS:
        threads(1 + count % 3)
        first = (7 * count) % (len(x) - count + 1)
        batch_rows = slice(first, first + count)
        assert torch.equal(kernels.linear(x[batch_rows], packed), rows_alone[batch_rows]), count
        assert torch.equal(kernels.lm_head_logits(x[batch_rows], packed), float32_rows_alone[batch_rows]), count
    check_accuracy(rows_alone, x, dequantized_weight(weight), bias)
    check_accuracy(float32_rows_alone, x, dequantized_weight(weight), bias)


@settings(max_examples=60, deadline=None)
@example(rows=8, inner=2, outer=13, group=8, bias=False, ordered=False, number=1, seed=94, code="int4")
@given(
    rows=st.integers(0, 60),
    inner=st.integers(0, 600),
    outer=st.integers(0, 140),
    group=st.sampled_from([8, 16, 32, 64, 128, 1024]),
    bias=st.booleans(),
    ordered=st.booleans(),
    number=st.integers(1, 4),
    seed=st.integers(0, 99),
    code=st.sampled_from(GROUPED_CODES),
)
def test_grouped_linear_is_accurate_for_any_shape(
    kernels, rows, inner, outer, group, bias, ordered, number, seed, code
):
    old_threads = torch.get_num_threads()
    torch.set_num_threads(number)
    x, weight = random_tensor(rows, inner, seed=seed), random_weight(outer, inner, group, seed, ordered, code)
    offset = random_tensor(outer, seed=seed + 2) if bias else None
    actual = kernels.linear(x, kernels.pack_grouped(weight, offset))
    torch.set_num_threads(old_threads)
    dequantized = dequantized_weight(weight)
    rounding = 2**-8 if code == "nf4" else 2**-22
    assert torch.allclose(dequantize_grouped(weight).double(), dequantized, rtol=rounding, atol=0)
    # A number that is rounded to zero beside a large one matters where the weight of the large one is zero.
    rows_read = rounded_rows(x, weight) if multiplies_integers(kernels, code) else x.double()
    check_accuracy(actual, rows_read, dequantized, offset)
    if not inner or not outer:
        return
    # Torch multiplies with weights rounded to bfloat16.
    torch_weight = torch_kernels.pack_grouped(weight, offset, torch.bfloat16)
    torch_result = torch_kernels.linear(rows_read.bfloat16(), torch_weight).double()
    largest_sum = rows_read.abs() @ dequantized.abs().T
    assert ((actual.double() - torch_result).abs() <= torch_result.abs() * 2**-7 + largest_sum * 2**-7 + 1e-30).all()


@pytest.mark.parametrize("code", ["int8", "e4m3"])
def test_every_number_of_8_bits_is_exact_and_rows_are_batch_invariant(kernels, threads, code):
    """Guards against subnormal numbers that a product of bfloat16 takes for zero."""
    weight = random_weight(77, 256, 64, code=code)
    numbers = torch.arange(77 * 256).view(77, 256).to(torch.uint8)
    weight.values.copy_(torch.where((numbers & 0x7F) == 0x7F, 0, numbers) if code == "e4m3" else numbers)
    packed, x = kernels.pack_grouped(weight), torch.eye(256, dtype=torch.bfloat16)
    actual = kernels.lm_head_logits(x, packed)
    assert torch.equal(actual.double(), dequantized_weight(weight).T.float().double())
    threads(1)
    assert torch.equal(torch.cat([kernels.lm_head_logits(row, packed) for row in x.split(9)]), actual)


def random_blocked_weight(code: str, outer: int, inner: int, seed: int = 0) -> tuple[PackedBlockWeight, torch.Tensor]:
    """A weight of random blocks, and its numbers by the definition of GGUF's types: float64 [out, in]."""
    source = torch.Generator().manual_seed(seed)
    bits, group, has_minimums = BLOCK_CODES[code]
    block = 32 if code in SMALL_BLOCKS else 256
    blocks = (outer, inner // block)
    values = torch.randint(0, 1 << bits, (outer, inner), generator=source, dtype=torch.uint8)
    factors = (torch.rand(*blocks, 2, generator=source) * 0.01).half()
    factors[0, 0] = torch.tensor([2.0**-24, 0.25])  # the smallest subnormal number, which is not taken for zero
    least, end = (0, 16) if code == "q2_k" else (-128, 128)
    integers = torch.randint(least, end, (*blocks, block // group, 1 + has_minimums), generator=source).to(torch.int8)
    heads = torch.cat((factors.view(torch.uint8), integers.view(torch.uint8).flatten(2)), -1)
    if code == "q2_k":
        pairs = integers.view(torch.uint8)
        heads = torch.cat((factors.view(torch.uint8), pairs[..., 0] | pairs[..., 1] << 4), -1)
    if code in SMALL_BLOCKS:
        integers, heads = torch.ones_like(integers), heads[..., :4].contiguous()
    heads = heads.view(torch.int32)
    scales = factors[..., :1].double() * integers[..., 0].double()
    middle = 0 if has_minimums else 1 << (bits - 1)
    units = BLOCK_TABLES[code][values.long()] if code in BLOCK_TABLES else values.double() - middle
    numbers = units.view(*scales.shape, group) * scales[..., None]
    if has_minimums:
        numbers -= (factors[..., 1:].double() * integers[..., 1].double())[..., None]
    values += 4 * (code == "q3_k")
    return PackedBlockWeight(values, heads, code), numbers.reshape(outer, inner)


@pytest.mark.parametrize("code", ["zero1_bf16", "zero2_f16", "zero3_f16", "zero3_bf16", "int2", "int3"])
@pytest.mark.parametrize("group", [64, 96, 512])
def test_integers_of_few_bits_give_the_bits_of_wider_ones_in_less_memory(kernels, threads, code, group):
    weight, bits = random_weight(133, 192, group, seed=3, code=code), FEW_BITS[code[:5]]
    wide = weight._replace(code="int4" if code[:3] == "int" else f"zero4{code[5:]}")
    bias, x = random_tensor(133, seed=2), random_tensor(60, 192)
    packed, wider = kernels.pack_grouped(weight, bias), kernels.pack_grouped(wide, bias)
    outputs = 133 + -133 % kernels.grouped_panel_outputs
    assert (wider.weight.nbytes - packed.weight.nbytes) * 8 == outputs * 192 * (4 - bits)
    for count in (1, 2, 3, 7, 13, 49, 60):
        threads(1 + count % 3)
        assert torch.equal(kernels.lm_head_logits(x[-count:], packed), kernels.lm_head_logits(x[-count:], wider)), count


@pytest.mark.parametrize(("code", "wider"), [("int3", "int4"), ("zero2_f16", "zero4_f16"), ("zero1_f16", "zero4_f16")])
def test_integers_of_few_bits_whose_groups_fill_no_words_take_four(kernels, code, wider):
    weight = random_weight(5, 96, 8, code=code)
    assert kernels.pack_grouped(weight).code == wider
    assert kernels.pack_grouped(random_weight(5, 96, 32, code=code)).code == code
    assert kernels.pack_grouped(random_weight(5, 88, 32, code=code)).code == wider


@pytest.mark.parametrize("code", BLOCK_CODES)
def test_blocks_of_gguf_are_exact_in_float32_and_rows_are_batch_invariant(kernels, threads, code):
    weight, numbers = random_blocked_weight(code, 133, 512)
    bias = random_tensor(133, seed=2)
    packed, x = kernels.pack_grouped_parts([weight], bias), random_tensor(60, 512)
    threads(1)
    rows_alone = torch.cat([kernels.lm_head_logits(row, packed) for row in x.split(1)])
    for count in (2, 3, 6, 7, 13, 49, 60):
        threads(1 + count % 3)
        assert torch.equal(kernels.lm_head_logits(x[-count:], packed), rows_alone[-count:]), count
    check_accuracy(rows_alone, x, numbers, bias)
    # A row of the identity selects a number, which has at most two roundings to float32
    one = kernels.lm_head_logits(torch.eye(512, dtype=torch.bfloat16), kernels.pack_grouped_parts([weight]))
    size = numbers.abs().amax()
    assert (one.double() - numbers.T).abs().max() <= size * 2**-21


def test_parts_with_codes_of_their_own_are_computed_as_alone(kernels):
    weights = [random_blocked_weight(code, outer, 256)[0] for code, outer in (("q4_k", 70), ("q6_k", 5), ("q4_1", 64))]
    weights.append(random_weight(40, 256, 32))
    x, bias = random_tensor(9, 256), random_tensor(179, seed=2)
    alone = [
        kernels.linear(x, kernels.pack_grouped_parts([weight], part))
        for weight, part in zip(weights, bias.split([70, 5, 64, 40]), strict=True)
    ]
    assert torch.equal(kernels.linear(x, kernels.pack_grouped_parts(weights, bias)), torch.cat(alone, -1))
    with pytest.raises(ValueError, match="permutation"):
        kernels.pack_grouped_parts([weights[0], random_weight(4, 256, 32, ordered=True)])


@pytest.mark.parametrize("code", ["q4_k", "q6_k", "q5_0"])
@pytest.mark.parametrize("outer", [64, 200, 256])
def test_pieces_are_packed_as_the_whole_weight(kernels, code, outer):
    """Blocks beside groups with one scale, as in a layer of a GGUF file with several types."""
    blocked, _ = random_blocked_weight(code, outer, 512)
    grouped = random_weight(outer, 512, 32)
    panel = kernels.grouped_panel_outputs

    def pieces_of(weight):
        fields = {
            name: tensor.split(panel) for name, tensor in weight._asdict().items() if isinstance(tensor, torch.Tensor)
        }
        pieces = (
            weight._replace(**dict(zip(fields, part, strict=True))) for part in zip(*fields.values(), strict=True)
        )
        return GroupedPieces(outer, pieces)

    whole = kernels.pack_grouped_parts([blocked, grouped])
    assert torch.equal(kernels.pack_grouped_parts([pieces_of(blocked), pieces_of(grouped)]).weight, whole.weight)
    assert torch.equal(kernels.pack_grouped_parts([pieces_of(blocked), grouped]).weight, whole.weight)


def test_nan_and_inf_stay_in_their_row_of_int4_linear(kernels):
    """Guards against a blocked kernel that mixes NaN or infinity of one row into its neighbors."""
    x, packed = random_tensor(20, 130), kernels.pack_grouped(random_weight(70, 130, 32))
    clean = kernels.linear(x, packed)
    x[7, 3], x[8, 0], x[9] = float("nan"), float("inf"), float("nan")
    actual = kernels.linear(x, packed)
    assert actual[7].isnan().all() and not actual[8].isfinite().any() and actual[9].isnan().all()
    other_rows = [i for i in range(20) if i not in (7, 8, 9)]
    assert torch.equal(actual[other_rows], clean[other_rows])


@pytest.mark.parametrize("code", ["int4", "int8", "q8_0"])
@pytest.mark.parametrize("group", [16, 128, 1024])
def test_numbers_of_any_size_lose_nothing_that_the_largest_would_keep(kernels, code, group):
    """Kernels that round rows to 16 bits do so next to the largest number of each run of at most 128."""
    weight, run = random_weight(48, 1024, group, code=code), min(group, 128)
    x = random_tensor(13, 1024) * 2.0 ** torch.randint(-20, 20, (13, 1024)).bfloat16()
    x[:4] *= torch.tensor([[2.0**60], [2.0**-60], [2.0**-100], [0]]).bfloat16()
    actual, numbers = kernels.lm_head_logits(x, kernels.pack_grouped(weight)).double(), dequantized_weight(weight)
    step = x.double().abs().view(13, -1, run).amax(-1) * 2.0**-15  # the largest has 15 bits
    rounding = step @ numbers.abs().view(48, -1, run).sum(-1).T
    largest_sum = (
        x.double().abs().sum(-1, keepdim=True) * numbers.abs().amax(1) * 16
    )  # before a zero point is subtracted
    assert ((actual - x.double() @ numbers.T).abs() <= rounding + largest_sum * 2.0**-20).all()


@pytest.mark.parametrize("group", [128, 4096])
def test_sums_of_the_largest_numbers_do_not_overflow(kernels, group):
    weight = random_weight(32, 4096, group, code="int8")
    weight.values.copy_(torch.tensor([0, 255]).to(torch.uint8).repeat(16)[:, None])
    x = torch.full((9, 4096), 255 * 2.0**70).bfloat16()
    x[:4] *= -1
    actual, exact = kernels.lm_head_logits(x, kernels.pack_grouped(weight)), x.double() @ dequantized_weight(weight).T
    assert ((actual.double() - exact).abs() <= 255 * x.double().abs().sum(-1, keepdim=True) * 2.0**-12).all()


def test_int4_linear_reads_strided_rows_and_rejects_wrong_widths(kernels):
    weight, x = random_weight(40, 48, 32), random_tensor(24, 3, 96, seed=2)
    packed = kernels.pack_grouped(weight)
    for rows in (x[:, 1, ::2], x[:, :, :48]):
        check_accuracy(kernels.linear(rows, packed).flatten(0, -2), rows.flatten(0, -2), dequantized_weight(weight))
    with pytest.raises(ValueError, match="47"):
        kernels.linear(random_tensor(2, 47), packed)
    with pytest.raises(ValueError, match="12"):
        kernels.pack_grouped(random_weight(4, 24, 12))


@settings(max_examples=60, deadline=None)
@given(
    inner=st.integers(0, 300),
    outer=st.integers(0, 40),
    group=st.sampled_from([8, 32, 128]),
    shift=st.sampled_from([0.0, 3.0, -100.0]),
    seed=st.integers(0, 99),
)
def test_int4_rounds_to_the_nearest_value(inner, outer, group, shift, seed):
    weight = random_tensor(outer, inner, seed=seed) + shift
    weight[:, inner // 2 :] *= 2**-20
    rounded = round_int4(weight, group)
    assert (rounded.values <= 15).all() and (rounded.zeros <= 15).all()
    error = (dequantize_grouped(rounded) - weight.float()).abs()
    steps = rounded.scales.repeat_interleave(group, 1)[:, :inner]
    # Half a step, plus the shift at the ends caused by rounding the zero point to a whole number.
    assert (error <= steps * 1.01).all()
    inside = (rounded.values > 0) & (rounded.values < 15)
    assert (error[inside] <= steps[inside] * 0.501).all()


def test_int4_keeps_constant_groups(kernels):
    """Groups of zeros, groups of one repeated number, and a group with NaN."""
    weight = torch.zeros(6, 64, dtype=torch.bfloat16)
    weight[1], weight[2, :32], weight[3] = 5.0, -2.0, 1e-30
    rounded = round_int4(weight, 32)
    assert torch.allclose(dequantize_grouped(rounded), weight.float(), rtol=1e-6, atol=0)
    weight[4, 5] = float("nan")
    x = torch.eye(64, dtype=torch.bfloat16)
    actual = kernels.linear(x, kernels.pack_grouped(round_int4(weight, 32)))
    assert actual[5, 4].isnan() and actual[:, [0, 1, 2, 3, 5]].isfinite().all()


def test_int4_pack_follows_the_activation_dtype():
    weight, x = random_weight(24, 64, 32), random_tensor(3, 64)
    for dtype in (torch.bfloat16, torch.float32):
        actual = native.linear(x.to(dtype), native.pack_grouped(weight, None, dtype))
        assert actual.dtype == dtype
        assert torch.allclose(actual.double(), x.double() @ dequantized_weight(weight).T, rtol=0.02, atol=0.3)
