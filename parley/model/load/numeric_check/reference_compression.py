"""Attention to a window and to compressed entries by its definition (``CompressionShape``), for the numeric check.

Indexers are not computed: the check has fewer entries than they choose.
"""

from __future__ import annotations

import torch

from parley.model.load.compression_weights import COMPRESSOR
from parley.model.load.numeric_check.reference_hyper import ReferenceHyperLayer
from parley.model.networks.rope import RopeConfig


class ReferenceCompressedLayer(ReferenceHyperLayer):
    """A layer of a decoder with compressed entries."""

    def _mix_rows(self, x: torch.Tensor) -> torch.Tensor:
        config, shape, sizes = self._config, self._shape, self._config.compression
        assert sizes is not None and shape.rope is not None and shape.window is not None
        rope, places = config.ropes[shape.rope], self._places
        latents, keys = self._project_parts(x, "qkv")
        latents = self._norm_field(latents, "query_latent_norm")
        queries = self._norms.norm_unweighted(self._project(latents, "query_up").unflatten(-1, (config.heads, -1)))
        queries = _rotate(queries, places, rope)
        keys = _rotate(self._norm_field(keys, "latent_norm")[:, None], places, rope)[:, 0]
        distance = places[:, None] - places
        visible = (distance >= 0) & (distance < shape.window)
        if shape.entries is not None:
            entries = _rotate(self._make_entries(x)[:, None], self._entry_places(), rope)[:, 0]
            keys = torch.cat((keys, entries))
            last = self._entry_places() + shape.entries.tokens - 1
            visible = torch.cat((visible, last <= places[:, None]), 1)
        scores = torch.einsum("qhd,kd->hqk", queries, keys) * shape.score_scale
        scores = scores.masked_fill(~visible, float("-inf"))
        sinks = self._weights.read_sinks(self._number)
        assert sinks is not None
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(x), 1)), -1)
        attended = torch.einsum("hqk,kd->qhd", scores.softmax(-1)[..., :-1], keys)
        groups = _rotate(attended, -places, rope).reshape(len(x), sizes.output_groups, -1)
        linear = self._weights.compression.group_linear(self._number)
        assert linear is not None
        weight = self._weights.quantization.read_stored_weight(self._weights.checkpoint, linear).to_float().float()
        weight = weight.view(sizes.output_groups, sizes.output_rank, -1)
        return self._project(torch.einsum("tgk,gok->tgo", groups, weight).flatten(1), "output")

    def _entry_places(self) -> torch.Tensor:
        """Return the positions of the first tokens of all entries, int64 [N]."""
        assert self._shape.entries is not None
        size = self._shape.entries.tokens
        return torch.arange(len(self._places) // size) * size

    def _make_entries(self, x: torch.Tensor) -> torch.Tensor:
        """Return the entries of attention before their rotation, [N, dim]."""
        shape, weights = self._shape.entries, self._weights.compression
        assert shape is not None
        bias, norm = weights.read_plain(self._number, COMPRESSOR)
        linears = weights.compressor_linears(self._number, COMPRESSOR)
        values, gates = (self._project_rows(x, linear) for linear in linears)
        count, dim, entries = len(x) // shape.tokens, self._config.head_dim, []
        for first in (self._entry_places()).tolist():
            own = slice(first, first + shape.tokens)
            own_values, own_gates = values[own, -dim:], (gates[own] + bias)[:, -dim:]
            if shape.is_chosen and first:
                before = slice(first - shape.tokens, first)
                own_values = torch.cat((values[before, :dim], own_values))
                own_gates = torch.cat(((gates[before] + bias)[:, :dim], own_gates))
            entries.append((own_gates.softmax(0) * own_values).sum(0))
        rows = torch.stack(entries) if count else values.new_zeros(0, dim)
        return self._norms.norm_unweighted(rows) * norm


def _rotate(x: torch.Tensor, places: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Return x [T, heads, dim] whose last numbers are rotated by the angles of ``places`` [T], in adjacent pairs."""
    angles = (places.float()[:, None] * rope.inverse_frequencies())[:, None]
    still, turning = x.split([x.shape[-1] - rope.rotary, rope.rotary], -1)
    cos, sin = angles.cos() * rope.scale, angles.sin() * rope.scale
    a, b = turning.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat((still, torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)), -1)
