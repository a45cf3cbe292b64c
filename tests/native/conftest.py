"""Fixtures for all tests of kernels."""

from collections.abc import Callable, Iterator

import pytest
import torch

from parley.native import build, kernel_choice, library
from parley.native.compiled_forms.compiled_kernels import CompiledKernels


@pytest.fixture(autouse=True)
def inference_mode() -> Iterator[None]:
    """Computes without gradients, as the engine does."""
    with torch.inference_mode():
        yield


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["off", *(build.usable_levels() if library.load_kernels() else [])])
def kernel_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs tests with torch's kernels, and with the compiled kernels of each level that this CPU supports."""
    kernels = None if request.param == "off" else CompiledKernels(library.open_level(request.param))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_choice, "compiled_kernels", lambda: kernels)
        yield request.param
