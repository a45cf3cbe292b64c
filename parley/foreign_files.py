"""Explains folders that hold no model in Hugging Face format, and says how to get one. Reads no weights."""

from __future__ import annotations

import json
from pathlib import Path

LFS_START = b"version https://git-lfs.github.com/"  # a pointer that stands for a file which was not downloaded
# Kinds of weight files that are not read, each as a clause with the files' patterns; the first match counts.
FOREIGN_WEIGHTS = {
    "its weights are in the format of their maker (consolidated files); name the same model in Hugging Face format, "
    "with config.json and model.safetensors": ("consolidated*",),
    "its weights are ONNX files, which are not read; name the model that they were exported from": (
        "*.onnx",
        "onnx/*.onnx",
    ),
    "its weights are files of OpenVINO, which are not read; name the model that they were exported from": (
        "openvino_model.xml",
    ),
    "its weights are pickle files, which can run code and are never read; save it anew as safetensors": (
        "*.bin",
        "*.pt",
        "*.pth",
    ),
    "its weights are files of TensorFlow or Flax, which are not read; save it anew as safetensors": (
        "*.h5",
        "*.msgpack",
    ),
}


def config_problem(folder: Path) -> str:
    """Return why a folder without config.json is not a model, as a clause."""
    if (folder / "adapter_config.json").is_file():
        return f"it is a LoRA adapter{_base_model(folder)}; serve that model with --lora NAME={folder}"
    if (folder / "model_index.json").is_file():
        return "it is a pipeline of Diffusers, which makes images and no text"
    return weights_problem(folder) or "its folder has no config.json"


def weights_problem(folder: Path) -> str:
    """Return a clause about the folder's weights in formats that are not read; empty if there are none."""
    kinds_found = (
        text for text, patterns in FOREIGN_WEIGHTS.items() if any(any(folder.glob(pattern)) for pattern in patterns)
    )
    return next(kinds_found, "")


def find_odd_file(folder: Path) -> Path | None:
    """Return an entry of the folder that is a pipe or a device: reading it may wait for ever, or never end.

    None if there is no such entry, or the folder cannot be listed. A server's Unix socket may be there.
    """
    try:
        entries = sorted(folder.iterdir())
        odd = (entry for entry in entries if entry.is_fifo() or entry.is_char_device() or entry.is_block_device())
        return next(odd, None)
    except OSError:
        return None


def pointer_problem(path: Path) -> str:
    """Return a clause if the file is a pointer of Git LFS, else an empty string. A missing file is none."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(LFS_START)) == LFS_START
    except OSError:
        return ""
    return (
        f"its {path.name} is a pointer of Git LFS, not the file; run `git lfs pull` in its folder" if is_pointer else ""
    )


def _base_model(folder: Path) -> str:
    """Return the name of the model that an adapter belongs to, as part of a clause."""
    try:
        base = json.loads((folder / "adapter_config.json").read_text("utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f" of {base}" if isinstance(base, str) else ""
