"""Pools a text's hidden states into one vector, as a model folder in sentence-transformers format specifies.

The folder's modules.json lists the stages after the network: a pooling with its own config.json, then an optional
normalization. Without that file the kind of network decides. Sums cover one text's rows only, so a vector does not
depend on the rest of the step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from parley.model.checkpoint.files import LoadError
from parley.types import PoolingOptions

HiddenRows = npt.NDArray[np.float32]  # hidden states of one text: [tokens, hidden]

# Pooling functions by their names in sentence-transformers. Its results are concatenated in this order.
POOLING_MODES: dict[str, Callable[[HiddenRows], HiddenRows]] = {
    "cls": lambda rows: rows[0],
    "max": lambda rows: rows.max(0),
    "mean": lambda rows: rows.sum(0) / np.float32(len(rows)),
    "mean_sqrt_len_tokens": lambda rows: rows.sum(0) / np.sqrt(np.float32(len(rows))),
    "weightedmean": lambda rows: (rows * _position_weights(len(rows))).sum(0),
    "lasttoken": lambda rows: rows[-1],
}
FLAG_PREFIX = "pooling_mode_"
FLAG_MODES = {"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean"}  # older configs use these longer names
MIN_NORM = 1e-12


def _position_weights(count: int) -> HiddenRows:
    """Return weights that grow with the position (SGPT, arXiv 2202.08904, section 3): [count, 1], sum 1."""
    steps = np.arange(1, count + 1, dtype=np.float32)
    result: HiddenRows = (steps / steps.sum())[:, None]
    return result


@dataclass(frozen=True)
class PoolingRecipe:
    """``modes``: of POOLING_MODES, concatenated in that order. ``max_text_tokens``: text length seen in training."""

    modes: tuple[str, ...]
    normalize: bool = True
    max_text_tokens: int | None = None

    @property
    def is_last_token(self) -> bool:
        """Whether only the last token's row is needed."""
        return self.modes == ("lasttoken",)

    def pool_rows(self, rows: HiddenRows, request: PoolingOptions) -> bytes | None:
        """Return the requested vector, or vectors, as little-endian float32 bytes; None if a number is not finite."""
        if request.task == "token_embed":
            vectors = rows[:, : request.dimensions]
        else:
            vectors = np.concatenate([POOLING_MODES[mode](rows) for mode in self.modes])[None, : request.dimensions]
        lengths = np.sqrt(np.square(vectors, dtype=np.float64).sum(1, keepdims=True))
        if not np.isfinite(lengths).all():
            return None
        if self.normalize if request.normalize is None else request.normalize:
            vectors = vectors / np.maximum(lengths, MIN_NORM).astype(np.float32)
        return vectors.astype("<f4").tobytes()


def read_pooling_recipe(folder: Path) -> PoolingRecipe | None:
    """Read the folder's pooling; None if it specifies none. Raises LoadError if it is not supported."""
    if not (folder / "modules.json").is_file():
        return None
    modules = [module for module in _read_json_value(folder / "modules.json", list) if isinstance(module, dict)]
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise LoadError(f"modules.json lists {', '.join(kinds)}; only Transformer, Pooling, Normalize can be served.")
    settings = _read_json_value(folder / str(modules[1].get("path", "")) / "config.json", dict)
    modes = settings.get("pooling_mode")
    if modes is None:
        flagged = {
            name.removeprefix(FLAG_PREFIX) for name, on in settings.items() if name.startswith(FLAG_PREFIX) and on
        }
        modes = {FLAG_MODES.get(name, name) for name in flagged}
    modes = set(map(str, modes)) if isinstance(modes, list | set) else {str(modes)}
    if not modes or modes - POOLING_MODES.keys():
        raise LoadError(f"The pooling {', '.join(sorted(modes)) or 'without a mode'} is not known.")
    if settings.get("include_prompt") is False:
        raise LoadError("The model's pooling leaves its prompts out, which is not supported.")
    max_text_tokens = None
    for path in sorted(folder.glob("sentence_*_config.json")):  # older folders name it after the family
        max_text_tokens = _read_json_value(path, dict).get("max_seq_length")
    return PoolingRecipe(
        tuple(mode for mode in POOLING_MODES if mode in modes),
        normalize="Normalize" in kinds,
        max_text_tokens=max_text_tokens if type(max_text_tokens) is int and max_text_tokens > 0 else None,
    )


def _read_json_value(path: Path, kind: type) -> Any:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path.parent.name}/{path.name} cannot be read: {error}") from None
    if not isinstance(value, kind):
        raise LoadError(f"{path.name} does not hold a value of the expected JSON type.")
    return value
