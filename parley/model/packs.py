"""Packed weights kept on disk beside the model, so that the next start reads them in place of packing again.

They are found by what they were made from: the content of the checkpoint, the config, the kernels, and how it was asked
for. A file is believed only if this user wrote it, because kernels trust the sizes that it states: its name depends on
a secret in the user's cache folder, so nobody who hands out a model can hand out such a file with it. Whatever
is wrong with the files costs a start nothing but time. It must not know what a layer is for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from parley import native
from parley.native import library, memory
from parley.native.layer import Layer
from parley.version import __version__

log = logging.getLogger("parley.engine")

FOLDER = ".parley"  # below the model's
CONTENTS = "contents.json"  # of each file of the checkpoint: size, time, inode and digest when it was last read
KINDS = {f"{kind.__module__}.{kind.__name__}": kind for kind in (Layer, *get_args(native.Packed))}
DTYPES = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float32)}


class Packs:
    """The packed weights of one model. ``files``: all that they are made of; ``how``: the settings that matter."""

    def __init__(self, folder: Path, files: Sequence[Path], how: str, secret: bytes, kernels: str):
        self.folder = folder / FOLDER
        digest = hashlib.sha256(secret)
        for part in (__version__, kernels, how, *digests(self.folder, files)):
            digest.update(part.encode() + b"\0")
        self._how = how
        self.path = self.folder / f"packed-{how}-{digest.hexdigest()[:32]}.safetensors"

    def read(self, progress: Callable[[float], None]) -> Any | None:
        """What was written, None if there is nothing that can be read."""
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, "pt") as file:
                structure = json.loads(file.metadata()["structure"])
                names = list(file.keys())
                tensors: dict[str, torch.Tensor] = {}
                with ThreadPoolExecutor(min(4, torch.get_num_threads()), "packs") as pool:
                    for name, tensor in zip(
                        names, pool.map(lambda name: _own(file.get_tensor(name)), names), strict=True
                    ):
                        tensors[name] = tensor
                        progress(len(tensors) / len(names))
            return _join(structure, tensors)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            log.warning("The packed weights in %s cannot be read (%s); they are made again.", self.path.name, error)
            return None

    def write(self, weights: Any) -> None:
        """Keep weights made of lists, layers, packed linears and tensors, and drop what was kept of an older state."""
        tensors: dict[str, torch.Tensor] = {}
        structure = json.dumps(_split(weights, tensors))
        scratch = None
        try:
            self.folder.mkdir(exist_ok=True)
            handle, scratch = tempfile.mkstemp(dir=self.folder)
            os.close(handle)
            save_file(tensors, scratch, {"structure": structure})
            with open(scratch, "rb") as file:
                os.fsync(file.fileno())
            os.replace(scratch, self.path)
            for other in self.folder.glob(f"packed-{self._how}-*.safetensors"):
                if other != self.path:
                    other.unlink(missing_ok=True)
            log.info("The packed weights are kept in %s.", self.path)
        except (OSError, SafetensorError) as error:
            if scratch:
                with suppress(OSError):
                    os.unlink(scratch)
            log.warning("The packed weights cannot be kept in %s: %s.", self.folder, error)


def find(folder: Path, files: Sequence[Path], how: str) -> Packs | None:
    """Where the packed weights of a model are kept; None where they cannot be."""
    kernels = native.identity()
    if kernels is None:
        log.warning("Packed weights are not kept: without compiled kernels, only torch knows their layout.")
        return None
    try:
        return Packs(folder, files, how, _secret(), kernels)
    except OSError as error:
        log.warning("Packed weights are not kept: %s.", error)
        return None


def _secret() -> bytes:
    """This user's own, made when there is none. Raises OSError."""
    path = library.cache() / "secret"
    with suppress(FileNotFoundError):
        return path.read_bytes()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(secrets.token_bytes(32))
    with suppress(FileExistsError):  # somebody else was faster, and his holds
        os.link(scratch, path)
    os.unlink(scratch)
    return path.read_bytes()


def digests(folder: Path | None, files: Sequence[Path]) -> list[str]:
    """SHA-256 of each file; of one that has not been touched since the last time, what it was then.

    What they were is kept in ``folder``, where there is one. Raises OSError.
    """
    known: Any = {}
    if folder is not None:
        with suppress(OSError, ValueError):
            known = json.loads((folder / CONTENTS).read_text())
    digests, fresh = [], {}
    for path in files:
        stat = path.stat()
        mark = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        entry = known.get(path.name) if isinstance(known, dict) else None
        if not (isinstance(entry, list) and entry[:-1] == mark and isinstance(entry[-1], str)):
            with path.open("rb") as file:
                entry = [*mark, hashlib.file_digest(file, "sha256").hexdigest()]
        fresh[path.name] = entry
        digests.append(entry[-1])
    if folder is not None and fresh != known:
        scratch = folder / f"{CONTENTS}.{os.getpid()}"
        try:
            folder.mkdir(exist_ok=True)
            scratch.write_text(json.dumps(fresh))
            os.replace(scratch, folder / CONTENTS)
        except OSError:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)
    return digests


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory for weights: a file's pages are small ones, and may be taken away."""
    return memory.mapped(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor)


def _split(thing: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """What JSON can hold of it; tensors are put aside under numbers."""
    if isinstance(thing, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = thing.contiguous()
        return {"tensor": name}
    if isinstance(thing, torch.dtype):
        return {"dtype": str(thing)}
    if isinstance(thing, list):
        return [_split(each, tensors) for each in thing]
    if dataclasses.is_dataclass(thing):
        kind = type(thing)
        members = {field.name: _split(getattr(thing, field.name), tensors) for field in dataclasses.fields(thing)}
        return {"kind": f"{kind.__module__}.{kind.__name__}", "members": members}
    assert thing is None or isinstance(thing, int | float | str), thing
    return thing


def _join(thing: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(thing, list):
        return [_join(each, tensors) for each in thing]
    if not isinstance(thing, dict):
        return thing
    if "tensor" in thing:
        return tensors[thing["tensor"]]
    if "dtype" in thing:
        return DTYPES[thing["dtype"]]
    members = {name: _join(member, tensors) for name, member in thing["members"].items()}
    return KINDS[thing["kind"]](**members)
