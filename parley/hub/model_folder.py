"""Finds a model's folder, and reports missing files.

A GGUF file may be named as a path, as ``owner/name:QUANT`` or as ``owner/name/FILE.gguf``; its folder is one that
``gguf/folder.py`` writes. A folder with a different config, tokenizer or chat template is one of
``derived_folder.py``.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from parley import foreign_files
from parley.gguf.folder import GGUF_SUFFIX, LINK_PATTERN, gguf_files, projector_files, unpack_gguf
from parley.gguf.header import GgufError, part_paths
from parley.hub.derived_folder import TOKENIZER_SOURCES, UnusableOverride, derive_folder
from parley.hub.download import (
    ModelMissing,
    ReportProgress,
    download_model,
    find_cached,
    find_cached_projector,
    is_hub_name,
    name_in_address,
)
from parley.types import ModelOverrides
from parley.weight_shards import INDEX_NAME, MAKER_PREFIX, find_shards

log = logging.getLogger("parley.server")
BUILT_IN = "parley-demo"
NO_PROJECTOR = "none"  # the value of ``ModelOverrides.mmproj`` that leaves the image or audio encoder out
NO_OVERRIDES = ModelOverrides()
TEXT_ONLY = ModelOverrides(mmproj=NO_PROJECTOR)


def served_name(model: str | None) -> str:
    """Return the model's default name in the API: its hub name, or the last part of its folder."""
    if not model or model == BUILT_IN:
        return BUILT_IN
    model = name_in_address(model)
    if not _is_path(model):
        return model
    return Path(os.path.abspath(os.path.expanduser(model))).name.removesuffix(GGUF_SUFFIX)  # links keep their name


def resolve_model(
    model: str | None,
    report: ReportProgress = lambda stage, fraction: None,
    *,
    needs_weights: bool = True,
    overrides: ModelOverrides = NO_OVERRIDES,
) -> Path:
    """Return the folder of a model; download it if necessary. Blocks. Raises ModelMissing.

    ``model`` is a folder, a GGUF file, a hub name (``owner/name`` or that of a GGUF file, optionally ``@revision``), an
    address of the hub, or None or "parley-demo" for the built-in one. A complete entry of the Hugging Face cache is
    used as it is, without asking the network. Without ``needs_weights`` the files with weights may be missing, and are
    not downloaded.
    """
    name = _name_with_revision(model, overrides.revision)
    folder = _find_plain(name, overrides, needs_weights=needs_weights)
    if folder is None:
        downloaded = download_model(name, report, needs_weights=needs_weights, needs_projector=not overrides.mmproj)
        folder = _open_gguf(downloaded, overrides.mmproj, is_on_hub=True)
    tokenizer = overrides.tokenizer
    tokenizer_folder = _find_tokenizer(tokenizer) or _download_tokenizer(tokenizer, report) if tokenizer else None
    return check_model_folder(
        _apply_overrides(folder, name, overrides, tokenizer_folder), name, needs_weights=needs_weights
    )


def resolve_draft_model(model: str, report: ReportProgress = lambda stage, fraction: None) -> Path:
    """Return the folder of a draft model, which is named as in ``resolve_model``. Blocks. Raises ModelMissing."""
    try:
        return resolve_model(model, report, overrides=TEXT_ONLY)
    except ModelMissing as error:
        raise _missing_draft(error) from None


def find_draft_model(model: str) -> Path | None:
    """Return the folder of a draft model on this machine; None if it must be downloaded. Raises ModelMissing."""
    try:
        folder = find_model(model, overrides=TEXT_ONLY)
        return None if folder is None else check_model_folder(folder, model)
    except ModelMissing as error:
        raise _missing_draft(error) from None


def _missing_draft(error: ModelMissing) -> ModelMissing:
    return ModelMissing(f"The draft model {str(error).replace('cannot be served', 'cannot be used', 1)}")


def pull_model(name: str, report: ReportProgress = lambda stage, fraction: None) -> Path:
    """Download a model by its name on the hub; no folder of that name is looked at. Blocks. Raises ModelMissing."""
    name = name_in_address(name)
    if not is_hub_name(name) or os.path.exists(name):
        raise ModelMissing(f"{name[:100]} cannot be pulled: it is no name of a model on the hub.")
    return check_model_folder(_apply_overrides(_open_gguf(download_model(name, report), is_on_hub=True), name), name)


def find_model(
    model: str | None, *, needs_weights: bool = True, overrides: ModelOverrides = NO_OVERRIDES
) -> Path | None:
    """Return a model's folder on this machine, complete or not; None if something must be downloaded for it.

    A GGUF file that cannot be used is returned itself. Raises ModelMissing if ``overrides`` do not fit.
    """
    name = _name_with_revision(model, overrides.revision)
    folder = _find_plain(name, overrides, needs_weights=needs_weights)
    tokenizer = _find_tokenizer(overrides.tokenizer) if overrides.tokenizer else None
    if folder is None or (overrides.tokenizer and tokenizer is None):
        return None
    return _apply_overrides(folder, name, overrides, tokenizer)


