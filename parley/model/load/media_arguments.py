"""Arguments of Transformers' decoders about the media of a batch, in addition to the embeddings of placeholders."""

from __future__ import annotations

from typing import Any

import torch

from parley.model.networks.network import MediaRows, PackedBatch


def granite4_layers(config: Any) -> list[int]:
    """Return the layers before which Granite 4 Vision adds features of images, in the encoder's order."""
    spatial_layers: list[int] = config.spatial_target_layers
    return [layer for _, layer in config.deepstack_layer_map or ()] + spatial_layers


class MediaArguments:
    """Computes these arguments for one model's decoder.

    ERNIE 4.5 VL has experts of its own for the placeholders and the marks around them. Granite 4 Vision adds embeddings
    to the input of some layers, Qwen3-VL and others to the output of the first ones.
    """

    def __init__(self, model: Any):
        config = model.config
        self._expert_ids: torch.Tensor | None = None
        self._deep_layers: list[int] = []
        if config.model_type == "ernie4_5_vl_moe":
            names = [f"{kind}{part}_token_id" for kind in ("image", "video") for part in ("", "_start", "_end")]
            self._expert_ids = torch.tensor([getattr(config, name) for name in names], device=model.device)
        if config.model_type == "granite4_vision":
            self._deep_layers = granite4_layers(config)

    def of_batch(self, batch: PackedBatch) -> dict[str, Any]:
        """Return the arguments for a batch, by name."""
        arguments: dict[str, Any] = {}
        if self._expert_ids is not None:
            arguments["moe_mm_token_type_ids"] = torch.isin(batch.token_ids, self._expert_ids)[None]
        if batch.media is not None and batch.media.deepstack:
            arguments |= self._deep_arguments(batch.media, torch.zeros_like(batch.token_ids, dtype=torch.bool))
        return arguments

    def _deep_arguments(self, media: MediaRows, is_media: torch.Tensor) -> dict[str, Any]:
        is_media[media.tokens] = True
        order = media.tokens.argsort()
        rows = [layer_rows[order] for layer_rows in media.deepstack]
        if not self._deep_layers:
            return {"visual_pos_masks": is_media[None], "deepstack_visual_embeds": rows}
        by_layer = dict(zip(self._deep_layers, rows, strict=True))
        return {"vision_mask": is_media[None, :, None], "deepstack_features": by_layer}
