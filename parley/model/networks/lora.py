"""Reads a LoRA adapter (arXiv 2106.09685) from a folder in PEFT's format: adapter_config.json and safetensors.

An unsupported config option is refused by name, and so is a tensor that belongs to no layer: an adapter that is applied
only in part would give untrained results. Pickle files are never read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from parley import native
from parley.model.checkpoint.files import MAX_HEADER_BYTES, Checkpoint, LoadError
from parley.model.networks.network import LinearSite

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PICKLE_FILES = ("adapter_model.bin", "adapter_model.pt")
MAX_RANK = 256  # of an adapter, unless the settings say otherwise
MAX_CONFIG_BYTES = 4 << 20  # bytes

# base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight. Some writers omit the prefix, some insert the
# adapter's name.
TENSOR_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")

# Where the layers of a decoder are, in plain models and in the language models of multimodal ones, by version of
# Transformers. Some adapters are trained on a model without its head ("").
BODY_PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.", "model.", "")

# Config members that change the computation, and their meaning. Empty values count as absent.
UNSUPPORTED_OPTIONS = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "lora_bias": "biases of adapters",
    "modules_to_save": "whole modules besides the adapter",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "adapters of parameters outside linear layers",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "activated LoRA",
    "megatron_config": "Megatron's layers",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """``core.sequence.LoadedAdapter``: weights in the kernels' layout, and a digest of the files they come from."""

    weights: native.PackedLora
    digest: bytes
    rank: int

    @property
    def nbytes(self) -> int:
        """The size of the weights in bytes."""
        return self.weights.nbytes


def read_adapter(
    folder: Path, linears: Mapping[str, LinearSite], max_rank: int, dtype: torch.dtype, device: torch.device
) -> LoraAdapter:
    """Read the adapter in a folder, for a network with these linear layers. Raises LoadError."""
    if not linears:
        raise LoadError("Adapters are not available for this kind of model.")
    if folder.is_file() and folder.suffix == ".gguf":
        raise LoadError(f"{folder.name} is in GGUF; adapters are read as PEFT folders.")
    if not folder.is_dir():
        raise LoadError(f"There is no adapter folder {folder.name}.")
    config_bytes, config = _read_adapter_config(folder / CONFIG_FILE)
    _check_config(config, max_rank)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        if any((folder / name).exists() for name in PICKLE_FILES):
            raise LoadError(f"{folder.name} has weights in a pickle file only, which is never read; save it anew with "
                            "safe_serialization=True.")  # fmt: skip
        raise LoadError(f"{folder.name} has no {WEIGHTS_FILE}.")
    largest = MAX_HEADER_BYTES + 8 * max_rank * sum(site.in_features + site.out_features for site in linears.values())
    if path.stat().st_size > largest:
        raise LoadError(f"{WEIGHTS_FILE} is larger than an adapter of rank {max_rank} for this model can be.")
    checkpoint = Checkpoint(folder, [path], mapped=False)
    pairs = _tensor_pairs(checkpoint, linears)
    _check_complete(config, pairs, linears)
    sites: list[list[native.LowRank]] = [[] for _ in range(1 + max(site.site for site in linears.values()))]
    rank_and_scale = _scale_rule(config, max_rank)
    highest_rank = 0
    for name, (a, b) in sorted(pairs.items(), key=lambda pair: linears[pair[0]].first):
        site = linears[name]
        rank, factor = rank_and_scale(TENSOR_NAME.sub(r"\1", a))  # the config names layers as the tensors do
        if rank > max_rank:
            raise LoadError(f"The adapter has rank {rank} at {name}; at most {max_rank} is allowed here.")
        highest_rank = max(highest_rank, rank)
        down = _read_lora_tensor(checkpoint, a, dtype, rank, site.in_features)
        up = _read_lora_tensor(checkpoint, b, dtype, site.out_features, rank)
        up = up if site.order is None else up[site.order]
        sites[site.site].append(native.LowRank(site.first, down, up, factor))
    digest = sha256(config_bytes + checkpoint.content_digest).digest()
    return LoraAdapter(native.pack_lora(sites, dtype, device), digest, highest_rank)


