"""The encoders ("towers") in the checkpoint of a multimodal model: checked by file headers, and loaded by Transformers.

The language model of such a checkpoint is loaded elsewhere (``multimodal.py``). Here Transformers builds the model with
an empty one, and gets the tensors of the towers and their projectors alone. Its import takes seconds, so it happens
with the first item, or in ``parley doctor``.
"""

from __future__ import annotations

import logging
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.mlx import has_mlx_layout
from parley.model.load.multimodal import IMAGE_MAKERS, keep_encoders
from parley.text.media_family import ENCODER_CONFIGS, MediaFamily, has_unread_media, read_media_family, writer_config
from parley.text.tokens.json_files import BadTokenizer, read_json_object
from parley.types import ParleySettings

log = logging.getLogger("parley.engine")

# Names of tensors in the numbered blocks of encoders: (list of blocks, number, tensor within the block). The layers in
# which Parakeet shortens sound are not alike, and of Q-Formers only every second block attends to the encoder's output.
BLOCK_TENSOR = re.compile(r"(?!.*\b(?:subsampling|qformer)\.)(.*?\b(?:layers?|blocks)\.)(\d+)\.(.+)")
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
QUANTIZED_SUFFIXES = (".qweight", ".weight_packed", ".weight_scale", ".absmax", ".SCB")


class MediaTowers(NamedTuple):
    """The encoders of a checkpoint. ``nbytes``: their weights in memory."""

    folder: Path
    config: dict[str, Any]
    family: MediaFamily
    dtype: torch.dtype
    device: torch.device
    nbytes: int


