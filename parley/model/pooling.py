"""How a text's hidden states become one vector, as a model folder in the form of sentence-transformers says.

The folder's modules.json lists what follows the network: a pooling with its own config.json, then perhaps a
normalisation. Without that file the network's kind decides. Sums run over one text's rows alone, so a vector does not
depend on what else was computed in the step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from parley.model.checkpoint import LoadError
from parley.types import Pooling

Rows = npt.NDArray[np.float32]  # hidden states of one text: [tokens, hidden]

# What the modes give, under the names that sentence-transformers has for them; the order is that of its results.
MODES: dict[str, Callable[[Rows], Rows]] = {
    "cls": lambda rows: rows[0],
    "max": lambda rows: rows.max(0),
    "mean": lambda rows: rows.sum(0) / np.float32(len(rows)),
    "mean_sqrt_len_tokens": lambda rows: rows.sum(0) / np.sqrt(np.float32(len(rows))),
    "weightedmean": lambda rows: (rows * _weights(len(rows))).sum(0),
    "lasttoken": lambda rows: rows[-1],
}
FLAG = "pooling_mode_"
FLAGS = {"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean"}  # where the older config has longer names
TINY = 1e-12


def _weights(count: int) -> Rows:
    """Later tokens weigh more (SGPT, arXiv 2202.08904, section 3): [count, 1], 1 in all."""
    steps = np.arange(1, count + 1, dtype=np.float32)
    return (steps / steps.sum())[:, None]


@dataclass(frozen=True)
class Recipe:
    """``modes``: of MODES, joined in that order. ``longest``: text that the model was trained on, in tokens."""

    modes: tuple[str, ...]
    normalize: bool = True
    longest: int | None = None

    @property
    def last(self) -> bool:
        """Whether the last token's row is all that is needed."""
        return self.modes == ("lasttoken",)

    def pool(self, rows: Rows, wish: Pooling) -> bytes | None:
        """The vector that is wished for, float32 in little endian; None where it is not made of numbers."""
        vector = np.concatenate([MODES[mode](rows) for mode in self.modes])[: wish.dimensions]
        length = float(np.sqrt(np.square(vector, dtype=np.float64).sum()))
        if not np.isfinite(length):
            return None
        if self.normalize if wish.normalize is None else wish.normalize:
            vector = vector / np.float32(max(length, TINY))
        return vector.astype("<f4").tobytes()


def read_recipe(folder: Path) -> Recipe | None:
    """What the folder says; None if it says nothing. Raises LoadError for what cannot be done here."""
    if not (folder / "modules.json").is_file():
        return None
    modules = _read(folder / "modules.json", list)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules if isinstance(module, dict)]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise LoadError(f"modules.json lists {', '.join(kinds)}; only Transformer, Pooling, Normalize can be served.")
    settings = _read(folder / str(modules[1].get("path", "")) / "config.json", dict)
    modes = settings.get("pooling_mode")
    if modes is None:
        named = {name.removeprefix(FLAG) for name, on in settings.items() if name.startswith(FLAG) and on}
        modes = {FLAGS.get(name, name) for name in named}
    modes = {modes} if isinstance(modes, str) else set(modes)
    if not modes or modes - MODES.keys():
        raise LoadError(f"The pooling {', '.join(sorted(map(str, modes))) or 'without a mode'} is not known.")
    if settings.get("include_prompt") is False:
        raise LoadError("The model's pooling leaves its prompts out, which is not supported.")
    longest = None
    for path in sorted(folder.glob("sentence_*_config.json")):  # named after the family in older folders
        longest = _read(path, dict).get("max_seq_length")
    return Recipe(
        tuple(mode for mode in MODES if mode in modes),
        normalize="Normalize" in kinds,
        longest=longest if type(longest) is int and longest > 0 else None,
    )


def _read(path: Path, kind: type) -> Any:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path.parent.name}/{path.name} cannot be read: {error}") from None
    if not isinstance(value, kind):
        raise LoadError(f"{path.name} does not hold what it should.")
    return value
