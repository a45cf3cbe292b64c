"""Whole layers of real width on the compiled kernels: a row has the same bits in a batch of any size.

The kernels' own tests show this for each kernel; here they all run one after another, with pages, at the widths of a
0.5B and an 8B model.
"""

from __future__ import annotations

import os

import pytest
import torch

from parley import native
from parley.core.sequence import PAGE_SIZE
from parley.model.networks.decoder import FusedDecoder
from parley.model.networks.decoder_config import DecoderConfig
from parley.model.networks.network import PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.model.networks.position_tables import make_rope_table
from parley.model.networks.rope import RopeConfig
from parley.native.layer import DecoderLayer
from parley.native.layout import RowSpan

# Every size of a small batch by night; else those around the widths of the kernels' tiles.
COUNTS = (
    [*range(1, 65), 100, 128, 256, 512] if os.environ.get("PARLEY_NIGHTLY") else [2, 5, 8, 17, 31, 33, 64, 100, 256]
)
ROWS = max(COUNTS)
SINGLES = range(0, ROWS, 8 if os.environ.get("PARLEY_NIGHTLY") else 64)  # the rows that also make a batch of their own
PAST = 20  # tokens before each row, so that it reads more than its own page
PAGES = 2  # per sequence
VOCAB = 64

SMALL = {"hidden_size": 896, "intermediate_size": 4864, "heads": 14, "kv_heads": 2, "head_dim": 64}
LARGE = {"hidden_size": 4096, "intermediate_size": 11008, "heads": 32, "kv_heads": 8, "head_dim": 128}


def build_decoder(size: dict[str, int], kind: str, layers: int) -> FusedDecoder:
    """Layers of random weights; all of them share the weights, because separate ones would not fit in memory."""
    generator = torch.Generator().manual_seed(0)

    def random_weight(out_features: int, in_features: int, kind: str = kind) -> native.PackedWeight:
        numbers = torch.randn(out_features, in_features, generator=generator).mul_(in_features**-0.5)
        if kind == "bf16":
            return native.pack_weight(numbers.bfloat16())
        scales = numbers.abs().amax(1) / 127
        values = (numbers / scales[:, None]).round().to(torch.int8)
        return native.pack_int8(values, scales, None, torch.bfloat16)

    shape = DecoderConfig(
        vocab_size=VOCAB,
        **size,
        eps=1e-6,
        ropes=(RopeConfig(10000.0, size["head_dim"]),),
        layers=(native.LayerShape(size["head_dim"] ** -0.5),) * layers,
        max_len=64,
    )
    attention_width = shape.heads * shape.head_dim
    ones = native.Norm(torch.ones(shape.hidden_size), 1e-6)
    layer = DecoderLayer(
        attention_norm=ones,
        qkv=random_weight(attention_width + 2 * shape.kv_heads * shape.head_dim, shape.hidden_size),
        output=random_weight(shape.hidden_size, attention_width),
        mlp_norm=ones,
        gate_up=random_weight(2 * shape.intermediate_size, shape.hidden_size),
        down=random_weight(shape.hidden_size, shape.intermediate_size),
    )
    embedding = torch.randn(VOCAB, shape.hidden_size, generator=generator).bfloat16()
    head, angles = random_weight(VOCAB, shape.hidden_size, "bf16"), make_rope_table(shape, 64, embedding.device)
    return FusedDecoder(shape, embedding, [layer] * layers, ones, head, angles, 0, 0)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize(("size", "layers"), [(SMALL, 4), (LARGE, 2)], ids=["0.5B", "8B"])
@torch.inference_mode()
def test_row_of_real_width_layers_is_batch_invariant(size, layers, kind):
    if native.packed_layout_id() is None:
        pytest.skip("torch's kernels guarantee this only up to a width of 1,024")
    model = build_decoder(size, kind, layers)
    generator = torch.Generator().manual_seed(1)
    pages = PagedKV(model.kv_layers, ROWS * PAGES, torch.bfloat16)
    tables = torch.arange(ROWS * PAGES).view(ROWS, PAGES)
    past_positions = torch.arange(PAST)
    past_slots = (tables[:, past_positions // PAGE_SIZE] * PAGE_SIZE + past_positions % PAGE_SIZE).flatten()
    pages.clear_pages(list(range(ROWS * PAGES)))
    for i, layer in enumerate(model.kv_layers):
        keys, values = torch.randn(2, len(past_slots), layer.heads, layer.dim, generator=generator).bfloat16()
        native.write_kv(
            keys, values, pages.layer_pool(i), native.write_indices(past_slots, pages.layer_pool(i).page_format)
        )
    tokens = torch.randint(VOCAB, (ROWS,), generator=generator)

    def next_logits(first: int, count: int) -> torch.Tensor:
        """Logits of the next token for each of ``count`` sequences."""
        spans = [RowSpan(i, 1, PAST + 1, tables[first + i].tolist()) for i in range(count)]
        slots = tables[first : first + count, PAST // PAGE_SIZE] * PAGE_SIZE + PAST % PAGE_SIZE
        batch = PackedBatch(tokens[first : first + count], torch.full((count,), PAST), slots, spans)
        return model.compute_logits(model.compute_hidden(batch, pages))

    full_batch = next_logits(0, ROWS)
    assert full_batch.isfinite().all() and full_batch.unique(dim=0).shape[0] == ROWS
    for i in SINGLES:
        assert torch.equal(next_logits(i, 1), full_batch[i : i + 1]), i
    for count in COUNTS:
        first = 7 * count % (ROWS - count + 1)
        assert torch.equal(next_logits(first, count), full_batch[first : first + count]), count
