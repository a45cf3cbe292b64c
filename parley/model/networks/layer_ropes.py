"""The rotary embeddings of a decoder's layers, read from its config: one for all layers, one for each type, or none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parley.model.networks.config_fields import read_flag
from parley.model.networks.families.decoder_family import FULL, SLIDING, DecoderFamily
from parley.model.networks.rope import RopeConfig, Unfusable, read_mrope, read_rope, rope_parameters


def read_layer_ropes(
    family: DecoderFamily, fields: dict[str, Any], head_dim: int, layer_types: list[str]
) -> tuple[tuple[RopeConfig, ...], list[int | None]]:
    """Return the rotary embeddings of the model, and the number of each layer's, None for layers without one.

    ``fields``: of the config, as the family names them. ``head_dim``: numbers of a head that may be rotated. Raises
    Unfusable.
    """
    ropes = _read_ropes_by_type(family, fields, head_dim)
    rotated = family.rotated(fields, layer_types)
    if len(rotated) != len(layer_types):
        raise Unfusable("its config does not say for each layer whether it has a rotary embedding")
    numbers = [list(ropes).index(name if name in ropes else FULL) for name in layer_types]
    is_interleaved = read_flag(fields, family.is_rope_interleaved)
    model_ropes = tuple(
        replace(rope, is_interleaved=is_interleaved, is_reversed=family.is_rope_reversed) for rope in ropes.values()
    )
    return model_ropes, [number if is_rotated else None for number, is_rotated in zip(numbers, rotated, strict=True)]


def _read_ropes_by_type(family: DecoderFamily, fields: dict[str, Any], head_dim: int) -> dict[str, RopeConfig]:
    """Return the rotary embedding of FULL and of SLIDING layers, or one for both as that of FULL."""
    if family.ropes is not None:
        return family.ropes(fields)
    if family.mrope is not None:
        return {FULL: read_mrope(fields, head_dim, *family.mrope)}
    parameters = rope_parameters(fields)
    if family.resolve_rope is not None:
        parameters = family.resolve_rope(fields, parameters, head_dim)
    if family.local_theta is None:
        return {FULL: read_rope(fields, parameters, head_dim)}
    by_type = {FULL: parameters, SLIDING: {}}
    if any(isinstance(value, dict) for value in parameters.values()):
        by_type = {name: parameters.get(name) or {} for name in by_type}
    bases = {FULL: fields, SLIDING: {**fields, "rope_theta": fields[family.local_theta]}}
    ropes = {name: read_rope(bases[name], by_type[name], head_dim) for name in (FULL, SLIDING)}
    if len({rope.rotary for rope in ropes.values()}) > 1 or any(rope.kind == "longrope" for rope in ropes.values()):
        raise Unfusable("its rotary embedding differs between layers")
    return ropes
