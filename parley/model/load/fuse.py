"""Turns a checkpoint of a model of a known family into the fused decoder; ``numeric_check`` compares its logits.

Weights are merged and packed straight from the mapped files, one layer after another, so a second copy of the model
never exists in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from parley.model.load.decoder_weights import DecoderWeights
from parley.model.load.packed_cache import PackedWeightCache
from parley.model.load.tensor_bytes import tensor_bytes
from parley.model.networks.altup_decoder import AltUpDecoder
from parley.model.networks.cross_decoder import CrossDecoder
from parley.model.networks.decoder import FusedDecoder
from parley.model.networks.hyper_decoder import HyperDecoder
from parley.model.networks.position_tables import make_rope_table
from parley.native.layer import DecoderLayer


def fuse_decoder(
    decoder_weights: DecoderWeights,
    max_len: int,
    progress: Callable[[float], None],
    packed_cache: PackedWeightCache | None = None,
) -> FusedDecoder:
    """Build the decoder from its weights, or from weights that ``packed_cache`` kept at an earlier start.

    ``check_tensor_names`` must have accepted the checkpoint. Raises LoadError."""
    config = decoder_weights.config
    weights = packed_cache.read_weights(progress) if packed_cache else None
    if weights is None:
        weights = _pack_weights(decoder_weights, progress)
        if packed_cache:
            packed_cache.write_weights(weights)
    layers, norm, head = weights
    embedding, parts = decoder_weights.embeddings.embedding_table(head), decoder_weights.embeddings.embedding_parts()
    progress(1.0)
    weights_bytes = tensor_bytes([embedding, parts, norm, head, *layers])
    network_class: type[FusedDecoder] = FusedDecoder if config.altup is None else AltUpDecoder
    if config.hyper is not None:
        network_class = HyperDecoder
    if any(shape.has_cross_attention for shape in config.layers):
        network_class = CrossDecoder
    return network_class(
        config,
        embedding,
        layers,
        norm,
        head,
        make_rope_table(config, max_len, embedding.device),
        decoder_weights.total_parameters,
        weights_bytes,
        decoder_weights.linears.linear_sites(),
        parts,
    )


def _pack_weights(decoder_weights: DecoderWeights, progress: Callable[[float], None]) -> list[Any]:
    """Pack all layers, the final norm and the head."""
    config = decoder_weights.config
    layers: list[DecoderLayer] = []
    with ThreadPoolExecutor(min(4, torch.get_num_threads()), "pack") as pool:
        last = pool.submit(decoder_weights.pack_head)  # the longest job, so it starts first
        jobs = [pool.submit(decoder_weights.pack_layer, i) for i in range(config.layer_count)]
        try:
            for job in jobs:  # in order, so that the first of several errors is reported
                layers.append(job.result())
                progress(len(layers) / (config.layer_count + 1))
            norm = decoder_weights.norms.read_norm(config.tensors.norm, offset=config.norms.last_offset)
            return [layers, norm, last.result()]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
