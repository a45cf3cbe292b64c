"""One call for all layers gives the bits of kernel by kernel, for all instruction sets, weight types and batches."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parley import native
from parley.core.sequence import PAGE_SIZE
from parley.model.networks.decoder import FusedDecoder
from parley.model.networks.decoder_config import BIASED_LAYER_NORMS, DecoderConfig, MixtureShape, NormForm, QueryScaling
from parley.model.networks.decoder_tensors import LLAMA_TENSORS, TensorNames
from parley.model.networks.network import MediaRows, PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.model.networks.position_tables import make_rope_table
from parley.model.networks.rope import RopeConfig
from parley.native import build, kernel_choice, library
from parley.native.compiled_forms.compiled_kernels import CompiledKernels
from parley.native.compiled_forms.compiled_layers import LAYER_NORMS
from parley.native.layer import DecoderLayer
from parley.native.layer_shape import ACTIVATIONS, LayerShape
from parley.native.layout import RowSpan
from parley.native.torch_forms.torch_grouped import GroupedWeight

try:
    build.find_compiler()
except build.BuildError:
    pytest.skip("no C++ compiler", allow_module_level=True)

VOCAB, CONTEXT = 50, 80
LATENT_SHAPES = native.LatentShape(32, 16, 8, 24), native.LatentShape(40, 8, 16, 8, 24)
IS_NIGHT = bool(os.environ.get("PARLEY_NIGHTLY"))
FORMATS = ("bf16", "int8", "int4", "int4 in another order", "e4m3", "e2m1")


@pytest.fixture(scope="module", params=build.usable_levels())
def level(request):
    """Replaces the compiled kernels of ``parley.native`` with those of one level."""
    kernel_library = library.open_level(request.param)
    kernels = CompiledKernels(kernel_library)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(library, "load_kernels", lambda: kernel_library)
        patch.setattr(kernel_choice, "compiled_kernels", lambda: kernels)
        yield request.param


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
        if weight_type == "e2m1":
            values, out_scales = self.random_integers(0, 16, outputs, inputs).byte(), torch.ones(outputs) / 3
            floats = GroupedWeight(values, scales.bfloat16(), None, group, code="e2m1", out_scales=out_scales)
            return native.pack_grouped(floats, bias, torch.bfloat16)
        order = torch.randperm(inputs, generator=self.generator) if weight_type != "int4" else None
        values, zeros = self.random_integers(0, 16, outputs, inputs).byte(), self.random_integers(0, 16, *shape).byte()
        return native.pack_grouped(GroupedWeight(values, scales, zeros, group, order), bias, torch.bfloat16)

    def build_decoder(self, shape: DecoderConfig, formats: list[str]) -> FusedDecoder:
        """``formats``: one weight type per linear layer, from the first to the last."""
        weight_types = cycle(formats)

        def random_site(site: str, outputs: int, inputs: int) -> native.PackedWeight:
            return self.random_linear(next(weight_types), outputs, inputs, site in shape.biases)

        def random_mlp_site(layer: LayerShape, site: str, outputs: int, inputs: int) -> native.PackedWeight | None:
            return random_site(site, outputs, inputs) if layer.routing is None or layer.routing.shared else None

        def random_experts(routing: native.Routing, outputs: int, inputs: int) -> native.PackedWeight:
            kind = next(weight_types).removesuffix(" in another order")
            experts = (
                self.random_linear(kind, outputs, inputs, "experts" in shape.biases) for _ in range(routing.experts)
            )
            return native.stack_experts(experts, routing.experts)

        def random_mixture(layer: LayerShape) -> native.Mixture | None:
            routing = layer.routing
            if routing is None:
                return None
            gate_up = random_experts(routing, (1 + layer.is_gated) * shape.mixture.expert_width, shape.hidden_size)
            down = random_experts(routing, shape.hidden_size, shape.mixture.expert_width)
            experts = native.Experts(routing.experts, gate_up, down, layer.is_gated)
            numbers = routing.experts + (routing.shared == 2)
            router = self.random_linear("bf16", numbers, shape.hidden_size, "experts" in shape.biases)
            return native.Mixture(router, self.random_bf16(routing.experts).float(), experts)

        def random_latents(sizes: native.LatentShape | None) -> dict[str, Any]:
            if sizes is None:
                return {}
            names = {"latent_norm": sizes.rank}
            parts: dict[str, Any] = {}
            if sizes.query_rank:
                names["query_latent_norm"] = sizes.query_rank
                parts["query_up"] = random_site("query_up", shape.heads * sizes.head_dim, sizes.query_rank)
            norms = {name: native.Norm(self.random_bf16(width).float(), 1e-6) for name, width in names.items()}
            key_up = native.pack_heads(self.random_bf16(shape.heads, sizes.rank, sizes.plain_dim))
            value_up = native.pack_heads(self.random_bf16(shape.heads, sizes.value_dim, sizes.rank))
            return {**norms, **parts, "key_up": key_up, "value_up": value_up}

        heads, (qkv_width, attention_width) = shape.heads + 2 * shape.kv_heads, attention_sizes(shape)
        layers = [
            DecoderLayer(
                **random_latents(shape.latent),
                qkv=random_site("qkv", qkv_width, shape.hidden_size),
                output=random_site("output", shape.hidden_size, attention_width),
                gate_up=random_mlp_site(
                    layer, "gate_up", (1 + layer.is_gated) * shape.intermediate_size, shape.hidden_size
                ),
                down=random_mlp_site(layer, "down", shape.hidden_size, shape.intermediate_size),
                mixture=random_mixture(layer),
                attention_norm=self.random_norm(shape, shape.tensors.attention_norm),
                attention_after_norm=self.random_norm(shape, shape.tensors.attention_after_norm),
                mlp_norm=self.random_norm(shape, shape.tensors.mlp_norm),
                mlp_after_norm=self.random_norm(shape, shape.tensors.mlp_after_norm),
                head_norm=self.random_head_norm(heads - shape.kv_heads, shape) if shape.tensors.query_norm else None,
                sinks=self.random_bf16(shape.heads).float() if shape.tensors.sinks else None,
                slopes=torch.tensor(layer.slopes) if layer.slopes else None,
                activation_factors=(0.8, 0.7, 0.5),
            )
            for layer in shape.layers
        ]
        embedding, head = (
            self.random_bf16(VOCAB, shape.hidden_size),
            native.pack_weight(self.random_bf16(VOCAB, shape.hidden_size)),
        )
        angles = make_rope_table(shape, CONTEXT, embedding.device)
        norm = self.random_norm(shape, shape.tensors.norm)
        return FusedDecoder(shape, embedding, layers, norm, head, angles, 0, 0)

    def random_norm(self, shape: DecoderConfig, name: str | None) -> native.Norm | None:
        if name is None:
            return None
        bias = self.random_bf16(shape.hidden_size).float() if shape.norms.has_bias else None
        return native.Norm(self.random_bf16(shape.hidden_size).float(), shape.eps, bias, shape.norms.is_centered)

    def random_head_norm(self, heads: int, shape: DecoderConfig) -> native.Norm:
        size = heads, shape.head_dim
        if shape.layers[0].has_whole_qk_norm:
            return native.Norm(self.random_bf16(*size).float(), shape.eps)
        bias = self.random_bf16(*size).float() if shape.norms.has_bias else None
        return native.Norm(self.random_bf16(*size).float(), shape.eps, bias, shape.norms.is_centered)

    def build_batch(self, counts: list[int]) -> PackedBatch:
        """A batch of sequences that compute these numbers of tokens each, after a random number of past tokens."""
        spans, positions, slots, pages = [], [], [], 0
        for count in counts:
            length = int(self.random_integers(count, CONTEXT + 1, 1))
            table = [pages + i for i in range(-(-length // PAGE_SIZE))]
            pages += len(table)
            spans.append(RowSpan(len(positions), count, length, table[::-1]))
            for position in range(length - count, length):
                positions.append(position)
                slots.append(spans[-1].table[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
        ids = self.random_integers(0, VOCAB, len(positions))
        return PackedBatch(ids, *(torch.tensor(numbers, dtype=torch.int64) for numbers in (positions, slots)), spans)

    def assign_adapters(self, batch: PackedBatch, shape: DecoderConfig, ranks: list[int]) -> None:
        """Assign adapters of these ranks to rows; some rows have none, and adapters skip some of their layers."""
        rows = list(range(len(batch.token_ids)))[:: 2 if len(ranks) == 1 else 1]
        (qkv_width, attention_width), latent = attention_sizes(shape), shape.latent
        kv, queries = shape.kv_heads * shape.head_dim, shape.heads * shape.head_dim
        linears = [
            (
                shape.hidden_size,
                [queries, kv, kv] if latent is None else [qkv_width - latent.stored_dim, latent.stored_dim],
            ),
            (attention_width, [shape.hidden_size]),
            (shape.hidden_size, [shape.intermediate_size] * (1 + shape.layers[0].is_gated)),
            (shape.intermediate_size, [shape.hidden_size]),
            (latent.query_rank, [queries]) if latent is not None and latent.query_rank else (1, []),
        ]

        def random_site(number: int, in_features: int, outs: list[int], rank: int) -> list[native.LowRank]:
            parts = []
            for part, out_features in enumerate(outs):
                if (number + part) % 3 or rank == 5:
                    down, up = (
                        self.random_bf16(rank, in_features) * in_features**-0.5,
                        self.random_bf16(out_features, rank) * rank**-0.5,
                    )
                    parts.append(native.LowRank(sum(outs[:part]), down, up, 1.5))
            return parts

        groups = []
        for i, rank in enumerate(ranks):
            sites = [random_site(n, *linear, rank) for n, linear in enumerate(linears * shape.layer_count)]
            adapter = native.pack_lora(sites, torch.bfloat16, torch.device("cpu"))
            groups.append((adapter, rows[i :: len(ranks)]))
        if groups:
            batch.lora_rows = native.group_lora_rows(groups, torch.device("cpu"))

    def add_media(self, batch: PackedBatch, shape: DecoderConfig, deep: int) -> None:
        """Give some tokens embeddings of an encoder, and all tokens positions on three axes."""
        count = len(batch.token_ids)
        tokens = torch.randperm(count, generator=self.generator)[: -(-count // 2)]
        rows = [self.random_bf16(len(tokens), shape.hidden_size) for _ in range(1 + deep)]
        batch.media = MediaRows(tokens, rows[0], rows[1:])
        batch.token_ids[tokens] = VOCAB + 5  # placeholders may lie beyond the embedding table
        if shape.rope.mrope_section:
            batch.rope_positions = self.random_integers(0, CONTEXT, 3, count)


def attention_sizes(shape: DecoderConfig) -> tuple[int, int]:
    """The outputs of qkv, and the inputs of the output layer."""
    queries, latent = shape.heads * shape.head_dim, shape.latent
    if latent is None:
        return queries + 2 * shape.kv_heads * shape.head_dim, queries
    return (latent.query_rank or queries) + latent.stored_dim, shape.heads * latent.value_dim


def decoder_configs() -> st.SearchStrategy[DecoderConfig]:
    """Configs of every variation that a layer may have."""
    eights = st.integers(1, 12).map(lambda count: 8 * count)
    dims = st.sampled_from([(8, 8), (16, 12), (24, 24), (32, 16), (64, 64), (40, 0)])
    axes = st.sampled_from([None, "blocks", "interleaved"])

    @st.composite
    def build_config(draw) -> DecoderConfig:
        kv_heads, (dim, rotary), mrope = draw(st.integers(1, 3)), draw(dims), draw(axes)
        latent, heads = draw(st.sampled_from([None, *LATENT_SHAPES])), draw(st.integers(1, 4)) * kv_heads
        if latent is not None:
            kv_heads, dim, rotary, mrope = heads, latent.head_dim, latent.rotary_dim, None
        half, are_heads_normed = rotary // 2, latent is None and draw(st.booleans())
        section = (half - half // 2, half // 4, half // 2 - half // 4) if half and mrope else ()
        rope = RopeConfig(
            10000.0,
            rotary,
            mrope_section=section,
            mrope_interleaved=mrope == "interleaved",
            is_interleaved=draw(st.booleans()),
        )
        ropes = (rope,) if section else (rope, replace(rope, theta=500.0))
        layer = LayerShape(
            score_scale=dim**-0.5,
            slopes=tuple(0.1 / (1 + i) for i in range(heads)) if draw(st.booleans()) else (),
            is_qk_norm_late=draw(st.booleans()),
            has_scaled_queries=draw(st.booleans()),
            softcap=draw(st.sampled_from([None, 20.0])),
            has_whole_qk_norm=draw(st.booleans()),
            activation=draw(st.sampled_from(ACTIVATIONS)),
            is_gated=draw(st.booleans()),
            is_parallel=draw(st.booleans()),
            residual_scale=draw(st.sampled_from([1.0, 0.22])),
        )
        windows = draw(st.lists(st.none() | st.integers(1, CONTEXT), min_size=1, max_size=3))
        shared = draw(st.integers(0, 2))
        chunks = st.sampled_from([None, None, 1, 20, 64])
        groups = {"groups": 3, "chosen_groups": 2, "sigmoid": True, "normalized": True} if draw(st.booleans()) else {}
        margin = -1.0 if groups else draw(st.sampled_from([-1.0, -1.0, 0.5]))
        routing = native.Routing(
            experts=6,
            experts_per_token=draw(st.integers(1, 3)),
            shared=shared,
            weighs_inputs=draw(st.booleans()),
            chooses_by_logits=draw(st.booleans()),
            margin=margin,
            **groups,
        )
        routings = st.sampled_from([None] if layer.activation == "xielu" else [None, routing])
        numbers = st.sampled_from([*range(len(ropes)), *[None] * (latent is None)])
        norms = {name: draw(st.sampled_from([None, "norm"])) for name in LAYER_NORMS[:4]}
        return DecoderConfig(
            vocab_size=VOCAB,
            hidden_size=draw(eights),
            intermediate_size=draw(eights),
            heads=heads,
            kv_heads=kv_heads,
            latent=latent,
            head_dim=dim,
            max_len=CONTEXT,
            eps=1e-6,
            ropes=ropes,
            layers=tuple(
                replace(layer, window=window, chunk=draw(chunks), rope=draw(numbers), routing=draw(routings))
                for window in windows
            ),
            mixture=MixtureShape(draw(eights)),
            biases=draw(st.frozensets(st.sampled_from(["qkv", "output", "gate_up", "down", "experts"]))),
            tensors=TensorNames(
                **norms, query_norm="norm" if are_heads_normed else None, sinks=draw(st.sampled_from([None, "sinks"]))
            ),
            norms=NormForm(is_centered=draw(st.booleans()), has_bias=draw(st.booleans())),
            embedding_scale=draw(st.sampled_from([1.0, 7.3])),
            query_scaling=QueryScaling(length=16, weight=0.3, shift=1),
        )

    return build_config()


def pages_with_past(decoder: FusedDecoder, batch: PackedBatch, int8: bool = False) -> PagedKV:
    """Return pages that are full of random keys and values, always the same ones."""
    used = sum(len(span.table) for span in batch.spans)
    past = RandomModel(7)
    pages = PagedKV(decoder.kv_layers, used, torch.bfloat16, int8=int8)
    pages.clear_pages(list(range(used)))
    for i, layer in enumerate(decoder.kv_layers):
        keys, values = (past.random_bf16(PAGE_SIZE * used, layer.heads, dim) for dim in (layer.dim, layer.value_dim))
        places = native.write_indices(torch.arange(PAGE_SIZE * used), pages.layer_pool(i).page_format)
        native.write_kv(keys, values, pages.layer_pool(i), places)
    return pages


def run_both_ways(
    decoder: FusedDecoder, batch: PackedBatch, int8: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Hidden states and pages after one step, by one call and kernel by kernel, from pages with the same past."""
    stores = [pages_with_past(decoder, batch, int8)]
    stores.append(PagedKV(stores[0].kv_layers, stores[0].page_count, torch.bfloat16, int8=int8))
    for i in range(len(decoder.kv_layers)):
        stores[1].layer_pool(i).data.copy_(stores[0].layer_pool(i).data)
    stack_hidden = decoder.compute_hidden(batch, stores[0])
    kernel_hidden = decoder.kernel_by_kernel(batch, stores[1])
    states = [
        [x, *(pages.layer_pool(i).data for i in range(len(decoder.kv_layers)))]
        for x, pages in zip((stack_hidden, kernel_hidden), stores, strict=True)
    ]
    return states[0], states[1]


