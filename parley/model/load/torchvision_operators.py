"""Lets torchvision run with a build of torch that it was not compiled for.

The published wheel of torchvision is compiled against a torch with CUDA. With a CPU build of torch, its library of
operators cannot be loaded, and then Python's part of torchvision cannot be imported either, and most of Transformers
neither, because both name these operators. Nothing here uses them: the transforms are plain torch. So if the library
cannot be loaded, the operators are declared without an implementation.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

# All operators that torchvision's Python names when it is imported (torchvision/_meta_registrations.py, ops/).
OPERATORS = (
    "nms",
    "qnms",
    "roi_align",
    "ps_roi_align",
    "roi_pool",
    "ps_roi_pool",
    "deform_conv2d",
    "_roi_align_backward",
    "_ps_roi_align_backward",
    "_roi_pool_backward",
    "_ps_roi_pool_backward",
    "_deform_conv2d_backward",
    "_cuda_version",
)

_declared_library: torch.library.Library | None = None  # the declarations last as long as this object


def declare_missing_operators() -> None:
    """Make torchvision importable if it is installed. Call this before the first import of Transformers."""
    global _declared_library
    if _declared_library is not None or hasattr(torch.ops.torchvision, "nms") or not _is_library_broken():
        return
    _declared_library = torch.library.Library("torchvision", "DEF")
    for name in OPERATORS:
        _declared_library.define(f"{name}() -> ()")


def _is_library_broken() -> bool:
    """Whether torchvision is installed and its library of operators cannot be loaded."""
    spec = find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return False
    try:
        for path in Path(spec.submodule_search_locations[0]).glob("_C*.so"):
            torch.ops.load_library(str(path))
            return False
    except OSError:
        pass
    return True
