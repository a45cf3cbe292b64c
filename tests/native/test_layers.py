"""One call for all layers gives the bits of kernel by kernel, for all instruction sets, weight types and batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parley import native
from parley.core.sequence import BLOCK_SIZE
from parley.model.networks.config import Rope, Shape
from parley.model.networks.decoder import Decoder
from parley.model.networks.network import Batch
from parley.model.networks.paged_kv import PagedKV
from parley.native import build, compiled, library
from parley.native.layer import Layer
from parley.native.layout import Span
from parley.native.torch_int4 import Grouped

try:
    build.compiler()
except build.BuildError:
    pytest.skip("no C++ compiler", allow_module_level=True)

VOCAB, CONTEXT = 50, 80
FORMATS = ("bf16", "int8", "int4", "int4 in another order")


@pytest.fixture(scope="module", params=build.usable())
def level(request):
    """Replaces the compiled kernels of ``parley.native`` with those of one level."""
    found = library.open_level(request.param)
    kernels = compiled.Kernels(found)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(library, "load", lambda: found)
        patch.setattr(native, "_compiled", lambda: kernels)
        yield


class Source:
    """Random weights, batches and adapters for a model."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(torch.bfloat16)

    def whole(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def linear(self, format: str, out: int, into: int, biased: bool) -> native.Packed:
        bias = self.noise(out) if biased else None
        if format == "bf16":
            return native.pack(self.noise(out, into), bias)
        if format == "int8":
            values = self.whole(-128, 128, out, into).to(torch.int8)
            return native.pack_int8(values, torch.rand(out, generator=self.generator) / 99, bias, torch.bfloat16)
        group = 32
        shape = out, -(-into // group)
        order = torch.randperm(into, generator=self.generator) if format != "int4" else None
        values, zeros = self.whole(0, 16, out, into).byte(), self.whole(0, 16, *shape).byte()
        scales = torch.rand(*shape, generator=self.generator) / 9
        return native.pack_int4(Grouped(values, scales, zeros, group, order), bias, torch.bfloat16)

    def decoder(self, shape: Shape, formats: list[str]) -> Decoder:
        """``formats``: one weight type per linear layer, from the first to the last."""
        heads, wide = shape.heads + 2 * shape.kv_heads, shape.heads * shape.head_dim
        which = iter(formats)
        layers = [
            Layer(
                input_norm=self.noise(shape.hidden),
                qkv=self.linear(next(which), heads * shape.head_dim, shape.hidden, shape.qkv_bias),
                head_norm=self.noise(heads - shape.kv_heads, shape.head_dim).float() if shape.qk_norm else None,
                output=self.linear(next(which), shape.hidden, wide, shape.o_bias),
                post_norm=self.noise(shape.hidden),
                gate_up=self.linear(next(which), 2 * shape.intermediate, shape.hidden, shape.mlp_bias),
                down=self.linear(next(which), shape.hidden, shape.intermediate, shape.mlp_bias),
                window=window,
            )
            for window in shape.windows
        ]
        embedding, head = self.noise(VOCAB, shape.hidden), native.pack(self.noise(VOCAB, shape.hidden))
        return Decoder(shape, embedding, layers, self.noise(shape.hidden), head, CONTEXT, 0, 0)

    def batch(self, counts: list[int]) -> Batch:
        """A batch of sequences that compute these numbers of tokens each, after a random number of past tokens."""
        spans, positions, slots, pages = [], [], [], 0
        for count in counts:
            length = int(self.whole(count, CONTEXT + 1, 1))
            table = [pages + i for i in range(-(-length // BLOCK_SIZE))]
            pages += len(table)
            spans.append(Span(len(positions), count, length, table[::-1]))
            for at in range(length - count, length):
                positions.append(at)
                slots.append(spans[-1].table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
        ids = self.whole(0, VOCAB, len(positions))
        return Batch(ids, *(torch.tensor(each, dtype=torch.int64) for each in (positions, slots)), spans)

    def adapt(self, batch: Batch, shape: Shape, ranks: list[int]) -> None:
        """Assign adapters of these ranks to rows; some rows have none, and adapters skip some of their layers."""
        rows = list(range(len(batch.token_ids)))[:: 2 if len(ranks) == 1 else 1]
        wide, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        linears = [
            (shape.hidden, [wide, kv, kv]),
            (wide, [shape.hidden]),
            (shape.hidden, [shape.intermediate] * 2),
            (shape.intermediate, [shape.hidden]),
        ]

        def site(number: int, into: int, outs: list[int], rank: int) -> list[native.LowRank]:
            parts = []
            for part, out in enumerate(outs):
                if (number + part) % 3 or rank == 5:
                    down, up = self.noise(rank, into) * into**-0.5, self.noise(out, rank) * rank**-0.5
                    parts.append(native.LowRank(sum(outs[:part]), down, up, 1.5))
            return parts

        groups = []
        for i, rank in enumerate(ranks):
            sites = [site(n, *linear, rank) for n, linear in enumerate(linears * shape.layers)]
            adapter = native.adapter(sites, torch.bfloat16, torch.device("cpu"))
            groups.append((adapter, rows[i :: len(ranks)]))
        if groups:
            batch.adapted = native.adapted(groups, torch.device("cpu"))


def shapes() -> st.SearchStrategy[Shape]:
    eights = st.integers(1, 12).map(lambda count: 8 * count)
    dims = st.sampled_from([(8, 8), (16, 12), (24, 24), (32, 16), (64, 64), (40, 0)])
    windows = st.lists(st.none() | st.integers(1, CONTEXT), min_size=1, max_size=3)

    def make(hidden, intermediate, kv_heads, fold, dims, windows, flags) -> Shape:
        rope = Rope(10000.0, dims[1])
        sizes = VOCAB, hidden, intermediate, fold * kv_heads, kv_heads, dims[0], 1e-6, rope, tuple(windows), CONTEXT
        return Shape(*sizes, False, *flags, False)

    flags = st.tuples(*[st.booleans()] * 4)
    return st.builds(make, eights, eights, st.integers(1, 3), st.integers(1, 4), dims, windows, flags)


def both(decoder: Decoder, batch: Batch, int8: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Hidden states and pages after one step, by one call and kernel by kernel, from pages with the same past."""
    used = sum(len(span.table) for span in batch.spans)
    past = Source(7)
    stores = [PagedKV(decoder.layers, used, torch.bfloat16, int8=int8) for _ in range(2)]
    for i, layer in enumerate(decoder.layers):
        keys, values = (
            past.noise(BLOCK_SIZE * used, layer.heads, layer.dim),
            past.noise(BLOCK_SIZE * used, layer.heads, layer.dim),
        )
        for pages in stores:
            pages.clear(list(range(used)))
            everywhere = torch.arange(BLOCK_SIZE * used)
            native.write(keys, values, pages.pool(i), native.places(everywhere, pages.pool(i).format))
    one = decoder.hidden(batch, stores[0])
    other = decoder.kernel_by_kernel(batch, stores[1])
    states = [
        [x, *(pages.pool(i).data for i in range(len(decoder.layers)))]
        for x, pages in zip((one, other), stores, strict=True)
    ]
    return states[0], states[1]


@settings(max_examples=40, deadline=None)
@given(
    shape=shapes(),
    formats=st.lists(st.sampled_from(FORMATS), min_size=12, max_size=12),
    counts=st.lists(st.integers(1, CONTEXT), max_size=3) | st.lists(st.just(1), max_size=20),
    int8=st.booleans(),
    number=st.integers(1, 3),
    seed=st.integers(0, 99),
    ranks=st.lists(st.sampled_from([1, 5, 16, 40]), max_size=3),
)
def test_fused_stack_equals_kernel_by_kernel(level, shape, formats, counts, int8, number, seed, ranks):
    source = Source(seed)
    decoder, batch = source.decoder(shape, formats), source.batch(counts)
    source.adapt(batch, shape, ranks)
    assert decoder.stack is not None
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    got, want = both(decoder, batch, int8)
    torch.set_num_threads(before)
    assert got[0].shape == (len(batch.token_ids), shape.hidden)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))  # compare bytes, since NaN != NaN


WIDE = Shape(
    VOCAB, 896, 4864, 14, 2, 64, 1e-6, Rope(1e6, 64), (None, 33), CONTEXT, False, True, False, False, False, False
)


@pytest.mark.parametrize("format", FORMATS)
def test_fused_stack_equals_kernel_by_kernel_at_real_width(level, format):
    source = Source(3)
    decoder = source.decoder(WIDE, [format] * 8)
    for counts in ([1], [1] * 13, [70, 1, 1, 60]):
        got, want = both(decoder, source.batch(counts), False)
        assert got[0].isfinite().all() and all(map(torch.equal, got, want))


def test_shapes_the_stack_cannot_run_fall_back_to_kernels(level):
    source = Source(4)
    shape = Shape(VOCAB, 44, 30, 2, 1, 10, 1e-6, Rope(1e4, 10), (None,), CONTEXT, False, *[False] * 5)
    decoder = source.decoder(shape, ["bf16", "int4", "int8", "bf16"])
    assert decoder.stack is None
    got, want = both(decoder, source.batch([5, 1]), False)
    assert got[0].isfinite().all() and all(map(torch.equal, got, want))


def test_fused_stack_rejects_out_of_range_tokens_and_positions(level):
    """Guards against reading outside the embedding or the rotary tables in C++."""
    source = Source(5)
    decoder, batch = source.decoder(WIDE, ["bf16"] * 8), source.batch([1])
    batch.positions[0] = CONTEXT
    with pytest.raises(IndexError):
        both(decoder, batch, False)
    batch.positions[0] = 0
    for token in (VOCAB, -1):
        batch.token_ids[0] = token
        with pytest.raises(IndexError):
            both(decoder, batch, False)


def test_selected_layers_compute_only_themselves(level):
    source = Source(6)
    decoder, batch = source.decoder(WIDE, ["bf16"] * 8), source.batch([9])
    got, want = both(decoder.select([1]), batch, False)
    assert all(map(torch.equal, got, want)) and not torch.equal(got[0], both(decoder, batch, False)[0][0])
