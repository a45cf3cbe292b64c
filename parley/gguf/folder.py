"""Turns a GGUF file into a model folder: config, tokenizer and chat template as files, and a link to the weights.

So all other code that reads models knows only folders. With the file of an encoder, the folder is that of the whole
multimodal model. It is in the user's cache, under a name that depends on the real path, size and time of the files and
on ``CONTENT_VERSION``; it is written once and never changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from parley.cache_folders import remove_scratch_folders, user_cache_folder, write_whole_folder
from parley.gguf.header import PART_NAME, GgufError, GgufModel, part_paths, read_header, read_model
from parley.gguf.model_config import model_config, read_factors_from
from parley.gguf.pooling_files import pooling_files
from parley.gguf.projectors.projector_tensors import check_block_tensors, projector_tensors
from parley.gguf.projectors.whole_model import (
    add_marks,
    check_pair,
    processor_config,
    tokenizer_marks,
    whole_config,
)
from parley.gguf.tokenizer import tokenizer_files

CONTENT_VERSION = 6  # is increased when this package writes other files for the same metadata
GGUF_SUFFIX = ".gguf"
# Within the model folder: has links to the file or its parts, and in a subfolder one to the encoder's file.
LINK_FOLDER = "gguf"
PROJECTOR_FOLDER = "mmproj"
LINK_PATTERN = LINK_FOLDER + "/**/*" + GGUF_SUFFIX
PROJECTOR_MARK = "mmproj"  # in the names of llama.cpp's image and audio encoders, which are files of their own
MODEL = "model"  # the value of ``general.type``
BITS_IN_NAME = re.compile(r"(?:B?F|I?Q)(\d+)", re.IGNORECASE)


def gguf_files(folder: Path) -> list[Path]:
    """Return the models among the GGUF files of a folder: of a split model only the first part.

    Of several files those are left out that say that they hold something else, such as the statistics of a quantizer.
    """
    paths = sorted(path for path in folder.glob("*" + GGUF_SUFFIX) if not _is_projector(path.name))
    models = [path for path in paths if part_paths(path)[0] == path or PART_NAME.fullmatch(path.name) is None]
    return models if len(models) < 2 else [path for path in models if _may_hold_model(path)] or models


def _may_hold_model(path: Path) -> bool:
    """Whether a GGUF file holds a model, or cannot be read."""
    try:
        return bool(read_header(path, 0)[0].get("general.type", MODEL) == MODEL)
    except GgufError:
        return True


def projector_files(folder: Path) -> list[Path]:
    """Return the image and audio encoders among the GGUF files of a folder."""
    return sorted(path for path in folder.glob("*" + GGUF_SUFFIX) if _is_projector(path.name))


def choose_projector(names: Iterable[str], model: str) -> str | None:
    """Return the encoder among the files of a repository that llama.cpp would take for a model, or None.

    It is in the model's folder, or else in one above. Of several there, the one whose numbers have nearly as many bits
    as the model's.
    """
    folders = PurePosixPath(model).parents

    def distance(name: str) -> tuple[int, int, str]:
        return folders.index(PurePosixPath(name).parent), abs(_bits_in(name) - _bits_in(model)), name

    projectors = [
        name
        for name in names
        if name.endswith(GGUF_SUFFIX) and _is_projector(name) and PurePosixPath(name).parent in folders
    ]
    return min(projectors, key=distance, default=None)


def _is_projector(name: str) -> bool:
    return PROJECTOR_MARK in PurePosixPath(name).name.lower()


def _bits_in(name: str) -> int:
    """Return the bits of a file's numbers that its name states, 0 if it states none."""
    stated = BITS_IN_NAME.findall(PurePosixPath(name).name)
    return int(stated[-1]) if stated else 0