def _read_adapter_config(path: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
        config = json.loads(raw)
    except FileNotFoundError:
        raise LoadError(f"{path.parent.name} has no {CONFIG_FILE}, so it is not a PEFT adapter folder.") from None
    except OSError as error:
        raise LoadError(f"{CONFIG_FILE} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise LoadError(f"{CONFIG_FILE} is not valid JSON.") from None
    if not isinstance(config, dict):
        raise LoadError(f"{CONFIG_FILE} does not hold a JSON object.")
    return raw, config


def _check_config(config: dict[str, Any], max_rank: int) -> None:
    """Raise LoadError for every config option that would change the computation."""
    if config.get("peft_type", "LORA") != "LORA":
        raise LoadError(f"The adapter is of kind {str(config['peft_type'])[:40]}; only LORA is supported.")
    for name, meaning in UNSUPPORTED_OPTIONS.items():
        if config.get(name):
            raise LoadError(f"The adapter's {name} asks for {meaning}, which is not supported.")
    if config.get("bias", "none") != "none":
        raise LoadError(f"The adapter's bias is {str(config['bias'])[:40]}; only none is supported.")
    _checked_rank(config.get("r"), "r", max_rank)
    _checked_alpha(config.get("lora_alpha"), "lora_alpha")


def _checked_rank(value: Any, field: str, max_rank: int) -> int:
    if type(value) is not int or not 1 <= value <= max_rank:
        raise LoadError(f"The adapter's {field} is {str(value)[:40]}; it must be a whole number from 1 to {max_rank}.")
    return value


def _checked_alpha(value: Any, field: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e9:
        raise LoadError(f"The adapter's {field} is {str(value)[:40]}; it must be a number.")
    return float(value)


def _scale_rule(config: dict[str, Any], max_rank: int) -> Callable[[str], tuple[int, float]]:
    """Return a function from a linear layer's name in the adapter to its rank and scale, by the config's patterns."""
    ranks, alphas = (_compile_patterns(config, name) for name in ("rank_pattern", "alpha_pattern"))
    rank_stabilized = bool(config.get("use_rslora"))

    def rank_and_scale(name: str) -> tuple[int, float]:
        rank = _checked_rank(_match_pattern(ranks, name, config["r"]), "rank_pattern", max_rank)
        alpha = _checked_alpha(_match_pattern(alphas, name, config["lora_alpha"]), "alpha_pattern")
        return rank, alpha / (math.sqrt(rank) if rank_stabilized else rank)

    return rank_and_scale


def _compile_patterns(config: dict[str, Any], field: str) -> list[tuple[re.Pattern[str], Any]]:
    """Compile a field's name patterns, each with its value. An expression that could run forever is refused."""
    entries = config.get(field) or {}
    if not isinstance(entries, dict):
        raise LoadError(f"The adapter's {field} is not an object.")
    compiled = []
    for key, value in entries.items():
        if len(key) > 200 or len(re.findall(r"[*+?{]", key)) > 3 or re.search(r"\)[*+?{]", key):
            raise LoadError(f"The adapter's {field} has an expression that is too complex: {key[:60]}")
        try:
            compiled.append((re.compile(rf"(.*\.)?({key})$"), value))
        except (re.error, OverflowError, RecursionError):
            raise LoadError(f"The adapter's {field} has an invalid expression: {key[:60]}") from None
    return compiled


def _match_pattern(patterns: list[tuple[re.Pattern[str], Any]], name: str, default: Any) -> Any:
    return next((value for pattern, value in patterns if pattern.match(name)), default)


def _tensor_pairs(checkpoint: Checkpoint, linears: Mapping[str, LinearSite]) -> dict[str, tuple[str, str]]:
    """Return the names of the two tensors (lora_A, lora_B) of each linear layer that the adapter changes."""
    names_by_place = {_place_in_body(name): name for name in linears}
    by_layer: dict[str, dict[str, str]] = {}
    for tensor in checkpoint.tensor_names:
        match = TENSOR_NAME.fullmatch(tensor)
        if match is None:
            raise LoadError(f"The adapter has a tensor {tensor[:120]}, which is not supported.")
        name = match[1] if match[1] in linears else names_by_place.get(_place_in_body(match[1]))
        if name is None:
            raise LoadError(
                f"The adapter changes {match[1][:120]}, which is not a linear layer that adapters may change here."
            )
        if match[2] in by_layer.setdefault(name, {}):
            raise LoadError(f"The adapter has two tensors lora_{match[2]} for {name}.")
        by_layer[name][match[2]] = tensor
    for name, pair in by_layer.items():
        if len(pair) < 2:
            raise LoadError(f"The adapter has only one of lora_A and lora_B for {name}.")
    if not by_layer:
        raise LoadError("The adapter has no tensors.")
    return {name: (pair["A"], pair["B"]) for name, pair in by_layer.items()}


def _place_in_body(name: str) -> str:
    """Return a layer's name without the path to the decoder that it is in."""
    return name.removeprefix(next(prefix for prefix in BODY_PREFIXES if name.startswith(prefix)))


def _check_complete(config: dict[str, Any], pairs: Mapping[str, object], linears: Mapping[str, LinearSite]) -> None:
    """Raise LoadError if a layer that the config names has no tensors: half a file must not pass for an adapter."""
    targets = config.get("target_modules")
    if config.get("exclude_modules") or config.get("layers_to_transform") is not None:
        return
    if targets == "all-linear":
        expected = list(linears)
    elif isinstance(targets, list):
        suffixes = tuple(f".{target}" for target in targets if isinstance(target, str))
        expected = [name for name in linears if f".{name}".endswith(suffixes)]
    else:
        return
    missing = sorted(set(expected) - set(pairs))
    if missing:
        raise LoadError(f"The adapter's config names {missing[0]}, but its file has no tensors for it.")


def _read_lora_tensor(checkpoint: Checkpoint, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if checkpoint.tensor_shape(name) != shape:
        raise LoadError(
            f"Tensor {name} of the adapter has shape {list(checkpoint.tensor_shape(name))}, but {list(shape)} fits "
            "the model: it was made for another model."
        )
    tensor = checkpoint.view_tensor(name, *shape).to(dtype)
    if not tensor.isfinite().all():
        raise LoadError(f"Tensor {name} of the adapter holds a value that is infinite or not a number.")
    return tensor
