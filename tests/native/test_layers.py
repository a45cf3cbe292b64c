"""One call for all layers gives the bits of kernel by kernel, for all instruction sets, weight types and batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parley import native
from parley.core.sequence import BLOCK_SIZE
from parley.model.networks.config import DecoderConfig, RopeConfig
from parley.model.networks.decoder import FusedDecoder, make_rope_table
from parley.model.networks.network import MediaRows, PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.native import build, compiled, library
from parley.native.layer import DecoderLayer
from parley.native.layout import Span
from parley.native.torch_grouped import GroupedWeight

try:
    build.find_compiler()
except build.BuildError:
    pytest.skip("no C++ compiler", allow_module_level=True)

VOCAB, CONTEXT = 50, 80
FORMATS = ("bf16", "int8", "int4", "int4 in another order", "e4m3")


@pytest.fixture(scope="module", params=build.usable_levels())
def level(request):
    """Replaces the compiled kernels of ``parley.native`` with those of one level."""
    kernel_library = library.open_level(request.param)
    kernels = compiled.CompiledKernels(kernel_library)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(library, "load_kernels", lambda: kernel_library)
        patch.setattr(native, "compiled_kernels", lambda: kernels)
        yield


class RandomModel:
    """Random weights, batches and adapters for a model."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def random_bf16(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(torch.bfloat16)

    def random_integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def random_linear(self, weight_type: str, outputs: int, inputs: int, biased: bool) -> native.PackedWeight:
        bias = self.random_bf16(outputs) if biased else None
        if weight_type == "bf16":
            return native.pack_weight(self.random_bf16(outputs, inputs), bias)
        if weight_type == "int8":
            values = self.random_integers(-128, 128, outputs, inputs).to(torch.int8)
            return native.pack_int8(values, torch.rand(outputs, generator=self.generator) / 99, bias, torch.bfloat16)
        group = 32
        shape = outputs, -(-inputs // group)
        scales = torch.rand(*shape, generator=self.generator) / 9
        if weight_type == "e4m3":
            values = self.random_bf16(outputs, inputs).to(torch.float8_e4m3fn).view(torch.uint8)
            return native.pack_grouped(GroupedWeight(values, scales, None, group, code="e4m3"), bias, torch.bfloat16)
        order = torch.randperm(inputs, generator=self.generator) if weight_type != "int4" else None
        values, zeros = self.random_integers(0, 16, outputs, inputs).byte(), self.random_integers(0, 16, *shape).byte()
        return native.pack_grouped(GroupedWeight(values, scales, zeros, group, order), bias, torch.bfloat16)

    def build_decoder(self, shape: DecoderConfig, formats: list[str]) -> FusedDecoder:
        """``formats``: one weight type per linear layer, from the first to the last."""
        heads, attention_width = shape.heads + 2 * shape.kv_heads, shape.heads * shape.head_dim
        weight_types = iter(formats)
        layers = [
            DecoderLayer(
                input_norm=self.random_bf16(shape.hidden),
                qkv=self.random_linear(next(weight_types), heads * shape.head_dim, shape.hidden, shape.qkv_bias),
                head_norm=self.random_bf16(heads - shape.kv_heads, shape.head_dim).float() if shape.qk_norm else None,
                output=self.random_linear(next(weight_types), shape.hidden, attention_width, shape.o_bias),
                post_norm=self.random_bf16(shape.hidden),
                gate_up=self.random_linear(next(weight_types), 2 * shape.intermediate, shape.hidden, shape.mlp_bias),
                down=self.random_linear(next(weight_types), shape.hidden, shape.intermediate, shape.mlp_bias),
                window=window,
            )
            for window in shape.windows
        ]
        embedding, head = (
            self.random_bf16(VOCAB, shape.hidden),
            native.pack_weight(self.random_bf16(VOCAB, shape.hidden)),
        )
        angles = make_rope_table(shape, CONTEXT, embedding.device)
        return FusedDecoder(shape, embedding, layers, self.random_bf16(shape.hidden), head, angles, 0, 0)

    def build_batch(self, counts: list[int]) -> PackedBatch:
        """A batch of sequences that compute these numbers of tokens each, after a random number of past tokens."""
        spans, positions, slots, pages = [], [], [], 0
        for count in counts:
            length = int(self.random_integers(count, CONTEXT + 1, 1))
            table = [pages + i for i in range(-(-length // BLOCK_SIZE))]
            pages += len(table)
            spans.append(Span(len(positions), count, length, table[::-1]))
            for position in range(length - count, length):
                positions.append(position)
                slots.append(spans[-1].table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        ids = self.random_integers(0, VOCAB, len(positions))
        return PackedBatch(ids, *(torch.tensor(each, dtype=torch.int64) for each in (positions, slots)), spans)

    def assign_adapters(self, batch: PackedBatch, shape: DecoderConfig, ranks: list[int]) -> None:
        """Assign adapters of these ranks to rows; some rows have none, and adapters skip some of their layers."""
        rows = list(range(len(batch.token_ids)))[:: 2 if len(ranks) == 1 else 1]
        attention_width, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        linears = [
            (shape.hidden, [attention_width, kv, kv]),
            (attention_width, [shape.hidden]),
            (shape.hidden, [shape.intermediate] * 2),
            (shape.intermediate, [shape.hidden]),
        ]

        def random_site(number: int, into: int, outs: list[int], rank: int) -> list[native.LowRank]:
            parts = []
            for part, out in enumerate(outs):
                if (number + part) % 3 or rank == 5:
                    down, up = self.random_bf16(rank, into) * into**-0.5, self.random_bf16(out, rank) * rank**-0.5
                    parts.append(native.LowRank(sum(outs[:part]), down, up, 1.5))
            return parts

        groups = []
        for i, rank in enumerate(ranks):
            sites = [random_site(n, *linear, rank) for n, linear in enumerate(linears * shape.layer_count)]
            adapter = native.pack_lora(sites, torch.bfloat16, torch.device("cpu"))
            groups.append((adapter, rows[i :: len(ranks)]))
        if groups:
            batch.adapted = native.group_lora_rows(groups, torch.device("cpu"))

    def add_media(self, batch: PackedBatch, shape: DecoderConfig, deep: int) -> None:
        """Give some tokens embeddings of an encoder, and all tokens positions on three axes."""
        count = len(batch.token_ids)
        tokens = torch.randperm(count, generator=self.generator)[: -(-count // 2)]
        rows = [self.random_bf16(len(tokens), shape.hidden) for _ in range(1 + deep)]
        batch.media = MediaRows(tokens, rows[0], rows[1:])
        batch.token_ids[tokens] = VOCAB + 5  # placeholders may lie beyond the embedding table
        if shape.rope.mrope_section:
            batch.rope_positions = self.random_integers(0, CONTEXT, 3, count)


def decoder_configs() -> st.SearchStrategy[DecoderConfig]:
    eights = st.integers(1, 12).map(lambda count: 8 * count)
    dims = st.sampled_from([(8, 8), (16, 12), (24, 24), (32, 16), (64, 64), (40, 0)])
    windows = st.lists(st.none() | st.integers(1, CONTEXT), min_size=1, max_size=3)

    def build_config(hidden, intermediate, kv_heads, fold, dims, windows, flags, axes) -> DecoderConfig:
        half = dims[1] // 2
        section = (half - half // 2, half // 4, half // 2 - half // 4) if half and axes else ()
        rope = RopeConfig(10000.0, dims[1], mrope_section=section, mrope_interleaved=axes == "interleaved")
        sizes = VOCAB, hidden, intermediate, fold * kv_heads, kv_heads, dims[0], 1e-6, rope, tuple(windows), CONTEXT
        return DecoderConfig(*sizes, False, *flags, False)

    flags = st.tuples(*[st.booleans()] * 4)
    axes = st.sampled_from([None, "blocks", "interleaved"])
    return st.builds(build_config, eights, eights, st.integers(1, 3), st.integers(1, 4), dims, windows, flags, axes)


def run_both_ways(
    decoder: FusedDecoder, batch: PackedBatch, int8: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Hidden states and pages after one step, by one call and kernel by kernel, from pages with the same past."""
    used = sum(len(span.table) for span in batch.spans)
    past = RandomModel(7)
    stores = [PagedKV(decoder.layers, used, torch.bfloat16, int8=int8) for _ in range(2)]
    for i, layer in enumerate(decoder.layers):
        keys, values = (
            past.random_bf16(BLOCK_SIZE * used, layer.heads, layer.dim),
            past.random_bf16(BLOCK_SIZE * used, layer.heads, layer.dim),
        )
        for pages in stores:
            pages.clear_pages(list(range(used)))
            everywhere = torch.arange(BLOCK_SIZE * used)
            native.write_kv(
                keys, values, pages.layer_pool(i), native.write_indices(everywhere, pages.layer_pool(i).page_format)
            )
    stack_hidden = decoder.compute_hidden(batch, stores[0])
    kernel_hidden = decoder.kernel_by_kernel(batch, stores[1])
    states = [
        [x, *(pages.layer_pool(i).data for i in range(len(decoder.layers)))]
        for x, pages in zip((stack_hidden, kernel_hidden), stores, strict=True)
    ]
    return states[0], states[1]


@settings(max_examples=40, deadline=None)
@given(
    shape=decoder_configs(),
    formats=st.lists(st.sampled_from(FORMATS), min_size=12, max_size=12),
    counts=st.lists(st.integers(1, CONTEXT), max_size=3) | st.lists(st.just(1), max_size=20),
    int8=st.booleans(),
    number=st.integers(1, 3),
    seed=st.integers(0, 99),
    ranks=st.lists(st.sampled_from([1, 5, 16, 40]), max_size=3),
    media=st.booleans(),
)
def test_fused_stack_equals_kernel_by_kernel(level, shape, formats, counts, int8, number, seed, ranks, media):
    source = RandomModel(seed)
    decoder, batch = source.build_decoder(shape, formats), source.build_batch(counts)
    source.assign_adapters(batch, shape, ranks)
    if media:
        source.add_media(batch, shape, deep=0)
    assert decoder.stack is not None
    old_threads = torch.get_num_threads()
    torch.set_num_threads(number)
    actual, expected = run_both_ways(decoder, batch, int8)
    torch.set_num_threads(old_threads)
    assert actual[0].shape == (len(batch.token_ids), shape.hidden)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))  # compare bytes, since NaN != NaN


REAL_WIDTH = DecoderConfig(
    VOCAB, 896, 4864, 14, 2, 64, 1e-6, RopeConfig(1e6, 64), (None, 33), CONTEXT, False, True, False, False, False, False
)


MROPE = replace(REAL_WIDTH, rope=RopeConfig(1e6, 64, mrope_section=(8, 12, 12)))


@pytest.mark.parametrize("weight_format", ["bf16", "int8"])
def test_text_keeps_its_bits_beside_media(level, weight_format):
    """Guards against bits that depend on whether other rows of the step have embeddings of an encoder."""
    texts, after = [], []
    for deep in (None, 0, 2):
        source = RandomModel(3)
        decoder, batch = source.build_decoder(MROPE, [weight_format] * 8), source.build_batch([30, 1, 40])
        if deep is not None:
            tokens, rows = torch.arange(10, 20), [source.random_bf16(10, MROPE.hidden) for _ in range(1 + deep)]
            batch.media = MediaRows(tokens, rows[0], rows[1:])
            batch.rope_positions = batch.positions.repeat(3, 1)
            batch.rope_positions[1:, tokens] -= 3
        hidden = run_both_ways(decoder, batch, False)[0][0]
        texts.append(torch.cat((hidden[:10], hidden[30:])))
        after.append(hidden[20:30])
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    assert not torch.equal(after[0], after[1]) and not torch.equal(after[1], after[2])


@pytest.mark.parametrize("weight_format", FORMATS)
def test_fused_stack_equals_kernel_by_kernel_at_real_width(level, weight_format):
    source = RandomModel(3)
    decoder = source.build_decoder(REAL_WIDTH, [weight_format] * 8)
    for counts in ([1], [1] * 13, [70, 1, 1, 60]):
        actual, expected = run_both_ways(decoder, source.build_batch(counts), False)
        assert actual[0].isfinite().all() and all(map(torch.equal, actual, expected))


def test_shapes_the_stack_cannot_run_fall_back_to_kernels(level):
    source = RandomModel(4)
    shape = DecoderConfig(VOCAB, 44, 30, 2, 1, 10, 1e-6, RopeConfig(1e4, 10), (None,), CONTEXT, False, *[False] * 5)
    decoder = source.build_decoder(shape, ["bf16", "int4", "int8", "bf16"])
    assert decoder.stack is None
    actual, expected = run_both_ways(decoder, source.build_batch([5, 1]), False)
    assert actual[0].isfinite().all() and all(map(torch.equal, actual, expected))


def test_fused_stack_rejects_out_of_range_tokens_and_positions(level):
    """Guards against reading outside the embedding or the rotary tables in C++."""
    source = RandomModel(5)
    decoder, batch = source.build_decoder(REAL_WIDTH, ["bf16"] * 8), source.build_batch([1])
    batch.positions[0] = CONTEXT
    with pytest.raises(IndexError):
        run_both_ways(decoder, batch, False)
    batch.positions[0] = 0
    for token in (VOCAB, -1):
        batch.token_ids[0] = token
        with pytest.raises(IndexError):
            run_both_ways(decoder, batch, False)


def test_selected_layers_compute_only_themselves(level):
    source = RandomModel(6)
    decoder, batch = source.build_decoder(REAL_WIDTH, ["bf16"] * 8), source.build_batch([9])
    actual, expected = run_both_ways(decoder.select_layers([1]), batch, False)
    assert all(map(torch.equal, actual, expected)) and not torch.equal(
        actual[0], run_both_ways(decoder, batch, False)[0][0]
    )