def choose_gguf(names: Iterable[str], quantization: str | None, file: str | None) -> list[str]:
    """Return the file of a repository that is meant, or all parts of it; none if there is no such file.

    ``names``: the repository's files. ``quantization``: as in ``model-Q4_K_M.gguf``, or ``file``: its name.
    """
    ending = re.compile(rf"(?:.*[-._/])?{re.escape(quantization or '')}(?:-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)
    candidates = [
        name
        for name in names
        if (name == file or (quantization and ending.fullmatch(name))) and not _is_projector(name)
    ]
    if not candidates:
        return []
    return [path.as_posix() for path in part_paths(Path(min(candidates, key=lambda name: (len(name), name))))]


def unpack_gguf(path: Path, projector: Path | None = None) -> Path:
    """Return the model folder for a GGUF file, or for the first part of a split one.

    ``projector``: the file with its encoder. Raises GgufError.
    """
    try:
        home = user_cache_folder() / "gguf"
        remove_scratch_folders(home)
    except OSError as error:
        raise GgufError(f"{path.name} cannot be unpacked: {error.strerror}; set XDG_CACHE_HOME") from None
    try:
        folder = home / _folder_name(path, projector)
    except FileNotFoundError as error:
        raise GgufError(f"{Path(error.filename).name} is missing") from None
    except OSError as error:
        raise GgufError(f"{path.name} cannot be read: {error.strerror}") from None
    if folder.is_dir():
        return folder
    model = read_model(path)
    encoder = None if projector is None else read_model(projector)
    contents = _model_files(model) if encoder is None else _whole_model_files(model, encoder)
    try:
        _write_folder(folder, model, encoder, contents)
    except OSError as error:
        raise GgufError(f"{path.name} cannot be unpacked into {home}: {error.strerror}; set XDG_CACHE_HOME") from None
    return folder


def _model_files(model: GgufModel) -> dict[str, Any]:
    """Return the JSON files of a language model by their names. Raises GgufError."""
    config = model_config(model, read_factors_from(model))
    tokenizer = tokenizer_files(model.metadata, model.paths[0].name)
    return {"config.json": config, **tokenizer, **pooling_files(model, config)}


def _whole_model_files(model: GgufModel, encoder: GgufModel) -> dict[str, Any]:
    """Return the JSON files of a language model with an encoder by their names. Raises GgufError.

    Some processors need a token to pad with, though they get one text.
    """
    config = model_config(model, read_factors_from(model))
    check_pair(encoder, config)
    projector_tensors(encoder)  # so that unknown ones are refused now
    check_block_tensors(encoder)
    name = model.paths[0].name
    metadata = add_marks(encoder, model.metadata, name)
    files = tokenizer_files(metadata, name)
    tokens = metadata["tokenizer.ggml.tokens"]
    marks = tokenizer_marks(encoder, tokens)
    return files | {
        "config.json": whole_config(encoder, config, tokens),
        "processor_config.json": processor_config(encoder),
        "tokenizer_config.json": {
            "pad_token": files["tokenizer_config.json"].get("eos_token") or next(iter(marks.values())),
            **files["tokenizer_config.json"],
            "tokenizer_class": "PreTrainedTokenizerFast",
            **marks,
        },
    }


def _folder_name(path: Path, projector: Path | None) -> str:
    """Return a name that changes with the files. Raises OSError."""
    digest = hashlib.sha256(str(CONTENT_VERSION).encode())
    for part in [*part_paths(path), *([projector] if projector else [])]:
        stat = part.stat()
        digest.update(f"\0{os.path.realpath(part)}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return f"{path.stem[:100]}-{digest.hexdigest()[:16]}"


def _write_folder(folder: Path, model: GgufModel, encoder: GgufModel | None, contents: dict[str, Any]) -> None:
    """Write the folder as a whole: another process sees all of it or nothing. Raises OSError."""
    with write_whole_folder(folder) as scratch:
        for name, content in contents.items():
            (scratch / name).parent.mkdir(exist_ok=True)
            (scratch / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        for name, template in _chat_templates(model.metadata).items():
            (scratch / name).parent.mkdir(exist_ok=True)
            (scratch / name).write_text(template, encoding="utf-8")
        links = {LINK_FOLDER: model.paths}
        if encoder is not None:
            links[f"{LINK_FOLDER}/{PROJECTOR_FOLDER}"] = encoder.paths
        for name, paths in links.items():
            (scratch / name).mkdir()
            for path in paths:
                (scratch / name / path.name).symlink_to(os.path.realpath(path))  # as in the folder's name


def _chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by the names of their files."""
    sources = {"chat_template.jinja": metadata.get("tokenizer.chat_template")}
    named = metadata.get("tokenizer.chat_templates")
    for name in named if isinstance(named, list) else []:
        if isinstance(name, str) and name.isidentifier() and name != "default":
            source = metadata.get("tokenizer.chat_template." + name)
            sources[f"additional_chat_templates/{name}.jinja"] = source
    return {name: source for name, source in sources.items() if isinstance(source, str)}
