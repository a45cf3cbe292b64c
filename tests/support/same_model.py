"""Checks that two forms of a model are the same one: a folder, a model of Transformers or torch, a GGUF file."""

from __future__ import annotations

from pathlib import Path

import torch
from support.run_model import load_test_runner, long_logprobs

from parley.gguf.folder import unpack_gguf
from parley.model.checkpoint.files import read_config
from parley.model.load.check import check_model
from parley.model.networks.config_reader import read_decoder_config
from parley.types import ParleySettings


@torch.inference_mode()
def check_reference_logprobs(folder: Path, reference: torch.nn.Module) -> None:
    """Check that a folder runs on the fused decoder without a caveat, with the log-probabilities of its reference."""
    assert check_model(ParleySettings(model=str(folder))).load_caveat == ""
    runner, info = load_test_runner(folder, dtype="float32")
    assert info.fused
    tokens = torch.randint(3, runner.vocab_size, (200,), generator=torch.Generator().manual_seed(0))  # long_logprobs'
    expected = reference.eval()(tokens[None]).logits[0].log_softmax(-1)
    assert (long_logprobs(folder, "float32") - expected).norm() < 1e-5 * expected.norm()


def check_gguf_logprobs(file: Path, folder: Path) -> None:
    """Check that a GGUF file has the layers of a folder, and the same bits of log-probabilities."""
    unpacked = unpack_gguf(file)
    assert read_decoder_config(read_config(unpacked)).layers == read_decoder_config(read_config(folder)).layers
    assert torch.equal(long_logprobs(unpacked, "float32"), long_logprobs(folder, "float32"))
