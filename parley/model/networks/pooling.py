"""Pools a text's hidden states into one vector, as a model folder in sentence-transformers format specifies.

The folder's modules.json lists the stages after the network: a pooling with its own config.json, then linear layers
with their own config.json and weights, and an optional normalization. Without that file, encoders and decoders have a
default each. A vector is computed from one text's rows only, so it does not depend on the rest of the step. The pooling
of a sparse embedding model is only read here; its head (``sparse_head.py``) applies it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from parley.gguf.folder import LINK_PATTERN
from parley.model.checkpoint.files import Checkpoint, LoadError
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
MODULES = ("Transformer", "Pooling", "Dense", "Normalize")  # the kinds that modules.json may list, in this order
SPARSE_MODULES = (["MLMTransformer", "SpladePooling"], ["Transformer", "SpladePooling"])  # of sparse embedding models
TOKEN_MASK = "MultiVectorMask"  # says which tokens count, by their ids
# The modules of late-interaction models: those of PyLate, or of sentence-transformers since 6.0
LATE_MODULES = re.compile(f"Transformer(,Dense)+(,{TOKEN_MASK})?(,Normalize)?|Transformer,{TOKEN_MASK}(,Normalize)?")
SPARSE_LOGARITHMS = {"relu": 1, "log1p_relu": 2}  # how many follow the ReLU, by ``activation_function``
SPLADE_MODE = "splade"
# Activations of linear layers, by the last part of the name of PyTorch's class.
DENSE_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
}


def _position_weights(count: int) -> HiddenRows:
    """Return weights that grow with the position (SGPT, arXiv 2202.08904, section 3): [count, 1], sum 1."""
    steps = np.arange(1, count + 1, dtype=np.float32)
    result: HiddenRows = (steps / steps.sum())[:, None]
    return result


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer that a text's vector, or those of its tokens, pass. ``weight`` float32 [out, in], ``bias`` float32
    [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    activate: Callable[[torch.Tensor], torch.Tensor]

    def apply_to_vectors(self, vectors: HiddenRows) -> HiddenRows:
        """Apply the layer: [..., in] -> [..., out]."""
        result: HiddenRows = self.activate(F.linear(torch.from_numpy(vectors), self.weight, self.bias)).numpy()
        return result


@dataclass(frozen=True)
class SparsePooling:
    """How the logits of a text's tokens become weights (``sparse_head.py``). ``strategy``: how the
    weights of a text's tokens are combined. ``logarithms``: how many times log(1 + x) is applied to a logit above 0."""

    strategy: Literal["max", "sum"] = "max"
    logarithms: int = 1


@dataclass(frozen=True)
class PoolingRecipe:
    """How the states of a text's tokens become its vector.

    * ``modes``: of POOLING_MODES; their results are concatenated in that order.
    * ``dense_layers``: linear layers after that, before the normalization.
    * ``max_text_tokens``: text length seen in training.
    * ``sparse``: the recipe of a sparse embedding model, whose only mode is SPLADE_MODE.
    * ``token_layers``: linear layers for the states of all tokens, before anything else. A late-interaction model
      (ColBERT) has such layers and no mode, because it makes vectors of tokens only.
    """

    modes: tuple[str, ...]
    normalize: bool = True
    max_text_tokens: int | None = None
    dense_layers: tuple[DenseLayer, ...] = ()
    sparse: SparsePooling | None = None
    token_layers: tuple[DenseLayer, ...] = ()

    @property
    def is_last_token(self) -> bool:
        """Whether only the last token's row is needed."""
        return self.modes == ("lasttoken",)

    def vector_size(self, hidden: int) -> int:
        """Return the length of a text's vector, for a network with hidden states of ``hidden`` numbers; 0 if texts have
        no vector."""
        if self.dense_layers:
            return self.dense_layers[-1].weight.shape[0]
        return self.token_vector_size(hidden) * len(self.modes)

    def token_vector_size(self, hidden: int) -> int:
        """Return the length of a token's vector, for a network with hidden states of ``hidden`` numbers."""
        return self.token_layers[-1].weight.shape[0] if self.token_layers else hidden

    def check_width(self, hidden: int) -> None:
        """Raise LoadError if the linear layers do not fit hidden states of ``hidden`` numbers."""
        for layers, width in (
            (self.token_layers, hidden),
            (self.dense_layers, self.token_vector_size(hidden) * len(self.modes)),
        ):
            for layer in layers:
                if layer.weight.shape[1] != width:
                    raise LoadError(f"A Dense module takes {layer.weight.shape[1]} numbers, but its input has {width}.")
                width = layer.weight.shape[0]

    def pool_rows(self, rows: HiddenRows, request: PoolingOptions) -> bytes | None:
        """Return the requested vector, or vectors, as little-endian float32 bytes; None if a number is not finite."""
        for layer in self.token_layers:
            rows = layer.apply_to_vectors(rows)
        if request.task == "token_embed":
            vectors = rows[:, : request.dimensions]
        else:
            vector = np.concatenate([POOLING_MODES[mode](rows) for mode in self.modes])
            for layer in self.dense_layers:
                vector = layer.apply_to_vectors(vector)
            vectors = vector[None, : request.dimensions]
        return encode_vectors(vectors, normalize=self.normalize if request.normalize is None else request.normalize)


