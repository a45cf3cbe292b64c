"""The linear layers within the layers of a decoder: applies them with LoRA adapters, and numbers them for adapters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parley import native
from parley.model.networks.network import PackedBatch
from parley.native.layer import DecoderLayer

# The linear layers within a layer, by number of their adapter site, as in ``layers.cpp``. A layer has only one of those
# with the same number. The sites of LAST_LINEARS follow those of all layers.
LINEAR_SITES = {
    **{"qkv": 0, "output": 1, "gate_up": 2, "down": 3, "query_up": 4},
    **dict.fromkeys(("state_gates", "state_parameters", "state_input", "input_gate"), 4),
}
SITES_OF_LAYER = 5
LAST_LINEARS = {"state_step": 0, "state_output": 0, "input_up": 0, "laurel_left": 1, "laurel_right": 2}


def linear_site(name: str, layer: int, layer_count: int) -> int | None:
    """Return the number of a layer's linear layer among those that adapters change, None if they cannot change it."""
    if name in LAST_LINEARS:
        return layer_count * (SITES_OF_LAYER + LAST_LINEARS[name]) + layer
    return layer * SITES_OF_LAYER + LINEAR_SITES[name] if name in LINEAR_SITES else None


class LayerLinears:
    """The linear layers of one decoder, by layer and by their names in ``DecoderLayer``."""

    def __init__(self, layer_weights: Sequence[DecoderLayer]):
        self._layer_weights = layer_weights

    def apply_linear(
        self, x: torch.Tensor | native.QuantizedRows, batch: PackedBatch, layer: int, name: str
    ) -> torch.Tensor:
        """Apply one linear layer, and add the products of LoRA adapters."""
        y = native.linear(x, getattr(self._layer_weights[layer], name))
        site = linear_site(name, layer, len(self._layer_weights))
        if batch.lora_rows is not None and site is not None:
            assert isinstance(x, torch.Tensor), "adapters read rows as they are"
            batch.lora_rows.add_lora(x, y, site)
        return y
