"""Combines a language model with the encoder in a projector file: config.json, processor, and the marks of media."""

from __future__ import annotations

import re
from typing import Any

from parley.gguf.header import GgufError, GgufModel
from parley.gguf.projectors.projector import WholeModel
from parley.gguf.projectors.table import find_projector, open_projector
from parley.gguf.vocabulary import CONTROL, UNKNOWN

UNUSED_TOKEN = re.compile(r"<unused\d+>|\[PAD\d+\]|<\|reserved_special_token_\d+\|>")
BYTE = 6  # the kind of tokens that stand for bytes


def check_pair(model: GgufModel, config: dict[str, Any]) -> WholeModel:
    """Return the multimodal model that a projector file and a language model with this config.json make.

    Raises GgufError if they do not belong together.
    """
    projector, file = open_projector(model)
    if len(model.paths) > 1:
        raise GgufError(f"{file.name} is one of {len(model.paths)} parts; an encoder is read from one file")
    whole = projector.whole_models.get(config["model_type"])
    if whole is None:
        types = " or ".join(projector.whole_models)
        raise GgufError(f"{file.name} is the encoder of a model of the type {types}, and not of {config['model_type']}")
    if projector.last_tensor:
        size = file.tensor_shape(projector.last_tensor)[0]
    else:
        size = file.read_count("projection_dim", config["hidden_size"])
    if size != config["hidden_size"]:
        raise GgufError(f"{file.name} makes embeddings of {size} numbers, but the model's have {config['hidden_size']}")
    return whole


def whole_config(model: GgufModel, config: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Return the config.json of a language model with the projector of a file. ``config``: the language model's.
    ``tokens``: the vocabulary, with the marks. Raises GgufError if they do not belong together."""
    whole, (projector, file) = check_pair(model, config), open_projector(model)
    for text in projector.plain_ids.values():
        if text not in tokens:
            raise GgufError(f"{file.name} is the encoder of a model whose vocabulary has the token {text}")
    shared = {name: config[name] for name in ("dtype", "quantization_config", "tie_word_embeddings")}
    return {
        "architectures": [whole.class_name],
        "model_type": whole.model_type,
        "text_config": config | {"model_type": whole.text_type} | projector.complete_text(config),
        **shared,
        **{member: tokens.index(projector.marks[mark]) for member, mark in projector.ids.items()},
        **{member: tokens.index(text) for member, text in projector.plain_ids.items()},
        **projector.read_encoder(file),
    }


def processor_config(model: GgufModel) -> dict[str, Any]:
    """Return the processor_config.json of a projector file. Raises GgufError."""
    projector, file = open_projector(model)
    return projector.read_processor(file)


def add_marks(model: GgufModel, metadata: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a language model's metadata with the special tokens that stand for media. ``name``: of its file.

    llama.cpp needs no token where embeddings go, so Gemma's files lack the one that their model has for it, after the
    last row of the embedding, and LLaVA's as well. One of the tokens that are not used gets its text, if embeddings or
    another mark take its place: the embedding of any other mark is a learned one. Raises GgufError.
    """
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise GgufError(f"{name} has no kinds of tokens, so those of images and audio are not known")
    tokens, kinds = list(tokens), list(kinds)
    projector = find_projector(model)
    replaced = {*projector.ids.values(), *projector.stand_ins}
    for attribute, mark in projector.marks.items():
        if mark not in tokens:
            free_tokens = _free_tokens(tokens, kinds) if attribute in replaced else []
            if not free_tokens and attribute in projector.stand_ins:
                continue
            if not free_tokens:
                content = "an image" if projector.modality == "vision" else "audio"
                raise GgufError(f"{name} has no token {mark}, which stands for {content}")
            tokens[free_tokens[-1]] = mark
            unnamed = {f"tokenizer.ggml.{name}_token_id" for name in ("unknown", "padding")}
            metadata = {key: value for key, value in metadata.items() if key not in unnamed or value != free_tokens[-1]}
        kinds[tokens.index(mark)] = CONTROL
    return metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}


def _free_tokens(tokens: list[Any], kinds: list[Any]) -> list[int]:
    """Return the ids of tokens without use: the unknown one as well, if all bytes are tokens."""
    free_tokens = [number for number, token in enumerate(tokens) if UNUSED_TOKEN.fullmatch(str(token))]
    if free_tokens or kinds.count(BYTE) < 256:
        return free_tokens
    return [number for number, kind in enumerate(kinds) if kind == UNKNOWN]


def tokenizer_marks(model: GgufModel, tokens: list[str]) -> dict[str, str]:
    """Return the marks by the attribute of the tokenizer. ``tokens``: the vocabulary, as ``add_marks`` makes it."""
    projector = find_projector(model)
    return {
        attribute: mark if mark in tokens else projector.marks[projector.stand_ins[attribute]]
        for attribute, mark in projector.marks.items()
    }
