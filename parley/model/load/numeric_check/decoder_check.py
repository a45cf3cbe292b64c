"""The numeric check of a fused decoder at load: its logits of a few tokens against those of ``ReferenceDecoder``.

With M-RoPE, some of the tokens have an image's positions.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from parley.core.rope_positions import RopePositions
from parley.core.sequence import PAGE_SIZE
from parley.model.checkpoint.files import Checkpoint
from parley.model.checkpoint.quantization import Quantization
from parley.model.load.numeric_check.probe_texts import relative_error
from parley.model.load.numeric_check.reference_decoder import ReferenceDecoder
from parley.model.networks.decoder import FusedDecoder
from parley.model.networks.decoder_config import DecoderConfig
from parley.model.networks.network import PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.native.layer_shape import LayerShape
from parley.native.layout import RowSpan
from parley.types import EmbeddingRun, MediaItem

PROBE_TOKENS = 24  # tokens in the numeric check
PROBE_OUTPUTS = 4096  # vocabulary entries with compared logits
# Parameters; the check runs all layers of models up to this size, else the first and the last.
FULL_CHECK_PARAMETERS = 50_000_000
PROBE_IMAGE = MediaItem("image", b"", 7, 12, [EmbeddingRun(0, 12, (2, 3, 2))])
# Relative error (L2) of the logits.
DECODER_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}


@torch.inference_mode()
def decoder_deviation(decoder: FusedDecoder, checkpoint: Checkpoint, quantization: Quantization) -> float:
    """Return the relative error (L2) of the decoder's logits against a ``ReferenceDecoder`` for a few tokens."""
    config = _choose_everything(decoder.config)
    layers = list(range(config.layer_count))
    if decoder.parameters > FULL_CHECK_PARAMETERS:
        kinds = [(type(shape.state), shape.entries) for shape in config.layers]
        checked_layers = {0, config.layer_count - 1, *map(kinds.index, set(kinds))}
        sources = {config.layers[i].kv_layer for i in checked_layers} - {None}
        layers = sorted(checked_layers.union(i for i in sources if i is not None))
    token_ids = torch.linspace(0, config.vocab_size - 1, PROBE_TOKENS).long()
    outputs = torch.linspace(0, config.vocab_size - 1, min(config.vocab_size, PROBE_OUTPUTS)).long()
    reference = ReferenceDecoder(checkpoint, config, quantization, _image_positions())
    expected = reference.compute_logits(token_ids, outputs, layers)

    selected = decoder.select_layers(layers, config)
    device = decoder.device
    count = -(-PROBE_TOKENS // PAGE_SIZE)
    pages = PagedKV(selected.kv_layers, count, decoder.dtype, device)
    pages.clear_pages(list(range(count)))
    positions = torch.arange(PROBE_TOKENS, device=device)
    batch = PackedBatch(
        token_ids.to(device), positions, positions, [RowSpan(0, PROBE_TOKENS, PROBE_TOKENS, list(range(count)))]
    )
    if config.rope.mrope_section:
        batch.rope_positions = _image_positions().to(device)
    actual = selected.compute_logits(selected.compute_hidden(batch, pages)[-1:])[:, outputs.to(device)].cpu()
    return relative_error(actual, expected)


def _choose_everything(config: DecoderConfig) -> DecoderConfig:
    """Return a config whose mixtures compute all experts for each token, and whose indexers choose all tokens.

    Otherwise, rounding alone could route single tokens to other experts than in the reference. For the same reason
    there is no margin, which could exclude single experts. Indexers choose all tokens, so their choice is not checked.
    """

    def choose_all(shape: LayerShape) -> LayerShape:
        routing = shape.routing
        if routing is None or routing.is_hashed:
            return shape
        all_experts = replace(routing, experts_per_token=routing.experts, groups=1, chosen_groups=1, margin=-1.0)
        return replace(shape, routing=all_experts)

    indexer = config.indexer
    if indexer is not None:
        indexer = replace(indexer, top_k=max(indexer.top_k, PROBE_TOKENS))
    compression = config.compression
    if compression is not None:
        compression = replace(compression, top_k=max(compression.top_k, PROBE_TOKENS))
    layers = tuple(map(choose_all, config.layers))
    return replace(config, layers=layers, indexer=indexer, compression=compression)


def _image_positions() -> torch.Tensor:
    """Return the positions of the tokens on three axes if some of them are an image's: int64 [3, PROBE_TOKENS]."""
    return torch.tensor(RopePositions([PROBE_IMAGE], PROBE_TOKENS).axes(0, PROBE_TOKENS))
