"""Checks that a checkpoint has the tensors that a fused decoder reads, and no others that would change its results."""

from __future__ import annotations

import re
from dataclasses import astuple

from parley.model.checkpoint.files import LoadError
from parley.model.load.decoder_weights import DecoderWeights
from parley.model.networks.indexers import TOKEN_INDEXER_NAMES
from parley.model.networks.rope import Unfusable

# Frequencies, sines, masks and fixed decays that checkpoints store, computed here; scales of an 8-bit KV cache, not
# used; and the layers of ERNIE and Qwen that predict further tokens.
IGNORED_TENSORS = re.compile(
    r"rotary_emb\.inv_freq$|\.embed_positions\.weights$|\.(attention|attn)\.((masked_)?bias|causal_mask)$|self_attn\.([qkv]_proj\.(output|[kv])|(attn\.)?([qkv]|prob(_output)?))_scale$|^(model\.)?mtp[._]"
    r"|self_attn\.(slope_rate|(query|key|diagonal)_decay)$"
)

INDEXER_NAMES = [name for name in astuple(TOKEN_INDEXER_NAMES) if name is not None]


def check_tensor_names(decoder_weights: DecoderWeights) -> None:
    """Raise Unfusable if there are tensors that the config does not account for, LoadError if any are missing."""
    config, checkpoint = decoder_weights.config, decoder_weights.checkpoint
    # A tied head needs no tensor of its own, but many checkpoints have one.
    expected = {
        *decoder_weights.quantization.stored_tensor_names(checkpoint, decoder_weights.embeddings.token_table),
        decoder_weights.head.name + ".weight",
        *[decoder_weights.head.name + ".bias"] * decoder_weights.head.bias,
        *decoder_weights.norms.norm_tensors(config.tensors.norm),
        *decoder_weights.embeddings.embedding_tensors(),
        *decoder_weights.linear_tensors(decoder_weights.head),
    }
    last_tensors = decoder_weights.layer_tensors(config.layer_count - 1)
    missing = {name for name in last_tensors if name not in checkpoint}
    if missing:  # checked before work is planned per layer: a config may claim a million layers
        raise LoadError(
            f"The checkpoint has no tensor {min(missing)}, but the config asks for {config.layer_count} layers."
        )
    for i in range(config.layer_count):
        expected.update(decoder_weights.layer_tensors(i))
    unused = tuple(f"{config.tensors.layer}{config.layer_count + i}." for i in range(config.extra_layers))
    unused += _unread_keys(decoder_weights)
    for name in checkpoint.tensor_names:
        if name.startswith(unused):
            continue
        if name not in expected and not IGNORED_TENSORS.search(name) and not _is_zero_bias(decoder_weights, name):
            raise Unfusable(f"it has a tensor {name}")


def _unread_keys(decoder_weights: DecoderWeights) -> tuple[str, ...]:
    """Return the prefixes of tensor names that published files have although no code reads them.

    They are: key and value projections of layers that read the keys and values of others; norms after the MLPs of
    layers without a mixture, where only mixtures have such norms; and indexers of layers that attend to the tokens that
    an earlier layer has chosen.
    """
    names = *decoder_weights.config.tensors.qkv[1:], decoder_weights.config.tensors.key_norm
    readers = [i for i, shape in enumerate(decoder_weights.config.layers) if shape.kv_layer is not None]
    unread = [decoder_weights.layer_name(layer, f"{name}.") for layer in readers for name in names if name]
    if norm := decoder_weights.config.tensors.mixture_after_norm:
        dense = [i for i, shape in enumerate(decoder_weights.config.layers) if shape.routing is None]
        unread += [decoder_weights.layer_name(layer, f"{norm}.") for layer in dense]
    if decoder_weights.config.indexer is not None:
        shared = [
            i for i, shape in enumerate(decoder_weights.config.layers) if shape.reads_chosen and not shape.has_indexer
        ]
        unread += [decoder_weights.layer_name(layer, f"{name}.") for layer in shared for name in INDEXER_NAMES]
    return tuple(unread)


def _is_zero_bias(decoder_weights: DecoderWeights, name: str) -> bool:
    """Whether a tensor is a bias of zeros. Some writers add one to each layer that they quantize."""
    if not name.endswith(".bias") or name.removesuffix("bias") + "qweight" not in decoder_weights.checkpoint:
        return False
    return not decoder_weights.checkpoint.view_tensor(name, *decoder_weights.checkpoint.tensor_shape(name)).any()
