"""Reads the tensors that the model's processor made of one item, from the file in memory that the API process keeps."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from parley.engine.feature_content import BadFeatures, read_feature_content
from parley.types import FeatureFile

INTEGER_DTYPES = {torch.int64, torch.int32, torch.bool}  # grids, sizes and masks
FLOAT_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


class EncoderError(Exception):
    """An item cannot be encoded. The message is a sentence for users, without paths."""


def read_feature_file(
    features: FeatureFile, digest: bytes, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the tensors of a feature file by name, the floating ones rounded to ``dtype``. Raises EncoderError.

    The file names its item, because the number of an ended request's file may belong to another file now.
    """
    try:
        content = read_feature_content(features)
        tensors = load(content)
    except BadFeatures as error:
        raise EncoderError(str(error)) from error
    except SafetensorError as error:
        raise EncoderError("The processed features are damaged.") from error
    if _stated_digest(content) != digest.hex():
        raise EncoderError("The processed features are not those of the request.")
    for name, tensor in tensors.items():
        if tensor.dtype not in INTEGER_DTYPES | FLOAT_DTYPES:
            raise EncoderError(f"The processed features hold {name} as {str(tensor.dtype).removeprefix('torch.')}.")
    return {
        name: tensor.to(device, dtype if tensor.dtype in FLOAT_DTYPES else tensor.dtype)
        for name, tensor in tensors.items()
    }


def _stated_digest(content: bytes) -> Any:
    """Return the digest in the header of a safetensors file: a length of 8 bytes, then JSON."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header.get("__metadata__", {}).get("digest")
