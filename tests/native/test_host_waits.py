"""What tests of graphs rely on: operators that would wait for a GPU, or copy from the host, are found on the CPU."""

from __future__ import annotations

import pytest
import torch
from support.host_waits import HostWait, refuse_host_waits

NUMBERS = torch.arange(10.0)
COUNTS = torch.full((10,), 2)
WAITING = {
    "item": lambda: NUMBERS.sum().item(),
    "int": lambda: int(COUNTS[0]),
    "bool": lambda: bool(NUMBERS[0] > 3),
    "tolist": lambda: COUNTS.tolist(),
    "cpu": lambda: NUMBERS.cpu(),
    "numpy": lambda: NUMBERS.numpy(),
    "boolean index": lambda: NUMBERS[NUMBERS > 3],
    "boolean index that is set": lambda: NUMBERS.clone().index_put_((NUMBERS > 3,), NUMBERS[0]),
    "masked_select": lambda: NUMBERS.masked_select(NUMBERS > 3),
    "nonzero": lambda: (NUMBERS > 3).nonzero(),
    "where": lambda: torch.where(NUMBERS > 3),
    "argwhere": lambda: torch.argwhere(NUMBERS > 3),
    "unique": lambda: COUNTS.unique(),
    "unique_consecutive": lambda: COUNTS.unique_consecutive(),
    "bincount": lambda: COUNTS.bincount(),
    "equal": lambda: torch.equal(COUNTS, COUNTS),
    "numbers of the host": lambda: torch.tensor([1, 2]),
    "number of the host": lambda: torch.tensor(1.0),
    "repeats of a tensor": lambda: NUMBERS.repeat_interleave(COUNTS),
}
LAUNCHING = {
    "repeats of a number": lambda: NUMBERS.repeat_interleave(2),
    "repeats of a known sum": lambda: NUMBERS.repeat_interleave(COUNTS, output_size=20),
    "index": lambda: NUMBERS[COUNTS],
    "sort": lambda: torch.sort(NUMBERS, stable=True),
    "masked_fill": lambda: NUMBERS.masked_fill(NUMBERS > 2, -1.0),
    "where of two": lambda: torch.where(NUMBERS > 2, NUMBERS, 0.0),
    "matrix product": lambda: NUMBERS.view(2, 5) @ NUMBERS.view(5, 2),
    "scatter": lambda: torch.zeros(10).scatter_add_(0, COUNTS, NUMBERS),
}


@pytest.fixture(params=[False, True], ids=["", "inference"], autouse=True)
def inference(request):
    with torch.inference_mode(request.param):
        yield


@pytest.mark.parametrize("name", WAITING)
def test_operators_that_wait_are_refused(name):
    WAITING[name]()
    with refuse_host_waits(), pytest.raises(HostWait):
        WAITING[name]()
    WAITING[name]()


@pytest.mark.parametrize("name", LAUNCHING)
def test_operators_that_only_launch_work_run(name):
    with refuse_host_waits():
        result = LAUNCHING[name]()
    expected = LAUNCHING[name]()
    assert all(
        map(torch.equal, *((output if isinstance(output, tuple) else (output,)) for output in (result, expected)))
    )
