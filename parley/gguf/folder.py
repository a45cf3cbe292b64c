"""Turns a GGUF file into a model folder: config, tokenizer and chat template as files, and a link to the weights.

So all else that reads models knows folders only. The folder is in the user's cache, under a name that depends on the
real path, size and time of the file and on ``CONTENT_VERSION``; it is written once and never changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from parley.gguf.header import PART_NAME, GgufError, GgufModel, part_paths, read_model
from parley.gguf.model_config import model_config, read_factors_from
from parley.gguf.tokenizer import tokenizer_files

CONTENT_VERSION = 3  # rises when this package writes other files for the same metadata
GGUF_SUFFIX = ".gguf"
LINK_FOLDER = "gguf"  # within the model folder; holds links to the file or its parts
LINK_PATTERN = LINK_FOLDER + "/*" + GGUF_SUFFIX
PROJECTOR_PREFIX = "mmproj"  # llama.cpp's encoders of pictures and sound are files of their own


def gguf_files(folder: Path) -> list[Path]:
    """Return the models among the GGUF files of a folder: of a split model only the first part."""
    names = sorted(path for path in folder.glob("*" + GGUF_SUFFIX) if not path.name.startswith(PROJECTOR_PREFIX))
    return [path for path in names if part_paths(path)[0] == path or PART_NAME.fullmatch(path.name) is None]


def choose_gguf(names: Iterable[str], quantization: str | None, file: str | None) -> list[str]:
    """Return the file of a repository that is meant, or all parts of it; none if there is no such file.

    ``names``: the repository's files. ``quantization``: as in ``model-Q4_K_M.gguf``, or ``file``: its name.
    """
    ending = re.compile(rf"(?:.*[-._/])?{re.escape(quantization or '')}(?:-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)
    chosen = [
        name
        for name in names
        if (name == file or (quantization and ending.fullmatch(name)))
        and not PurePosixPath(name).name.startswith(PROJECTOR_PREFIX)
    ]
    if not chosen:
        return []
    return [path.as_posix() for path in part_paths(Path(min(chosen, key=lambda name: (len(name), name))))]


def unpack_gguf(path: Path) -> Path:
    """Return the model folder for a GGUF file, or for the first part of a split one. Raises GgufError."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parley" / "gguf"
        folder = home / _folder_name(path)
        if folder.is_dir():
            return folder
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileNotFoundError as error:
        raise GgufError(f"{Path(error.filename).name} is missing") from None
    except OSError as error:
        raise GgufError(f"{path.name} cannot be unpacked: {error.strerror}; set XDG_CACHE_HOME") from None
    except RuntimeError:
        raise GgufError(f"{path.name} cannot be unpacked: the user has no home folder; set XDG_CACHE_HOME") from None
    model = read_model(path)
    contents = {
        "config.json": model_config(model, read_factors_from(model)),
        **tokenizer_files(model.metadata, path.name),
    }
    try:
        _write_folder(home, folder, model, contents)
    except OSError as error:
        raise GgufError(f"{path.name} cannot be unpacked into {home}: {error.strerror}; set XDG_CACHE_HOME") from None
    return folder


def _folder_name(path: Path) -> str:
    """Return a name that changes with the file. Raises OSError."""
    digest = hashlib.sha256(str(CONTENT_VERSION).encode())
    for part in part_paths(path):
        stat = part.stat()
        digest.update(f"\0{os.path.realpath(part)}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return f"{path.stem[:100]}-{digest.hexdigest()[:16]}"


def _write_folder(home: Path, folder: Path, model: GgufModel, contents: dict[str, dict[str, Any]]) -> None:
    """Write the folder as a whole: another process sees all of it or nothing. Raises OSError."""
    scratch = Path(tempfile.mkdtemp(dir=home))
    try:
        for name, content in contents.items():
            (scratch / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        for name, template in _chat_templates(model.metadata).items():
            (scratch / name).parent.mkdir(exist_ok=True)
            (scratch / name).write_text(template, encoding="utf-8")
        (scratch / LINK_FOLDER).mkdir()
        for path in model.paths:
            (scratch / LINK_FOLDER / path.name).symlink_to(os.path.realpath(path))  # as in the folder's name
        with suppress(OSError):  # another process was faster
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if not folder.is_dir():
        raise OSError(0, "the folder cannot be renamed")


def _chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by the names of their files."""
    sources = {"chat_template.jinja": metadata.get("tokenizer.chat_template")}
    named = metadata.get("tokenizer.chat_templates")
    for name in named if isinstance(named, list) else []:
        if isinstance(name, str) and name.isidentifier() and name != "default":
            source = metadata.get("tokenizer.chat_template." + name)
            sources[f"additional_chat_templates/{name}.jinja"] = source
    return {name: source for name, source in sources.items() if isinstance(source, str)}
