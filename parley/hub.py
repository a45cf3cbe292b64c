"""Find a model's folder: the built-in model, a local folder, the Hugging Face cache, or a download from the hub.

Finds or downloads a folder and reports missing files; reads no weights. A GGUF file may be named as a path, as
``owner/name:QUANT`` or as ``owner/name/FILE.gguf``; its folder is one that ``gguf/folder.py`` writes. The API process
uses this module in a worker thread, so nothing here imports torch; ``huggingface_hub`` is imported only for names that
are not folders.
"""

from __future__ import annotations

import glob
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parley import foreign_files
from parley.gguf.folder import GGUF_SUFFIX, LINK_PATTERN, choose_gguf, gguf_files, unpack_gguf
from parley.gguf.header import GgufError, part_paths

BUILT_IN = "parley-demo"
WEIGHT_PATTERN = "*.safetensors"
DOWNLOAD_PATTERNS = [WEIGHT_PATTERN, "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# The hub's name of a GGUF file: ``owner/name:QUANT`` or ``owner/name/FILE.gguf``, which may be in a folder
HUB_GGUF_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+)|/((?:\w[\w. -]*/)*\w[\w. -]*\.gguf))")

SHOWN_FILES = 8  # of a repository that lacks the one that was asked for

ReportProgress = Callable[[str, float], None]  # called with the stage and the progress, 0..1


class ModelMissing(Exception):
    """There is no usable model of that name. The message is one sentence with a hint."""


def served_name(model: str | None) -> str:
    """Return the model's default name in the API: its hub name, or the last part of its folder."""
    if not model or model == BUILT_IN:
        return BUILT_IN
    if not _is_path(model):
        return model
    return Path(os.path.abspath(os.path.expanduser(model))).name.removesuffix(GGUF_SUFFIX)  # links keep their name


def resolve_model(
    model: str | None, report: ReportProgress = lambda stage, fraction: None, *, needs_weights: bool = True
) -> Path:
    """Return the folder of a model; download it if necessary. Blocks. Raises ModelMissing.

    ``model`` is a folder, a GGUF file, a hub name (``owner/name`` or that of a GGUF file, optionally ``@revision``), or
    None or "parley-demo" for the built-in one. A complete entry of the Hugging Face cache is used as it is, without
    asking the network. Without ``needs_weights`` the files with weights may be missing, and are not downloaded.
    """
    folder = find_model(model, needs_weights=needs_weights)
    if folder is None:
        assert model is not None  # only a hub name can be missing here
        folder = _open_folder(_download_model(model, report, needs_weights))
    return check_model_folder(folder, model or BUILT_IN, needs_weights=needs_weights)


def pull_model(name: str, report: ReportProgress = lambda stage, fraction: None) -> Path:
    """Download a model by its name on the hub; no folder of that name is looked at. Blocks. Raises ModelMissing."""
    if not _is_hub_name(name) or os.path.exists(name):
        raise ModelMissing(f"{name[:100]} cannot be pulled: it is no name of a model on the hub.")
    return check_model_folder(_open_folder(_download_model(name, report)), name)


def find_model(model: str | None, *, needs_weights: bool = True) -> Path | None:
    """Return a model's folder on this machine, complete or not; None for a hub name without a complete cache entry.

    A GGUF file that cannot be used is returned itself.
    """
    if not model or model == BUILT_IN:
        from parley import demo

        return Path(demo.model_folder())
    if _is_path(model):
        return _open_folder(Path(os.path.abspath(os.path.expanduser(model))))
    return _find_cached(model, needs_weights)


def _open_folder(path: Path) -> Path:
    """Return the folder of a model at this path: a GGUF file's is written now, unless the file cannot be used."""
    try:
        gguf = _find_gguf(path)
        return path.resolve() if gguf is None else unpack_gguf(gguf)
    except GgufError:
        return path


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


def folder_problem(folder: Path, *, needs_weights: bool = True) -> str:
    """Return the reason why a folder is not a model, as a clause; empty if it is one."""
    if not os.path.exists(folder):  # unlike Path.exists, it never raises for odd names
        return "there is no such folder"
    try:
        if (gguf := _find_gguf(folder)) is not None:
            unpack_gguf(gguf)
            return ""
    except GgufError as error:
        return str(error)
    if not folder.is_dir():
        return "it is a file; name the folder that contains it"
    if not (folder / "config.json").is_file():
        return foreign_files.config_problem(folder)
    if not (folder / "tokenizer.json").is_file():
        return "its folder has no tokenizer.json (convert the tokenizer with Transformers' save_pretrained)"
    for name in ("config.json", "tokenizer.json"):
        if problem := foreign_files.pointer_problem(folder / name):
            return problem
    return _weights_problem(folder) if needs_weights else ""


