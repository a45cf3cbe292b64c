"""Whole layers of real width on the compiled kernels: a row has the same bits in a batch of any size.

The kernels' own tests show this for each kernel; here they all run one after another, with pages, at the widths of a
0.5B and an 8B model.
"""

from __future__ import annotations

import pytest
import torch

from parley import native
from parley.core.sequence import BLOCK_SIZE
from parley.model.networks.config import Rope, Shape
from parley.model.networks.decoder import Decoder, Layer
from parley.model.networks.network import Batch
from parley.model.networks.paged_kv import PagedKV
from parley.native.layout import Span

COUNTS = [*range(1, 65), 100, 128, 256, 512]
ROWS = max(COUNTS)
PAST = 20  # tokens before each row, so that it reads more than its own page
PAGES = 2  # per sequence
VOCAB = 64

SMALL = {"hidden": 896, "intermediate": 4864, "heads": 14, "kv_heads": 2, "head_dim": 64}
LARGE = {"hidden": 4096, "intermediate": 11008, "heads": 32, "kv_heads": 8, "head_dim": 128}


def stack(size: dict[str, int], kind: str, layers: int) -> Decoder:
    """Layers of random weights; all of them share the weights, because separate ones would not fit in memory."""
    generator = torch.Generator().manual_seed(0)

    def weight(out: int, into: int, kind: str = kind) -> native.Packed:
        numbers = torch.randn(out, into, generator=generator).mul_(into**-0.5)
        if kind == "bf16":
            return native.pack(numbers.bfloat16())
        scales = numbers.abs().amax(1) / 127
        values = (numbers / scales[:, None]).round().to(torch.int8)
        return native.pack_int8(values, scales, None, torch.bfloat16)

    shape = Shape(
        vocab=VOCAB,
        **size,
        eps=1e-6,
        rope=Rope(10000.0, size["head_dim"]),
        windows=(None,) * layers,
        max_len=64,
        tied=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        merged=False,
    )
    wide = shape.heads * shape.head_dim
    ones = torch.ones(shape.hidden, dtype=torch.bfloat16)
    layer = Layer(
        input_norm=ones,
        qkv=weight(wide + 2 * shape.kv_heads * shape.head_dim, shape.hidden),
        head_norm=None,
        output=weight(shape.hidden, wide),
        post_norm=ones,
        gate_up=weight(2 * shape.intermediate, shape.hidden),
        down=weight(shape.hidden, shape.intermediate),
        window=None,
    )
    embedding = torch.randn(VOCAB, shape.hidden, generator=generator).bfloat16()
    return Decoder(shape, embedding, [layer] * layers, ones, weight(VOCAB, shape.hidden, "bf16"), 64, 0, 0)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize(("size", "layers"), [(SMALL, 4), (LARGE, 2)], ids=["0.5B", "8B"])
@torch.inference_mode()
def test_row_of_real_width_layers_is_batch_invariant(size, layers, kind):
    if native.identity() is None:
        pytest.skip("torch's kernels guarantee this only up to a width of 1,024")
    model = stack(size, kind, layers)
    generator = torch.Generator().manual_seed(1)
    pages = PagedKV(model.layers, ROWS * PAGES, torch.bfloat16)
    tables = torch.arange(ROWS * PAGES).view(ROWS, PAGES)
    places = torch.arange(PAST)
    past = (tables[:, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE).flatten()
    pages.clear(list(range(ROWS * PAGES)))
    for i, layer in enumerate(model.layers):
        keys, values = torch.randn(2, len(past), layer.heads, layer.dim, generator=generator).bfloat16()
        native.write(keys, values, pages.pool(i), native.places(past, pages.pool(i).format))
    tokens = torch.randint(VOCAB, (ROWS,), generator=generator)

    def run(first: int, count: int) -> torch.Tensor:
        """Logits of the next token for each of ``count`` sequences."""
        spans = [Span(i, 1, PAST + 1, tables[first + i].tolist()) for i in range(count)]
        slots = tables[first : first + count, PAST // BLOCK_SIZE] * BLOCK_SIZE + PAST % BLOCK_SIZE
        batch = Batch(tokens[first : first + count], torch.full((count,), PAST), slots, spans)
        return model.logits(model.hidden(batch, pages))

    whole = run(0, ROWS)
    assert whole.isfinite().all() and whole.unique(dim=0).shape[0] == ROWS
    for i in range(0, ROWS, 8):
        assert torch.equal(run(i, 1), whole[i : i + 1]), i
    for count in COUNTS:
        first = 7 * count % (ROWS - count + 1)
        assert torch.equal(run(first, count), whole[first : first + count]), count
