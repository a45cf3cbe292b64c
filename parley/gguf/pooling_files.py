"""Makes the files that describe an embedding model's pooling, in the format of sentence-transformers.

GGUF files name the pooling. They do not say that vectors are normalized, because llama.cpp always does that; Ollama's
files say it if vectors are not.
"""

from __future__ import annotations

import reprlib
from typing import Any

from parley.gguf.architecture import fields_of
from parley.gguf.encoder_architectures import CLASSIFIER_OUTPUT, DENSE_FOLDERS
from parley.gguf.header import GgufError, GgufModel

POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
NO_POOLING, RANK = 0, 4
MODULE = "sentence_transformers.models."


def pooling_files(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    """Return the files' contents by their names; none if the metadata name no pooling. ``config``: the model's.

    Raises GgufError if the pooling is unknown, or if it makes scores and the model is no classifier.
    """
    fields, file = fields_of(model), model.paths[0].name
    number = fields.get("pooling_type", NO_POOLING)
    is_classifier = "id2label" in config
    if number == RANK or CLASSIFIER_OUTPUT in model.tensors:
        if not is_classifier:
            raise GgufError(f"{file} is a reranker of the type {config['model_type']}, which is not read from GGUF")
        return {}
    dense = [stem for stem in DENSE_FOLDERS if f"{stem}.weight" in model.tensors]
    if type(number) is not int or number not in (NO_POOLING, *POOLINGS):
        raise GgufError(f"{file} gives pooling_type as {reprlib.repr(number)}; 0 to 4 are known")
    if number == NO_POOLING:
        if dense:
            raise GgufError(f"{file} has a layer for vectors of tokens, which is not read from GGUF")
        return {}
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *((DENSE_FOLDERS[stem], "Dense") for stem in dense)]
    if fields.get("normalize_embeddings") is not False:
        modules.append((f"{len(modules)}_Normalize", "Normalize"))
    files: dict[str, Any] = {
        "modules.json": [
            {"idx": module_number, "name": str(module_number), "path": path, "type": MODULE + kind}
            for module_number, (path, kind) in enumerate(modules)
        ],
        "1_Pooling/config.json": {"pooling_mode": POOLINGS[number]},
    }
    for stem in dense:
        files[f"{DENSE_FOLDERS[stem]}/config.json"] = _dense_config(model, stem)
    return files


def _dense_config(model: GgufModel, stem: str) -> dict[str, Any]:
    """Return the config of a linear layer after the pooling. Raises GgufError."""
    shape = model.tensors[f"{stem}.weight"].shape
    if len(shape) != 2:
        raise GgufError(f"{model.paths[0].name} is damaged: tensor {stem}.weight has shape {list(shape)}")
    return {
        "in_features": shape[1],
        "out_features": shape[0],
        "bias": f"{stem}.bias" in model.tensors,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
