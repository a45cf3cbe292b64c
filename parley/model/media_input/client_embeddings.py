"""Embeddings that clients send instead of media, as a safetensors file: never pickle, which could run code.

The file has the tensor ``embeddings``, [n, width] in float32, float16 or bfloat16. The width is the model's; if some of
its layers take embeddings of images as well (deepstack), those of each layer follow in the same row. For models whose
positions have three axes the file also has ``image_grid_thw`` or ``video_grid_thw``, int64 [1, 3]: frames, rows and
columns before spatial merging.
"""

from __future__ import annotations

import safetensors.torch
import torch
from safetensors import SafetensorError

from parley.model.media_input.unusable import UnusableMedia

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_ROWS = 1 << 17


def read_client_embeddings(
    data: bytes, hidden: int, deep_layers: int, grid_name: str | None
) -> dict[str, torch.Tensor]:
    """Return a client's embeddings as the engine reads them: ``embeddings`` [n, hidden], and ``deep_embeddings``
    [layers, n, hidden] if the model has such layers. ``grid_name``: of the grid that must come with them, if any.

    Raises UnusableMedia.
    """
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError, OverflowError):
        raise UnusableMedia("is no safetensors file", "bad_embeddings") from None
    names = [*([grid_name] if grid_name else []), "embeddings"]
    if tensors.keys() != set(names):
        predicate = f"must be a safetensors file with {' and '.join(names)}, and nothing else"
        raise UnusableMedia(predicate, "bad_embeddings")
    rows = tensors["embeddings"]
    _check_rows(rows, hidden * (1 + deep_layers))
    first, *deep = rows.split(hidden, dim=1)
    result = {"embeddings": first.contiguous()}
    if deep:
        result["deep_embeddings"] = torch.stack(deep)
    if grid_name is not None:
        _check_grid(tensors[grid_name], grid_name)
        result[grid_name] = tensors[grid_name]
    return result


def _check_rows(rows: torch.Tensor, width: int) -> None:
    if rows.dtype not in FLOAT_DTYPES:
        raise UnusableMedia("has embeddings that are not float32, float16 or bfloat16", "bad_embeddings")
    if rows.ndim != 2 or rows.shape[1] != width or not 1 <= rows.shape[0] <= MAX_ROWS:
        shape = " x ".join(map(str, rows.shape))
        predicate = f"has embeddings of shape {shape}, and this model reads 1 to {MAX_ROWS} rows of {width} numbers"
        raise UnusableMedia(predicate, "bad_embeddings")
    if not torch.isfinite(rows).all():
        raise UnusableMedia("has embeddings that are not finite numbers", "bad_embeddings")


def _check_grid(grid: torch.Tensor, name: str) -> None:
    if grid.dtype != torch.int64 or grid.shape != (1, 3) or not ((grid > 0) & (grid < 1 << 20)).all():
        raise UnusableMedia(f"must have {name} as int64 of shape 1 x 3, all above 0", "bad_embeddings")
