"""Attention over pages: accuracy against a definition in float64, and bits that depend on a row alone."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.kernel_checks import check_batch_invariant, empty_pool
from support.random_tensors import random_tensor
from support.unpack_int4 import fill_with_nan, unpack_pages

from parley import native
from parley.core.sequence import PAGE_SIZE
from parley.model.networks.network import PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.native.layout import LayerKV, RowSpan
from parley.native.torch_forms import torch_attention

pytestmark = pytest.mark.usefixtures("kernel_level")


def attention_in_float64(
    q, k, v, scale, window=None, softcap=None, sinks=None, visible_ends=None, chunk=None, slopes=None
):
    """Attention of one sequence in float64, computed from the formulas. Row i sees keys before ``visible_ends[i]``."""
    count, heads = q.shape[:2]
    k, v = (tensor.double().repeat_interleave(heads // tensor.shape[1], 1) for tensor in (k, v))
    visible_ends = torch.arange(1, count + 1) if visible_ends is None else torch.tensor(visible_ends)
    results = []
    for rows in torch.arange(count).split(128):  # all scores at once would take longer to allocate than to compute
        keys = torch.arange(int(visible_ends[rows].max()))
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k[keys]) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = rows[:, None] - keys
        masked = keys >= visible_ends[rows, None]
        if window is not None:
            masked |= distance >= window
        if chunk is not None:
            masked |= rows[:, None] // chunk != keys // chunk
        if slopes is not None:
            scores -= slopes.double().view(-1, 1, 1) * distance
        scores.masked_fill_(masked, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, len(rows), 1)), -1)
        results.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(keys)], v[keys]))
    return torch.cat(results)


class AttentionCase:
    """Sequences with random queries, keys and values, in pages that previous owners left full of NaN.

    ``visible_ends``: how far each row of a sequence sees, a list per sequence. None: itself and earlier rows.
    """

    visible_ends: list[list[int]] | None = None

    def __init__(self, lengths, heads, layer, dtype, seed=0, int8=False):
        self.layer, self.heads, self.dtype, self.int8 = layer, heads, dtype, int8
        self.random = random.Random(seed)
        shapes = ((heads, layer.dim), (layer.heads, layer.dim), (layer.heads, layer.value_dim))
        self.data = [
            tuple(
                random_tensor(length, *shape, seed=seed + 3 * i + j, dtype=dtype) * 2 for j, shape in enumerate(shapes)
            )
            for i, length in enumerate(lengths)
        ]
        if layer.has_latents:
            self.data = [(q, k, k[..., : layer.value_dim]) for q, k, _ in self.data]
        self.lengths = lengths

    def attend_in_batches(self, chunk_rows, select_active, **options) -> list[torch.Tensor]:
        """Feed all sequences, ``chunk(left)`` rows at a time; ``together(active)`` selects the sequences of a batch."""
        page_counts = [-(-length // PAGE_SIZE) for length in self.lengths]
        pages = PagedKV([self.layer], sum(page_counts) + 2, self.dtype, int8=self.int8)
        fill_with_nan(pages.layer_pool(0))
        free = list(range(pages.page_count))
        self.random.shuffle(free)
        tables = [[free.pop() for _ in range(count)] for count in page_counts]
        computed = [0] * len(tables)
        outputs = [[] for _ in tables]
        while active := [i for i, length in enumerate(self.lengths) if computed[i] < length]:
            spans, slots, rows, batch_parts = [], [], 0, []
            for i in select_active(active):
                count = chunk_rows(self.lengths[i] - computed[i])
                if self.visible_ends is not None:  # a batch has all that its last row sees
                    count = max(self.visible_ends[i][computed[i] : computed[i] + count]) - computed[i]
                past, computed[i] = computed[i], computed[i] + count
                # A page is cleared when it is allocated, not earlier.
                pages.clear_pages(tables[i][-(-past // PAGE_SIZE) : -(-computed[i] // PAGE_SIZE)])
                spans.append(RowSpan(rows, count, computed[i], tables[i][: -(-computed[i] // PAGE_SIZE)]))
                slots += [tables[i][p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(past, computed[i])]
                batch_parts.append((i, past, count))
                rows += count
            batch = PackedBatch(torch.zeros(rows, dtype=torch.int64), torch.zeros(rows), torch.tensor(slots), spans)
            if self.visible_ends is not None:
                batch.visible_ends = torch.tensor(
                    [end for i, past, count in batch_parts for end in self.visible_ends[i][past : past + count]]
                )
            q, k, v = (
                torch.cat([self.data[i][j][past : past + count] for i, past, count in batch_parts]) for j in range(3)
            )
            pages.write_kv(0, k, v, batch)
            attended = pages.attend_pages(0, q, batch, **options)
            for (i, _, _), part in zip(
                batch_parts, attended.split([count for _, _, count in batch_parts]), strict=True
            ):
                outputs[i].append(part)
        return [torch.cat(output) for output in outputs]

    def attend_alone(self, **options):
        return self.attend_in_batches(lambda rows_left: rows_left, lambda active: active[:1], **options)

    def attend_mixed(self, **options):
        return self.attend_in_batches(
            lambda rows_left: min(rows_left, self.random.choice([1, 1, 2, 3, 7, 16, 31, 64, 100])),
            lambda active: self.random.sample(active, self.random.randint(1, len(active))),
            **options,
        )


def rounded_to_int8(data):
    """The same data with keys and values rounded as an int8 cache stores them."""

    def round_rows(rows):
        largest = rows.float().abs().amax(-1, keepdim=True)
        return (rows.float() * torch.full_like(largest, 127).div(largest)).round() * (largest / 127)

    keys, values = round_rows(data[1]), round_rows(data[2])
    is_latent = data[2].data_ptr() == data[1].data_ptr()  # a value is the beginning of its key
    return data[0], keys, keys[..., : data[2].shape[-1]] if is_latent else values


def max_error(data) -> float:
    """Maximum error of bfloat16 attention: probabilities and result are rounded, each to 2^-9 of the largest value."""
    return float(data[2].abs().max()) * 2**-7


LENGTH = st.sampled_from([1, 2, 5, 15, 16, 17, 47, 63, 64, 65, 130, 256, 300])


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(LENGTH, min_size=1, max_size=6),
    dim=st.sampled_from([16, 32, 64, 80, 96, 128, 256, 512, 17, 50]),
    kv_heads=st.sampled_from([1, 2, 4]),
    fold=st.sampled_from([1, 2, 3, 7]),
    window=st.sampled_from([None, None, 1, 5, 40, 200]),
    chunk=st.sampled_from([None, None, 1, 30, 128]),
    softcap=st.sampled_from([None, None, 20.0]),
    sink=st.booleans(),
    slope=st.booleans(),
    value_dim=st.sampled_from([None, None, 16, 96, 33]),
    int8=st.booleans(),
    seed=st.integers(0, 1000),
)
# torch used another kernel for the values of one row, and for the last row of many
@example([300], 16, 2, 1, None, None, None, False, False, None, False, 298)
@example([17, 1, 63, 1, 47, 300], 32, 1, 7, None, None, None, False, False, None, False, 0)
def test_attention_row_is_batch_invariant(
    lengths, dim, kv_heads, fold, window, chunk, softcap, sink, slope, value_dim, int8, seed
):
    stage = AttentionCase(
        lengths, kv_heads * fold, LayerKV(kv_heads, dim, value_dim or dim), torch.bfloat16, seed, int8
    )
    sinks = random_tensor(kv_heads * fold, dtype=torch.float32) if sink else None
    slopes = random_tensor(kv_heads * fold, dtype=torch.float32).abs() / 9 if slope else None
    options = {"scale": dim**-0.5, "window": window, "chunk": chunk, "softcap": softcap, "sinks": sinks}
    options["slopes"] = slopes
    outputs_alone = stage.attend_alone(**options)
    for actual, data in zip(outputs_alone, stage.data, strict=True):
        exact = attention_in_float64(*(rounded_to_int8(data) if int8 else data), **options)
        assert (actual.double() - exact).abs().max() < max_error(data)
    for actual, expected in zip(stage.attend_mixed(**options), outputs_alone, strict=True):
        assert torch.equal(actual, expected)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(LENGTH, min_size=1, max_size=4),
    dim=st.sampled_from([16, 64, 96, 17]),
    fold=st.sampled_from([1, 3]),
    window=st.sampled_from([None, None, 1, 20, 200]),
    sink=st.booleans(),
    int8=st.booleans(),
    seed=st.integers(0, 1000),
)
@example([1, 3000, 17], 16, 3, 700, False, False, 5)
def test_attention_to_later_tokens_of_an_image_is_batch_invariant(lengths, dim, fold, window, sink, int8, seed):
    """Rows of an image see its later rows. Where the window is narrow, they still see these."""
    stage = AttentionCase(lengths, 2 * fold, LayerKV(2, dim, dim), torch.bfloat16, seed, int8)
    sizes = random.Random(seed)
    stage.visible_ends = []
    for length in lengths:
        visible_ends: list[int] = []
        while len(visible_ends) < length:
            size = min(length - len(visible_ends), sizes.choice([1, 1, 2, 16, 40, 256, 700]))
            visible_ends += (
                [len(visible_ends) + size] * size
                if sizes.random() < 0.6
                else range(len(visible_ends) + 1, len(visible_ends) + size + 1)
            )
        stage.visible_ends.append(visible_ends)
    sinks = random_tensor(2 * fold, dtype=torch.float32) if sink else None
    options = {"scale": dim**-0.5, "window": window, "sinks": sinks}
    outputs_alone = stage.attend_alone(**options)
    for actual, data, visible_ends in zip(outputs_alone, stage.data, stage.visible_ends, strict=True):
        exact = attention_in_float64(*(rounded_to_int8(data) if int8 else data), **options, visible_ends=visible_ends)
        assert (actual.double() - exact).abs().max() < max_error(data)
    for actual, expected in zip(stage.attend_mixed(**options), outputs_alone, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("lengths", "heads", "rank", "rotary", "int8"),
    [
        ([70, 1, 33], 20, 512, 64, False),
        ([33, 17], 20, 512, 64, True),
        ([1100], 1, 512, 64, False),
        ([64, 200, 17], 3, 40, 8, False),
    ],
)
def test_attention_over_latents_is_batch_invariant(lengths, heads, rank, rotary, int8):
    """Values that are the beginnings of their keys, at DeepSeek's sizes and at odd ones."""
    layer = LayerKV(1, rank + rotary, rank, has_latents=True)
    stage = AttentionCase(lengths, heads, layer, torch.bfloat16, int8=int8)
    scale = 0.2 * (rank + rotary) ** -0.5
    outputs_alone = stage.attend_alone(scale=scale)
    for actual, data in zip(outputs_alone, stage.data, strict=True):
        exact = attention_in_float64(*(rounded_to_int8(data) if int8 else data), scale=scale)
        assert (actual.double() - exact).abs().max() < max_error(data)
    for actual, expected in zip(stage.attend_mixed(scale=scale), outputs_alone, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(("rank", "rotary", "interleaved"), [(512, 64, True), (40, 8, False)])
def test_latents_and_their_queries_are_accurate_and_batch_invariant(rank, rotary, interleaved):
    heads, plain, count, pages = 3, 24, 257, 20
    rows, queries = random_tensor(count, rank + rotary), random_tensor(count, heads, plain + rotary, seed=1)
    weight, key_up = random_tensor(rank, seed=2, dtype=torch.float32), random_tensor(heads, rank, plain, seed=3)
    angles = torch.rand(count, 1, rotary // 2, generator=torch.Generator().manual_seed(3)) * 6
    cos, sin = torch.stack((angles.cos(), angles.cos())), torch.stack((-angles.sin(), angles.sin()))
    cos, sin = (table.movedim(0, -1 if interleaved else -2).flatten(-2) for table in (cos, sin))
    slots = torch.randperm(pages * PAGE_SIZE, generator=torch.Generator().manual_seed(5))[:count]
    packed = native.pack_heads(key_up)

    def kernel(rows, queries, cos, sin, slots):
        pool = empty_pool(pages, LayerKV(1, rank + rotary, rank, has_latents=True))
        places = native.write_indices(slots, pool.page_format)
        native.write_latents(rows, native.Norm(weight, 1e-6), cos, sin, pool, places, is_interleaved=interleaved)
        assert pool.data.count_nonzero() <= len(rows) * (rank + rotary)
        absorbed = native.absorb_queries(queries, packed, cos, sin, is_interleaved=interleaved)
        return torch.cat((absorbed, unpack_pages(pool)[0][slots // PAGE_SIZE, slots % PAGE_SIZE]), 1)

    actual = check_batch_invariant(kernel, rows, queries, cos, sin, slots).double()

    def turn(x):
        turning = x.double().unflatten(-1, (-1, 2) if interleaved else (2, -1))
        pairs = torch.complex(*turning.unbind(-1 if interleaved else -2))
        pairs = pairs * torch.polar(torch.ones_like(angles.double()), angles.double())
        return torch.stack((pairs.real, pairs.imag), -1 if interleaved else -2).flatten(-2)

    latents = rows[:, :rank].double()
    normed = latents / (latents.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    key = torch.cat((normed[:, None], turn(rows[:, None, rank:])), -1)
    absorbed = torch.einsum("thi,hoi->tho", queries[..., :plain].double(), key_up.double())
    exact = torch.cat((torch.cat((absorbed, turn(queries[..., plain:])), -1), key), 1)
    assert ((actual - exact).abs() <= exact.abs() * 2**-7 + 1e-4).all()


def test_text_has_the_same_bits_in_a_batch_with_images():
    stage = AttentionCase([70, 9], 4, LayerKV(2, 32, 32), torch.bfloat16)
    plain = stage.attend_alone(scale=0.2)
    stage.visible_ends = [list(range(1, 71)), [*range(1, 4), *[9] * 6]]
    mixed = stage.attend_mixed(scale=0.2)
    assert torch.equal(mixed[0], plain[0]) and torch.equal(mixed[1][:3], plain[1][:3])
    assert torch.equal(mixed[1][8], plain[1][8]) and not torch.equal(mixed[1][3:8], plain[1][3:8])


@pytest.mark.parametrize(("window", "int8"), [(None, False), (700, False), (None, True)])
def test_attention_over_many_value_chunks_is_batch_invariant(window, int8):
    stage = AttentionCase([1400, 513, 1025], 4, LayerKV(2, 64, 64), torch.bfloat16, int8=int8)
    outputs_alone = stage.attend_alone(scale=0.125, window=window)
    one_by_one = stage.attend_in_batches(
        lambda rows_left: 500 if rows_left > 500 else min(rows_left, 13),
        lambda active: active,
        scale=0.125,
        window=window,
    )
    for actual, expected, data in zip(one_by_one, outputs_alone, stage.data, strict=True):
        assert torch.equal(actual, expected)
        exact = attention_in_float64(*(rounded_to_int8(data) if int8 else data), 0.125, window)
        assert (actual.double() - exact).abs().max() < max_error(data)


@pytest.mark.parametrize(("kv_heads", "window", "sink"), [(1, None, False), (2, None, True), (1, 1500, False)])
def test_attention_split_over_threads_keeps_its_bits(kv_heads, window, sink):
    """Guards against a split of the keys that depends on the number of threads."""
    stage = AttentionCase([3300], 2 * kv_heads, LayerKV(kv_heads, 16, 16), torch.bfloat16)
    options = {
        "scale": 0.25,
        "window": window,
        "sinks": random_tensor(2 * kv_heads, dtype=torch.float32) if sink else None,
    }
    old_threads = torch.get_num_threads()
    results = []
    for thread_count, last_rows in ((1, 3300), (1, 3), (2, 3), (3, 1)):
        torch.set_num_threads(thread_count)
        results += stage.attend_in_batches(
            lambda rows_left, last=last_rows: rows_left - last or last, lambda active: active, **options
        )
    torch.set_num_threads(old_threads)
    assert all(torch.equal(result, results[0]) for result in results[1:])
    exact = attention_in_float64(*stage.data[0], **options)
    assert (results[0].double() - exact).abs().max() < max_error(stage.data[0])


def test_threads_do_not_change_attention():
    old_threads = torch.get_num_threads()
    results = []
    for thread_count in (1, 2, 3):
        torch.set_num_threads(thread_count)
        results.append(
            AttentionCase([200, 3, 90, 64], 14, LayerKV(2, 64, 64), torch.bfloat16).attend_mixed(scale=0.125)
        )
    torch.set_num_threads(old_threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(("heads", "dim", "value_dim"), [(100, 8, 8), (2, 15, 15), (2, 16, 600), (1, 600, 24)])
def test_attention_supports_unusual_head_sizes(heads, dim, value_dim):
    stage = AttentionCase([30, 70], heads, LayerKV(1, dim, value_dim), torch.bfloat16)
    outputs_alone = stage.attend_alone(scale=dim**-0.5)
    for actual, expected, data in zip(stage.attend_mixed(scale=dim**-0.5), outputs_alone, stage.data, strict=True):
        assert torch.equal(actual, expected)
        assert (actual.double() - attention_in_float64(*data, dim**-0.5)).abs().max() < max_error(data)


@pytest.mark.parametrize("int8", [False, True])
def test_float32_attention_matches_definition(int8):
    stage = AttentionCase([70, 9], 6, LayerKV(2, 24, 24), torch.float32, int8=int8)
    for actual, data in zip(stage.attend_mixed(scale=0.2), stage.data, strict=True):
        exact = attention_in_float64(*(rounded_to_int8(data) if int8 else data), 0.2)
        assert (actual.double() - exact).abs().max() < 1e-5


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (5, 18)])
def test_kv_write_stores_keys_and_values(dim, value_dim, int8):
    """A write to 6 slots must not touch other slots."""
    layer = LayerKV(3, dim, value_dim)
    pool = empty_pool(4, layer, int8)
    slots = torch.tensor([0, 33, 34, 63, 17, 5])
    keys, values = random_tensor(6, 3, dim), random_tensor(6, 3, value_dim, seed=1) * 50
    keys[1], values[2, 1], keys[3] = 0, 0, keys[3] * 1e-20
    native.write_kv(keys, values, pool, native.write_indices(slots, pool.page_format))
    for actual, rows in zip(unpack_pages(pool), (keys, values), strict=True):
        actual = actual[slots // PAGE_SIZE, slots % PAGE_SIZE]
        if int8:
            step = rows.float().abs().amax(-1, keepdim=True) / 127
            assert ((actual - rows).abs() <= step * 0.51).all()
        else:
            assert torch.equal(actual, rows.float())
    assert pool.data.count_nonzero() <= 6 * 3 * (dim + value_dim + 8)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_nan_in_kv_affects_only_its_own_sequence(odd, int8):
    """Guards against a padded batch in which NaN of one sequence reaches another, because 0 times NaN is NaN."""
    stage = AttentionCase([40, 50], 4, LayerKV(2, 32, 32), torch.bfloat16, int8=int8)
    clean = stage.attend_in_batches(lambda rows_left: min(rows_left, 20), lambda active: active, scale=0.2)
    stage.data[0][1][10, :, 3] = stage.data[0][2][10, :, 3] = odd
    spoilt, other = stage.attend_in_batches(lambda rows_left: min(rows_left, 20), lambda active: active, scale=0.2)
    assert spoilt[10:, :, 3].isnan().all() and torch.equal(other, clean[1])


@pytest.mark.parametrize("first", [0, 1024])
def test_nan_in_all_keys_of_a_segment_reaches_the_row(first):
    """A segment of keys that are all NaN is not taken for one that the row does not see."""
    stage = AttentionCase([2100], 2, LayerKV(1, 32, 32), torch.bfloat16)
    stage.data[0][1][first : first + 1024] = float("nan")
    (output,) = stage.attend_in_batches(lambda rows_left: min(rows_left, 700), lambda active: active, scale=0.2)
    assert output[2090:].isnan().all()


def test_attention_to_huge_scores_is_that_to_the_largest():
    """In one rounding, a score would differ from the reference that it is by more than a power of two can hold."""
    stage = AttentionCase([40], 2, LayerKV(1, 32, 32), torch.bfloat16)
    q, k, v = stage.data[0]
    stage.data[0] = (q * 2**17, k * 2**17, v)
    (output,) = stage.attend_alone(scale=0.2)
    exact = attention_in_float64(*stage.data[0], 0.2)
    assert (output.double() - exact).abs().max() < max_error(stage.data[0])


def test_attention_separates_scores_too_large_for_bfloat16():
    # Biases give keys a large common part: the scores are around 4000 and differ by about 1.
    stage = AttentionCase([40], 2, LayerKV(1, 64, 64), torch.bfloat16)
    q, k, v = stage.data[0]
    stage.data[0] = (q.abs() + 4, k + 64, v)
    actual = stage.attend_alone(scale=0.25)[0]
    assert (actual.double() - attention_in_float64(*stage.data[0], 0.25)).abs().max() < max_error(stage.data[0])


@pytest.mark.parametrize(("rise", "int8"), [(0.2, False), (0.2, True), (3, False), (-3, False)])
def test_attention_to_rising_scores_is_batch_invariant(rise, int8):
    """Scores of later keys exceed those of the first block slightly, by some bits, or by far, depending on the row."""
    lengths = [300, 130, 1300]
    stage = AttentionCase(lengths, 7, LayerKV(1, 64, 64), torch.bfloat16, int8=int8)
    for length, (q, k, _) in zip(lengths, stage.data, strict=True):
        q[..., 0] = 1 + torch.arange(7) / 7 + torch.arange(length)[:, None] % 3
        k[..., 0] = rise * torch.arange(length)[:, None]
    options = {"scale": 0.125, "sinks": random_tensor(7, dtype=torch.float32)}
    outputs_alone = stage.attend_alone(**options)
    for actual, expected, data in zip(stage.attend_mixed(**options), outputs_alone, stage.data, strict=True):
        assert torch.equal(actual, expected)
        exact = attention_in_float64(*(rounded_to_int8(data) if int8 else data), **options)
        assert (actual.double() - exact).abs().max() < max_error(data)


def test_torch_attention_plan_bounds_group_size():
    table = list(range(64))
    spans = [RowSpan(i, 1, 1000, table) for i in range(500)]
    groups = torch_attention.plan_tiles(
        spans,
        heads=4,
        page_shape=(2, 2, PAGE_SIZE, 64),
        window=None,
        visible_ends=None,
        zero_page=64,
        device=torch.device("cpu"),
    )
    assert sum(group.tiles for group in groups) == 500
    assert all(group.tiles * group.keys * 2 * 64 <= 1 << 19 for group in groups)


def test_torch_attention_plan_reads_only_window_pages():
    spans = [RowSpan(0, 1, 5000, list(range(400)))]
    (group,) = torch_attention.plan_tiles(
        spans,
        heads=1,
        page_shape=(2, 1, PAGE_SIZE, 8),
        window=100,
        visible_ends=None,
        zero_page=400,
        device=torch.device("cpu"),
    )
    assert group.keys <= 1024
    assert int(group.pages[0]) // 2 * PAGE_SIZE <= 4900


def test_torch_attention_masks_stay_small_for_long_contexts():
    spans = [RowSpan(0, 2048, 32768, list(range(2048)))]
    groups = torch_attention.plan_tiles(
        spans,
        heads=2,
        page_shape=(2, 1, PAGE_SIZE, 64),
        window=None,
        visible_ends=None,
        zero_page=2048,
        device=torch.device("cpu"),
    )
    assert sum(group.mask.numel() for group in groups) < 1 << 20
