"""Builds a Transformers model without its weights, on torch's meta device: only names, shapes and layers.

That shows nearly every reason why ``load/transformers.py`` may refuse a model, but no wrong numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig

from parley.model.checkpoint.files import Checkpoint
from parley.model.load.transformers import TransformersNetwork, build_network, read_model, read_supported_config

META = torch.device("meta")
SCALAR_OPERATORS = {
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten._local_scalar_dense.default,
}


def build_weightless(folder: Path, checkpoint: Checkpoint, dtype: torch.dtype, max_len: int) -> TransformersNetwork:
    """Return the network of a checkpoint, without weights. Raises LoadError as ``load_transformers`` does.

    Raises other exceptions if the model's code depends on more values than a tensor without data has.
    """
    config = read_supported_config(folder)

    def load_shapes(model_class: Any, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
        """Do as ``from_pretrained``, which needs another library for the meta device."""
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
        info["missing_keys"] = set(info["missing_keys"]) - checkpoint.unread_names
        return model, info

    with _MetaValues():  # type: ignore[no-untyped-call]
        return build_network(read_model(config, load_shapes), max_len)


class _MetaValues(TorchDispatchMode):
    """Answers 0 where a model's code asks for a value of a tensor without data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SCALAR_OPERATORS and args[0].is_meta:
            return 0
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        return func(*args, **(kwargs or {}))
