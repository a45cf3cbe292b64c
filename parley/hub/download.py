"""Downloads of models and tokenizers from the hub, and the entries of its cache that are complete without one."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parley.gguf.folder import GGUF_SUFFIX, choose_gguf, choose_projector
from parley.hub.answer_limits import HubLimitExceeded
from parley.hub.path_guard import PathInsteadOfName, guard_cache
from parley.hub.transfer import TransferMeter

WEIGHT_PATTERN = "*.safetensors"
DOWNLOAD_PATTERNS = [WEIGHT_PATTERN, "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
# Most sub-folders have other formats of the same weights. But those of sentence-transformers, such as 1_Pooling and
# 2_Dense, define the pooling of an encoder, and additional_chat_templates has templates. Patterns cannot exclude words,
# only characters.
IGNORED_FOLDERS = ["[!1-9a]*/*", "[1-9][!_]*/*", "[1-9]_[!A-Z]*/*", "a[!d]*/*", "ad[!d]*/*"]
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# The hub's name of a GGUF file: ``owner/name:QUANT`` or ``owner/name/FILE.gguf``, which may be in a folder
HUB_GGUF_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+)|/((?:\w[\w. -]*/)*\w[\w. -]*\.gguf))")

# A model's address: its page on the hub, or that of one of its files or revisions; also as other servers write it
HUB_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+?)"
    r"(?:/(?:blob|resolve|tree)/([^/?#]+)(?:/([^?#]+?))?)?/*(?:[?#].*)?"
)

SHOWN_FILES = 8  # of a repository that lacks the one that was asked for

ReportProgress = Callable[[str, float], None]  # called with the stage and the progress, 0..1


class ModelMissing(Exception):
    """There is no usable model of that name. The message is one sentence with a hint."""


def is_hub_name(model: str) -> bool:
    """Whether the hub may have a model of this name, which may end with ``@revision``."""
    name = model.partition("@")[0]
    return bool(HUB_NAME.fullmatch(name) or HUB_GGUF_NAME.fullmatch(name))


def name_in_address(model: str) -> str:
    """Return the hub's name of the model that an address of the hub means; any other text as it is."""
    match = HUB_ADDRESS.fullmatch(model)
    if match is None:
        return model
    name, revision, file = match.groups()
    if file:
        name += f"/{file}"
    return f"{name}@{revision}" if revision not in (None, "main") else name


def find_cached(model: str, *, needs_weights: bool, needs_projector: bool = True) -> Path | None:
    """Return the cached folder, or GGUF file, of the hub's ``model``; None if files are missing.

    ``needs_projector``: with a GGUF file, its image or audio encoder counts as missing if a download was killed.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    name, arguments = _download_arguments(model, needs_weights)
    try:
        folder = Path(snapshot_download(name, local_files_only=True, **arguments))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    gguf = HUB_GGUF_NAME.fullmatch(model.partition("@")[0])
    if gguf is None:
        return folder
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*" + GGUF_SUFFIX)]
    chosen_names = choose_gguf(names, gguf[2], gguf[3])
    if not chosen_names or not set(chosen_names) <= set(names):
        return None
    if needs_projector and _unfinished_mark(name, chosen_names[0]).exists():
        return None
    return folder / chosen_names[0]


def _download_arguments(model: str, needs_weights: bool) -> tuple[str, dict[str, Any]]:
    """Return a hub name and the arguments of the download: weights and text files of the top folder, the revision."""
    name, _, revision = model.partition("@")
    if gguf := HUB_GGUF_NAME.fullmatch(name):
        return gguf[1], {"revision": revision or None, "allow_patterns": []}  # chosen from the list of its files
    patterns = [pattern for pattern in DOWNLOAD_PATTERNS if needs_weights or pattern != WEIGHT_PATTERN]
    return name, {"revision": revision or None, "allow_patterns": patterns, "ignore_patterns": IGNORED_FOLDERS}


def find_cached_projector(gguf: Path) -> Path | None:
    """Return a GGUF file's image or audio encoder in the hub's cache; None if it was not downloaded."""
    root = next((folder for folder in gguf.parents if folder.parent.name == "snapshots"), gguf.parent)
    names = [path.relative_to(root).as_posix() for path in root.rglob("*" + GGUF_SUFFIX)]
    chosen = choose_projector(names, gguf.relative_to(root).as_posix())
    return None if chosen is None else root / chosen


def download_model(
    model: str, report: ReportProgress, *, needs_weights: bool = True, needs_projector: bool = True
) -> Path:
    """Download a model, or its files without weights; return its folder or GGUF file. Raises ModelMissing.

    ``needs_projector``: with a GGUF file, the image or audio encoder is downloaded, if the repository has one.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, arguments = _download_arguments(model, needs_weights)
    guard_cache()
    report("downloading", 0.0)
    try:
        chosen_names = _choose_on_hub(model, name, arguments, needs_projector)
        if chosen_names:
            arguments["allow_patterns"] = [glob.escape(name) for name in chosen_names]
        meter = TransferMeter(_bytes_to_download(name, arguments), report)
        mark = _unfinished_mark(name, chosen_names[0]) if chosen_names and needs_projector else None
        if mark and meter.total:  # 0: nothing is missing, or the hub does not say; the cache may be read-only
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        folder = snapshot_download(name, tqdm_class=_progress_bar_class(meter), **arguments)
        if mark and all(Path(folder, chosen_name).exists() for chosen_name in chosen_names):
            with contextlib.suppress(OSError):  # another process has removed it, or the cache is read-only
                mark.unlink()
        meter.set_done(meter.total)  # of equal files one is downloaded
        if needs_weights and not chosen_names and not any(Path(folder).glob(WEIGHT_PATTERN)):
            _refuse_unnamed_gguf(model, name, arguments)
        return Path(folder, *chosen_names[:1])
    except ModelMissing:
        raise
    except (PathInsteadOfName, HubLimitExceeded) as error:
        raise ModelMissing(str(error)) from None
    except GatedRepoError:
        reason = "it is open only to users who accepted its terms; accept them on the hub and set HF_TOKEN"
    except RepositoryNotFoundError:
        reason = "the hub knows no such model (a private one needs HF_TOKEN)"
    except RevisionNotFoundError:
        reason = "the hub has no such revision of it"
    except HFValidationError:
        reason = "it is neither a folder nor a valid name on the hub"
    except LocalEntryNotFoundError as error:
        state, remedy = "cannot be reached", "try again"
        if isinstance(error.__cause__, HfHubHTTPError):
            state = "has a fault"
        elif HF_HUB_OFFLINE:
            state, remedy = "cannot be reached since HF_HUB_OFFLINE is set", "unset that"
        reason = f"it is neither a folder nor in the Hugging Face cache, and the hub {state}; copy it here or {remedy}"
    except HfHubHTTPError as error:
        reason = f"the hub answered with status {error.response.status_code}; try again later"
    except Exception as error:  # disk or network; huggingface_hub passes on its HTTP client's errors
        cause = getattr(error, "strerror", None) or type(error).__name__
        reason = f"the download failed ({cause}); check disk and network, and try again"
    raise ModelMissing(f"{model} cannot be served: {reason}.")