def _name_with_revision(model: str | None, revision: str) -> str:
    """Return the name of the model with its revision on the hub. Raises ModelMissing if it can have none."""
    name = name_in_address(model or BUILT_IN)
    if not revision:
        return name
    if name == BUILT_IN or _is_path(name):
        kind = "built in" if name == BUILT_IN else "no name on the hub"
        raise ModelMissing(f"{name} cannot be served: it is {kind}, so it has no revision {revision}.")
    if "@" in name:
        raise ModelMissing(f"{name} cannot be served: its name has a revision, and revision is {revision}; give one.")
    return f"{name}@{revision}"


def _find_plain(model: str, overrides: ModelOverrides, *, needs_weights: bool) -> Path | None:
    """Return the folder of a model as it was published, or None if it must be downloaded. Raises ModelMissing."""
    if model == BUILT_IN:
        from parley import demo

        folder = Path(demo.model_folder())
        return _open_gguf(folder, overrides.mmproj) if overrides.mmproj else folder
    if _is_path(model):
        return _open_gguf(Path(os.path.abspath(os.path.expanduser(model))), overrides.mmproj)
    cached_folder = find_cached(model, needs_weights=needs_weights, needs_projector=not overrides.mmproj)
    if cached_folder is None:
        return None
    if cached_folder.suffix == GGUF_SUFFIX:
        return _open_gguf(cached_folder, overrides.mmproj, is_on_hub=True)
    if folder_problem(cached_folder, needs_weights=needs_weights, needs_tokenizer=not overrides.tokenizer):
        return None
    return (
        cached_folder
        if overrides.mmproj in ("", NO_PROJECTOR)
        else _open_with_projector(cached_folder, None, overrides.mmproj)
    )


def _apply_overrides(
    folder: Path, model: str, overrides: ModelOverrides = NO_OVERRIDES, tokenizer: Path | None = None
) -> Path:
    """Return the folder with the overrides applied; a folder that is no model as it is. Raises ModelMissing."""
    if folder_problem(folder, needs_weights=False, needs_tokenizer=tokenizer is None):
        return folder
    try:
        return derive_folder(folder, overrides, tokenizer)
    except UnusableOverride as error:
        raise ModelMissing(f"{model} cannot be served: {error}.") from None


def _find_tokenizer(name: str) -> Path | None:
    """Return the folder of a tokenizer, None if it must be downloaded. Raises ModelMissing."""
    folder: Path | None
    if _is_path(name):
        folder = _open_gguf(Path(os.path.abspath(os.path.expanduser(name))))
    else:
        folder = find_cached(name, needs_weights=False, needs_projector=False)
        if folder is None or not _has_tokenizer(folder):
            return None
    if not folder.is_dir():
        raise ModelMissing(f"The tokenizer {name} cannot be used: there is no such folder.")
    if not _has_tokenizer(folder):
        raise ModelMissing(f"The tokenizer {name} cannot be used: its folder has no tokenizer.json.")
    return folder


def _download_tokenizer(name: str, report: ReportProgress) -> Path:
    try:
        folder = download_model(name, report, needs_weights=False, needs_projector=False)
    except ModelMissing as error:
        raise ModelMissing(f"The tokenizer {str(error).replace('cannot be served', 'cannot be used', 1)}") from None
    if not _has_tokenizer(folder):
        raise ModelMissing(f"The tokenizer {name} cannot be used: it has no tokenizer.json.")
    return folder


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", *TOKENIZER_SOURCES))


def _open_gguf(path: Path, mmproj: str = NO_PROJECTOR, *, is_on_hub: bool = False) -> Path:
    """Return the folder of a model at this path: a GGUF file's is written now, unless the file cannot be used.

    ``mmproj``: as in ``ModelOverrides``. Raises ModelMissing if a file that it names cannot be used.
    """
    try:
        gguf = _find_gguf(path)
    except GgufError:
        return path
    if mmproj not in ("", NO_PROJECTOR) and os.path.exists(path):
        return _open_with_projector(path, gguf, mmproj)
    try:
        if gguf is None:
            return path.resolve()
        projector = None if mmproj else _find_projector(gguf, is_on_hub=is_on_hub)
        if projector is not None:
            try:
                return unpack_gguf(gguf, projector)
            except GgufError as error:
                folder = unpack_gguf(gguf)  # or else the fault is the model's
                log.warning("%s reads text only: %s.", gguf.name, error)
                return folder
        return unpack_gguf(gguf)
    except GgufError:
        return path


