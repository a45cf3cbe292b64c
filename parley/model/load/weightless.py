"""Builds a Transformers model without its weights, on torch's meta device: only names, shapes and layers.

Building it finds nearly every reason why ``load/transformers.py`` may refuse a model, except wrong numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig

from parley.model.checkpoint.files import Checkpoint
from parley.model.load.meta_values import META, MetaValues
from parley.model.load.transformers import read_supported_config, read_transformers_model
from parley.model.load.transformers_network import TransformersNetwork, build_network


def build_weightless(folder: Path, checkpoint: Checkpoint, dtype: torch.dtype, max_len: int) -> TransformersNetwork:
    """Return the network of a checkpoint, without weights. Raises LoadError as ``load_transformers`` does.

    Raises other exceptions if the model's code depends on more values than a tensor without data has.
    """
    config = read_supported_config(folder)

    def load_shapes(model_class: Any, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
        """Do the work of ``from_pretrained``, which needs another library for the meta device."""
        with META:
            model: PreTrainedModel = model_class.from_config(config, dtype=dtype, **options)
        load_config = LoadStateDictConfig(
            device_map={"": META},
            dtype=dtype,
            dtype_plan=model._get_dtype_plan(dtype),
            weight_mapping=get_model_conversion_mapping(model),  # type: ignore[arg-type]
        )
        tensors = {
            name: torch.empty(checkpoint.tensor_shape(name), dtype=dtype, device=META)
            for name in checkpoint.tensor_names
        }
        loading_info, _ = model._load_pretrained_model(model, tensors, None, load_config)
        info = model._finalize_model_loading(model, load_config, loading_info).to_dict()
        # Names in the file may lack a prefix that the model adds.
        info["missing_keys"] = {key for key in info["missing_keys"] if not key.endswith(tuple(checkpoint.unread_names))}
        return model, info

    with MetaValues():  # type: ignore[no-untyped-call]
        return build_network(read_transformers_model(config, load_shapes), max_len)
