"""Computes the memory that a decoder's weights will take, from the headers of its files.

The loading code reads, merges and packs the weights on torch's meta device, without numbers. So it chooses the same
forms as in loading: which weights stay quantized and which become plain numbers.
"""

from __future__ import annotations

from parley.model.load.decoder_weights import DecoderWeights
from parley.model.load.memory import free_device_memory, refuse_large_weights
from parley.model.load.meta_values import META, MetaValues
from parley.model.load.tensor_bytes import tensor_bytes

NUMBER_BYTES = 4  # at most, of a number in memory: float32, or 8 bits or fewer with the scales of small groups


def refuse_weights_beyond_memory(weights: DecoderWeights) -> None:
    """Raise LoadError if the weights of the fused decoder do not fit into memory, or as ``plan_weights`` does.

    Measuring makes torch import a second's worth of modules, so weights that fit in any form are not measured.
    """
    if max_weight_bytes(weights) > free_device_memory(weights.device):
        plan_weights(weights)


def max_weight_bytes(weights: DecoderWeights) -> int:
    """Return an upper bound of the bytes that the stored weights take in the fused decoder, in whatever form."""
    head = (
        weights.config.vocab_size * weights.config.hidden_size
    )  # one that is tied to the embedding may be in memory twice
    return NUMBER_BYTES * (weights.total_parameters + head)


def plan_weights(weights: DecoderWeights, *, keeps_head: bool = True) -> int:
    """Return the bytes that the weights of the fused decoder will take; on a GPU, at least.

    ``keeps_head``: it keeps its head after the numeric check. Raises LoadError if they do not fit into memory, or as
    ``fuse_decoder`` does if tensors are not as the config says.
    """
    weights.check_shapes()
    if weights.device.type != "cpu":
        size = weights.quantization.min_bytes(weights.checkpoint, weights.dtype)
    else:
        size = measure_weights(weights, keeps_head=keeps_head)
    refuse_large_weights(size, weights.device)
    return size


def measure_weights(weights: DecoderWeights, *, keeps_head: bool = True) -> int:
    """Return the bytes that the weights of the fused decoder take on the CPU. Their shapes must have been checked."""
    config = weights.config
    weights = DecoderWeights(weights.checkpoint.without_data(), config, weights.quantization, weights.dtype, META)
    layer_bytes: dict[object, int] = {}
    with MetaValues():  # type: ignore[no-untyped-call]
        head = weights.pack_head()
        embeddings, norm = weights.embeddings, weights.norms.read_norm(config.tensors.norm)
        outer = [embeddings.embedding_table(head), embeddings.embedding_parts(), norm]
        total = tensor_bytes([*outer, head] if keeps_head else outer)
        for layer in range(config.layer_count):
            form = _layer_form(weights, layer)
            if form not in layer_bytes:  # most layers of a model are alike
                layer_bytes[form] = tensor_bytes([weights.pack_layer(layer)])
            total += layer_bytes[form]
    return total


def _layer_form(weights: DecoderWeights, layer: int) -> object:
    """Return everything that a layer's size in bytes depends on."""
    first = len(weights.layer_name(layer, ""))
    names = [name for name in weights.layer_tensors(layer) if name in weights.checkpoint]
    tensors = frozenset((name[first:], weights.checkpoint.tensor_form(name)) for name in names)
    return weights.config.layers[layer], tensors