def _open_with_projector(path: Path, gguf: Path | None, mmproj: str) -> Path:
    """Return the folder of a GGUF file with an image or audio encoder that the user named.

    Raises ModelMissing.
    """
    if gguf is None:
        raise ModelMissing(f"{path} cannot be served: it is no GGUF file, and mmproj {mmproj} belongs to one.")
    try:
        return unpack_gguf(gguf, Path(os.path.abspath(os.path.expanduser(mmproj))))
    except GgufError as error:
        raise ModelMissing(f"{path} cannot be served: {error}.") from None


def _find_projector(gguf: Path, *, is_on_hub: bool) -> Path | None:
    """Return a GGUF file's image or audio encoder: the only one beside it, or the one that its repository has."""
    if is_on_hub:
        return find_cached_projector(gguf)
    files = projector_files(gguf.parent)
    if len(files) > 1:
        log.warning("%s reads text only: its folder has %d mmproj files; name one (--mmproj).", gguf.name, len(files))
    return files[0] if len(files) == 1 else None


def _find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that a path means: itself, or the only model in a folder without other weights.

    Of a split model it is the first part. None if the path means no GGUF file. Raises GgufError.
    """
    if path.name.endswith(GGUF_SUFFIX) and os.path.isfile(path):
        return part_paths(path)[0]
    if not os.path.isdir(path) or any(path.glob("*.safetensors")) or not (files := gguf_files(path)):
        return None
    if len(files) > 1:
        raise GgufError(f"its folder has {len(files)} GGUF models; name one of them, such as {files[0].name}")
    return files[0]


def check_model_folder(folder: Path, model: str, *, needs_weights: bool = True) -> Path:
    """Return the folder if it contains all files of a model. Raises ModelMissing, naming the first that is missing."""
    if problem := folder_problem(folder, needs_weights=needs_weights):
        raise ModelMissing(f"{model} cannot be served: {problem}.")
    return folder


def folder_problem(folder: Path, *, needs_weights: bool = True, needs_tokenizer: bool = True) -> str:
    """Return the reason why a folder is not a model, as a clause; empty if it is one."""
    if not os.path.exists(folder):  # unlike Path.exists, it never raises for odd names
        return f"there is no such {'file' if folder.suffix == '.gguf' else 'folder'}"
    try:
        if (gguf := _find_gguf(folder)) is not None:
            unpack_gguf(gguf)
            return ""
    except GgufError as error:
        return str(error)
    if not folder.is_dir():
        return "it is a file; name the folder that contains it"
    if (odd := foreign_files.find_odd_file(folder)) is not None:
        return f"its {odd.name} is a pipe or a device, and not a file"
    if not (folder / "config.json").is_file():
        return foreign_files.config_problem(folder)
    if needs_tokenizer and not _has_tokenizer(folder):
        return (
            "its folder has no tokenizer.json (convert the tokenizer with Transformers' save_pretrained, "
            "or name another one with --tokenizer)"
        )
    for name in ("config.json", "tokenizer.json", *TOKENIZER_SOURCES):
        if problem := foreign_files.pointer_problem(folder / name):
            return problem
    return (_weights_problem(folder) if needs_weights else "") or _config_problem(folder)


def _config_problem(folder: Path) -> str:
    """Return the reason why a folder's config.json cannot be used, as a clause; empty if it is an object."""
    try:
        content = json.loads((folder / "config.json").read_bytes())
    except OSError as error:
        return f"its config.json cannot be read: {error.strerror}"
    except (ValueError, RecursionError):
        return "its config.json is not valid JSON"
    return "" if isinstance(content, dict) else "its config.json does not hold a JSON object"


def _weights_problem(folder: Path) -> str:
    """Return the reason why a folder's weights cannot be used, as a clause; empty if they can."""
    index = folder / INDEX_NAME
    if not index.is_file():
        weights = [path for path in folder.glob("*.safetensors") if not path.name.startswith(MAKER_PREFIX)]
        if not weights and not any(folder.glob(LINK_PATTERN)):
            return foreign_files.weights_problem(folder) or "its folder has no *.safetensors weights"
        problem = "" if (folder / "model.safetensors").is_file() else find_shards(folder)[1]
        return problem or next(filter(None, map(foreign_files.pointer_problem, sorted(weights))), "")
    try:
        shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"its {index.name} cannot be read"
    absent = [shard for shard in shards if not (folder / str(shard)).is_file()]
    if absent:
        return f"{len(absent)} of its {len(shards)} weight files are missing, first {absent[0]}"
    return next(filter(None, (foreign_files.pointer_problem(folder / str(shard)) for shard in shards)), "")


def _is_path(model: str) -> bool:
    """Whether a name refers to a folder: it looks like a path, or a file of that name exists."""
    return model.startswith((".", "/", "~")) or os.path.exists(model) or not is_hub_name(model)
