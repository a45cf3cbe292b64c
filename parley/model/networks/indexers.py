"""The indexers of the model types on the fused decoder: names of tensors, and how their sizes are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parley.model.networks.config_fields import read_size
from parley.model.networks.rope import Unfusable, wrong_value
from parley.native.layer_shape import IndexerShape, LatentShape


@dataclass(frozen=True)
class IndexerNames:
    """The names of an indexer's linear layers and norm in a layer."""

    queries: str = "self_attn.indexer.wq_b"
    key: str = "self_attn.indexer.wk"
    key_norm: str = "self_attn.indexer.k_norm"
    head_weights: str = "self_attn.indexer.weights_proj"


def every_indexer(fields: Mapping[str, Any], count: int) -> list[bool]:
    """Return whether each of ``count`` layers has an indexer: all have."""
    return [True] * count


def listed_indexers(fields: Mapping[str, Any], count: int) -> list[bool]:
    """Return whether each of ``count`` layers has an indexer: "full" in ``indexer_types``, or F in
    ``index_topk_pattern``; without both, those before ``index_skip_topk_offset`` and each ``index_topk_freq``-th of the
    others have (GLM-5). Others are "shared", or S. Raises Unfusable."""
    name = "indexer_types" if fields["indexer_types"] is not None else "index_topk_pattern"
    listed = fields[name]
    if listed is None:
        step, first = read_size(fields, "index_topk_freq"), fields["index_skip_topk_offset"]
        if type(first) is not int:
            raise wrong_value("index_skip_topk_offset", first)
        return [max(layer - first + 1, 0) % step == 0 for layer in range(count)]
    kinds = {"F": True, "S": False} if isinstance(listed, str) else {"full": True, "shared": False}
    if not isinstance(listed, list | str) or not all(isinstance(kind, str) and kind in kinds for kind in listed):
        raise wrong_value(name, listed)
    return [kinds[kind] for kind in listed]


@dataclass(frozen=True)
class IndexerFamily:
    """How the indexers of one model type are read. ``is_interleaved``: of ``IndexerShape``. ``has_indexer``: returns
    whether each layer has one; it gets the config's fields and the number of layers, and raises Unfusable."""

    is_interleaved: bool = False
    has_indexer: Callable[[Mapping[str, Any], int], list[bool]] = every_indexer

    def read_shape(self, fields: Mapping[str, Any], latent: LatentShape | None) -> IndexerShape:
        """Return the sizes of the indexers. Raises Unfusable."""
        if latent is None or not latent.query_rank:
            raise Unfusable("its indexers have no latents of queries to read")
        heads, dim, top_k = (read_size(fields, f"index_{name}") for name in ("n_heads", "head_dim", "topk"))
        if dim < latent.rotary_dim:
            raise Unfusable(f"its indexers have {dim} numbers in a key, of which {latent.rotary_dim} turn")
        return IndexerShape(heads, dim, top_k, latent.rotary_dim, self.is_interleaved)

    def read_layers(self, fields: Mapping[str, Any], count: int) -> list[bool]:
        """Return whether each layer has an indexer. Raises Unfusable."""
        own = self.has_indexer(fields, count)
        if len(own) != count or not own[0]:
            raise Unfusable("its config does not say for each layer whether it has an indexer, or the first has none")
        return own
