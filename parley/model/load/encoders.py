"""Encoders of all families: which configs are theirs, and how they are loaded and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.load import bert, modern_bert
from parley.model.networks.encoder import EncoderConfig, EncoderNetwork
from parley.model.networks.rotary_encoder import RotaryEncoderConfig

UNSUPPORTED_HEADS = ("ForTokenClassification", "ForImageClassification", "ForQuestionAnswering", "ForMultipleChoice")


def is_encoder(config: dict[str, Any]) -> bool:
    """True if the config names one of these encoders, not a model that generates."""
    is_known = config["model_type"] in (*bert.ENCODER_FAMILIES, modern_bert.MODEL_TYPE)
    return is_known and not config.get("is_decoder")


def read_encoder_config(config: dict[str, Any]) -> EncoderConfig | RotaryEncoderConfig:
    """Read the encoder's sizes from the content of config.json. Raises LoadError."""
    names = [str(name) for name in config.get("architectures") or ()]
    if task_heads := [name for name in names if name.endswith(UNSUPPORTED_HEADS)]:
        raise LoadError(f"A {task_heads[0]} is not an embedding model, and no classifier of whole texts.")
    if config["model_type"] == modern_bert.MODEL_TYPE:
        return modern_bert.read_config(config)
    return bert.read_encoder_config(config)


def load_encoder(
    checkpoint: Checkpoint, config: dict[str, Any], device: torch.device, progress: Callable[[float], None]
) -> EncoderNetwork:
    """Load the encoder in float32 and check it numerically. Raises LoadError."""
    if config["model_type"] == modern_bert.MODEL_TYPE:
        return modern_bert.load_modern_bert(checkpoint, config, device, progress)
    return bert.load_encoder(checkpoint, config, torch.float32, device, progress)


def check_encoder_tensors(checkpoint: Checkpoint, config: dict[str, Any]) -> EncoderConfig | RotaryEncoderConfig:
    """Check names, shapes and types of all tensors without reading any, and return the sizes. Raises LoadError."""
    if config["model_type"] == modern_bert.MODEL_TYPE:
        return modern_bert.check_modern_bert(checkpoint, config)
    return bert.check_encoder_tensors(checkpoint, config)