def _weights_problem(folder: Path) -> str:
    """Return the reason why a folder's weights cannot be used, as a clause; empty if they can."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        weights = [path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated")]
        if not weights and not any(folder.glob(LINK_PATTERN)):
            return foreign_files.weights_problem(folder) or "its folder has no *.safetensors weights"
        return next(filter(None, map(foreign_files.pointer_problem, sorted(weights))), "")
    try:
        shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"its {index.name} cannot be read"
    absent = [shard for shard in shards if not (folder / str(shard)).is_file()]
    if absent:
        return f"{len(absent)} of its {len(shards)} weight files are missing, first {absent[0]}"
    return next(filter(None, (foreign_files.pointer_problem(folder / str(shard)) for shard in shards)), "")


def _is_path(model: str) -> bool:
    """Whether a name refers to a folder: it looks like a path, or a file of that name exists."""
    return model.startswith((".", "/", "~")) or os.path.exists(model) or not _is_hub_name(model)


def _is_hub_name(model: str) -> bool:
    name = model.partition("@")[0]
    return bool(HUB_NAME.fullmatch(name) or HUB_GGUF_NAME.fullmatch(name))


def _download_arguments(model: str, needs_weights: bool) -> tuple[str, dict[str, Any]]:
    """Return a hub name and the arguments of the download: weights and text files of the top folder, the revision."""
    name, _, revision = model.partition("@")
    if gguf := HUB_GGUF_NAME.fullmatch(name):
        return gguf[1], {"revision": revision or None, "allow_patterns": []}  # chosen from the list of its files
    patterns = [pattern for pattern in DOWNLOAD_PATTERNS if needs_weights or pattern != WEIGHT_PATTERN]
    # Sub-folders hold other formats of the same weights; 1_Pooling describes how an encoder pools its vectors.
    return name, {"revision": revision or None, "allow_patterns": patterns, "ignore_patterns": ["[!1]*/*"]}


def _find_cached(model: str, needs_weights: bool) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    name, arguments = _download_arguments(model, needs_weights)
    try:
        folder = Path(snapshot_download(name, local_files_only=True, **arguments))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    if gguf := HUB_GGUF_NAME.fullmatch(model.partition("@")[0]):
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*" + GGUF_SUFFIX)]
        chosen = choose_gguf(names, gguf[2], gguf[3])
        return _open_folder(folder / chosen[0]) if chosen and set(chosen) <= set(names) else None
    return None if folder_problem(folder, needs_weights=needs_weights) else folder


def _download_model(model: str, report: ReportProgress, needs_weights: bool = True) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, arguments = _download_arguments(model, needs_weights)
    report("downloading", 0.0)
    try:
        chosen = _choose_on_hub(model, name, arguments)
        if chosen:
            arguments["allow_patterns"] = [glob.escape(each) for each in chosen]
        return Path(snapshot_download(name, tqdm_class=_progress_bar_class(report), **arguments), *chosen[:1])
    except ModelMissing:
        raise
    except GatedRepoError:
        reason = "it is open only to users who accepted its terms; accept them on the hub and set HF_TOKEN"
    except RepositoryNotFoundError:
        reason = "the hub knows no such model (a private one needs HF_TOKEN)"
    except RevisionNotFoundError:
        reason = "the hub has no such revision of it"
    except HFValidationError:
        reason = "it is neither a folder nor a valid name on the hub"
    except LocalEntryNotFoundError as error:
        state = "has a fault" if isinstance(error.__cause__, HfHubHTTPError) else "cannot be reached"
        reason = f"it is neither a folder nor in the Hugging Face cache, and the hub {state}; copy it here or try again"
    except HfHubHTTPError as error:
        reason = f"the hub answered with status {error.response.status_code}; try again later"
    except Exception as error:  # disk or network; huggingface_hub passes on its HTTP client's errors
        cause = getattr(error, "strerror", None) or type(error).__name__
        reason = f"the download failed ({cause}); check disk and network, and try again"
    raise ModelMissing(f"{model} cannot be served: {reason}.")


def _choose_on_hub(model: str, name: str, arguments: dict[str, Any]) -> list[str]:
    """Return the files to download if ``model`` names a GGUF file, else none. Raises ModelMissing and hub errors."""
    gguf = HUB_GGUF_NAME.fullmatch(model.partition("@")[0])
    if gguf is None:
        return []
    from huggingface_hub import list_repo_files

    names = list_repo_files(name, revision=arguments["revision"])
    chosen = choose_gguf(names, gguf[2], gguf[3])
    if not chosen:
        known = [each for each in names if each.endswith(GGUF_SUFFIX)]
        shown = ", ".join(known[:SHOWN_FILES]) + ", …" * (len(known) > SHOWN_FILES) if known else "none"
        raise ModelMissing(f"{model} cannot be served: {name} has no such GGUF file; it has {shown}.")
    return chosen


def _progress_bar_class(report: ReportProgress) -> type:
    """Return a class with tqdm's interface that reports the downloaded share of bytes instead of drawing a bar."""
    from huggingface_hub.utils.tqdm import tqdm

    lock = threading.Lock()

    class ProgressBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs | {"disable": True})  # type: ignore[no-untyped-call]
            self.counts_bytes = kwargs.get("unit") == "B"
            self.total, self.downloaded = kwargs.get("total") or 0, kwargs.get("initial") or 0

        def update(self, n: float | None = 1) -> None:
            with lock:
                self.downloaded += n or 0
                if self.counts_bytes and self.total:
                    report("downloading", min(1.0, self.downloaded / self.total))

        def refresh(self, *args: Any, **kwargs: Any) -> None:
            pass

    return ProgressBar