def plan_towers(folder: Path, config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> MediaTowers | None:
    """Return the encoders of a model with this config.json, None if it reads text only.

    Raises LoadError if the file headers lack a tensor of a block that others of an encoder have.
    """
    family = read_media_family(config)
    if family is None:
        if has_unread_media(config):
            log.info("The model reads text only: encoders of %s models are not supported.", config["model_type"])
        return None
    if missing := _missing_package(folder, family):
        log.info("The model reads text only: its %s, which is not installed.", missing)
        return None
    if has_mlx_layout(Checkpoint(folder)):
        log.info("The model reads text only: folders of MLX have encoders in another layout.")
        return None
    towers = _open_towers(folder)
    if not towers.tensor_names or any(name.endswith(QUANTIZED_SUFFIXES) for name in towers.tensor_names):
        log.info("The model reads text only: its checkpoint has no encoders, or quantized ones.")
        return None
    if not family.needs_timm:  # whose blocks differ
        _check_blocks(towers.tensor_names, _encoder_layer_types(config))
    return MediaTowers(folder, config, family, dtype, device, towers.parameter_count * dtype.itemsize)


def _missing_package(folder: Path, family: MediaFamily) -> str | None:
    """Return the part of the model that needs a package which is not installed, and the package's name; None if there
    is none. Raises LoadError.

    MiniCPM-OCR's processor may choose sizes by the letters that it finds with OpenCV.
    """
    if family.needs_timm and find_spec("timm") is None:
        return "encoders need the package timm"
    for name in PROCESSOR_FILES:
        try:
            content = read_json_object(folder / name)
        except BadTokenizer as error:
            raise LoadError(str(error)) from None
        settings = content.get("image_processor", content)
        is_adaptive = isinstance(settings, dict) and settings.get("small_image_upsize") == "adaptive"
        if is_adaptive and find_spec("cv2") is None:
            return "processor needs the package opencv-python-headless"
    return None


def usable_towers(towers: MediaTowers | None, *, is_fused: bool) -> MediaTowers | None:
    """Return the encoders that a decoder has a use for: None if only the fused decoder has, and it is not that one."""
    if towers is None or is_fused or not towers.family.needs_fused:
        return towers
    log.info("The model reads text only: a decoder in Transformers' code cannot read its media over pages.")
    return None


def memory_needed_later(settings: ParleySettings, towers: MediaTowers, *, is_fused: bool) -> int:
    """Return the bytes that media take once they are sent: their embeddings, and encoders that are not yet loaded.

    ``is_fused``: the language model runs on the fused decoder; otherwise Transformers loads the encoders with it.
    """
    return settings.media_cache + (towers.nbytes if is_fused else 0)


def check_towers(towers: MediaTowers) -> None:
    """Check by the file headers that no tensor is missing or has a wrong shape. Raises LoadError."""
    checkpoint = _open_towers(towers.folder)
    stand_in = torch.zeros((), dtype=towers.dtype)  # for all numbers, so that no memory is needed
    _build_model(towers, {name: stand_in.expand(checkpoint.tensor_shape(name)) for name in checkpoint.tensor_names})


def load_towers(towers: MediaTowers) -> Any:
    """Return a model of Transformers with an empty language model, whose encoders are loaded. Raises LoadError."""
    from parley.model.media.slices import optimize_encoders  # imports Transformers, which takes seconds

    checkpoint = _open_towers(towers.folder)
    model = _build_model(
        towers,
        {name: checkpoint.view_tensor(name, *checkpoint.tensor_shape(name)) for name in checkpoint.tensor_names},
    )
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(towers.device, copy=True)  # not a view of the file, which may change
    return optimize_encoders(model.to(towers.device).eval().requires_grad_(False))


def _open_towers(folder: Path) -> Checkpoint:
    """Open a checkpoint without the tensors of the language model."""
    checkpoint = Checkpoint(folder)
    keep_encoders(checkpoint)
    return checkpoint


def _encoder_layer_types(config: dict[str, Any]) -> list[Any]:
    """Return the types of an encoder's layers; empty if all of them are alike."""
    for name in ENCODER_CONFIGS:
        encoder_config = writer_config(config).get(name)
        if isinstance(encoder_config, dict) and isinstance(encoder_config.get("layer_types"), list):
            return list(encoder_config["layer_types"])
    return []


def _check_blocks(names: list[str], layer_types: list[Any]) -> None:
    """Raise LoadError if a block lacks a tensor that other blocks of the same list have.

    ``layer_types``: of the blocks of a list that is as long; those of one type have the same tensors.
    """
    blocks: dict[str, dict[int, set[str]]] = {}
    for name in names:
        if match := BLOCK_TENSOR.fullmatch(name):
            blocks.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(match[3])
    for prefix, tensors in blocks.items():
        count = max(tensors) + 1
        types = layer_types if len(layer_types) == count else [None] * count
        for number in range(count):
            alike = [tensors[other] for other in tensors if types[other] == types[number]]
            for tensor in sorted(set().union(*alike) - tensors.get(number, set())):
                raise LoadError(f"The checkpoint has no tensor {prefix}{number}.{tensor}.")


def _build_model(towers: MediaTowers, tensors: dict[str, torch.Tensor]) -> Any:
    """Build the model of Transformers from the tensors of its encoders. Raises LoadError."""
    from transformers import CONFIG_MAPPING

    from parley.model.load.transformers import WRITER_MAPPINGS, one_line, silence_transformers
    from parley.model.media.encoder import encoder_parts

    model_type = towers.family.model_type
    with silence_transformers():
        try:
            config = CONFIG_MAPPING[model_type].from_dict(_read_tagged_floats(towers.config))
            _empty_language_model(config)
            mapping: Any = next(mapping_table for mapping_table in WRITER_MAPPINGS if type(config) in mapping_table)
            model_class: Any = mapping[type(config)]
            model, report = model_class.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=towers.dtype,
                attn_implementation="eager",  # the only one that all encoders have
                ignore_mismatched_sizes=True,  # refused below, in clearer words
                output_loading_info=True,
            )
        except MemoryError:
            raise
        except Exception as error:
            raise LoadError(
                f"Transformers cannot load the encoder of this {model_type} model: {one_line(error)}"
            ) from error
    for name, _ in list(model.base_model.named_children()):
        if f"model.{name}.".startswith(IMAGE_MAKERS):
            delattr(model.base_model, name)
    for name, shape, expected in sorted(report["mismatched_keys"]):
        raise LoadError(f"Tensor {name} has shape {list(shape)}; the config asks for {list(expected)}.")
    head = model.get_output_embeddings()
    if head is None:  # it belongs to the language model alone, as that of Nemotron-H Omni
        head = model.language_model.get_output_embeddings()
    parts = (model.get_decoder(), head)
    encoders = {id(parameter) for part in encoder_parts(model) for parameter in part.parameters()}
    language_model = {id(parameter) for part in parts for parameter in part.parameters()} - encoders
    needed = {name for name, parameter in model.named_parameters() if id(parameter) not in language_model}
    missing = sorted(needed & set(report["missing_keys"]))
    if missing:
        raise LoadError(f"The checkpoint has no tensor {missing[0]} ({len(missing)} missing in all).")
    return model


def _read_tagged_floats(value: Any) -> Any:
    """Return a value of config.json with numbers where Transformers has written {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _read_tagged_floats(member) for name, member in value.items()}
    return [_read_tagged_floats(member) for member in value] if isinstance(value, list) else value


def _empty_language_model(config: Any) -> None:
    """Change the config to a language model of no layers and one token."""
    text_config = config.get_text_config()
    text_config.num_hidden_layers = 0
    text_config.vocab_size = 1
    text_config.pad_token_id = 0
    if getattr(text_config, "hidden_size_per_layer_input", None):
        text_config.hidden_size_per_layer_input = 0
    if hasattr(text_config, "altup_num_inputs"):
        text_config.altup_num_inputs, text_config.altup_active_idx, text_config.num_kv_shared_layers = 1, 0, 0
    if getattr(text_config, "layer_types", None):
        text_config.layer_types = []  # its length is the number of layers of Nemotron-H
    if hasattr(config, "quantization_config"):
        del config.quantization_config
