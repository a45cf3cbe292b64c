"""GPT-2 and decoders of its kind as GGUF files, laid out as llama.cpp does it, against the folders they come from."""

from __future__ import annotations

import pytest
from support.gguf_gpt import convert_gpt
from test_gguf_architectures import answers, write_family

from parley.gguf.folder import unpack_gguf
from parley.gguf.header import GgufError, read_model
from parley.gguf.model_config import model_config


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "phi",
        "falcon",
        "falcon of two norms",
        "bloom",
        "mpt",
        "mpt with limits",
        "dbrx",
    ],
)
def test_answers_are_the_folders(name, tmp_path):
    folder = write_family(tmp_path / "folder", name, {})
    assert answers(unpack_gguf(convert_gpt(tmp_path / "x.gguf", folder))) == answers(folder)


@pytest.mark.parametrize(
    ("name", "key", "value", "reason"),
    [
        ("gpt_neox", "use_parallel_residual", 3, r"^x\.gguf gives use_parallel_residual as 3; it is true or false$"),
        ("mpt", "attention.max_alibi_bias", 0.0, r"^x\.gguf gives attention\.max_alibi_bias as 0\.0; it is more than"),
    ],
)
def test_other_computations_are_refused(name, key, value, reason, tmp_path):
    model = read_model(convert_gpt(tmp_path / "x.gguf", write_family(tmp_path / "folder", name, {})))
    model.metadata[f"{model.metadata['general.architecture']}.{key}"] = value
    with pytest.raises(GgufError, match=reason):
        model_config(model)
