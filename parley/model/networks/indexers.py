"""The indexers of the model types on the fused decoder: names of tensors, and how their sizes are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parley.core.sequence import PAGE_SIZE
from parley.model.networks.config_fields import read_number, read_size
from parley.model.networks.rope import Unfusable, wrong_value
from parley.native.layer_shape import BlockIndexerShape, IndexerShape, LatentShape


@dataclass(frozen=True)
class IndexerNames:
    """The names of an indexer's linear layers and norms in a layer; None: it has none."""

    queries: str = "self_attn.indexer.wq_b"
    key: str = "self_attn.indexer.wk"
    key_norm: str = "self_attn.indexer.k_norm"
    head_weights: str | None = "self_attn.indexer.weights_proj"
    query_norm: str | None = None


TOKEN_INDEXER_NAMES = IndexerNames()
BLOCK_INDEXER_NAMES = IndexerNames(
    "self_attn.indexer.q_proj",
    "self_attn.indexer.k_proj",
    "self_attn.indexer.k_norm",
    None,
    "self_attn.indexer.q_norm",
)


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
    """How the indexers of one model type are read. ``is_interleaved`` and ``is_last_rotated``: of ``IndexerShape``.
    ``has_own_eps``: the norm of keys has an eps of 1e-6, not that of the config. ``has_indexer``: returns whether each
    layer has one; it gets the config's fields and the number of layers, and raises Unfusable."""

    is_interleaved: bool = False
    is_last_rotated: bool = False
    has_own_eps: bool = True
    has_indexer: Callable[[Mapping[str, Any], int], list[bool]] = every_indexer
    is_shared = True  # layers without an indexer attend to the tokens that the last one before them chose

    def read_shape(self, fields: Mapping[str, Any], latent: LatentShape | None, rotary_dim: int) -> IndexerShape:
        """Return the sizes of the indexers. ``rotary_dim``: of the heads of attention. Raises Unfusable."""
        if latent is None or not latent.query_rank:
            raise Unfusable("its indexers have no latents of queries to read")
        heads, dim, top_k = (read_size(fields, f"index_{name}") for name in ("n_heads", "head_dim", "topk"))
        if dim < latent.rotary_dim:
            raise Unfusable(f"its indexers have {dim} numbers in a key, of which {latent.rotary_dim} turn")
        eps = 1e-6 if self.has_own_eps else read_number(fields, "rms_norm_eps")
        return IndexerShape(heads, dim, top_k, latent.rotary_dim, self.is_interleaved, self.is_last_rotated, eps)

    def read_layers(self, fields: Mapping[str, Any], count: int) -> list[bool]:
        """Return whether each layer has an indexer. Raises Unfusable."""
        own = self.has_indexer(fields, count)
        if len(own) != count or not own[0]:
            raise Unfusable("its config does not say for each layer whether it has an indexer, or the first has none")
        return own


@dataclass(frozen=True)
class BlockIndexerFamily:
    """How the indexers of MiniMax-M3 are read, which choose blocks of tokens."""

    is_shared = False

    def read_shape(self, fields: Mapping[str, Any], latent: LatentShape | None, rotary_dim: int) -> BlockIndexerShape:
        """Return the sizes of the indexers. ``rotary_dim``: of the heads of attention. Raises Unfusable."""
        published = _read_published(fields)
        sizes = {
            name: published.get(old, fields[name])
            for name, old in {
                "index_n_heads": "sparse_num_index_heads",
                "index_head_dim": "sparse_index_dim",
                "index_topk_blocks": "sparse_topk_blocks",
                "index_block_size": "sparse_block_size",
                "index_local_blocks": "sparse_local_block",
            }.items()
        }
        heads, dim, top_k, block_size, local_blocks = (read_size(sizes, name) for name in sizes)
        if heads != fields["num_key_value_heads"]:
            raise Unfusable(f"its indexers choose for {heads} of {fields['num_key_value_heads']} key/value heads")
        if dim < rotary_dim:
            raise Unfusable(f"its indexers have {dim} numbers in a key, of which {rotary_dim} turn")
        if block_size % PAGE_SIZE:
            raise Unfusable(f"its indexers choose blocks of {block_size} tokens, which fill no pages of {PAGE_SIZE}")
        if local_blocks > top_k:
            raise Unfusable(f"its indexers always choose {local_blocks} of {top_k} blocks")
        return BlockIndexerShape(heads, dim, top_k, block_size, local_blocks, rotary_dim)

    def read_layers(self, fields: Mapping[str, Any], count: int) -> list[bool]:
        """Return whether each layer has an indexer: ``indexed_layers``, or else ``sparse_attention_freq``, says so;
        without both, none has. Raises Unfusable."""
        listed, name = fields["indexed_layers"], "layer_types"
        if listed is None:
            name = "sparse_attention_freq"
            listed = _read_published(fields).get(name, [0] * count)
            kinds: dict[Any, bool] = {0: False, 1: True}
        else:
            kinds = {"full_attention": False, "minimax_m3_sparse": True}
        if not isinstance(listed, list) or len(listed) != count or not all(kind in kinds for kind in listed):
            raise wrong_value(name, listed)
        return [kinds[kind] for kind in listed]


def _read_published(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``sparse_attention_config``, in which the publishers of MiniMax-M3 have the sizes of indexers."""
    published = fields["sparse_attention_config"]
    if published is not None and not isinstance(published, dict):
        raise wrong_value("sparse_attention_config", published)
    return published or {}