def _unfinished_mark(name: str, gguf_name: str) -> Path:
    """Return the file that is in a repository's folder of the cache while one of its GGUF files is downloaded with its
    image or audio encoder, and stays if the process is killed. The hub's library knows which files of a repository are
    missing, but not which of them belong to this model.
    """
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"))
    return folder / f".parley-unfinished-{hashlib.sha256(gguf_name.encode()).hexdigest()[:16]}"


def _choose_on_hub(model: str, name: str, arguments: dict[str, Any], needs_projector: bool) -> list[str]:
    """Return the files to download if ``model`` names a GGUF file, else none. Raises ModelMissing and hub errors."""
    gguf = HUB_GGUF_NAME.fullmatch(model.partition("@")[0])
    if gguf is None:
        return []
    from huggingface_hub import list_repo_files

    names = list_repo_files(name, revision=arguments["revision"])
    chosen_names = choose_gguf(names, gguf[2], gguf[3])
    if not chosen_names:
        raise ModelMissing(f"{model} cannot be served: {name} has no such GGUF file; it has {_shown_ggufs(names)}.")
    projector = choose_projector(names, chosen_names[0]) if needs_projector else None
    return chosen_names if projector is None else [*chosen_names, projector]


def _refuse_unnamed_gguf(model: str, name: str, arguments: dict[str, Any]) -> None:
    """Raise ModelMissing if a repository without other weights has GGUF files, of which the user has to name one."""
    from huggingface_hub import list_repo_files

    names = list_repo_files(name, revision=arguments["revision"])
    example = next((file for file in names if choose_gguf(names, None, file)), None)
    if example is not None:
        _, mark, revision = model.partition("@")
        raise ModelMissing(
            f"{model} cannot be served: its weights are GGUF files; name one of them, such as "
            f"{name}/{example}{mark}{revision}; it has {_shown_ggufs(names)}."
        )


def _shown_ggufs(names: list[str]) -> str:
    """Return the first GGUF files of a repository, as part of a sentence."""
    gguf_names = [name for name in names if name.endswith(GGUF_SUFFIX)]
    return ", ".join(gguf_names[:SHOWN_FILES]) + ", …" * (len(gguf_names) > SHOWN_FILES) if gguf_names else "none"


def _bytes_to_download(name: str, arguments: dict[str, Any]) -> int:
    """Return the size of all files that are missing in the cache; 0 if the hub does not say, as the download will."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    try:
        files = snapshot_download(name, dry_run=True, tqdm_class=_progress_bar_class(None), **arguments)
    except DryRunError:
        return 0
    return sum(file.file_size or 0 for file in files if file.will_download)


def _progress_bar_class(meter: TransferMeter | None) -> type:
    """Return a class with tqdm's interface that tells ``meter`` the bytes it counts instead of drawing a bar."""
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
                if self.counts_bytes and meter is not None:
                    meter.set_done(self.downloaded)

        def refresh(self, *args: Any, **kwargs: Any) -> None:
            pass

    return ProgressBar
