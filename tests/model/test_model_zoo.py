"""The model zoo: every checkpoint is served with the numbers of Transformers, or refused in one true sentence, and
doctor knows which. ``PARLEY_NIGHTLY=1`` takes all of them, otherwise a few.
"""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import pytest
from support.model_zoo.serve_zoo import ModelRefused, consult_doctor, measure_errors, serve_folder
from support.model_zoo.zoo import ZOO

IS_NIGHT = bool(os.environ.get("PARLEY_NIGHTLY"))
SAMPLE = [
    "llama in parts", "llama with SentencePiece", "qwen3_moe, FP8, 128 x 128 blocks", "llama, GGUF Q4_K_M",
    "mixtral, HQQ 4 and 8 bits", "beam in parts", "longcat_flash", "modernbert-decoder", "modernbert",
    "llama, MLX 6 bits", "qwen3_next, MLX 4 bits",
    "llama with a head that its config denies", "refused: zamba", "gte-Qwen2", "refused: LoRA adapter",
]  # fmt: skip
SENTENCE = re.compile(r"[^\n]{20,400}[.)]")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("dtype", ["float32", "auto"] if IS_NIGHT else ["auto"])
@pytest.mark.parametrize("name", ZOO if IS_NIGHT else SAMPLE)
def test_every_folder_is_served_as_transformers_computes_it_or_refused(name, dtype, tmp_path):
    folder = ZOO[name]
    named, reference = folder.write(tmp_path)
    advice = consult_doctor(named, dtype)
    try:
        served = serve_folder(named, dtype, **folder.settings)
    except ModelRefused as refused:
        sentence = str(refused)
        assert folder.refusal and folder.refusal in sentence, sentence
        assert sentence in advice.refusal
        assert SENTENCE.fullmatch(sentence)
        return
    assert not folder.refusal and not advice.refusal
    assert advice.weight_bytes == pytest.approx(served.info.weights_bytes, rel=0.02)
    if folder.fused is not None:
        assert served.info.fused == folder.fused
    errors = measure_errors(reference, served)
    if served.info.dtype == "float32" and not folder.has_rounded_activations:
        assert errors.largest < 5e-4 and errors.loss < 1e-3
    else:
        assert errors.median < 0.2


def test_models_page_matches_the_zoo():
    script = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "models.py"))
    assert script["PAGE"].read_text("utf-8") == script["models_page"](), "docs/models.md is old: make docs"
