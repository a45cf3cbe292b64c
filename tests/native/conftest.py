"""Fixtures for all tests of kernels."""

from collections.abc import Callable, Iterator

import pytest
import torch


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