def encode_vectors(vectors: HiddenRows, *, normalize: bool) -> bytes | None:
    """Return vectors [rows, numbers] as little-endian float32 bytes; None if a number is not finite. ``normalize``:
    scale each to length 1."""
    lengths = np.sqrt(np.square(vectors, dtype=np.float64).sum(1, keepdims=True))
    if not np.isfinite(lengths).all():
        return None
    if normalize:
        vectors = vectors / np.maximum(lengths, MIN_NORM).astype(np.float32)
    return vectors.astype("<f4").tobytes()


def read_pooling_recipe(folder: Path) -> PoolingRecipe | None:
    """Read the folder's pooling; None if it specifies none. Raises LoadError if it is not supported."""
    if not (folder / "modules.json").is_file():
        return None
    modules = [module for module in _read_json_value(folder / "modules.json", list) if isinstance(module, dict)]
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if kinds in SPARSE_MODULES:
        return PoolingRecipe(
            (SPLADE_MODE,),
            normalize=False,
            max_text_tokens=_read_text_length(folder),
            sparse=_read_sparse_pooling(folder / str(modules[1].get("path", ""))),
        )
    dense_count = kinds.count("Dense")
    if LATE_MODULES.fullmatch(",".join(kinds)):
        dense_modules = modules[1:][:dense_count]
        return PoolingRecipe(
            (),
            normalize="Normalize" in kinds or TOKEN_MASK not in kinds,  # PyLate's code does it without a module
            max_text_tokens=_read_text_length(folder),
            token_layers=tuple(
                _read_dense_layer(folder / str(module.get("path", "")), reads_tokens=True) for module in dense_modules
            ),
        )
    if kinds != ["Transformer", "Pooling", *["Dense"] * dense_count, *["Normalize"] * ("Normalize" in kinds)]:
        raise LoadError(f"modules.json lists {', '.join(kinds)}; only {', '.join(MODULES)} can be served, in order.")
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
    return PoolingRecipe(
        tuple(mode for mode in POOLING_MODES if mode in modes),
        normalize="Normalize" in kinds,
        max_text_tokens=_read_text_length(folder),
        dense_layers=tuple(
            _read_dense_layer(folder / str(module.get("path", ""))) for module in modules[2:][:dense_count]
        ),
    )


def _read_text_length(folder: Path) -> int | None:
    """Return the length of texts in training, in tokens; None if the folder does not say it. Raises LoadError."""
    length = None
    for path in sorted(folder.glob("sentence_*_config.json")):  # older folders name it after the family
        length = _read_json_value(path, dict).get("max_seq_length")
    return length if type(length) is int and length > 0 else None


def _read_sparse_pooling(folder: Path) -> SparsePooling:
    """Read a SpladePooling module of sentence-transformers. Raises LoadError."""
    settings = _read_json_value(folder / "config.json", dict)
    strategy = str(settings.get("pooling_strategy", "max"))[:100]
    activation = str(settings.get("activation_function", "relu"))[:100]
    if activation in SPARSE_LOGARITHMS:
        if strategy == "max":
            return SparsePooling("max", SPARSE_LOGARITHMS[activation])
        if strategy == "sum":
            return SparsePooling("sum", SPARSE_LOGARITHMS[activation])
    raise LoadError(
        f"{folder.name} has the strategy {strategy} and the activation {activation}; only max and sum, and "
        f"{' and '.join(SPARSE_LOGARITHMS)}, are supported."
    )


def _read_dense_layer(folder: Path, *, reads_tokens: bool = False) -> DenseLayer:
    """Read a Dense module of sentence-transformers. ``reads_tokens``: vectors of tokens, not of texts. Raises
    LoadError."""
    settings = _read_json_value(folder / "config.json", dict)
    activation = str(settings.get("activation_function", "Tanh"))
    activate = DENSE_ACTIVATIONS.get(activation.rpartition(".")[2])
    if activate is None:
        raise LoadError(f"{folder.name} has the activation {activation}, which is not supported.")
    read_names = (None, "sentence_embedding", *["token_embeddings"] * reads_tokens)
    if settings.get("module_input_name") not in read_names:
        raise LoadError(f"{folder.name} reads {settings['module_input_name']}; only sentence_embedding is supported.")
    if settings.get("use_residual"):
        raise LoadError(f"{folder.name} adds its input to its output (use_residual), which is not supported.")
    weights, prefix = folder / "model.safetensors", "linear"
    if not weights.is_file():
        if not any(folder.parent.glob(LINK_PATTERN)):
            raise LoadError(f"{folder.name} has no model.safetensors, and files of other formats are not read.")
        prefix = f"{folder.name}.linear"  # a GGUF file has all layers
    sizes = [settings.get("out_features"), settings.get("in_features")]
    if any(type(size) is not int or size < 1 for size in sizes):
        raise LoadError(f"{folder.name}/config.json has no valid in_features and out_features.")
    checkpoint = Checkpoint(folder, [weights]) if prefix == "linear" else Checkpoint(folder.parent)
    has_bias = settings.get("bias", True) is not False
    return DenseLayer(
        checkpoint.view_tensor(f"{prefix}.weight", *sizes).float().clone(),
        checkpoint.view_tensor(f"{prefix}.bias", sizes[0]).float().clone() if has_bias else None,
        activate,
    )


def _read_json_value(path: Path, kind: type) -> Any:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path.parent.name}/{path.name} cannot be read: {error}") from None
    if not isinstance(value, kind):
        raise LoadError(f"{path.name} does not hold a value of the expected JSON type.")
    return value
