"""Which device a model runs on: ``auto`` takes a GPU only if torch can use one, and says why it does not."""

from __future__ import annotations

import logging

import pytest
import torch
from support import tiny_models
from support.run_model import load_test_runner

from parley.model.checkpoint.files import LoadError
from parley.model.load import devices
from parley.model.load.devices import resolve_device

HAS_GPU = torch.cuda.is_available()
WITHOUT_GPU = pytest.mark.skipif(HAS_GPU, reason="there is a GPU")


@WITHOUT_GPU
def test_auto_is_the_cpu_without_a_gpu():
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")


@WITHOUT_GPU
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_missing_gpu_is_refused(name):
    with pytest.raises(LoadError, match="torch finds no usable GPU"):
        resolve_device(name)


@pytest.mark.parametrize("name", ["meta", "mps", "toaster"])
def test_other_devices_are_refused(name):
    with pytest.raises(LoadError, match="must be auto, cpu or cuda"):
        resolve_device(name)


@WITHOUT_GPU
@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_gpu_that_torch_cannot_use_is_logged_once(name, tmp_path, monkeypatch, caplog):
    """The driver has a GPU, and torch is a build for CPUs."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(devices, "GPU_FILE", tmp_path / "nvidia0")
    devices._log_unused_gpu.cache_clear()
    with caplog.at_level(logging.INFO, "parley.engine"):
        assert resolve_device(name) == resolve_device(name) == torch.device("cpu")
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "There is a GPU, and it is not used" in caplog.text


@WITHOUT_GPU
def test_model_with_device_auto_reports_its_device():
    _, info = load_test_runner(tiny_models.model_folder("llama"), device="auto")
    assert info.device == "cpu"