def select_results(hidden: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Return the rows of the result that are read."""
    ends = [span.first + span.count for span in batch.spans]
    counts = batch.result_counts or []
    return torch.cat([hidden[end - count : end] for end, count in zip(ends, counts, strict=True)] or [hidden])


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
    read=st.none() | st.lists(st.integers(0, CONTEXT), min_size=20, max_size=20),
)
def test_fused_stack_equals_kernel_by_kernel(level, shape, formats, counts, int8, number, seed, ranks, media, read):
    source = RandomModel(seed)
    decoder, batch = source.build_decoder(shape, formats), source.build_batch(counts)
    source.assign_adapters(batch, shape, ranks)
    if media:
        source.add_media(batch, shape, deep=0)
    if read is not None:
        batch.result_counts = list(map(min, counts, read))
    assert decoder.stack is not None
    old_threads = torch.get_num_threads()
    torch.set_num_threads(number)
    actual, expected = run_both_ways(decoder, batch, int8)
    torch.set_num_threads(old_threads)
    assert actual[0].shape == (len(batch.token_ids), shape.hidden_size)
    if batch.result_counts is not None:
        actual[0], expected[0] = (select_results(hidden, batch) for hidden in (actual[0], expected[0]))
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))  # compare bytes, since NaN != NaN


REAL_WIDTH = DecoderConfig(
    VOCAB,
    896,
    4864,
    14,
    2,
    64,
    CONTEXT,
    1e-6,
    ropes=(RopeConfig(1e6, 64),),
    layers=(LayerShape(0.125), LayerShape(0.125, window=33)),
    biases=frozenset({"qkv"}),
)
# A small scale, so that attention spreads over many tokens in spite of large random weights.
MROPE = replace(
    REAL_WIDTH,
    ropes=(RopeConfig(1e6, 64, mrope_section=(8, 12, 12)),),
    layers=(LayerShape(1e-4), LayerShape(1e-4, window=33)),
)
# The attention of DeepSeek-V3, with fewer heads. A small scale, because random queries and keys are large.
DEEPSEEK_LATENT = native.LatentShape(512, 64, 128, 128, 256)
DEEPSEEK = replace(
    REAL_WIDTH,
    heads=4,
    kv_heads=4,
    head_dim=DEEPSEEK_LATENT.head_dim,
    ropes=(RopeConfig(1e4, 64, is_interleaved=True),),
    layers=(LayerShape(1e-4), LayerShape(1e-3)),
    latent=DEEPSEEK_LATENT,
    biases=frozenset(),
)
# Every variation of a layer at once.
ODD_LAYER = LayerShape(
    0.1,
    rope=1,
    softcap=30.0,
    has_whole_qk_norm=True,
    activation="gelu",
    is_gated=False,
    is_parallel=True,
    residual_scale=0.3,
)
ODD = replace(
    REAL_WIDTH,
    ropes=tuple(RopeConfig(theta, 32, is_interleaved=True) for theta in (1e4, 1e6)),
    layers=(ODD_LAYER, replace(ODD_LAYER, rope=0, window=20, activation="gelu_tanh", is_parallel=False)),
    tensors=replace(
        LLAMA_TENSORS, attention_after_norm="a", mlp_after_norm="b", query_norm="q", key_norm="k", sinks="s"
    ),
    norms=BIASED_LAYER_NORMS,
    embedding_scale=29.93,
)


@pytest.mark.parametrize("weight_format", ["bf16", "int8"])
def test_text_keeps_its_bits_in_a_batch_with_media(level, weight_format):
    """Guards against bits that depend on whether other rows of the step have embeddings of an encoder."""
    source, texts, after = RandomModel(3), [], []
    decoder, text = source.build_decoder(MROPE, [weight_format] * 8), source.build_batch([30, 1, 40])
    # Large ones, as later tokens see a small part of them only.
    tokens, rows = torch.arange(10, 20), [16 * source.random_bf16(10, MROPE.hidden_size) for _ in range(3)]
    for deep in (None, 0, 2):
        batch = replace(text)
        if deep is not None:
            batch.media = MediaRows(tokens, rows[0], rows[1 : 1 + deep])
            batch.rope_positions = batch.positions.repeat(3, 1)
            batch.rope_positions[1:, tokens] -= 3
        hidden = decoder.compute_hidden(batch, pages_with_past(decoder, batch))
        texts.append(torch.cat((hidden[:10], hidden[30:])))
        after.append(hidden[20:30])
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    assert not torch.equal(after[0], after[1]) and not torch.equal(after[1], after[2])


@pytest.mark.parametrize(
    ("shape", "weight_format"),
    [
        *((REAL_WIDTH, weight_format) for weight_format in FORMATS),
        (ODD, "bf16"),
        (ODD, "int8"),
        (DEEPSEEK, "bf16"),
        (DEEPSEEK, "int8"),
    ],
)
def test_fused_stack_equals_kernel_by_kernel_at_real_width(level, shape, weight_format):
    if level == "generic" and shape is REAL_WIDTH and weight_format != "int4" and not IS_NIGHT:
        pytest.skip("takes seconds without vectors: PARLEY_NIGHTLY=1")
    source = RandomModel(3)
    decoder = source.build_decoder(shape, [weight_format] * 8)
    for counts, read in (([1], None), ([1] * 13, None), ([70, 1, 1, 60], None), ([70, 1, 9, 60], [0, 1, 0, 3])):
        batch = source.build_batch(counts)
        batch.result_counts = read
        actual, expected = run_both_ways(decoder, batch, False)
        if read is not None:
            actual[0], expected[0] = (select_results(hidden, batch) for hidden in (actual[0], expected[0]))
        assert actual[0].isfinite().all() and all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("formats", [("bf16", "bf16"), ("bf16", "int8"), ("int8", "bf16"), ("int8", "int8")])
def test_gates_computed_within_a_product_have_the_bits_of_two_steps(level, formats, activation):
    """With AVX-512, products of more than a few rows multiply gates at once. Adapters need the two steps."""
    source = RandomModel(8)
    shape = replace(
        REAL_WIDTH,
        intermediate_size=96,
        layers=tuple(replace(layer, activation=activation) for layer in REAL_WIDTH.layers),
        biases=frozenset({"gate_up"}),
    )
    decoder = source.build_decoder(shape, ["bf16", "bf16", *formats])
    batch = source.build_batch([33, 1, 1])
    at_once, expected = run_both_ways(decoder, batch, False)
    assert at_once[0].isfinite().all() and all(map(torch.equal, at_once, expected))
    source.assign_adapters(batch, shape, [1])
    adapted = decoder.compute_hidden(batch, pages_with_past(decoder, batch))
    row = 33  # a sequence of its own, and without an adapter
    assert torch.equal(adapted[row], at_once[0][row]) and not torch.equal(adapted, at_once[0])


def test_shapes_the_stack_cannot_run_fall_back_to_kernels(level):
    source = RandomModel(4)
    shape = DecoderConfig(VOCAB, 44, 30, 2, 1, 10, CONTEXT, 1e-6, (RopeConfig(1e4, 10),), (LayerShape(0.3),))
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
    whole = decoder.compute_hidden(batch, pages_with_past(decoder, batch))
    assert all(map(torch.equal, actual, expected)) and not torch.equal(actual[0], whole)
