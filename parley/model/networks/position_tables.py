"""Tables of a decoder with a row for each position: the rotary angles, and the factors of queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from parley.model.networks.decoder_config import DecoderConfig
from parley.model.networks.network import PackedBatch

# Positions whose rotary angles are computed at once, so that a table of millions takes little memory besides itself
ROPE_TABLE_PIECE = 1 << 14


def make_rope_table(config: DecoderConfig, max_len: int, device: torch.device) -> torch.Tensor:
    """Return cosines and sines of each rotary embedding's angles, float32 [ropes, max_len, 2, rotary / 2].

    The table has rotated pairs only; rotary embeddings with fewer of them leave the end of their rows unused. There is
    a table because torch's cosine may have other bits at another index of a vector. If sequences of this length may use
    the long factors, ``max_len`` more rows follow, with these.
    """
    sets = _frequency_sets(config, max_len)
    table = torch.empty(len(config.ropes), sets, max_len, 2, _table_pairs(config), device=device)
    for first in range(0, max_len, ROPE_TABLE_PIECE):
        positions = torch.arange(first, min(first + ROPE_TABLE_PIECE, max_len)).float()
        for i, rope in enumerate(config.ropes):
            for j in range(sets):
                angles = torch.outer(positions, rope.inverse_frequencies(is_long=bool(j))[: rope.pairs])
                piece = torch.stack((angles.cos(), -angles.sin() if rope.is_reversed else angles.sin()), 1) * rope.scale
                table[i, j, first : first + len(positions), :, : rope.pairs] = piece
    return table.flatten(1, 2)


def _table_pairs(config: DecoderConfig) -> int:
    """Return the pairs of dimensions that a row of the rotary table has angles of."""
    return max(rope.pairs for rope in config.ropes)


def _frequency_sets(config: DecoderConfig, max_len: int) -> int:
    """Return how many sets of rotary frequencies contexts of ``max_len`` tokens need: 2 if some use long factors."""
    return 1 + (max_len > config.rope.long_rope_after)


def spread_angles(cos: torch.Tensor, sin: torch.Tensor, *, is_interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines that ``rope_write`` takes [..., rotary], of those of each pair [..., rotary / 2]."""
    if is_interleaved:
        return cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def position_table_bytes(config: DecoderConfig, max_len: int) -> int:
    """Return the bytes of the tables of ``PositionTables`` for each of ``max_len`` positions."""
    angles = len(config.ropes) * _frequency_sets(config, max_len) * 2 * _table_pairs(config)
    return torch.float32.itemsize * (angles + (config.query_scaling is not None))


def make_query_scales(config: DecoderConfig, max_len: int, device: torch.device) -> torch.Tensor | None:
    """Return the factor of queries at each position, float32 [max_len]; None if no layer scales them."""
    scaling = config.query_scaling
    if scaling is None:
        return None
    steps = (torch.arange(max_len) + scaling.shift) // scaling.length
    return (1 + scaling.weight * steps.float().log1p()).to(device)


class PositionTables:
    """Both tables of one decoder. ``rope_table``: from ``make_rope_table``; ``query_scales``: from
    ``make_query_scales``."""

    def __init__(self, config: DecoderConfig, rope_table: torch.Tensor, query_scales: torch.Tensor | None):
        self._config, self.rope_table, self._query_scales = config, rope_table, query_scales
        self.frequency_axes = config.rope.frequency_axes().to(rope_table.device) if config.rope.mrope_section else None

    def position_scales(self, batch: PackedBatch) -> torch.Tensor | None:
        """Return the factor of each token's queries, float32 [T]; None if no layer scales them."""
        return None if self._query_scales is None else self._query_scales.index_select(0, batch.positions)

    def rope_rows(self, batch: PackedBatch, positions: torch.Tensor) -> torch.Tensor:
        """Return the row of the rope table for each position, in the second half for the long factors."""
        if batch.long_rope is None:
            return positions
        return positions + batch.long_rope * (self.rope_table.shape[1] // 2)

    def rope_angles(self, batch: PackedBatch, rope: int = 0) -> torch.Tensor:
        """Return cosines and sines of one rotary embedding for each token, float32 [T, 2, rotary / 2].

        With M-RoPE, each frequency has the angle of the token's position on its axis. The angles come from the same
        table, so a token with the same position on all axes has the same bits as without M-RoPE.
        """
        table = self.rope_table[rope]
        if batch.rope_positions is None:
            return table.index_select(0, self.rope_rows(batch, batch.positions))
        assert self.frequency_axes is not None, "the model has no M-RoPE"
        rows = self.rope_rows(batch, batch.rope_positions).index_select(0, self.frequency_axes).t()
        frequencies = torch.arange(rows.shape[1], device=rows.device)
        return table[rows, :, frequencies].transpose(1, 2).contiguous()

    def rotations(self, batch: PackedBatch) -> dict[int | None, tuple[torch.Tensor, torch.Tensor]]:
        """Return the cosines and sines that ``rope_write`` takes, float32 [T, 1, rotary], by rotary embedding."""
        nothing = torch.empty(len(batch.token_ids), 1, 0, device=self.rope_table.device)
        rotations: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {None: (nothing, nothing)}
        for rope in {shape.rope for shape in self._config.layers} - {None}:
            assert rope is not None
            pairs, all_pairs = self._config.ropes[rope].pairs, self._config.ropes[rope].rotary // 2
            cos, sin = self.rope_angles(batch, rope)[:, None, :, :pairs].unbind(2)
            if all_pairs > pairs:  # the others are rotated by an angle of 0
                cos, sin = F.pad(cos, (0, all_pairs - pairs), value=1.0), F.pad(sin, (0, all_pairs - pairs))
            rotations[rope] = spread_angles(cos, sin, is_interleaved=self._config.rope.is_interleaved)
        return rotations
